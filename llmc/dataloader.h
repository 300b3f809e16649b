/*
Token shards in llm.c's format: a writer, a strict reader, and the data loader for training.

A shard is a header of 256 int32 (magic, version, number of tokens, then zeros) followed by uint16 tokens, all
little-endian.
Source: dev/data/data_common.py of llm.c, https://github.com/karpathy/llm.c.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "rand.h"
#include "text_input.h"
#include "utils.h"
#include <glob.h>
#include <pthread.h>
#include <signal.h>

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER_BYTES = 1024 };

// ---- writing shards -------------------------------------------------------------

// Writes a shard to path.tmp and renames it to its final name only once it is complete on disk, so that no reader sees
// half a shard. After a successful open, call shard_writer_close() or shard_writer_abort().
typedef struct {
    FileWriter file;     // writes path.tmp
    Path path;           // the final name
    uint64_t num_tokens; // number of tokens written so far
} ShardWriter;

static inline bool shard_writer_open(ShardWriter* w, const char* path, Error* err) {
    Path tmp;
    if (!path_set(&tmp, "%s.tmp", path)) { return error_set(err, "%.64s...: the file name is too long", path); }
    if (is_directory(path)) { return error_set(err, "%s: is a directory, cannot write a shard there", path); }
    path_set(&w->path, "%s", path);
    w->num_tokens = 0;
    if (!writer_open(&w->file, tmp.text, err)) { return false; }
    int32_t header[256] = {0};
    header[0] = SHARD_MAGIC;
    header[1] = SHARD_VERSION;
    writer_put(&w->file, header, sizeof(header)); // the token count is patched in by shard_writer_close()
    return true;
}

// Appends tokens (n). An error is remembered and reported by shard_writer_close().
static inline void shard_writer_put(ShardWriter* w, const uint16_t* tokens, size_t n) {
    w->num_tokens += n;
    if (w->num_tokens > INT32_MAX && !w->file.failed) {
        error_set(&w->file.error, "%s: more than %d tokens, the format's limit for one shard: write smaller shards",
                  w->path.text, INT32_MAX);
        w->file.failed = true;
    }
    writer_put(&w->file, tokens, n * sizeof(tokens[0]));
}

// Gives up: removes path.tmp. A file that already has the final name is kept.
static inline void shard_writer_abort(ShardWriter* w) {
    w->file.failed = true;
    writer_close(&w->file, NULL);
    unlink(w->file.path.text);
}

// Patches the token count into the header, syncs the file and renames it. Returns false if any operation since the open
// failed; path.tmp is then removed.
static inline bool shard_writer_close(ShardWriter* w, Error* err) {
    writer_flush(&w->file);
    int32_t count = (int32_t)w->num_tokens;
    if (!w->file.failed && pwrite(w->file.fd, &count, sizeof(count), 2 * sizeof(int32_t)) != sizeof(count)) {
        writer_fail(&w->file, "write");
    }
    bool ok = writer_close(&w->file, err);
    if (ok && rename(w->file.path.text, w->path.text) != 0) {
        ok = error_set(err, "%s: cannot rename %s: %s", w->path.text, w->file.path.text, strerror(errno));
    }
    if (!ok) {
        unlink(w->file.path.text);
        return false;
    }
    return sync_directory(directory_of(w->path.text).text, err);
}

// ---- reading shards -------------------------------------------------------------

static inline int shard_token(const uint8_t* data, size_t i) { // data points to the shard's header
    uint16_t token;
    memcpy(&token, data + SHARD_HEADER_BYTES + i * sizeof(token), sizeof(token));
    return token;
}

// Converts tokens begin .. begin + n - 1 of a shard to int, into out (n). The shard must have passed shard_parse().
// Returns false if an id is >= vocab_size.
static inline bool shard_read(const uint8_t* data, size_t begin, size_t n, int* out, const char* name, int vocab_size,
                              Error* err) {
    int largest = 0;
    for (size_t i = 0; i < n; i++) {
        int token = shard_token(data, begin + i);
        largest = token > largest ? token : largest;
        out[i] = token;
    }
    if (largest < vocab_size) { return true; }
    size_t i = 0;
    while (out[i] < vocab_size) { i++; }
    return error_set(
        err, "%s: token %zu is id %d, but the model's vocabulary ends at %d: was it made for another tokenizer?", name,
        begin + i, out[i], vocab_size - 1);
}

// Checks that the header of a shard is valid and agrees with its size in bytes, and, unless vocab_size is 0, that every
// id is below vocab_size. name is used in messages.
static inline bool shard_parse(const uint8_t* data, size_t size, const char* name, int vocab_size, size_t* num_tokens,
                               Error* err) {
    *num_tokens = 0;
    if (size == 0) { return error_set(err, "%s: is empty, expected a token shard", name); }
    int32_t header[3] = {0, 0, 0}, magic = SHARD_MAGIC;
    memcpy(header, data, size < sizeof(header) ? size : sizeof(header));
    if (size < SHARD_HEADER_BYTES && memcmp(data, &magic, size < sizeof(magic) ? size : sizeof(magic)) == 0) {
        return error_set(err, "%s: is a token shard cut short: %zu bytes, the header alone has %d; make it again", name,
                         size, SHARD_HEADER_BYTES);
    }
    if (size < sizeof(header) || header[0] != SHARD_MAGIC) {
        const FileKind* kind = file_kind(data, size);
        if (kind) {
            return error_set(err, "%s: is %s, not a token shard: %s", name, kind->name,
                             kind->advice ? kind->advice : "make shards of text with dev/data/tokenize");
        }
        if (!memchr(data, '\0', size < (size_t)TEXT_HEAD ? size : (size_t)TEXT_HEAD)) {
            return error_set(err, "%s: looks like text: make shards of it with dev/data/tokenize", name);
        }
        return error_set(err, "%s: is not a token shard: begins with %d, want %d", name, header[0], SHARD_MAGIC);
    }
    if (header[1] != SHARD_VERSION) {
        return error_set(err, "%s: shard version %d, only version %d is supported", name, header[1], SHARD_VERSION);
    }
    if (header[2] < 0) { return error_set(err, "%s: the header says %d tokens", name, header[2]); }
    uint64_t want = SHARD_HEADER_BYTES + (uint64_t)header[2] * sizeof(uint16_t);
    if (size != want) {
        return error_set(err, "%s: the header says %d tokens, that is %llu bytes, but the file has %zu: %s", name,
                         header[2], (unsigned long long)want, size,
                         size < want ? "cut short?" : "overwritten in part?");
    }
    for (size_t i = 0; vocab_size > 0 && i < (size_t)header[2]; i++) {
        int token;
        if (!shard_read(data, i, 1, &token, name, vocab_size, err)) { return false; }
    }
    *num_tokens = (size_t)header[2];
    return true;
}

// ---- the loader -------------------------------------------------------------------

// The batch shape of a training step.
typedef struct {
    int B;               // sequences per micro-batch
    int T;               // tokens per sequence
    int64_t total;       // tokens per step, of all ranks
    int64_t micro_steps; // micro-batches per step, on each rank
} Batch;

// The position at which the next batch begins. Plain data, for checkpoints. Independent of B and of the number of
// ranks.
typedef struct {
    int64_t epoch;    // from 0
    int64_t shard;    // index in this epoch's order of shards, from 0; without shuffle that is the order of the names
    int64_t position; // tokens of this shard that all ranks together have consumed
    uint64_t seed;    // seed of the shuffle
    int64_t shuffle;  // 0 or 1
    int64_t T;        // row length; shuffling permutes rows of T tokens
    int64_t num_shards, num_tokens; // totals of the data set, to detect that it has changed
    uint64_t fingerprint;           // of samples of its tokens, for the same purpose; 0: unknown
} DataLoaderState;

typedef struct {
    char* path;
    size_t num_tokens;
} DataShard;

enum { BATCH_EMPTY, BATCH_READY, BATCH_FAILED };

// A prefetch thread always prepares one batch ahead. There must be a single consumer. A DataLoader must not be copied
// or moved while it is open.
typedef struct {
    // set by dataloader_open(), then constant
    int B, T, rank, num_ranks, vocab_size;
    bool shuffle;
    uint64_t seed;
    int64_t num_shards, num_tokens;
    uint64_t fingerprint;      // see DataLoaderState
    int64_t batches_per_epoch; // per rank
    int64_t step_tokens;       // B * T * num_ranks
    DataShard* shards;         // (num_shards), sorted by name
    // used only by the consumer
    DataLoaderState next; // position of the batch that the next call of dataloader_next() will return
    bool is_open;
    // owned by the prefetch thread while status is BATCH_EMPTY, otherwise by the consumer
    DataLoaderState ahead;             // position of the batch being prepared; once it is ready, of the batch after it
    int *inputs, *targets;             // (B,T), the prepared batch
    int* row;                          // (B*T + 1), scratch for a run of consecutive tokens
    uint32_t *shard_order, *row_order; // (num_shards), (rows of the longest shard): permutations, only with shuffle
    int64_t order_epoch, order_shard;  // the epoch of shard_order and the shard of row_order, -1: not computed yet
    int64_t open_shard;                // index into shards of the mapped shard, -1: none
    int fd;                            // the mapped shard's file
    const uint8_t* data;               // the mapping (data_size)
    size_t data_size;
    Error error;
    // synchronization of consumer and prefetch thread
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int status; // BATCH_*
    bool stop;
} DataLoader;

static inline void dataloader_unmap(DataLoader* d) {
    if (d->open_shard < 0) { return; }
    munmap((void*)d->data, d->data_size);
    close(d->fd);
    d->open_shard = -1;
}

// Maps shard `index`. The shard is checked again, because it may have changed since the loader was opened.
static inline bool dataloader_map(DataLoader* d, int64_t index, Error* err) {
    if (d->open_shard == index) { return true; }
    dataloader_unmap(d);
    const DataShard* shard = &d->shards[index];
    int fd = open(shard->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { return error_set(err, "%s: %s", shard->path, strerror(errno)); }
    struct stat st;
    size_t num_tokens = 0, size = SHARD_HEADER_BYTES + shard->num_tokens * sizeof(uint16_t);
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size != size) {
        close(fd);
        return error_set(err, "%s: has changed its size since the program started", shard->path);
    }
    void* data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
        error_set(err, "%s: cannot map %zu bytes: %s", shard->path, size, strerror(errno));
        close(fd);
        return false;
    }
    if (!shard_parse((const uint8_t*)data, size, shard->path, 0, &num_tokens, err)) {
        munmap(data, size);
        close(fd);
        return false;
    }
    d->fd = fd;
    d->data = (const uint8_t*)data;
    d->data_size = size;
    d->open_shard = index;
    return true;
}

// Seed of one permutation in an epoch. what: -1 for the order of the shards, else the index of the shard whose rows are
// permuted.
static inline uint64_t dataloader_seed(const DataLoader* d, int64_t epoch, int64_t what) {
    return splitmix64(splitmix64(splitmix64(d->seed) + (uint64_t)epoch) + (uint64_t)what);
}

// Returns the index into shards of the shard that is number `place` (from 0) in an epoch. order (num_shards) is
// scratch.
static inline int64_t dataloader_shard_at(const DataLoader* d, int64_t epoch, int64_t place, uint32_t* order) {
    if (!d->shuffle) { return place; }
    random_permutation(order, (uint32_t)d->num_shards, dataloader_seed(d, epoch, -1));
    return order[place];
}

// Moves `at` to the shard of the next batch, and makes that epoch's order of shards. What is left of a shard and does not fill
// a batch is skipped; it may be a whole shard.
static inline void dataloader_find_batch(DataLoader* d, DataLoaderState* at) {
    for (;;) {
        if (d->shuffle && d->order_epoch != at->epoch) {
            dataloader_shard_at(d, at->epoch, 0, d->shard_order);
            d->order_epoch = at->epoch;
            d->order_shard = -1;
        }
        int64_t index = d->shuffle ? d->shard_order[at->shard] : at->shard;
        if (at->position + d->step_tokens < (int64_t)d->shards[index].num_tokens) { return; }
        at->position = 0;
        if (++at->shard == d->num_shards) { at->shard = 0, at->epoch++; }
    }
}

// Reads n consecutive inputs (n) from token `begin` of the mapped shard, and their targets (n), each the next token.
static inline bool dataloader_run(DataLoader* d, size_t begin, size_t n, int* inputs, int* targets) {
    const char* path = d->shards[d->open_shard].path;
    if (!shard_read(d->data, begin, n + 1, d->row, path, d->vocab_size, &d->error)) { return false; }
    memcpy(inputs, d->row, n * sizeof(int));
    memcpy(targets, d->row + 1, n * sizeof(int));
    return true;
}

// Prepares the batch that d->ahead points to and advances d->ahead. On false, d->error holds the reason.
static inline bool dataloader_prepare(DataLoader* d) {
    DataLoaderState* at = &d->ahead;
    int64_t index = d->shuffle ? d->shard_order[at->shard] : at->shard;
    if (!dataloader_map(d, index, &d->error)) { return false; }
    struct stat st; // reading a page of the mapping beyond the end of a truncated file would raise SIGBUS
    if (fstat(d->fd, &st) != 0 || (uint64_t)st.st_size < d->data_size) {
        return error_set(&d->error, "%s: has become shorter while it was being read", d->shards[index].path);
    }
    size_t num_tokens = d->shards[index].num_tokens, B = (size_t)d->B, T = (size_t)d->T;
    size_t begin = (size_t)at->position + (size_t)d->rank * B * T;
    if (!d->shuffle) {
        if (!dataloader_run(d, begin, B * T, d->inputs, d->targets)) { return false; }
    } else {
        if (d->order_shard != index) {
            random_permutation(d->row_order, (uint32_t)((num_tokens - 1) / T), dataloader_seed(d, at->epoch, index));
            d->order_shard = index;
        }
        for (size_t b = 0; b < B; b++) {
            size_t row = d->row_order[begin / T + b];
            if (!dataloader_run(d, row * T, T, d->inputs + b * T, d->targets + b * T)) { return false; }
        }
    }
    at->position += d->step_tokens;
    dataloader_find_batch(d, at);
    return true;
}

static inline void* dataloader_thread(void* arg) {
    DataLoader* d = (DataLoader*)arg;
    pthread_mutex_lock(&d->mutex);
    for (;;) {
        while (d->status != BATCH_EMPTY && !d->stop) { pthread_cond_wait(&d->changed, &d->mutex); }
        if (d->stop) { break; }
        pthread_mutex_unlock(&d->mutex);
        bool ok = dataloader_prepare(d);
        pthread_mutex_lock(&d->mutex);
        d->status = ok ? BATCH_READY : BATCH_FAILED;
        pthread_cond_broadcast(&d->changed);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

// Waits until the prefetch thread is idle. The consumer then owns the loader's buffers until it calls dataloader_go().
static inline int dataloader_wait(DataLoader* d) {
    pthread_mutex_lock(&d->mutex);
    while (d->status == BATCH_EMPTY) { pthread_cond_wait(&d->changed, &d->mutex); }
    int status = d->status;
    pthread_mutex_unlock(&d->mutex);
    return status;
}

// Lets the prefetch thread prepare the next batch.
static inline void dataloader_go(DataLoader* d) {
    pthread_mutex_lock(&d->mutex);
    d->status = BATCH_EMPTY;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
}

// Copies the next batch of this rank to inputs and targets (B,T); targets are shifted by one token. Without shuffle,
// batch s of a shard is its s-th run of num_ranks * B*T tokens, of which each rank gets B*T in the order of ranks, as
// in llm.c. With shuffle, rows of T tokens are permuted by (seed, epoch). Returns false if an id is not in the
// vocabulary or a shard has become unreadable; later calls then fail too, until dataloader_reset() or
// dataloader_restore().
static inline bool dataloader_next(DataLoader* d, int* inputs, int* targets, Error* err) {
    require(d->is_open);
    if (dataloader_wait(d) == BATCH_FAILED) { return error_set(err, "%s", d->error.text); }
    size_t bytes = (size_t)d->B * (size_t)d->T * sizeof(int);
    memcpy(inputs, d->inputs, bytes);
    memcpy(targets, d->targets, bytes);
    d->next = d->ahead;
    dataloader_go(d);
    return true;
}

// Returns the position of the batch that the next call of dataloader_next() will return. The batch that has already
// been prefetched does not count as consumed.
static inline void dataloader_state(const DataLoader* d, DataLoaderState* state) { *state = d->next; }

static inline void dataloader_seek(DataLoader* d, const DataLoaderState* state) {
    dataloader_wait(d);
    d->ahead = *state;
    dataloader_find_batch(d, &d->ahead);
    d->next = d->ahead;
    dataloader_go(d);
}

// Continues exactly where the saved run stopped, even with another B or number of ranks. No token is repeated, and none
// is skipped except at the end of a shard, where too few are left for a batch. Returns false, without changing
// anything, if that is impossible: the data or the shuffle setting differs, or, with shuffle, the seed or T.
static inline bool dataloader_restore(DataLoader* d, const DataLoaderState* state, Error* err) {
    require(d->is_open);
    const char* what = "cannot resume the data";
    if (state->num_shards != d->num_shards || state->num_tokens != d->num_tokens) {
        return error_set(err, "%s: the saved run read %lld tokens in %lld shards, now there are %lld in %lld", what,
                         (long long)state->num_tokens, (long long)state->num_shards, (long long)d->num_tokens,
                         (long long)d->num_shards);
    }
    if (state->fingerprint != 0 && state->fingerprint != d->fingerprint) {
        return error_set(err, "%s: there are as many tokens as when it was saved, but other ones", what);
    }
    if ((state->shuffle != 0) != d->shuffle) {
        return error_set(err, "%s: the saved run read it %s, but this run does not", what,
                         state->shuffle ? "shuffled" : "in order");
    }
    if (d->shuffle && (state->seed != d->seed || state->T != d->T)) {
        return error_set(err, "%s: it was shuffled with seed %llu and T = %lld, now seed %llu and T = %d", what,
                         (unsigned long long)state->seed, (long long)state->T, (unsigned long long)d->seed, d->T);
    }
    DataLoaderState at = d->next;
    at.epoch = state->epoch;
    at.shard = state->shard;
    at.position = state->position;
    bool possible = at.epoch >= 0 && at.shard >= 0 && at.shard < d->num_shards && at.position >= 0;
    if (possible) {
        uint32_t* order = (uint32_t*)malloc_check((size_t)d->num_shards * sizeof(uint32_t));
        int64_t num_tokens = (int64_t)d->shards[dataloader_shard_at(d, at.epoch, at.shard, order)].num_tokens;
        free(order);
        possible = (at.position == 0 || at.position < num_tokens) && !(d->shuffle && at.position % d->T != 0);
    }
    if (!possible) {
        return error_set(err, "%s: epoch %lld, shard %lld, position %lld is not in it", what, (long long)state->epoch,
                         (long long)state->shard, (long long)state->position);
    }
    dataloader_seek(d, &at);
    return true;
}

// Goes back to the first batch of epoch 0.
static inline void dataloader_reset(DataLoader* d) {
    require(d->is_open);
    DataLoaderState at = d->next;
    at.epoch = at.shard = at.position = 0;
    dataloader_seek(d, &at);
}

static inline void dataloader_free(DataLoader* d) {
    dataloader_unmap(d);
    for (int64_t i = 0; i < d->num_shards; i++) { free(d->shards[i].path); }
    free(d->shards);
    free(d->inputs);
    free(d->targets);
    free(d->row);
    free(d->shard_order);
    free(d->row_order);
    memset(d, 0, sizeof(*d));
}

// May be called at any time, also after a failed open and more than once.
static inline void dataloader_close(DataLoader* d) {
    if (!d->is_open) { return; }
    pthread_mutex_lock(&d->mutex);
    d->stop = true;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->mutex);
    pthread_join(d->thread, NULL);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->mutex);
    dataloader_free(d);
}

static inline int dataloader_by_path(const void* a, const void* b) {
    return strcmp(((const DataShard*)a)->path, ((const DataShard*)b)->path);
}

// Finds the shards that match a pattern, sorted by strcmp, so that the order is the same on every rank and in any
// locale.
static inline bool dataloader_find(DataLoader* d, const char* pattern, Error* err) {
    glob_t found;
    if (is_directory(pattern)) {
        return error_set(err,
                         "%s: is a directory: name the shards in it by a pattern in quotes, such as '%s/*_train_*.bin'",
                         pattern, pattern);
    }
    if (file_exists(pattern)) { // a name that contains characters of patterns, such as a[1].bin
        d->shards = (DataShard*)calloc_check(1, sizeof(DataShard));
        d->shards[0].path = strdup_check(pattern);
        d->num_shards = 1;
        return true;
    }
    int result = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (result != 0) {
        if (result == GLOB_NOSPACE) { die("out of memory: files of '%s'", pattern); }
        if (result != GLOB_NOMATCH) { return error_set(err, "'%s': cannot read the directory", pattern); }
        return error_set(err, "no file matches '%s': make shards with dev/data/tokenize%s", pattern,
                         strchr(pattern, ',') ? "; several are named by one pattern, not by a list" : "");
    }
    d->shards = (DataShard*)calloc_check(found.gl_pathc, sizeof(DataShard));
    for (size_t i = 0; i < found.gl_pathc; i++) { d->shards[i].path = strdup_check(found.gl_pathv[i]); }
    d->num_shards = (int64_t)found.gl_pathc;
    globfree(&found);
    qsort(d->shards, (size_t)d->num_shards, sizeof(DataShard), dataloader_by_path);
    return true;
}

// Adds a shard (size bytes) to the fingerprint of the data: a checksum of 16 blocks of 512 bytes, spread over the shard.
// Reading all of it would take minutes where there are many.
static inline uint64_t dataloader_add_fingerprint(uint64_t fingerprint, const uint8_t* data, size_t size) {
    uint32_t crc = crc32c(0, &size, sizeof(size));
    for (size_t i = 0; i < 16; i++) {
        size_t at = (size > 512 ? size - 512 : 0) * i / 15, n = size < 512 ? size : 512;
        crc = crc32c(crc, data + at, n);
    }
    return splitmix64(fingerprint ^ crc);
}

// Returns advice for a batch that does not fit into a shard of n tokens.
static inline const char* dataloader_advice(const DataLoader* d, int64_t n) {
    int64_t ranks = d->num_ranks;
    bool smaller_b = d->B > 1 && n > ranks * d->T, smaller_t = d->T > 1 && n > ranks * d->B;
    return smaller_b && smaller_t ? "use smaller -b or -t"
           : smaller_b            ? "use a smaller -b"
           : smaller_t            ? "use a smaller -t"
           : ranks < n            ? "use smaller -b and -t"
                                  : "make longer shards";
}

// Checks every shard's header and length, and sets num_tokens, batches_per_epoch and fingerprint. A shard that is too short for
// a batch, such as the last one that tokenize writes, is passed over with a note of rank 0, unless all of them are. It still
// counts as one of the shards, because another B or number of ranks may read it.
static inline bool dataloader_check_shards(DataLoader* d, Error* err) {
    int64_t too_short = 0, longest = 0;
    Error first; // about the first shard that is too short
    first.text[0] = '\0';
    for (int64_t i = 0; i < d->num_shards; i++) {
        DataShard* shard = &d->shards[i];
        MappedFile file;
        if (!map_file(&file, shard->path, err)) { return false; }
        bool ok = shard_parse(file.data, file.size, shard->path, 0, &shard->num_tokens, err);
        int64_t n = (int64_t)shard->num_tokens;
        if (ok) { d->fingerprint = dataloader_add_fingerprint(d->fingerprint, file.data, file.size); }
        int32_t magic = 0;
        if (file.size >= sizeof(magic)) { memcpy(&magic, file.data, sizeof(magic)); }
        unmap_file(&file);
        if (!ok && magic != SHARD_MAGIC && d->num_shards > 1 && err) {
            Error reason = *err;
            return error_set(
                err, "%.600s; the pattern matches %lld files, and must match shards only, as '*_train_*.bin' does",
                reason.text, (long long)d->num_shards);
        }
        if (!ok) { return false; }
        d->num_tokens += n;
        longest = n > longest ? n : longest;
        if (n > d->step_tokens) {
            d->batches_per_epoch += (n - 1) / d->step_tokens;
        } else if (too_short++ == 0) {
            char ranks[32] = "";
            if (d->num_ranks > 1) { snprintf(ranks, sizeof(ranks), " x %d ranks", d->num_ranks); }
            error_set(&first, "%s: has %lld tokens, one batch needs %lld%s x %d + 1 = %lld", shard->path, (long long)n,
                      (long long)d->B, ranks, d->T, (long long)d->step_tokens + 1);
        }
    }
    if (too_short == d->num_shards) { return error_set(err, "%s: %s", first.text, dataloader_advice(d, longest)); }
    if (too_short > 0 && d->rank == 0) {
        print_line(stderr, "note: %lld of %lld shards are too short for a batch and are passed over: %s",
                   (long long)too_short, (long long)d->num_shards, first.text);
    }
    return true;
}

// Starts the prefetch thread, in which all signals are blocked: the main thread handles them. Returns 0 or the error's number.
static inline int dataloader_start(DataLoader* d) {
    sigset_t all, before;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->changed, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(&d->thread, NULL, dataloader_thread, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        pthread_cond_destroy(&d->changed);
        pthread_mutex_destroy(&d->mutex);
    }
    return failed;
}

// Opens the shards that match pattern (glob(3)) for rank `rank` of num_ranks, and starts the prefetch thread. Release
// it with dataloader_close(), which is not necessary after a failed open.
static inline bool dataloader_open(DataLoader* d, const char* pattern, int B, int T, int rank, int num_ranks,
                                   int vocab_size, bool shuffle, uint64_t seed, Error* err) {
    memset(d, 0, sizeof(*d));
    d->open_shard = d->order_epoch = d->order_shard = -1;
    if (B < 1 || T < 1 || num_ranks < 1 || rank < 0 || rank >= num_ranks || vocab_size < 1) {
        return error_set(err, "'%s': cannot read batches of %d x %d for rank %d of %d, vocabulary %d", pattern, B, T,
                         rank, num_ranks, vocab_size);
    }
    int64_t batch = (int64_t)B * T; // < 2^62
    if (__builtin_mul_overflow(batch, (int64_t)num_ranks, &d->step_tokens) || d->step_tokens > INT32_MAX) {
        return error_set(err,
                         "'%s': a batch of %d x %d for %d ranks is more than a shard can hold: use smaller -b or -t",
                         pattern, B, T, num_ranks);
    }
    d->B = B;
    d->T = T;
    d->rank = rank;
    d->num_ranks = num_ranks;
    d->vocab_size = vocab_size;
    d->shuffle = shuffle;
    d->seed = seed;
    if (!dataloader_find(d, pattern, err) || !dataloader_check_shards(d, err)) {
        dataloader_free(d);
        return false;
    }
    size_t max_rows = 0;
    for (int64_t i = 0; i < d->num_shards; i++) {
        size_t tokens = d->shards[i].num_tokens, rows = tokens > 0 ? (tokens - 1) / (size_t)T : 0;
        max_rows = rows > max_rows ? rows : max_rows;
    }
    d->inputs = (int*)malloc_check((size_t)batch * sizeof(int));
    d->targets = (int*)malloc_check((size_t)batch * sizeof(int));
    d->row = (int*)malloc_check(((size_t)batch + 1) * sizeof(int));
    if (shuffle) {
        d->shard_order = (uint32_t*)malloc_check((size_t)d->num_shards * sizeof(uint32_t));
        d->row_order = (uint32_t*)malloc_check(max_rows * sizeof(uint32_t));
    }
    d->next.seed = seed;
    d->next.shuffle = shuffle;
    d->next.T = T;
    d->next.num_shards = d->num_shards;
    d->next.num_tokens = d->num_tokens;
    d->next.fingerprint = d->fingerprint;
    dataloader_find_batch(d, &d->next);
    d->ahead = d->next;
    int failed = dataloader_start(d);
    if (failed) {
        dataloader_free(d);
        return error_set(err, "cannot start the thread that reads '%s': %s", pattern, strerror(failed));
    }
    d->is_open = true;
    return true;
}

#endif
