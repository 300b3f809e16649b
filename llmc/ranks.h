/*
The ranks of a run: one process for each GPU. rank_env_read() tells a process which rank it is, from the environment
that its launcher made; ranks_launch() is our own launcher for the GPUs of one machine. Neither needs MPI, NCCL or CUDA.

    RankEnv ranks;
    if (!rank_env_read(&ranks, &err)) { die("%s", err.text); }
    if (ranks.num_ranks == 1 && gpus > 1) {         // before CUDA is touched: it does not survive a fork
        static const char* const resume[] = {"-y", "1", NULL};
        RankLaunch launch = {gpus, restarts, resume, 0, 0, 0};
        return ranks_launch(&launch, argv);         // the same program again, `gpus` times
    }
    ... rendezvous(), see rendezvous.h; then train; after the first step: rank_env_report_progress(&ranks); ...

Ctrl-C: each rank has a process group of its own, so a terminal or a `kill -- -GROUP` reaches the parent alone, and the
parent passes on every signal once. Linux kills the ranks of a parent that was killed -9. macOS has no such call: there
a rank that lost its parent goes on. C11, also compiles as C++17.
*/
#ifndef LLMC_RANKS_H
#define LLMC_RANKS_H

#include "utils.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

extern char** environ;

enum {
    RANKS_MAX = 4096,         // ranks in a run
    RANKS_MAX_LOCAL = 64,     // ranks that ranks_launch() starts
    RANKS_ADDRESS = 256,      // bytes of a host name or an address
    RANKS_FIRST_PORT = 20000, // ports that are derived from a job's id; they end below those that Linux (32768) and
    RANKS_NUM_PORTS = 12000   // macOS (49152) give to clients
};

// ---- which rank this process is ---------------------------------------------------

// Which of the processes of a run this is. Set once, when the program has found out. (unused: a program may include this
// header and read none of these four.)
__attribute__((unused)) static int run_rank = 0, run_num_ranks = 1;
// NULL, unless there are several processes. from_rank0 replaces data by process 0's; sum_over_ranks adds up their x.
__attribute__((unused)) static void (*from_rank0)(void* data, size_t bytes);
__attribute__((unused)) static double (*sum_over_ranks)(double x);

typedef enum { RANKS_ALONE, RANKS_LAUNCHER, RANKS_TORCHRUN, RANKS_OPEN_MPI, RANKS_PMI, RANKS_SLURM } RankSource;

typedef struct {
    int rank, num_ranks;         // 0 <= rank < num_ranks
    int local_rank;              // number among the ranks of this machine: the GPU to use
    char address[RANKS_ADDRESS]; // host name or address of rank 0, and its port; "" and 0 if there is one rank
    int port;
    uint64_t token; // tells this run from another one on the same port; from the launcher or the job's id
    RankSource source;
    int start;       // 0, or the number of the restart (ranks_launch)
    int listen_fd;   // rank 0 of ranks_launch(): a socket that listens on port; else -1
    int progress_fd; // see rank_env_report_progress(); else -1
} RankEnv;

// The name of what started the ranks, for messages.
static inline const char* rank_source_name(RankSource source) {
    static const char* const names[] = {"one process", "--gpus", "torchrun", "Open MPI", "PMI", "Slurm"};
    return names[source];
}

// FNV-1a, 64 bits: for run tokens, and for flags that must agree. http://www.isthe.com/chongo/tech/comp/fnv/
static inline uint64_t ranks_hash(const void* data, size_t bytes) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++) { hash = (hash ^ ((const uint8_t*)data)[i]) * 0x100000001B3u; }
    return hash;
}

// Little-endian numbers in messages.
static inline uint64_t ranks_get(const uint8_t* p, int bytes) {
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) { v |= (uint64_t)p[i] << (8 * i); }
    return v;
}

static inline uint8_t* ranks_put(uint8_t* p, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; i++) { *p++ = (uint8_t)(v >> (8 * i)); }
    return p;
}

// send() that raises no SIGPIPE, if the socket has SO_NOSIGPIPE where there is no MSG_NOSIGNAL.
static inline ssize_t ranks_send(int fd, const uint8_t* data, size_t bytes) {
#ifdef MSG_NOSIGNAL
    int flags = MSG_NOSIGNAL;
#else
    int flags = 0;
#endif
    ssize_t n;
    do { n = send(fd, data, bytes, flags); } while (n < 0 && errno == EINTR);
    return n;
}

// The value of an environment variable; NULL if it is not set or empty.
static inline const char* ranks_value(const char* name) {
    const char* value = getenv(name);
    return value && value[0] ? value : NULL;
}

// Reads a decimal number from min to max. Only digits are accepted.
static inline bool ranks_read_number(int64_t* out, const char* name, int64_t min, int64_t max, Error* err) {
    const char* text = ranks_value(name);
    size_t digits = text ? strspn(text, "0123456789") : 0;
    int64_t value = text && digits > 0 && digits < 18 && !text[digits] ? (int64_t)strtoll(text, NULL, 10) : -1;
    if (value < min || value > max) {
        return error_set(err, "environment: %s=%s: not a whole number from %lld to %lld", name, text ? text : "",
                         (long long)min, (long long)max);
    }
    *out = value;
    return true;
}

