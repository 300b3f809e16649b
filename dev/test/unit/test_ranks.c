/*
The environments of torchrun, Slurm, Open MPI and PMI; and the launcher: it starts this program again as 1 to 16 ranks, which
end well, fail, die, hang or ignore signals. In every case the right one is named, its code is returned, and no process and
no descriptor is left.

    test_ranks --run RANKS RESTARTS NOTICE_MS TERM_MS FILE WHAT...    the tests below run this

WHAT says what a rank does: "1:sleep 50,exit 3" is for rank 1, "1@0:..." for its first start alone, "*:..." for all. The
first that fits counts; a rank without one ends at once, with 0. Ranks write what they see to FILE.
*/
#include "../test.h"
#include "../../../llmc/ranks.h"
#include "../../../llmc/rendezvous.h"
#include <dirent.h>
#include <sys/ioctl.h>
#include <termios.h>

static const char* self;

// ---- a rank ------------------------------------------------------------------------------

static int log_fd = -1;
static int my_rank;
static volatile sig_atomic_t asked_to_end;

PRINTF_LIKE(1, 2) static void log_line(const char* fmt, ...) {
    char line[4096];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof(line) - 1, fmt, args);
    va_end(args);
    line[n] = '\n';
    if (write(log_fd, line, (size_t)n + 1) != n + 1) { _exit(90); } // one write: O_APPEND keeps the lines whole
}

static void on_signal(int number) {
    log_line("rank %d got %s", my_rank, ranks_signal_name(number));
    if (number != SIGUSR2) { asked_to_end = 1; }
}

static int count_fds(void) {
    int n = 0;
    DIR* dir = opendir("/proc/self/fd");
    while (dir && readdir(dir)) { n++; }
    if (dir) { closedir(dir); }
    return n;
}

static void catch_signals(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
    struct sigaction action, old;
    memset(&action, 0, sizeof(action));
    action.sa_handler = on_signal;
    sigfillset(&action.sa_mask);
    for (int i = 0; i < 5; i++) {
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN && signals[i] == SIGHUP) { continue; }
        sigaction(signals[i], &action, NULL);
    }
}

// Does one thing of a rank's list.
static void act(RankEnv* env, const char* what) {
    int number = strchr(what, ' ') ? atoi(strchr(what, ' ')) : 0;
    if (strncmp(what, "exit", 4) == 0) { exit(number); }
    if (strncmp(what, "kill", 4) == 0) {
        if (number != SIGKILL && number != SIGSTOP) { signal(number, SIG_DFL); } // the sanitizer's handler would exit
        kill(getpid(), number);
    }
    if (strncmp(what, "sleep", 5) == 0) { usleep((useconds_t)number * 1000); }
    if (strncmp(what, "report", 6) == 0) { rank_env_report_progress(env), rank_env_report_progress(env); }
    if (strncmp(what, "print", 5) == 0) { printf("out of %d\n", my_rank), fprintf(stderr, "err of %d\n", my_rank); }
    if (strncmp(what, "meet", 4) == 0) {
        Rendezvous how;
        Error err;
        char blob[16] = "";
        memset(&how, 0, sizeof(how));
        how.ranks = env;
        how.version = LLMC_VERSION;
        how.limit_ms = 20000;
        if (env->rank == 0) { strcpy(blob, "hello"); }
        if (!rendezvous(&how, blob, sizeof(blob), &err)) {
            log_line("rank %d: %s", env->rank, err.text);
            exit(1);
        }
        log_line("rank %d got the blob %s", env->rank, blob);
    }
    if (strncmp(what, "child", 5) == 0) { // two that would stay for ever, one of which minds no signal
        for (int i = 0; i < 2; i++) {
            if (fork() != 0) { continue; }
            if (i == 0) { signal(SIGTERM, SIG_IGN); }
            for (;;) { pause(); }
        }
    }
    if (strncmp(what, "ignore", 6) == 0) {
        signal(SIGTERM, SIG_IGN);
        log_line("rank %d is ready, process %d", my_rank, (int)getpid());
        for (;;) { pause(); }
    }
    if (strncmp(what, "wait", 4) == 0) { // for a signal, and then a moment for a second one
        catch_signals();
        log_line("rank %d is ready, process %d", my_rank, (int)getpid());
        while (!asked_to_end) { usleep(2000); }
        double end = time_ms() + 60;
        while (time_ms() < end) { usleep(2000); }
    }
}

static int be_rank(RankEnv* env, int argc, char** argv) {
    char args[1024] = "", input[64] = "", first[32], every[32];
    struct sigaction pipe_action, int_action;
    size_t used = 0;
    my_rank = env->rank;
    for (int i = 7; i < argc; i++) { used += (size_t)snprintf(args + used, sizeof(args) - used, " %s", argv[i]); }
    ssize_t n = readlink("/proc/self/fd/0", input, sizeof(input) - 1);
    input[n > 0 ? n : 0] = '\0';
    sigaction(SIGPIPE, NULL, &pipe_action);
    sigaction(SIGINT, NULL, &int_action);
    int fds = count_fds();
    log_line(
        "start %d rank %d of %d local %d at %s:%d token %llx listens %d reports %d fds %d group %d stdin %s left %d "
        "actions %d%d args%s",
        env->start, env->rank, env->num_ranks, env->local_rank, env->address, env->port, (unsigned long long)env->token,
        env->listen_fd >= 0, env->progress_fd >= 0, fds, getpgrp() == getpid(), input, getenv("LLMC_RANK") != NULL,
        pipe_action.sa_handler == SIG_DFL, int_action.sa_handler == SIG_DFL, args);
    snprintf(first, sizeof(first), "%d@%d:", env->rank, env->start);
    snprintf(every, sizeof(every), "%d:", env->rank);
    for (int i = 7; i < argc; i++) {
        const char* what = argv[i];
        if (strncmp(what, first, strlen(first)) != 0 && strncmp(what, every, strlen(every)) != 0 && what[0] != '*') {
            continue;
        }
        for (what = strchr(what, ':') + 1; *what; what += strcspn(what, ","), what += *what == ',') { act(env, what); }
        break;
    }
    rank_env_close(env);
    return 0;
}

