/*
Stopping a run by a signal: the handler only notes that a stop is requested, and the run ends where it can be resumed.

    run_heed_interrupt();
    run_install_signal_handlers();
    for (...) {
        ... one step ...
        if (run_stop_signal) { ... save ...; break; }
    }
*/
#ifndef LLMC_STOP_H
#define LLMC_STOP_H

#include "utils.h"
#include <signal.h>

// 0, or the number of the signal that requested a stop. The training loop checks it between two steps and between two
// micro-batches; if it is set, the loop saves a checkpoint and exits. An unfinished step is dropped.
static volatile sig_atomic_t run_stop_signal;
// True after the first SIGINT or SIGTERM: another one ends the process at once.
static volatile sig_atomic_t run_stop_urged;

// Set in a process that leaves it to another one to tell the user that the run stops.
static bool run_stop_is_silent;

// What the run does, for the message of the first signal: what it finishes before it ends.
#define RUN_FINISHES_STEP "this micro-batch"
static const char* volatile run_finishes = RUN_FINISHES_STEP;
// True if the run will save a checkpoint then.
static volatile sig_atomic_t run_will_save;

// Tells what the run still does. Called by the handler, so it only writes.
static inline void run_tell_stop(void) {
    const char* const texts[] = {
        run_stop_signal == SIGPIPE ? "\nstandard output was closed, stopping" : "\nstopping", ": the run finishes ",
        run_finishes, run_will_save ? ", then saves a checkpoint" : ", and saves nothing, because -o is not given",
        "; a second Ctrl-C or SIGTERM ends it at once\n"};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (write(STDERR_FILENO, texts[i], strlen(texts[i])) < 0) { return; } // the run stops without the message
    }
}

// Requests a stop. The second SIGINT or SIGTERM ends the process at once with exit code 128 + signal: 130 or 143.
static inline void run_on_signal(int signal_number) {
    int saved_errno = errno;
    bool urged = signal_number == SIGINT || signal_number == SIGTERM;
    if (urged && run_stop_urged) { _exit(128 + signal_number); }
    if (urged) { run_stop_urged = 1; }
    bool first = !run_stop_signal;
    if (first) { run_stop_signal = signal_number; }
    if (first && !run_stop_is_silent) { run_tell_stop(); }
    errno = saved_errno;
}

// Lets SIGINT end the program until the handlers are installed, even if the shell ignored it when it started the program in
// the background: otherwise one that comes too early would be lost.
static inline void run_heed_interrupt(void) { require(signal(SIGINT, SIG_DFL) != SIG_ERR); }

// Installs the handler for the signals that end a run:
//     SIGINT, SIGTERM
//     SIGHUP            the terminal was closed; unless it is ignored, as under nohup
//     SIGUSR1           sent by Slurm and other schedulers before the time is up
//     SIGPIPE           nobody reads stdout any more; the exit code is 128 + SIGPIPE, as of other programs
// SIGXFSZ, the limit on file sizes, is ignored: the write fails instead. SA_RESTART: interrupted system calls are
// restarted, so a signal during a save does not make the save fail.
static inline void run_install_signal_handlers(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
    struct sigaction action, old;
    memset(&action, 0, sizeof(action));
    action.sa_handler = run_on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        bool nohup = signals[i] == SIGHUP && sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler == SIG_IGN;
        if (!nohup) { require(sigaction(signals[i], &action, NULL) == 0); }
    }
    require(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
}

#endif