// Reads rank, number of ranks and local rank from three variables, all of which must be set.
static inline bool ranks_read_numbers(RankEnv* env, const char* rank, const char* num_ranks, const char* local,
                                      Error* err) {
    const char* const names[] = {rank, num_ranks, local};
    int64_t values[3];
    for (int i = 0; i < 3; i++) {
        const char* other = ranks_value(names[0]) ? names[0] : ranks_value(names[1]) ? names[1] : names[2];
        if (!ranks_value(names[i])) {
            return error_set(err, "environment: %s=%s is set but %s is not: set %s, %s and %s, or none of them", other,
                             ranks_value(other), names[i], rank, num_ranks, local);
        }
        if (!ranks_read_number(&values[i], names[i], i == 1, i == 1 ? RANKS_MAX : RANKS_MAX - 1, err)) { return false; }
    }
    for (int i = 0; i < 3; i += 2) {
        if (values[i] >= values[1]) {
            return error_set(err, "environment: %s=%lld contradicts %s=%lld: ranks count from 0", names[i],
                             (long long)values[i], num_ranks, (long long)values[1]);
        }
    }
    env->rank = (int)values[0];
    env->num_ranks = (int)values[1];
    env->local_rank = (int)values[2];
    return true;
}

// Reads a host name, an IPv4 or an IPv6 address.
static inline bool ranks_read_address(RankEnv* env, const char* name, Error* err) {
    const char* text = ranks_value(name);
    bool ok = strlen(text) < sizeof(env->address);
    for (const char* p = text; *p; p++) { ok = ok && (isalnum((unsigned char)*p) || strchr(".-_:%", *p)); }
    if (!ok) { return error_set(err, "environment: %s=%s: not a host name or an address", name, text); }
    snprintf(env->address, sizeof(env->address), "%s", text);
    return true;
}

// Reads where rank 0 listens from two variables, both of which must be set.
static inline bool ranks_read_place(RankEnv* env, const char* address, const char* port, const char* rank, Error* err) {
    const char* missing = !ranks_value(address) ? address : !ranks_value(port) ? port : NULL;
    int64_t number;
    if (missing) {
        return error_set(err, "environment: %s=%s is set but %s is not: rank 0 listens at %s, port %s", rank,
                         ranks_value(rank), missing, address, port);
    }
    if (!ranks_read_address(env, address, err) || !ranks_read_number(&number, port, 1, 65535, err)) { return false; }
    env->port = (int)number;
    return true;
}

// MPI and Slurm: MASTER_ADDR and MASTER_PORT, if set, say where rank 0 listens. Else it is at host (NULL: unknown), on a port
// that is derived from the job.
static inline bool ranks_find_place(RankEnv* env, const char* host, const char* job, const char* remedy, Error* err) {
    int64_t port;
    env->token = ranks_hash(job, strlen(job));
    env->port = RANKS_FIRST_PORT + (int)(env->token % RANKS_NUM_PORTS);
    if (ranks_value("MASTER_PORT")) {
        if (!ranks_read_number(&port, "MASTER_PORT", 1, 65535, err)) { return false; }
        env->port = (int)port;
    }
    if (ranks_value("MASTER_ADDR")) { return ranks_read_address(env, "MASTER_ADDR", err); }
    if (!host) {
        return error_set(err, "environment: MASTER_ADDR is not set, and %s does not say on which host rank 0 runs: %s",
                         rank_source_name(env->source), remedy);
    }
    snprintf(env->address, sizeof(env->address), "%s", host);
    return true;
}

// Writes the first host of a Slurm host list to host (size bytes): "node03" for "node[03-05,7],x". The whole list must be
// well-formed: https://slurm.schedmd.com/scontrol.html, hostlist expressions.
static inline bool ranks_first_host(char* host, size_t size, const char* list, Error* err) {
    size_t used = 0, begin = 0, i = 0;
    bool first = true, ok = true;
    for (; ok; i++) {
        char c = list[i];
        if (c == ',' || c == '\0') {
            ok = i > begin; // no empty name
            first = false;
            begin = i + 1;
            if (c == '\0') { break; }
        } else if (c == '[') {
            for (bool first_number = true; ok; first_number = false) { // numbers and ranges of numbers
                const char* low = list + ++i;
                size_t digits = strspn(low, "0123456789"), more = 0;
                if (first && first_number) {
                    size_t n = digits < size - used ? digits : size - used; // used == size: too long
                    memcpy(host + used, low, n);
                    used += n;
                }
                if (low[digits] == '-') {
                    more = strspn(low + digits + 1, "0123456789");
                    ok = more > 0 && more < 18 && digits < 18 &&
                         strtoll(low, NULL, 10) <= strtoll(low + digits + 1, NULL, 10);
                    more++;
                }
                i += digits + more;
                ok = ok && digits > 0 && (list[i] == ',' || list[i] == ']');
                if (!ok || list[i] == ']') { break; }
            }
        } else {
            ok = isalnum((unsigned char)c) || c == '-' || c == '.' || c == '_';
            if (first && used < size) { host[used++] = c; }
        }
    }
    if (!ok || used == 0 || used >= size) { return error_set(err, "'%s': not a list of hosts", list); }
    host[used] = '\0';
    return true;
}

// The variables of ranks_launch(). They also serve a start by hand, through ssh for instance: RANK to PORT are required,
// TOKEN is any number in hex that is the same for all ranks, 0 if it is not set.
static const char* const ranks_variables[] = {"LLMC_RANK",    "LLMC_NUM_RANKS", "LLMC_LOCAL_RANK",
                                              "LLMC_ADDRESS", "LLMC_PORT",      "LLMC_TOKEN",
                                              "LLMC_START",   "LLMC_LISTEN_FD", "LLMC_PROGRESS_FD"};