// The parent of the ranks.
static int launch(char** argv) {
    static const char* const more[] = {"-y", "1", NULL};
    RankLaunch how = {atoi(argv[2]), atoi(argv[3]), more, atof(argv[4]), atof(argv[5]), 1};
    struct sigaction before, after;
    sigaction(SIGTERM, NULL, &before);
    int fds = count_fds();
    log_line("parent fds %d", fds);
    printf("the parent\n"); // still in the buffer, as it goes to a file
    int code = ranks_launch(&how, argv);
    sigaction(SIGTERM, NULL, &after);
    log_line("parent returns %d new fds %d same action %d", code, count_fds() - fds,
             before.sa_handler == after.sa_handler);
    return code;
}

static int child(int argc, char** argv) {
    RankEnv env;
    Error err;
    if (argc < 7) { return 91; }
    log_fd = open(argv[6], O_WRONLY | O_APPEND | O_CLOEXEC);
    if (log_fd < 0) { return 92; }
    if (!rank_env_read(&env, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 93;
    }
    return env.source == RANKS_ALONE ? launch(argv) : be_rank(&env, argc, argv);
}

// ---- running the launcher ------------------------------------------------------------------

enum { TEXT = 65536 };

typedef struct {
    pid_t pid;
    int code; // exit code, 128 + signal if a signal ended it
    char log[TEXT], out[TEXT], err[TEXT];
    char log_path[128], out_path[128], err_path[128];
    bool ignore_hup;
    const char* program; // NULL: this one
    int terminal;        // -1, or the master of a terminal that the launcher gets
    int broken[2];       // a pipe that nobody reads, to be its stderr; 0: it has an ordinary one
} Run;

static void read_text(char* text, const char* path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, TEXT - 1);
    text[n > 0 ? n : 0] = '\0';
    if (fd >= 0) { close(fd); }
}

static int count(const char* text, const char* needle) {
    int n = 0;
    for (const char* p = text; (p = strstr(p, needle)); p += strlen(needle)) { n++; }
    return n;
}

