/*
Asynchronous checkpoints: the training waits only until its weights and moments are copied; a thread writes the copy,
syncs and renames it, and removes old checkpoints, while the next steps are computed.

    Saver saver = {.dir = "log", .lock = -1, .keep = 5, .tokenizer = &tokenizer};
    saver_allocate(&saver, num_parameters(&config));  // or leave saver.copy NULL and use saver_run() alone
    for (...) {
        ... one step ...
        if (it is time) {
            saver_wait(&saver);         // for the previous checkpoint, if it is still being written
            ... report it ...
            ... copy weights and moments to saver.copy, set saver.state ...
            saver_start(&saver, saver.copy);
        }
        if (saver_poll(&saver)) { ... report it ... }
    }

With several ranks each of them has a Saver, and together they save what run_parts() dealt to them: set ranks, parts and
buffer instead of tensors, with a new token for each save, and call saver_start() on all ranks at about the same time. Rank 0
alone marks the best checkpoint and removes old ones.

    RunRank ranks = {rank, num_ranks, token, 0.0, &rank_died, NULL};
    saver.ranks = ranks;
    saver.parts = &parts;
    saver.buffer = buffer; // ... filled with this rank's parts

One thread at most; all functions are called by the thread that owns the Saver. C11, also compiles as C++17.
*/
#ifndef LLMC_SAVER_H
#define LLMC_SAVER_H

#include "run_parts.h"
#include "run_state.h"
#include "tokenizer.h"
#include "utils.h"
#include <pthread.h>
#include <signal.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    // what is saved where; set before saver_start() or saver_run(), and constant until the thread has ended
    const char* dir;
    int lock;              // of dir (run_lock), or negative; no checkpoint is removed without run_owns()
    int keep, major_every; // see run_prune()
    bool best;             // also mark it as the best one, see run_mark_best()
    const Tokenizer* tokenizer;
    RunState state;
    const float* tensors[3]; // (num_parameters) each: weights, AdamW's moments m and v
    float* copy[3];          // the same sizes: memory for a copy of them; NULL if there is none
    // instead of tensors, which are then not used: the parts that this rank saves, see run_save_parts()
    RunRank ranks;         // num_ranks 0: there are no parts
    const RunParts* parts; // how they are dealt
    const float* buffer;   // (parts->rank_floats[ranks.rank])
    // the thread
    pthread_t thread;
    bool running; // started and not yet joined
    int done;     // atomic: the thread has set the results below
    // results of the last save
    bool saved, pruned;
    Error error, prune_error; // set if not saved, if not pruned
    double ms;                // time of the save, without the pruning
} Saver;

// Saves and prunes in the calling thread, and fills in the results.
static inline void saver_run(Saver* s) {
    double start = time_ms();
    bool first = s->ranks.rank == 0;
    if (s->ranks.num_ranks > 0) {
        s->saved = run_save_parts(s->dir, &s->state, s->parts, &s->ranks, s->buffer, s->tokenizer, &s->error);
    } else {
        // once more, as a save makes a directory that is gone
        s->saved = run_owns(s->dir, s->lock, &s->error) &&
                   run_save(s->dir, &s->state, s->tensors[0], s->tensors[1], s->tensors[2], s->tokenizer, &s->error);
    }
    if (s->saved && s->best && first) { s->saved = run_mark_best(s->dir, s->state.step, &s->error); }
    s->ms = time_ms() - start;
    s->pruned =
        !s->saved || !first ||
        (run_owns(s->dir, s->lock, &s->prune_error) && run_prune(s->dir, s->keep, s->major_every, &s->prune_error));
}

static inline void* saver_thread(void* arg) {
    Saver* s = (Saver*)arg;
#ifdef _OPENMP
    omp_set_num_threads(1); // for this thread only: the training needs the cores
#endif
    saver_run(s);
    __atomic_store_n(&s->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// Starts saving s->tensors in a thread. If no thread can be started, saves in this one.
static inline void saver_start(Saver* s) {
    sigset_t all, before;
    require(!s->running);
    s->done = 0;
    sigfillset(&all); // the main thread handles the signals
    pthread_sigmask(SIG_BLOCK, &all, &before);
    s->running = pthread_create(&s->thread, NULL, saver_thread, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!s->running) {
        saver_run(s);
        s->done = 1;
    }
}

// Waits until the thread has ended. Returns true if there is a save whose results have not been returned yet.
static inline bool saver_wait(Saver* s) {
    if (s->running) { pthread_join(s->thread, NULL); }
    bool news = s->running || s->done;
    s->running = false;
    s->done = 0;
    return news;
}

// Like saver_wait(), but returns false at once if the thread is still at work.
static inline bool saver_poll(Saver* s) { return __atomic_load_n(&s->done, __ATOMIC_ACQUIRE) ? saver_wait(s) : false; }

#endif