enum { RANKS_NUM_VARIABLES = sizeof(ranks_variables) / sizeof(ranks_variables[0]) };

// Takes over an inherited descriptor, which programs that this one starts shall not inherit.
static inline bool ranks_read_fd(int* fd, const char* name, bool listens, Error* err) {
    int64_t number;
    int on = 0;
    socklen_t bytes = sizeof(on);
    struct stat st;
    if (!ranks_value(name)) { return true; }
    if (!ranks_read_number(&number, name, 3, INT32_MAX, err)) { return false; }
    bool ok = listens ? getsockopt((int)number, SOL_SOCKET, SO_ACCEPTCONN, &on, &bytes) == 0 && on
                      : fstat((int)number, &st) == 0 && S_ISFIFO(st.st_mode);
    if (!ok || fcntl((int)number, F_SETFD, FD_CLOEXEC) != 0) {
        return error_set(err, "environment: %s=%s: not an open %s", name, ranks_value(name),
                         listens ? "socket that listens" : "pipe");
    }
    *fd = (int)number;
    return true;
}

static inline bool ranks_read_launcher(RankEnv* env, Error* err) {
    const char* token = ranks_value("LLMC_TOKEN");
    int64_t start = 0;
    if (!ranks_read_numbers(env, "LLMC_RANK", "LLMC_NUM_RANKS", "LLMC_LOCAL_RANK", err) ||
        !ranks_read_place(env, "LLMC_ADDRESS", "LLMC_PORT", "LLMC_RANK", err) ||
        (ranks_value("LLMC_START") && !ranks_read_number(&start, "LLMC_START", 0, INT32_MAX, err)) ||
        !ranks_read_fd(&env->progress_fd, "LLMC_PROGRESS_FD", false, err) ||
        !ranks_read_fd(&env->listen_fd, "LLMC_LISTEN_FD", true, err)) {
        return false;
    }
    if (token && (strlen(token) > 16 || token[strspn(token, "0123456789abcdefABCDEF")])) {
        return error_set(err, "environment: LLMC_TOKEN=%s: not a number of up to 16 hex digits", token);
    }
    env->token = token ? strtoull(token, NULL, 16) : 0;
    env->start = (int)start;
    // what this rank starts itself is not a rank
    for (int i = 0; i < RANKS_NUM_VARIABLES; i++) { unsetenv(ranks_variables[i]); }
    return true;
}

