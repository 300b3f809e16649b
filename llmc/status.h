/*
What a run shows on a terminal: the last line says what the program does, and is rewritten in place. A thread adds the seconds
when the program is busy for longer, so the terminal is never silent. Files and pipes get none of this.

    status_show("validation %d of %d", i, n);
    status_clear();                              // before anything else is printed; print_line() and die() hide the line

Also keeps back what is printed while a run is set up, so that an error of the set-up stands alone:

    output_begin(true);
    ... printf() ...        // dropped if the program ends by die()
    output_release();
*/
#ifndef LLMC_STATUS_H
#define LLMC_STATUS_H

#include "utils.h"
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>

typedef struct {
    pthread_mutex_t lock;
    bool wanted;       // by the task: only a run shows what it does
    bool ticks, shown; // the thread runs; the line is on the terminal
    char text[256];
    double set_ms, written_ms; // when the text was set and when it was last written
} Status;

static inline Status* status_state(void) {
    static Status s = {PTHREAD_MUTEX_INITIALIZER, false, false, false, "", 0, 0};
    return &s;
}

// True in a run whose stdout is a terminal that knows escape codes.
static inline bool status_on(void) {
    const char* term = getenv("TERM");
    return status_state()->wanted && isatty(STDOUT_FILENO) && !(term && strcmp(term, "dumb") == 0);
}

// Columns of the terminal; 80 if it does not say.
static inline int status_columns(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Writes past stdio, whose stdout may hold its output back.
static inline void status_write(const char* text, size_t n) {
    if (write(STDOUT_FILENO, text, n) < 0) { /* ignored: it is only the status */
    }
}

// Writes the line, cut to the terminal's width. The lock is held.
static inline void status_write_line(Status* s, double now) {
    char line[400], seconds[32] = "", *end;
    if (now - s->set_ms > 1500) { snprintf(seconds, sizeof(seconds), " (%.0fs)", (now - s->set_ms) * 1e-3); }
    int room = status_columns() - 1,
        n = snprintf(line, sizeof(line), "\r%.*s%s", room - (int)strlen(seconds), s->text, seconds);
    n = (int)mask_controls(line + 1, (size_t)n - 1, false) + 1;
    end = line + n;
    memcpy(end, "\033[K", 3);
    status_write(line, (size_t)n + 3);
    s->shown = true;
    s->written_ms = now;
}

// Removes the line. forget: for good; otherwise it comes back if nothing else is shown within a second.
static inline void status_remove(bool forget) {
    Status* s = status_state();
    pthread_mutex_lock(&s->lock);
    if (s->shown) { status_write("\r\033[K", 4); }
    if (forget) { s->text[0] = '\0'; }
    s->shown = false;
    s->written_ms = time_ms();
    pthread_mutex_unlock(&s->lock);
}
static inline void status_hide(void) { status_remove(false); }
static inline void status_clear(void) { status_remove(true); }

static inline void* status_thread(void* state) {
    Status* s = (Status*)state;
    for (;;) {
        usleep(500000);
        pthread_mutex_lock(&s->lock);
        double now = time_ms();
        if (s->text[0] && now - s->written_ms > 900) { status_write_line(s, now); }
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

static inline void status_start(Status* s) {
    pthread_t thread;
    sigset_t all, before;
    s->ticks = true;
    on_print = status_hide;
    atexit(status_clear);
    sigfillset(&all); // the main thread handles the signals
    pthread_sigmask(SIG_BLOCK, &all, &before);
    if (pthread_create(&thread, NULL, status_thread, s) == 0) { pthread_detach(thread); }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Sets what the program does now; it is shown once a second has passed. Does nothing where status_on() is false.
PRINTF_LIKE(1, 2) static inline void status_set(const char* fmt, ...) {
    Status* s = status_state();
    if (!status_on()) { return; }
    if (!s->ticks) { status_start(s); }
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&s->lock);
    vsnprintf(s->text, sizeof(s->text), fmt, args);
    s->set_ms = time_ms();
    pthread_mutex_unlock(&s->lock);
    va_end(args);
}

// Shows what was set, at most ten times a second.
static inline void status_update(void) {
    Status* s = status_state();
    double now = time_ms();
    if (!status_on()) { return; }
    pthread_mutex_lock(&s->lock);
    if (!s->shown || now - s->written_ms > 100) {
        fflush(stdout);
        status_write_line(s, now);
    }
    pthread_mutex_unlock(&s->lock);
}

#define status_show(...) (status_set(__VA_ARGS__), status_update())

// ---- output of the set-up ------------------------------------------------------------

typedef struct {
    FILE* real; // stdout as it was; NULL: nothing is held
    char* text;
    size_t n;
} HeldOutput;

static inline HeldOutput* held_output(void) {
    static HeldOutput held = {NULL, NULL, 0};
    return &held;
}

// What was shown has ended: shows that the program is being set up, if its output is held, or nothing.
static inline void status_next(void) {
    if (held_output()->real) {
        status_show("starting");
    } else {
        status_clear();
    }
}

// Begins a run. hold: keeps back what is printed on stdout from here on; if the program ends before output_release(), it is
// dropped.
static inline void output_begin(bool hold) {
    HeldOutput* h = held_output();
    FILE* memory = hold ? open_memstream(&h->text, &h->n) : NULL; // without memory, it is printed at once
    status_state()->wanted = true;
    if (memory) {
        h->real = stdout;
        stdout = memory;
    }
    status_next();
}

static inline void output_release(void) {
    HeldOutput* h = held_output();
    if (!h->real) { return; }
    fclose(stdout);
    stdout = h->real;
    status_clear();
    fwrite(h->text, 1, h->n, stdout);
    free(h->text);
    h->real = NULL;
}

#endif