// Starts the launcher in a process group of its own. args: from RANKS on, without FILE, separated by '|'.
static void run_start(Run* r, const char* args) {
    static int runs;
    char copy[1024], *argv[40];
    int argc = 0;
    snprintf(r->log_path, sizeof(r->log_path), "%s/log%d", test_dir(), runs);
    snprintf(r->out_path, sizeof(r->out_path), "%s/out%d", test_dir(), runs);
    snprintf(r->err_path, sizeof(r->err_path), "%s/err%d", test_dir(), runs++);
    snprintf(copy, sizeof(copy), "%s", args);
    argv[argc++] = (char*)(r->program ? r->program : self);
    argv[argc++] = (char*)"--run";
    for (char* p = strtok(copy, "|"); p && argc < 38; p = strtok(NULL, "|")) {
        argv[argc++] = p;
        if (argc == 6) { argv[argc++] = r->log_path; }
    }
    argv[argc] = NULL;
    close(open(r->log_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    fflush(stdout);
    r->pid = fork();
    if (r->pid < 0) { die("fork: %s", strerror(errno)); }
    if (r->pid > 0) {
        if (r->terminal < 0) { setpgid(r->pid, r->pid); } // setsid() needs a process that leads no group
        return;
    }
    if (r->terminal >= 0) {
        setsid();
        int tty = open(ptsname(r->terminal), O_RDWR);
        if (tty < 0 || ioctl(tty, TIOCSCTTY, 0) != 0) { _exit(94); }
        close(tty);
    } else {
        setpgid(0, 0);
    }
    int out = open(r->out_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int err = open(r->err_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    dup2(out, STDOUT_FILENO);
    dup2(r->broken[1] ? r->broken[1] : err, STDERR_FILENO);
    if (r->broken[1]) { close(r->broken[1]); }
    if (r->ignore_hup) { signal(SIGHUP, SIG_IGN); }
    execv(argv[0], argv);
    _exit(95);
}

static Run run_new(void) {
    Run r;
    memset(&r, 0, sizeof(r));
    r.terminal = -1;
    return r;
}

// Waits until the log has a text so often.
static void run_await(Run* r, const char* needle, int times) {
    double end = time_ms() + 20000;
    do {
        usleep(2000);
        read_text(r->log, r->log_path);
    } while (count(r->log, needle) < times && time_ms() < end);
    check_msg(count(r->log, needle) >= times, "no %d times '%s' in:\n%s", times, needle, r->log);
}

// The first of a process's children; 0 if it has none, or if the kernel does not tell.
static pid_t first_child(pid_t pid) {
    static char text[TEXT];
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)pid, (int)pid);
    read_text(text, path);
    return (pid_t)atoi(text);
}

// Waits until a process is in a state of /proc/PID/stat: T is stopped, Z has ended, S sleeps.
static bool await_state(pid_t pid, char state) {
    static char text[TEXT];
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    for (int i = 0; i < 5000; i++) {
        read_text(text, path);
        const char* p = strrchr(text, ')');
        if (p && p[2] == state) { return true; }
        usleep(2000);
    }
    return false;
}

// The process of a rank that is ready.
static pid_t process_of(const Run* r, int rank) {
    char text[64];
    snprintf(text, sizeof(text), "rank %d is ready, process ", rank);
    const char* p = strstr(r->log, text);
    return p ? (pid_t)atoi(p + strlen(text)) : getpid(); // which a signal would end: the test fails
}

// Waits for the launcher. Then no process may be left: this process is the new parent of any orphan.
static void run_finish(Run* r) {
    int status = 0;
    waitpid(r->pid, &status, 0);
    r->code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    double end = time_ms() + 3000; // a killed process needs a moment
    pid_t orphan;
    while ((orphan = waitpid(-1, NULL, WNOHANG)) >= 0 && time_ms() < end) { usleep(1000); }
    check_msg(orphan < 0 && errno == ECHILD, "a process is left");
    read_text(r->log, r->log_path);
    read_text(r->out, r->out_path);
    read_text(r->err, r->err_path);
    while (orphan == 0) { // for the tests that follow
        pid_t left = first_child(getpid());
        if (left <= 0) { break; }
        kill(left, SIGKILL);
        orphan = waitpid(left, NULL, 0) == left ? waitpid(-1, NULL, WNOHANG) : -1;
    }
}

static void run(Run* r, const char* args) {
    *r = run_new();
    run_start(r, args);
    run_finish(r);
}

// The run must have ended with this code, and have written each of two texts to stderr.
static void expect(int line, const Run* r, int code, const char* want, const char* also) {
    if (r->code != code || !strstr(r->err, want) || !strstr(r->err, also)) {
        test_fail(__FILE__, line, "code %d, wanted %d; wanted '%s' and '%s' in:\n%s", r->code, code, want, also,
                  r->err);
    }
}
#define ended(r, code, want, also) expect(__LINE__, r, code, want, also)

// ---- the launcher ----------------------------------------------------------------------------

static void test_all_end_well(void) {
    static const int sizes[] = {1, 2, 3, 8, 16};
    for (int k = 0; k < 5; k++) {
        Run r;
        char args[64], text[256], first[128] = "";
        int parent_fds = 0;
        snprintf(args, sizeof(args), "%d|0|5000|5000|7:none|-y|0", sizes[k]);
        run(&r, args);
        ended(&r, 0, "", "");
        check_str(r.err, "");
        check(strstr(r.log, "parent returns 0 new fds 0 same action 1") != NULL);
        check(sscanf(r.log, "parent fds %d", &parent_fds) == 1);
        for (int rank = 0; rank < sizes[k]; rank++) {
            snprintf(text, sizeof(text), "start 0 rank %d of %d local %d at 127.0.0.1:", rank, sizes[k], rank);
            const char* p = strstr(r.log, text);
            check_msg(count(r.log, text) == 1, "no '%s' in %s", text, r.log);
            if (!p) { continue; }
            // port and token are the same for all
            p += strlen(text);
            int same = (int)(strstr(p, " listens") - p);
            if (!first[0]) { snprintf(first, sizeof(first), "%.*s", same, p); }
            check(atoi(p) > 0 && strncmp(first, p, (size_t)same) == 0 && strstr(first, " token "));
            snprintf(text, sizeof(text),
                     " listens %d reports 1 fds %d group 1 stdin /dev/null left 0 actions 11 args 7:none -y 0\n",
                     rank == 0, parent_fds + 1 + (rank == 0));
            check_msg(strncmp(p + same, text, strlen(text)) == 0, "wanted '%s', got '%.160s'", text, p + same);
        }
    }
}

static void test_output_unchanged(void) {
    Run r;
    run(&r, "3|0|5000|5000|*:print");
    ended(&r, 0, "", "");
    for (int rank = 0; rank < 3; rank++) {
        char text[32];
        snprintf(text, sizeof(text), "out of %d\n", rank);
        check(count(r.out, text) == 1);
        snprintf(text, sizeof(text), "err of %d\n", rank);
        check(count(r.err, text) == 1);
    }
    check(strncmp(r.out, "the parent\n", 11) == 0); // what was printed before comes first, and once
    check(strlen(r.out) == 11 + 3 * strlen("out of 0\n") && strlen(r.err) == 3 * strlen("err of 0\n"));
}

static void test_rendezvous(void) { // through the socket that rank 0 inherits
    Run r;
    run(&r, "8|1|100|5000|1@0:kill 9|*:meet"); // the first time one is missing, so that nobody gets it
    ended(&r, 0, "error: rank 1 of 8 (process ", "restart 1 of 1");
    check_msg(count(r.log, "got the blob hello") == 8, "%s", r.log);
}

static void test_exit_code(void) {
    Run r;
    run(&r, "3|0|100|5000|1:sleep 20,exit 3|*:wait"); // the others do not notice
    ended(&r, 3, "error: rank 1 of 3 (process ", ") ended with exit code 3 after ");
    ended(&r, 3, "rank 0 of 3 (process ", ") still runs after 0.1 s: SIGTERM");
    ended(&r, 3, "rank 2 of 3 (process ", "");
    check(count(r.err, "error:") == 1 && count(r.err, "SIGKILL") == 0);
    check(count(r.log, "got SIGTERM") == 2 && strstr(r.log, "new fds 0"));
    run(&r, "3|0|5000|5000|2:exit 4|*:sleep 30"); // the others end by themselves, with 0
    ended(&r, 4, "error: rank 2 of 3 (process ", ") ended with exit code 4");
    check(count(r.err, "rank") == 1);
}

static void test_killed(void) {
    Run r;
    run(&r, "3|0|100|5000|2:kill 9|*:wait");
    ended(&r, 137, "error: rank 2 of 3 (process ", ") was ended by signal 9, SIGKILL, after ");
    run(&r, "2|0|100|5000|0:kill 11|*:wait");
    ended(&r, 139, "error: rank 0 of 2 (process ", ") was ended by signal 11, SIGSEGV, after ");
}

static void test_cause_before_consequence(void) {
    Run r;
    run(&r, "4|0|5000|5000|2:sleep 20,kill 9|*:sleep 300,exit 1");
    ended(&r, 137, "error: rank 2 of 4 (process ", "");
    check(strncmp(r.err, "error: rank 2", 13) == 0 && count(r.err, "error:") == 1 && count(r.err, "exit code") == 0);
    // the parent sleeps, and finds all dead at the same time
    r = run_new();
    run_start(&r, "3|0|5000|5000|2:ignore|*:wait,exit 1");
    run_await(&r, "is ready", 3);
    kill(r.pid, SIGSTOP);
    check(await_state(r.pid, 'T'));
    kill(process_of(&r, 2), SIGKILL);
    for (int rank = 0; rank < 2; rank++) { kill(process_of(&r, rank), SIGUSR1); }
    for (int rank = 0; rank < 3; rank++) { check(await_state(process_of(&r, rank), 'Z')); }
    kill(r.pid, SIGCONT);
    run_finish(&r);
    ended(&r, 137, "error: rank 2 of 3 (process ", "signal 9, SIGKILL");
}

static void test_ignores_sigterm(void) {
    Run r;
    run(&r, "3|0|50|80|1:sleep 200,exit 3|2:ignore|*:wait");
    ended(&r, 3, "rank 2 of 3 (process ", ") still runs after 0.1 s: SIGKILL");
    check(count(r.err, ": SIGTERM") == 2 && count(r.err, ": SIGKILL") <= 2 && !strstr(r.err, "cannot be killed"));
    run(&r, "2|0|50|80|1:exit 3|*:kill 19"); // SIGSTOP: it hears nothing
    ended(&r, 3, "rank 0 of 2 (process ", ": SIGKILL");
    check(!strstr(r.err, "cannot be killed"));
}

static void test_no_grandchildren(void) {
    Run r;
    run(&r, "2|0|100|100|*:child"); // the ranks end well, what they started would stay
    ended(&r, 0, "", "");
    run(&r, "2|0|50|50|0:child,exit 3|*:child,ignore");
    ended(&r, 3, "", "");
}

static void test_parent_killed(void) {
    Run r = run_new();
    run_start(&r, "4|0|5000|5000|*:ignore");
    run_await(&r, "is ready", 4);
    kill(r.pid, SIGKILL);
    run_finish(&r);
    check(r.code == 137);
}

static void test_parent_killed_early(void) { // at any moment of the start
    for (int k = 0; k < 12; k++) {
        Run r = run_new();
        run_start(&r, "4|0|5000|5000|*:ignore");
        usleep((useconds_t)(k * 700));
        kill(r.pid, SIGKILL);
        run_finish(&r);
        check(r.code == 137);
    }
}

static void test_signals_forwarded(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    static const char* const names[] = {"got SIGINT", "got SIGTERM", "got SIGHUP", "got SIGUSR1"};
    for (int to_group = 0; to_group < 2; to_group++) { // kill PARENT; kill -- -GROUP, as the terminal does
        for (int k = 0; k < 4; k++) {
            Run r = run_new();
            run_start(&r, "3|9|5000|5000|*:wait");
            run_await(&r, "is ready", 3);
            kill(to_group ? -r.pid : r.pid, signals[k]);
            run_finish(&r);
            ended(&r, 0, "", "");
            check_str(r.err, "");
            check_msg(count(r.log, names[k]) == 3 && count(r.log, " got ") == 3, "%s", r.log);
            check(count(r.log, "start ") == 3); // no restart
        }
    }
}

static void test_signals_twice(void) {
    Run r = run_new();
    run_start(&r, "2|0|5000|5000|*:wait");
    run_await(&r, "is ready", 2);
    kill(r.pid, SIGUSR2); // does not end the run
    run_await(&r, "got SIGUSR2", 2);
    kill(r.pid, SIGINT);
    run_await(&r, "got SIGINT", 2);
    kill(r.pid, SIGINT); // within the time that the ranks wait for it
    run_finish(&r);
    ended(&r, 0, "", "");
    check(count(r.log, "got SIGUSR2") == 2 && count(r.log, "got SIGINT") >= 2);
}

static void test_terminal(void) { // a real Ctrl-C
    Run r = run_new();
    r.terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (r.terminal < 0 || grantpt(r.terminal) != 0 || unlockpt(r.terminal) != 0) {
        test_skip("needs a pseudo-terminal");
        return;
    }
    run_start(&r, "3|0|5000|5000|*:wait");
    run_await(&r, "is ready", 3);
    check(write(r.terminal, "\x03", 1) == 1);
    run_finish(&r);
    close(r.terminal);
    ended(&r, 0, "", "");
    check_msg(count(r.log, "got SIGINT") == 3 && count(r.log, " got ") == 3, "%s", r.log);
    // the terminal is closed
    r = run_new();
    r.terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    check(r.terminal >= 0 && grantpt(r.terminal) == 0 && unlockpt(r.terminal) == 0);
    run_start(&r, "3|0|5000|5000|*:wait");
    run_await(&r, "is ready", 3);
    close(r.terminal);
    run_finish(&r);
    check_msg(count(r.log, "got SIGHUP") == 3, "%s", r.log);
}

static void test_nohup(void) {
    Run r = run_new();
    r.ignore_hup = true;
    run_start(&r, "2|1|100|1000|0@0:wait|1@0:wait|*:none");
    run_await(&r, "is ready", 2);
    kill(-r.pid, SIGHUP);
    usleep(50000);
    check(count(r.log, " got ") == 0);
    kill(process_of(&r, 1), SIGKILL); // it did not ask for the end either: the ranks are started again
    run_finish(&r);
    ended(&r, 0, "restart 1 of 1", "");
    check(count(r.log, "got SIGHUP") == 0);
}

static void test_ctrl_z(void) {
    Run r = run_new();
    run_start(&r, "1|0|5000|5000|*:wait");
    run_await(&r, "is ready", 1);
    kill(r.pid, SIGTSTP);
    check(await_state(r.pid, 'T') && await_state(process_of(&r, 0), 'T'));
    kill(r.pid, SIGCONT);
    check(await_state(r.pid, 'S') && await_state(process_of(&r, 0), 'S'));
    kill(r.pid, SIGTERM);
    run_finish(&r);
    ended(&r, 0, "", "");
    check(count(r.log, "got SIGTERM") == 1);
}

// ---- restarts ------------------------------------------------------------------------------------

static void test_restarts_succeed(void) {
    Run r;
    run(&r, "2|5|1000|1000|1@0:report,exit 1|1@1:report,kill 9|*:none");
    ended(&r, 0, "starting all ranks again: restart 1 of 5\n", "starting all ranks again: restart 2 of 5\n");
    check(count(r.err, "restart 3") == 0 && count(r.log, "start 2 rank ") == 2 && count(r.log, "start ") == 6);
    check(count(r.log, "*:none -y 1\n") == 4 && strstr(r.log, "new fds 0")); // twice two ranks
    char first[64] = "", last[64] = "";                                      // each start has its own token
    const char *a = strstr(r.log, "start 0 rank 0"), *b = strstr(r.log, "start 2 rank 0");
    check(a && b && sscanf(strstr(a, " token "), " token %63s", first) == 1 &&
          sscanf(strstr(b, " token "), " token %63s", last) == 1);
    check(strcmp(first, last) != 0);
}

static void test_restarts_exhausted(void) {
    Run r;
    run(&r, "2|2|1000|1000|1:report,exit 7|*:none");
    ended(&r, 7, "restart 2 of 2", "error: not started again: all restarts are used up");
    check(count(r.log, "start ") == 6 && count(r.err, "exit code 7") == 3 && strstr(r.log, "new fds 0"));
}

static void test_no_restart(void) {
    Run r;
    run(&r, "2|5|1000|1000|1:report,exit 2|*:none");
    ended(&r, 2, "error: not started again: exit code 2 is a usage error", "");
    check(count(r.log, "start ") == 2);
    run(&r, "2|5|1000|1000|1:report,exit 141|*:none");
    ended(&r, 141, "error: not started again: standard output was closed", "");
    check(count(r.log, "start ") == 2);
    run(&r, "2|5|1000|1000|1:exit 1|*:none");
    ended(&r, 1, "error: not started again: it failed before the first step was done", "");
    check(count(r.log, "start ") == 2);
    run(&r, "2|5|1000|1000|1@0:report,exit 1|1:exit 1|*:none"); // progress counts for one start
    ended(&r, 1, "restart 1 of 5", "error: not started again: it failed before the first step was done");
    check(count(r.log, "start ") == 4);
    run(&r, "2|1|1000|1000|1@0:kill 9|*:none"); // not the user's error
    ended(&r, 0, "restart 1 of 1", "");
    run(&r, "2|0|1000|1000|1:report,exit 1|*:none");
    ended(&r, 1, "exit code 1", "");
    check(count(r.err, "again") == 0);
}

static void test_no_restart_after_a_signal(void) {
    for (int k = 0; k < 2; k++) { // a rank fails after SIGTERM; a rank is killed by SIGUSR2, which it does not handle
        Run r = run_new();
        run_start(&r, k == 0 ? "2|5|1000|1000|1:report,wait,exit 5|*:wait" : "2|5|100|1000|1:report,ignore|*:wait");
        run_await(&r, "is ready", 2);
        kill(r.pid, k == 0 ? SIGTERM : SIGUSR2);
        run_finish(&r);
        ended(&r, k == 0 ? 5 : 128 + SIGUSR2, k == 0 ? "exit code 5" : "SIGUSR2", "");
        check(count(r.log, "start ") == 2 && count(r.err, "again") == 0);
    }
}

static void test_program_replaced(void) { // the file is gone at the restart
    Run r = run_new();
    char path[128], command[512];
    snprintf(path, sizeof(path), "%s/copy", test_dir());
    snprintf(command, sizeof(command), "cp '%s' '%s'", self, path);
    check(system(command) == 0);
    r.program = path;
    run_start(&r, "2|1|1000|1000|1@0:wait,report,exit 1|0@0:wait|*:none");
    run_await(&r, "is ready", 2);
    unlink(path);
    for (int rank = 0; rank < 2; rank++) { kill(process_of(&r, rank), SIGUSR1); }
    run_finish(&r);
    ended(&r, 0, "restart 1 of 1", "");
    check(count(r.log, "start 1 rank ") == 2);
}

static void test_nobody_reads_stderr(void) {
    Run r = run_new();
    check(pipe(r.broken) == 0);
    close(r.broken[0]);
    run_start(&r, "2|0|100|100|1:exit 3|*:wait");
    close(r.broken[1]);
    run_finish(&r);
    check_msg(r.code == 3, "ended with %d", r.code);
}

// ---- the environment ---------------------------------------------------------------------------------

static void clear_environment(void) {
    static const char* const prefixes[] = {"LLMC_RANK",  "LLMC_NUM",   "LLMC_LOCAL",  "LLMC_ADDRESS",  "LLMC_PORT",
                                           "LLMC_TOKEN", "LLMC_START", "LLMC_LISTEN", "LLMC_PROGRESS", "RANK",
                                           "WORLD_SIZE", "LOCAL_RANK", "MASTER_",     "TORCHELASTIC_", "SLURM_",
                                           "OMPI_",      "PMI",        "MPI_"};
    for (bool found = true; found;) {
        found = false;
        for (char** e = environ; *e && !found; e++) {
            for (size_t k = 0; k < sizeof(prefixes) / sizeof(prefixes[0]) && !found; k++) {
                char name[256];
                if (strncmp(*e, prefixes[k], strlen(prefixes[k])) != 0) { continue; }
                snprintf(name, sizeof(name), "%.*s", (int)strcspn(*e, "="), *e);
                found = unsetenv(name) == 0;
            }
        }
    }
}

typedef struct {
    const char* variables; // "A=1 B=2"
    const char* want;      // "SOURCE RANK/NUM local LOCAL at ADDRESS:PORT", or a part of the error
} Environment;

#define TORCH "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29500"
#define SLURM                                                                                                          \
    "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_NODELIST=n[03-05,7],x SLURM_JOB_ID=42 SLURM_STEP_ID=0"
#define OMPI "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=3"
#define PMI "PMI_RANK=3 PMI_SIZE=8 MPI_LOCALRANKID=3"
#define OURS "LLMC_RANK=3 LLMC_NUM_RANKS=8 LLMC_LOCAL_RANK=3 LLMC_ADDRESS=127.0.0.1 LLMC_PORT=4000"
#define PLACE " MASTER_ADDR=head MASTER_PORT=1234"

static const Environment environments[] = {
    {"", "one process 0/1 local 0 at :0"},
    {OURS, "--gpus 3/8 local 3 at 127.0.0.1:4000"},
    {OURS " " TORCH " " SLURM, "--gpus 3/8 local 3 at 127.0.0.1:4000"},
    {TORCH, "torchrun 3/8 local 1 at node0:29500"},
    {TORCH " TORCHELASTIC_USE_AGENT_STORE=True", "torchrun 3/8 local 1 at node0:29501"},
    {TORCH " TORCHELASTIC_USE_AGENT_STORE=False", "torchrun 3/8 local 1 at node0:29500"},
    {TORCH " " SLURM " " OMPI, "torchrun 3/8 local 1 at node0:29500"},
    {SLURM, "Slurm 3/8 local 1 at n03:PORT"},
    {SLURM PLACE, "Slurm 3/8 local 1 at head:1234"},
    {SLURM " PMI_RANK=3 PMI_SIZE=8", "Slurm 3/8 local 1 at n03:PORT"},                      // srun --mpi=pmi2
    {SLURM " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=y", "Slurm 3/4 local 1 at y:PORT"}, // srun --preserve-env
    {SLURM " " OMPI PLACE, "Open MPI 3/8 local 3 at head:1234"},
    // mpirun in a job: on the second node its daemon is the only task of a step
    {"SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 " OMPI PLACE, "Open MPI 3/8 local 3 at head:1234"},
    {"SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 " PMI PLACE, "PMI 3/8 local 3 at head:1234"},
    {OMPI " OMPI_COMM_WORLD_LOCAL_SIZE=8", "Open MPI 3/8 local 3 at 127.0.0.1:PORT"},
    {OMPI " OMPI_COMM_WORLD_LOCAL_SIZE=8 MASTER_PORT=99", "Open MPI 3/8 local 3 at 127.0.0.1:99"},
    {PMI " MPI_LOCALNRANKS=8", "PMI 3/8 local 3 at 127.0.0.1:PORT"},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0", "Open MPI 0/1 local 0 at :0"},
    {TORCH " MASTER_ADDR=fe80::1%eth0", "torchrun 3/8 local 1 at fe80::1%eth0:29500"},
    // must not start several ranks
    {"SLURM_NTASKS=8 SLURM_JOB_ID=42 SLURM_JOB_NODELIST=n[1-8]", "one process 0/1 local 0 at :0"}, // salloc's shell
    {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 SLURM_JOB_ID=42",
     "one process 0/1 local 0 at :0"}, // sbatch's script
    {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 SLURM_STEP_ID=4294967290", "one process 0/1 local 0 at :0"},
    {"SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0", "Slurm 0/1 local 0 at :0"}, // srun --pty bash
    {"SLURM_PROCID= SLURM_NTASKS= SLURM_STEP_ID= RANK= WORLD_SIZE=", "one process 0/1 local 0 at :0"},
    {"MASTER_ADDR=x MASTER_PORT=1 SLURM_CONF=/etc/slurm PMIX_NAMESPACE=1 LOCAL_WORLD_SIZE=3",
     "one process 0/1 local 0 at :0"},
    // incomplete
    {"RANK=3", "RANK=3 is set but WORLD_SIZE is not: set RANK, WORLD_SIZE and LOCAL_RANK, or none of them"},
    {"WORLD_SIZE=8 MASTER_ADDR=x MASTER_PORT=1", "WORLD_SIZE=8 is set but RANK is not"},
    {"RANK=3 WORLD_SIZE=8 MASTER_ADDR=x MASTER_PORT=1", "RANK=3 is set but LOCAL_RANK is not"},
    {"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_PORT=1", "RANK=3 is set but MASTER_ADDR is not"},
    {"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=x", "RANK=3 is set but MASTER_PORT is not"},
    {"SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_STEP_ID=0", "SLURM_PROCID=3 is set but SLURM_NTASKS is not"},
    {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_ID=0", "SLURM_PROCID=3 is set but SLURM_LOCALID is not"},
    {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_ID=4",
     "SLURM_NTASKS=8 is set but SLURM_JOB_NODELIST is not"},
    {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=x",
     "SLURM_NTASKS=8 is set but SLURM_JOB_ID is not"},
    {OMPI, "MASTER_ADDR is not set, and Open MPI does not say on which host rank 0 runs: mpirun -x MASTER_ADDR=HOST"},
    {OMPI " OMPI_COMM_WORLD_LOCAL_SIZE=4", "MASTER_ADDR is not set, and Open MPI does not say"},
    {PMI, "MASTER_ADDR is not set, and PMI does not say"},
    {"OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=8 is set but OMPI_COMM_WORLD_RANK is not"},
    {"PMI_RANK=1 PMI_SIZE=2", "PMI_RANK=1 is set but MPI_LOCALRANKID is not"},
    {"LLMC_RANK=1 LLMC_NUM_RANKS=2", "LLMC_RANK=1 is set but LLMC_LOCAL_RANK is not"},
    {"LLMC_RANK=1 LLMC_NUM_RANKS=2 LLMC_LOCAL_RANK=1", "LLMC_RANK=1 is set but LLMC_ADDRESS is not"},
    // wrong
    {TORCH " RANK=8", "RANK=8 contradicts WORLD_SIZE=8: ranks count from 0"},
    {TORCH " LOCAL_RANK=8", "LOCAL_RANK=8 contradicts WORLD_SIZE=8"},
    {TORCH " RANK=-1", "RANK=-1: not a whole number from 0 to 4095"},
    {TORCH " RANK=1x", "RANK=1x: not a whole number"},
    {TORCH " RANK=+1", "RANK=+1: not a whole number"},
    {TORCH " RANK=0x1", "RANK=0x1: not a whole number"},
    {TORCH " RANK=99999999999999999999999", "RANK=99999999999999999999999: not a whole number"},
    {TORCH " WORLD_SIZE=0", "WORLD_SIZE=0: not a whole number from 1 to 4096"},
    {TORCH " WORLD_SIZE=5000", "WORLD_SIZE=5000: not a whole number from 1 to 4096"},
    {TORCH " MASTER_PORT=65536", "MASTER_PORT=65536: not a whole number from 1 to 65535"},
    {TORCH " MASTER_PORT=http", "MASTER_PORT=http: not a whole number"},
    {TORCH " MASTER_ADDR=a;b", "MASTER_ADDR=a;b: not a host name or an address"},
    {TORCH " MASTER_ADDR=\x1b[2J", "MASTER_ADDR=?[2J: not a host name or an address"},
    {SLURM " SLURM_JOB_NODELIST=n[3", "SLURM_JOB_NODELIST='n[3': not a list of hosts"},
    {SLURM " SLURM_JOB_ID=x", "SLURM_JOB_ID=x: not a whole number"},
    {SLURM " SLURM_STEP_ID=x", "SLURM_STEP_ID=x: not a whole number"},
    {SLURM " SLURM_PROCID=8", "SLURM_PROCID=8 contradicts SLURM_NTASKS=8"},
    {SLURM PLACE " MASTER_PORT=0", "MASTER_PORT=0: not a whole number"},
    {OMPI " OMPI_COMM_WORLD_LOCAL_SIZE=9", "OMPI_COMM_WORLD_LOCAL_SIZE=9: not a whole number from 1 to 8"},
    {OURS " LLMC_TOKEN=xyz", "LLMC_TOKEN=xyz: not a number of up to 16 hex digits"},
    {OURS " LLMC_TOKEN=00000000000000001", "LLMC_TOKEN=00000000000000001: not a number"},
    {OURS " LLMC_START=x", "LLMC_START=x: not a whole number"},
    {OURS " LLMC_LISTEN_FD=1", "LLMC_LISTEN_FD=1: not a whole number from 3"},
    {OURS " LLMC_LISTEN_FD=999", "LLMC_LISTEN_FD=999: not an open socket that listens"},
    {OURS " LLMC_PROGRESS_FD=999", "LLMC_PROGRESS_FD=999: not an open pipe"},
};

// Sets "A=1 B=2"; a later one overrides.
static void set_environment(const char* variables) {
    char copy[1024];
    clear_environment();
    snprintf(copy, sizeof(copy), "%s", variables);
    for (char* p = strtok(copy, " "); p; p = strtok(NULL, " ")) {
        char* value = strchr(p, '=');
        *value = '\0';
        setenv(p, value + 1, 1);
    }
}

static void test_environments(void) {
    for (size_t k = 0; k < sizeof(environments) / sizeof(environments[0]); k++) {
        const Environment* e = &environments[k];
        RankEnv env;
        Error err;
        char got[1200], want[300];
        set_environment(e->variables);
        if (!rank_env_read(&env, &err)) {
            check_msg(strncmp(err.text, "environment: ", 13) == 0, "%s", err.text);
            check_msg(strstr(err.text, e->want), "%s\n  gives the error '%s'\n  wanted '%s'", e->variables, err.text,
                      e->want);
            continue;
        }
        snprintf(want, sizeof(want), "%s", e->want);
        char* port = strstr(want, ":PORT"); // any of those that may be derived
        if (port && env.port >= RANKS_FIRST_PORT && env.port < RANKS_FIRST_PORT + RANKS_NUM_PORTS) {
            snprintf(port, sizeof(want) - (size_t)(port - want), ":%d", env.port);
        }
        snprintf(got, sizeof(got), "%s %d/%d local %d at %s:%d", rank_source_name(env.source), env.rank, env.num_ranks,
                 env.local_rank, env.address, env.port);
        check_msg(strcmp(got, want) == 0, "%s\n  gives '%s'\n  wanted '%s'", e->variables, got, want);
        check(env.listen_fd == -1 && env.progress_fd == -1 && !getenv("LLMC_RANK"));
    }
    clear_environment();
}

static uint64_t token_of(const char* variables, int* port) {
    RankEnv env;
    Error err = {""};
    set_environment(variables);
    check_msg(rank_env_read(&env, &err), "%s", err.text);
    *port = env.port;
    return env.token;
}

static void test_tokens(void) {
    int port, other;
    uint64_t token = token_of(SLURM, &port);
    check(token != 0 && token_of(SLURM, &other) == token && other == port);
    check(token_of(SLURM " SLURM_PROCID=0 SLURM_LOCALID=0", &other) == token && other == port); // the same on all ranks
    check(token_of(SLURM " SLURM_JOB_ID=43", &other) != token && other != port);
    check(token_of(SLURM " SLURM_STEP_ID=1", &other) != token && other != port);
    check(token_of(SLURM " SLURM_RESTART_COUNT=1", &other) != token);
    token = token_of(TORCH " TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=0", &port);
    check(token_of(TORCH " TORCHELASTIC_RUN_ID=b TORCHELASTIC_RESTART_COUNT=0", &port) != token);
    check(token_of(TORCH " TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=1", &port) != token);
    check(token_of(OURS " LLMC_TOKEN=00ff", &port) == 255);
    check(token_of(OURS, &port) == 0);
    clear_environment();
}

static void test_host_lists(void) {
    static const char* const table[][2] = {
        {"node03", "node03"},
        {"node[03-05,7],x", "node03"},
        {"node[7,03-05]", "node7"},
        {"a,b[1-2]", "a"},
        {"gpu-[1,3]-ib[02-4].local,x", "gpu-1-ib02.local"},
        {"n[0-0]", "n0"},
        {"n[9-10]b", "n9b"},
        {"a_b.c-d", "a_b.c-d"},
        {"[1-3]", "1"},
        // not a list
        {"", NULL},
        {",", NULL},
        {"a,", NULL},
        {",a", NULL},
        {"a,,b", NULL},
        {"n[", NULL},
        {"n[]", NULL},
        {"n[1", NULL},
        {"n[1-", NULL},
        {"n[1-]", NULL},
        {"n[-1]", NULL},
        {"n[1,]", NULL},
        {"n[,1]", NULL},
        {"n[2-1]", NULL},
        {"n[1-2-3]", NULL},
        {"n[1[2]]", NULL},
        {"n]", NULL},
        {"n[a]", NULL},
        {"a b", NULL},
        {"a;b", NULL},
        {"x,n[", NULL},
        {"x,n[2-1]", NULL},
        {"n[1-99999999999999999999]", NULL},
    };
    char host[RANKS_ADDRESS], list[600];
    Error err;
    for (size_t k = 0; k < sizeof(table) / sizeof(table[0]); k++) {
        bool ok = ranks_first_host(host, sizeof(host), table[k][0], &err);
        check_msg(ok == (table[k][1] != NULL), "'%s' is %s", table[k][0], ok ? "accepted" : err.text);
        if (ok && table[k][1]) { check_str(host, table[k][1]); }
        char* exact = strdup_check(table[k][0]); // the sanitizer sees a read behind its end
        ranks_first_host(host, sizeof(host), exact, &err);
        free(exact);
    }
    for (int brackets = 0; brackets < 2; brackets++) { // names of the longest and of one more
        for (int n = RANKS_ADDRESS - 1; n <= RANKS_ADDRESS; n++) {
            memset(list, '1', sizeof(list));
            if (brackets) { list[100] = '[', list[n + 1] = ']'; }
            list[n + 2 * brackets] = '\0';
            check(ranks_first_host(host, sizeof(host), list, &err) == (n < RANKS_ADDRESS));
        }
    }
}

static const Test tests[] = {
    {"environments", "what each launcher sets, what is incomplete, what is wrong", test_environments},
    {"tokens", "the same for all ranks of a run, another one for another run", test_tokens},
    {"host_lists", "the first host of Slurm's lists", test_host_lists},
    {"all_end_well", "1 to 16 ranks: what each of them sees", test_all_end_well},
    {"output_unchanged", "stdout and stderr pass through", test_output_unchanged},
    {"rendezvous", "of launched ranks, with a restart", test_rendezvous},
    {"exit_code", "of the rank that failed; the others get SIGTERM", test_exit_code},
    {"killed", "the signal is named", test_killed},
    {"cause_before_consequence", "who failed first, when all fail", test_cause_before_consequence},
    {"ignores_sigterm", "SIGKILL ends it; also one that is stopped", test_ignores_sigterm},
    {"no_grandchildren", "what ranks have started is ended with them", test_no_grandchildren},
    {"parent_killed", "kill -9 of the parent ends the ranks", test_parent_killed},
    {"parent_killed_early", "at any moment of the start", test_parent_killed_early},
    {"signals_forwarded", "to the parent, to its group: each rank gets one", test_signals_forwarded},
    {"signals_twice", "SIGUSR2 goes on, a second SIGINT arrives", test_signals_twice},
    {"terminal", "Ctrl-C in a terminal, a terminal that is closed", test_terminal},
    {"nohup", "an ignored SIGHUP stays ignored", test_nohup},
    {"ctrl_z", "stops the ranks, fg continues them", test_ctrl_z},
    {"restarts_succeed", "at the third start", test_restarts_succeed},
    {"restarts_exhausted", "the last code counts", test_restarts_exhausted},
    {"no_restart", "usage errors, a closed output, no progress", test_no_restart},
    {"no_restart_after_a_signal", "that asked for the end", test_no_restart_after_a_signal},
    {"program_replaced", "a restart runs the same program", test_program_replaced},
    {"nobody_reads_stderr", "a broken pipe changes nothing", test_nobody_reads_stderr},
};

int main(int argc, char** argv) {
    static char path[4096];
    if (argc > 1 && strcmp(argv[1], "--run") == 0) { return child(argc, argv); }
    clear_environment();
    if (!realpath("/proc/self/exe", path)) { snprintf(path, sizeof(path), "%s", argv[0]); }
    self = path;
#ifdef __linux__
    prctl(PR_SET_CHILD_SUBREAPER, 1); // an orphan becomes a child of this process
#endif
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