// torchrun's agent may listen on MASTER_PORT itself (TORCHELASTIC_USE_AGENT_STORE, torch/distributed/rendezvous.py); then
// rank 0 uses the next port.
static inline bool ranks_read_torchrun(RankEnv* env, Error* err) {
    char job[512];
    const char *id = ranks_value("TORCHELASTIC_RUN_ID"), *count = ranks_value("TORCHELASTIC_RESTART_COUNT");
    const char* agent = ranks_value("TORCHELASTIC_USE_AGENT_STORE");
    if (!ranks_read_numbers(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", err) ||
        !ranks_read_place(env, "MASTER_ADDR", "MASTER_PORT", "RANK", err)) {
        return false;
    }
    if (agent && strcmp(agent, "True") == 0) { env->port += env->port < 65535 ? 1 : -1; }
    snprintf(job, sizeof(job), "torchrun %s %s", id ? id : "", count ? count : "");
    env->token = ranks_hash(job, strlen(job));
    return true;
}

// Open MPI and PMI do not say where rank 0 runs. If all ranks run on one machine, that does not matter. local_size: the
// variable with the number of ranks on this machine.
static inline bool ranks_read_mpi(RankEnv* env, const char* rank, const char* num_ranks, const char* local,
                                  const char* local_size, const char* job_id, Error* err) {
    char job[512];
    int64_t here = 0;
    const char* id = ranks_value(job_id);
    if (!ranks_read_numbers(env, rank, num_ranks, local, err) ||
        (ranks_value(local_size) && !ranks_read_number(&here, local_size, 1, env->num_ranks, err))) {
        return false;
    }
    snprintf(job, sizeof(job), "%s %s", rank_source_name(env->source), id ? id : "");
    return env->num_ranks == 1 ||
           ranks_find_place(env, here == env->num_ranks ? "127.0.0.1" : NULL, job,
                            env->source == RANKS_OPEN_MPI ? "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT ..."
                                                          : "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT ...",
                            err);
}

// True if srun started this process as a task of a step. SLURM_NTASKS alone does not say so: salloc's shell, sbatch's script
// and `srun --pty bash` have it too. The script has SLURM_PROCID, but no step; the shell of an interactive step has a step
// number of 4294967290. (Slurm's src/common/env.c, slurm.h: SLURM_MAX_NORMAL_STEP_ID is 0xfffffff0.)
static inline bool ranks_in_slurm_step(Error* err, bool* ok) {
    const char* name = ranks_value("SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID";
    int64_t step = 0;
    *ok = true;
    if (!ranks_value("SLURM_PROCID") || !ranks_value(name)) { return false; }
    *ok = ranks_read_number(&step, name, 0, UINT32_MAX, err);
    return *ok && step < 0xFFFFFFF0;
}

static inline bool ranks_read_slurm(RankEnv* env, Error* err) {
    // srun --preserve-env leaves the job's number of tasks in SLURM_NTASKS
    const char* num_ranks = ranks_value("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    const char* nodes = ranks_value("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const char* step = ranks_value("SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID";
    const char *list = ranks_value(nodes), *restart = ranks_value("SLURM_RESTART_COUNT");
    char host[RANKS_ADDRESS], job[128];
    int64_t job_id, step_id;
    Error reason;
    if (!ranks_read_numbers(env, "SLURM_PROCID", num_ranks, "SLURM_LOCALID", err)) { return false; }
    if (env->num_ranks == 1) { return true; }
    if (!ranks_value("SLURM_JOB_ID") || !list) {
        return error_set(err, "environment: %s=%s is set but %s is not", num_ranks, ranks_value(num_ranks),
                         list ? "SLURM_JOB_ID" : nodes);
    }
    if (!ranks_read_number(&job_id, "SLURM_JOB_ID", 0, UINT32_MAX, err) ||
        !ranks_read_number(&step_id, step, 0, UINT32_MAX, err)) {
        return false;
    }
    if (!ranks_first_host(host, sizeof(host), list, &reason)) {
        return error_set(err, "environment: %s=%s", nodes, reason.text);
    }
    snprintf(job, sizeof(job), "Slurm %lld.%lld %s", (long long)job_id, (long long)step_id, restart ? restart : "");
    return ranks_find_place(env, host, job, "", err);
}

// Finds out which rank this process is. The first of these that is set decides; without any, there is one rank:
//     ranks_launch()   LLMC_RANK, LLMC_NUM_RANKS, LLMC_LOCAL_RANK, LLMC_ADDRESS, LLMC_PORT
//     torchrun         RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//     Open MPI         OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; on several hosts MASTER_ADDR
//     PMI              PMI_RANK, PMI_SIZE, MPI_LOCALRANKID (MPICH, Intel MPI); on several hosts MASTER_ADDR
//     Slurm            SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST, SLURM_JOB_ID: tasks of srun alone
// mpirun goes before Slurm because inside a job it starts its own daemons with srun: their step is not ours. MASTER_ADDR and
// MASTER_PORT also override what Slurm says. An empty variable counts as not set. Returns false and names the variable if one
// has no valid value, if a set is incomplete or contradicts itself. Call it once: the LLMC_ variables are removed.
static inline bool rank_env_read(RankEnv* env, Error* err) {
    bool ok;
    memset(env, 0, sizeof(*env));
    env->num_ranks = 1;
    env->listen_fd = env->progress_fd = -1;
    if (ranks_value("LLMC_RANK") || ranks_value("LLMC_NUM_RANKS") || ranks_value("LLMC_LOCAL_RANK")) {
        env->source = RANKS_LAUNCHER;
        return ranks_read_launcher(env, err);
    }
    if (ranks_value("RANK") || ranks_value("WORLD_SIZE") || ranks_value("LOCAL_RANK")) {
        env->source = RANKS_TORCHRUN;
        return ranks_read_torchrun(env, err);
    }
    if (ranks_value("OMPI_COMM_WORLD_RANK") || ranks_value("OMPI_COMM_WORLD_SIZE")) {
        env->source = RANKS_OPEN_MPI;
        return ranks_read_mpi(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                              "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", err);
    }
    bool step = ranks_in_slurm_step(err, &ok); // srun --mpi=pmi2 sets PMI_RANK too, but not MPI_LOCALRANKID
    if (!ok) { return false; }
    if (ranks_value("MPI_LOCALRANKID") || (!step && (ranks_value("PMI_RANK") || ranks_value("PMI_SIZE")))) {
        env->source = RANKS_PMI;
        return ranks_read_mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID", err);
    }
    if (step) {
        env->source = RANKS_SLURM;
        return ranks_read_slurm(env, err);
    }
    return true;
}

// Tells ranks_launch() that this start got somewhere: a rank that fails before any has called this is not started again,
// unless a signal ended it. To be called after the first step; further calls do nothing.
static inline void rank_env_report_progress(RankEnv* env) {
    if (env->progress_fd < 0) { return; }
    ssize_t n;
    do { n = write(env->progress_fd, "p", 1); } while (n < 0 && errno == EINTR);
    close(env->progress_fd);
    env->progress_fd = -1;
}

// Closes the inherited descriptors that are still open.
static inline void rank_env_close(RankEnv* env) {
    if (env->listen_fd >= 0) { close(env->listen_fd); }
    if (env->progress_fd >= 0) { close(env->progress_fd); }
    env->listen_fd = env->progress_fd = -1;
}

// ---- the launcher -------------------------------------------------------------------

typedef struct {
    int num_ranks;                   // 1 .. RANKS_MAX_LOCAL
    int restarts;                    // after a failure all ranks are started again, so many times at most
    const char* const* restart_args; // appended to argv from the second start on, then NULL; may be NULL
    // times in ms; 0: the default
    double notice_ms; // for the others to end by themselves after one failed, before SIGTERM: 10,000
    double term_ms;   // between SIGTERM and SIGKILL: 10,000
    double pause_ms;  // between a failure and the next start: 1,000
} RankLaunch;

// all ranks run; one failed and the others have notice_ms; they got SIGTERM; they got SIGKILL
typedef enum { RANKS_RUN, RANKS_NOTICE, RANKS_TERM, RANKS_KILL } RankPhase;

typedef struct {
    const RankLaunch* how;
    pid_t pids[RANKS_MAX_LOCAL];   // 0: has ended
    int statuses[RANKS_MAX_LOCAL]; // as waitpid() returns them
    double started_ms[RANKS_MAX_LOCAL];
    int num_running;
    int first_failed; // rank, or -1
    RankPhase phase;
    double deadline_ms; // end of the phase
    int signal_fd;      // receives a byte for each signal
    int progress_fd;    // receives a byte from each rank that reports progress
    bool progressed;
    bool forwarded[NSIG]; // signals that the ranks were sent on request
    bool stop;            // SIGINT, SIGTERM, SIGHUP or SIGUSR1: the end was asked for
} RankGroup;

enum { RANKS_NUM_SIGNALS = 8, RANKS_NUM_FORWARDED = 5 };
static const int ranks_signals[RANKS_NUM_SIGNALS] = {SIGINT,  SIGTERM, SIGHUP, SIGUSR1,
                                                     SIGUSR2, // to here: forwarded
                                                     SIGCHLD, SIGTSTP, SIGCONT};
static volatile sig_atomic_t ranks_signal_fd;

static inline void ranks_on_signal(int number) {
    int saved_errno = errno;
    uint8_t byte = (uint8_t)number;
    if (write(ranks_signal_fd, &byte, 1) < 0) { /* the pipe is full of signals that wait to be handled */
    }
    errno = saved_errno;
}

// "SIGKILL" for 9.
static inline const char* ranks_signal_name(int number) {
    static const struct {
        int number;
        const char* name;
    } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
                 {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
                 {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
                 {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"},
                 {SIGXFSZ, "SIGXFSZ"}, {SIGSYS, "SIGSYS"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (names[i].number == number) { return names[i].name; }
    }
    return "an unusual signal";
}

// A pipe whose ends do not block and are closed on exec.
static inline bool ranks_pipe(int fds[2], Error* err) {
    if (pipe(fds) != 0) { return error_set(err, "pipe: %s", strerror(errno)); }
    for (int i = 0; i < 2; i++) {
        fcntl(fds[i], F_SETFD, FD_CLOEXEC);
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
    }
    return true;
}

// Listens on a free port of the loopback interface. Returns the socket, or -1. address: 16 bytes.
static inline int ranks_listen(char* address, int* port, Error* err) {
    for (int v6 = 0; v6 < 2; v6++) { // a machine may have IPv6 alone
        struct sockaddr_in a4;
        struct sockaddr_in6 a6;
        memset(&a4, 0, sizeof(a4));
        memset(&a6, 0, sizeof(a6));
        a4.sin_family = AF_INET;
        a4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        a6.sin6_family = AF_INET6;
        a6.sin6_addr = in6addr_loopback;
        struct sockaddr* a = v6 ? (struct sockaddr*)&a6 : (struct sockaddr*)&a4;
        socklen_t bytes = v6 ? sizeof(a6) : sizeof(a4);
        int fd = socket(a->sa_family, SOCK_STREAM, 0);
        if (fd >= 0 && bind(fd, a, bytes) == 0 && listen(fd, SOMAXCONN) == 0 && getsockname(fd, a, &bytes) == 0) {
            fcntl(fd, F_SETFD, FD_CLOEXEC);
            snprintf(address, 16, "%s", v6 ? "::1" : "127.0.0.1");
            *port = ntohs(v6 ? a6.sin6_port : a4.sin_port);
            return fd;
        }
        if (!v6 || errno != EAFNOSUPPORT) {
            error_set(err, "cannot listen on the loopback interface: %s", strerror(errno));
        }
        if (fd >= 0) { close(fd); }
    }
    return -1;
}

static inline uint64_t ranks_random_token(void) {
    uint64_t token = 0;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &token, sizeof(token)) != (ssize_t)sizeof(token)) {
        token = (uint64_t)getpid() << 32 ^ (uint64_t)(time_ms() * 1e6);
    }
    if (fd >= 0) { close(fd); }
    return token;
}

// What a start has in common for all ranks.
typedef struct {
    Path path; // of the program
    char** argv;
    int num_kept; // variables that are passed on
    char** envp;  // (num_kept + RANKS_NUM_VARIABLES + 1); the rest differs between the ranks
    int listen_fd, progress_fd;
    pid_t parent;
    sigset_t mask;                                   // the parent's before ranks_launch()
    const struct sigaction* old_actions;             // (RANKS_NUM_SIGNALS) likewise
    const struct sigaction* old_pipe;                // of SIGPIPE
    char values[RANKS_NUM_VARIABLES][RANKS_ADDRESS]; // "LLMC_RANK=3" and so on
} RankStart;

static inline void ranks_restore_signal(int number, const struct sigaction* old) {
    struct sigaction action = *old;
    // a handler is of no use to another program
    if ((action.sa_flags & SA_SIGINFO) || (action.sa_handler != SIG_IGN)) {
        action.sa_flags = 0;
        action.sa_handler = SIG_DFL;
    }
    sigaction(number, &action, NULL);
}

// Turns the new process into a rank. All signals are blocked. Only async-signal-safe calls.
__attribute__((noreturn)) static inline void ranks_become(const RankStart* s, int rank) {
    static const char text[] = "error: a rank cannot execute the program\n";
    setpgid(0, 0);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != s->parent) { _exit(1); } // it ended before prctl()
#endif
    for (int i = 0; i < RANKS_NUM_SIGNALS; i++) { ranks_restore_signal(ranks_signals[i], &s->old_actions[i]); }
    ranks_restore_signal(SIGPIPE, s->old_pipe);
    signal(SIGTTOU, SIG_IGN);               // stty tostop: a rank is in the background, and prints all the same
    int null = open("/dev/null", O_RDONLY); // a rank that read from the terminal would be stopped
    if (null > 0) { dup2(null, 0), close(null); }
    if (rank == 0) { fcntl(s->listen_fd, F_SETFD, 0); }
    fcntl(s->progress_fd, F_SETFD, 0);
    sigprocmask(SIG_SETMASK, &s->mask, NULL);
#ifdef __linux__
    execve(s->path.text, s->argv, s->envp);
    execve("/proc/self/exe", s->argv, s->envp); // the file was replaced or removed since: this is still the old one
#else
    environ = s->envp;
    execvp(s->path.text, s->argv);
#endif
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0) { _exit(126); }
    _exit(127);
}

// Sets the variables of a rank.
static inline void ranks_fill_variables(RankStart* s, int rank, int num_ranks, int start, const char* address, int port,
                                        uint64_t token) {
    for (int i = 0; i < RANKS_NUM_VARIABLES; i++) {
        char* text = s->values[i];
        const char* name = ranks_variables[i];
        const int numbers[] = {rank, num_ranks, rank, 0, port, 0, start, s->listen_fd, s->progress_fd};
        snprintf(text, RANKS_ADDRESS, "%s=%d", name, numbers[i]);
        if (i == 3) { snprintf(text, RANKS_ADDRESS, "%s=%s", name, address); }
        if (i == 5) { snprintf(text, RANKS_ADDRESS, "%s=%016llx", name, (unsigned long long)token); }
        if (i == 7 && rank > 0) { snprintf(text, RANKS_ADDRESS, "%s=", name); }
        s->envp[s->num_kept + i] = text;
    }
    s->envp[s->num_kept + RANKS_NUM_VARIABLES] = NULL;
}

// Finds the program, and copies the environment and the arguments.
static inline void ranks_prepare(RankStart* s, char** argv, const char* const* more_args) {
    int num_env = 0, num_args = 0, num_more = 0;
    while (environ[num_env]) { num_env++; }
    while (argv[num_args]) { num_args++; }
    while (more_args && more_args[num_more]) { num_more++; }
    s->envp = (char**)calloc_check((size_t)num_env + RANKS_NUM_VARIABLES + 1, sizeof(char*));
    s->argv = (char**)calloc_check((size_t)num_args + num_more + 1, sizeof(char*));
    for (int i = 0; i < num_env; i++) {
        bool ours = false;
        for (int k = 0; k < RANKS_NUM_VARIABLES; k++) {
            size_t n = strlen(ranks_variables[k]);
            ours = ours || (strncmp(environ[i], ranks_variables[k], n) == 0 && environ[i][n] == '=');
        }
        if (!ours) { s->envp[s->num_kept++] = environ[i]; }
    }
    memcpy(s->argv, argv, (size_t)num_args * sizeof(char*));
    for (int i = 0; i < num_more; i++) { s->argv[num_args + i] = (char*)more_args[i]; }
    path_set(&s->path, "%s", argv[0]);
#ifdef __linux__
    ssize_t n = readlink("/proc/self/exe", s->path.text, sizeof(s->path.text) - 1);
    snprintf(s->path.text + (n > 0 ? n : 0), n > 0 ? 1 : sizeof(s->path.text), "%s", n > 0 ? "" : "/proc/self/exe");
#endif
}

// Starts all ranks. The port is free and stays so: it is bound here, and rank 0 inherits the socket. If one cannot be
// started, returns false; those that were started are in g.
static inline bool ranks_start(RankGroup* g, RankStart* s, int start, Error* err) {
    char address[16];
    int port, progress[2];
    sigset_t all;
    bool ok = true;
    s->listen_fd = ranks_listen(address, &port, err);
    if (s->listen_fd < 0) { return false; }
    if (!ranks_pipe(progress, err)) {
        close(s->listen_fd);
        return false;
    }
    g->progress_fd = progress[0];
    s->progress_fd = progress[1];
    s->parent = getpid();
    uint64_t token = ranks_random_token();
    fflush(NULL); // what was printed before the start comes before what the ranks print
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &s->mask); // a signal that comes now reaches all ranks, when they are all there
    for (int rank = 0; rank < g->how->num_ranks && ok; rank++) {
        ranks_fill_variables(s, rank, g->how->num_ranks, start, address, port, token);
        pid_t pid = fork();
        if (pid == 0) { ranks_become(s, rank); }
        if (pid < 0) {
            ok = error_set(err, "cannot start rank %d of %d: %s", rank, g->how->num_ranks, strerror(errno));
        } else {
            setpgid(pid, pid); // so does the rank; the first of them counts
            g->pids[rank] = pid;
            g->started_ms[rank] = time_ms();
            g->num_running++;
        }
    }
    sigprocmask(SIG_SETMASK, &s->mask, NULL);
    close(s->listen_fd);
    close(s->progress_fd);
    return ok;
}

static inline void ranks_signal_all(RankGroup* g, int number) {
    for (int i = 0; i < g->how->num_ranks; i++) {
        if (g->pids[i]) { kill(g->pids[i], number); }
    }
}

// "was killed by SIGKILL after 12.3 s"
static inline void ranks_format_end(char* out, size_t size, const RankGroup* g, int rank) {
    char after[32];
    double seconds = (time_ms() - g->started_ms[rank]) / 1000;
    int status = g->statuses[rank];
    if (seconds < 60) {
        snprintf(after, sizeof(after), "%.1f s", seconds);
    } else {
        format_duration(after, sizeof(after), seconds);
    }
    if (WIFSIGNALED(status)) {
        const char* hint = WTERMSIG(status) == SIGKILL ? " (by hand, or because memory was short: see dmesg)" : "";
        snprintf(out, size, "was ended by signal %d, %s, after %s%s", WTERMSIG(status),
                 ranks_signal_name(WTERMSIG(status)), after, hint);
    } else {
        snprintf(out, size, "ended with exit code %d after %s", WEXITSTATUS(status), after);
    }
}

// Collects the ranks that have ended, together with what they started, and reports the first one that failed and those that
// a signal ended. Which of several that are found at the same time failed first is not known: a signal is more likely a cause
// than an exit code.
static inline void ranks_reap(RankGroup* g) {
    bool ended[RANKS_MAX_LOCAL];
    for (int i = 0; i < g->how->num_ranks; i++) {
        siginfo_t info;
        memset(&info, 0, sizeof(info));
        ended[i] = g->pids[i] && waitid(P_PID, (id_t)g->pids[i], &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
                   info.si_pid == g->pids[i];
        if (!ended[i]) { continue; }
        kill(-g->pids[i], SIGKILL); // the rest of its group, while no other process can have this number
        while (waitpid(g->pids[i], &g->statuses[i], 0) < 0 && errno == EINTR) {}
        g->num_running--;
    }
    for (int pass = 0; pass < 2 && g->first_failed < 0; pass++) {
        for (int i = 0; i < g->how->num_ranks && g->first_failed < 0; i++) {
            if (ended[i] && (pass == 0 ? WIFSIGNALED(g->statuses[i]) : g->statuses[i] != 0)) { g->first_failed = i; }
        }
    }
    for (int k = -1; k < g->how->num_ranks; k++) { // the first that failed, then the others
        int i = k < 0 ? g->first_failed : k;
        if (i < 0 || !ended[i] || !g->pids[i]) { continue; }
        char how[160];
        ranks_format_end(how, sizeof(how), g, i);
        bool by_us = g->phase >= RANKS_TERM && WIFSIGNALED(g->statuses[i]);
        bool follows = i != g->first_failed && !WIFSIGNALED(g->statuses[i]); // has ended because the first one did
        if (g->statuses[i] != 0 && !by_us && !follows) {
            print_line(stderr, "%srank %d of %d (process %ld) %s", i == g->first_failed ? "error: " : "", i,
                       g->how->num_ranks, (long)g->pids[i], how);
        }
        g->pids[i] = 0;
    }
}

// After a failure: gives the others time, then SIGTERM, then SIGKILL. A process that hangs in a driver outlives even that; it
// is left alone after another term_ms.
static inline void ranks_escalate(RankGroup* g) {
    double now = time_ms(), notice_ms = g->how->notice_ms > 0 ? g->how->notice_ms : 10000;
    double term_ms = g->how->term_ms > 0 ? g->how->term_ms : 10000;
    if (g->first_failed < 0 || g->num_running == 0) { return; }
    if (g->phase == RANKS_RUN) {
        g->phase = RANKS_NOTICE;
        g->deadline_ms = now + notice_ms;
        return;
    }
    if (now < g->deadline_ms) { return; }
    g->phase = (RankPhase)(g->phase + 1);
    g->deadline_ms = now + term_ms;
    for (int i = 0; i < g->how->num_ranks; i++) {
        if (!g->pids[i]) { continue; }
        if (g->phase <= RANKS_KILL) {
            bool term = g->phase == RANKS_TERM;
            print_line(stderr, "rank %d of %d (process %ld) still runs after %.1f s: %s", i, g->how->num_ranks,
                       (long)g->pids[i], (term ? notice_ms : term_ms) / 1000, term ? "SIGTERM" : "SIGKILL");
            kill(term ? g->pids[i] : -g->pids[i], term ? SIGTERM : SIGKILL);
            if (!term) { kill(g->pids[i], SIGKILL); } // in case it has left its group
        } else {
            print_line(stderr,
                       "error: rank %d of %d (process %ld) cannot be killed: it hangs in the kernel or a driver", i,
                       g->how->num_ranks, (long)g->pids[i]);
            g->pids[i] = 0;
            g->num_running--;
        }
    }
}

// Waits for a signal, at most ms (-1: for ever), and handles all that have come.
static inline void ranks_handle_signals(RankGroup* g, int ms) {
    struct pollfd fds[2] = {{g->signal_fd, POLLIN, 0}, {g->progress_fd, POLLIN, 0}};
    uint8_t numbers[256];
    ssize_t n;
    poll(fds, g->progress_fd < 0 ? 1 : 2, ms);
    if (g->progress_fd >= 0 && (n = read(g->progress_fd, numbers, sizeof(numbers))) >= 0) {
        g->progressed = g->progressed || n > 0;
        if (n == 0) { // no rank can report any more; a closed pipe would end each poll() at once
            close(g->progress_fd);
            g->progress_fd = -1;
        }
    }
    while ((n = read(g->signal_fd, numbers, sizeof(numbers))) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            int number = numbers[i];
            for (int k = 0; k < RANKS_NUM_FORWARDED; k++) {
                if (number != ranks_signals[k]) { continue; }
                g->forwarded[number] = true;
                g->stop = g->stop || number != SIGUSR2;
                ranks_signal_all(g, number);
            }
            if (number == SIGTSTP) { // Ctrl-Z
                ranks_signal_all(g, SIGSTOP);
                kill(getpid(), SIGSTOP);
            }
            if (number == SIGCONT) { ranks_signal_all(g, SIGCONT); }
        }
    }
}

// Waits until all ranks have ended.
static inline void ranks_wait(RankGroup* g) {
    while (g->num_running > 0) {
        double left = g->phase == RANKS_RUN ? 1000 : g->deadline_ms - time_ms() + 1;
        ranks_handle_signals(g, left < 0 ? 0 : left > 1000 ? 1000 : (int)left);
        ranks_reap(g);
        ranks_escalate(g);
    }
    if (g->progress_fd >= 0) {
        ranks_handle_signals(g, 0);
        if (g->progress_fd >= 0) { close(g->progress_fd); }
        g->progress_fd = -1;
    }
}

// Decides whether a failed run is started again, and says why not.
static inline bool ranks_may_restart(const RankGroup* g, int start) {
    int status = g->statuses[g->first_failed];
    bool asked = WIFSIGNALED(status) && WTERMSIG(status) < NSIG && g->forwarded[WTERMSIG(status)];
    const char* reason = NULL;
    if (g->how->restarts == 0 || g->stop || asked) { return false; }
    if (g->phase > RANKS_KILL) { reason = "a rank of the last start is still there"; }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) { reason = "exit code 2 is a usage error"; }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGPIPE) { reason = "standard output was closed"; }
    if (WIFEXITED(status) && !g->progressed && !reason) { reason = "it failed before the first step was done"; }
    if (start >= g->how->restarts && !reason) { reason = "all restarts are used up"; }
    if (reason) { print_line(stderr, "error: not started again: %s", reason); }
    return !reason;
}

// One start and its end. Returns the exit code of the rank that failed first, 128 + signal if a signal ended it; 0 if none.
static inline int ranks_run_once(RankGroup* g, RankStart* s, int start) {
    Error err;
    g->first_failed = g->progress_fd = -1;
    g->phase = RANKS_RUN;
    g->num_running = 0;
    g->progressed = false;
    memset(g->pids, 0, sizeof(g->pids));
    bool started = ranks_start(g, s, start, &err);
    if (!started) {
        print_line(stderr, "error: %s", err.text);
        ranks_signal_all(g, SIGKILL);
        g->phase = RANKS_KILL; // the ranks need not be reported
        g->deadline_ms = time_ms() + 10000;
        g->stop = true;
    }
    ranks_wait(g);
    if (!started) { return EXIT_FAILURE; }
    int status = g->first_failed < 0 ? 0 : g->statuses[g->first_failed];
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// Runs this program again as how->num_ranks ranks, with the same arguments, and waits for them. Must be called before CUDA
// and before any thread is started. stdout and stderr are those of this process; stdin is /dev/null. SIGINT, SIGTERM, SIGHUP,
// SIGUSR1 and SIGUSR2 are passed on to each rank once; Ctrl-Z and fg work.
//
// When a rank ends with a nonzero code or by a signal, a line on stderr says so, the others get some time to notice
// (notice_ms), then SIGTERM, then SIGKILL, also the processes that a rank has started. Then all are started again,
// how->restarts times at most, with the next number in RankEnv.start; but not after a signal that asked for the end, nor after
// a usage error (exit code 2), nor if stdout was closed (exit code 141), nor if a rank exits before it called
// rank_env_report_progress().
//
// Returns the exit code for main: 0 if all ranks ended with 0, else the code of the one that failed first, 128 + signal if a
// signal ended it.
static inline int ranks_launch(const RankLaunch* how, char** argv) {
    struct sigaction action, ignore, old_actions[RANKS_NUM_SIGNALS], old_pipe;
    RankGroup group;
    int code = EXIT_FAILURE, signals[2];
    Error err;
    require(how->num_ranks >= 1 && how->num_ranks <= RANKS_MAX_LOCAL && how->restarts >= 0);
    if (!ranks_pipe(signals, &err)) { die("%s", err.text); }
    memset(&group, 0, sizeof(group));
    group.how = how;
    group.signal_fd = signals[0];
    ranks_signal_fd = signals[1];
    memset(&action, 0, sizeof(action));
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    ignore = action;
    action.sa_handler = ranks_on_signal;
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &ignore, &old_pipe); // nobody reads stderr: the ranks are looked after all the same
    for (int i = 0; i < RANKS_NUM_SIGNALS; i++) {
        int number = ranks_signals[i];
        sigaction(number, &action, &old_actions[i]);
        // what is ignored, as SIGHUP under nohup, stays so; but the shell ignores SIGINT for a job in the background
        bool needed = number == SIGINT || number == SIGTERM || number == SIGCHLD;
        if (old_actions[i].sa_handler == SIG_IGN && !needed) { sigaction(number, &old_actions[i], NULL); }
    }
    for (int start = 0; !group.stop; start++) {
        RankStart s;
        memset(&s, 0, sizeof(s));
        s.old_actions = old_actions;
        s.old_pipe = &old_pipe;
        ranks_prepare(&s, argv, start > 0 ? how->restart_args : NULL);
        code = ranks_run_once(&group, &s, start);
        free(s.argv);
        free(s.envp);
        if (code == 0 || group.first_failed < 0 || !ranks_may_restart(&group, start)) { break; }
        print_line(stderr, "starting all ranks again: restart %d of %d", start + 1, how->restarts);
        double end = time_ms() + (how->pause_ms > 0 ? how->pause_ms : 1000);
        for (double left; !group.stop && (left = end - time_ms()) > 0;) { ranks_handle_signals(&group, (int)left + 1); }
    }
    for (int i = 0; i < RANKS_NUM_SIGNALS; i++) { sigaction(ranks_signals[i], &old_actions[i], NULL); }
    sigaction(SIGPIPE, &old_pipe, NULL);
    close(signals[0]);
    close(signals[1]);
    return code;
}

#endif
