/*
Checkpoints that several processes (ranks) write together, when none of them has all weights and moments. The result is
byte for byte what run_save() writes from full arrays, whatever the number of ranks. The ranks need a common file system
and no other connection.

    RunParts parts;
    run_parts(&parts, &config, num_ranks);                              // who saves which tensor: the same on all ranks
    float* buffer = (float*)malloc_check(parts.rank_floats[rank] * sizeof(float));
    ...
    for (int i = 0; i < parts.num_parts; i++) {                         // fill the buffer; our layout, (out, in) rows
        const RunPart* part = &parts.parts[i];
        ... gather the part on all ranks ...
        if (part->rank == rank) { ... copy part->floats floats to buffer + part->offset ... }
    }
    RunRank me = {rank, num_ranks, token, 0.0, &rank_died, NULL};
    if (!run_save_parts(out_dir, &state, &parts, &me, buffer, tokenizer, &err)) { ... }    // on every rank
    run_parts_free(&parts);

    rank 0                                        rank r
      | creates the hidden directory, the small     | looks for .TOKEN.0
      | files, and both .safetensors files with     |
      | their headers and full sizes                |
      | creates .TOKEN.r.open for each other rank,  |
      | with room for a report, then .TOKEN.0 ----->| renames .TOKEN.r.open to .TOKEN.r.new
      | writes its parts                            | writes its parts, syncs
      |<------------------------ .TOKEN.r: its sums | writes its report there, renames it to .TOKEN.r
      | combines the sums, writes state.json,       | looks for its result
      | publishes by rename                         |
      | .end-step_00000100-PID/.TOKEN.r: result --->| removes it, and the directory if it is empty

The files .TOKEN.r are in the hidden directory until it gets its name. The token tells this save from what an earlier one
left. If a rank fails, it reports the reason; if it cannot write, it removes the file for its report, for which a full disk has
room. Rank 0 then removes the hidden directory and gives the reason to all others. If a rank dies, the others fail when the
time is over, or when *stop is set. C11, also compiles as C++17.
*/
#ifndef LLMC_RUN_PARTS_H
#define LLMC_RUN_PARTS_H

#include "checkpoint.h"
#include "crc32c.h"
#include "gpt2.h"
#include "run_state.h"
#include "safetensors.h"
#include "tokenizer.h"
#include "utils.h"

// ---- who saves what ---------------------------------------------------------------

// One tensor of one layer of one of the three arrays.
typedef struct {
    int array;     // 0: weights, 1: AdamW's m, 2: v
    int p, layer;  // see gpt2_params
    int rank;      // that saves it
    size_t floats; // in our layout, with the padding rows of wte: param_layer_size()
    size_t offset; // in the buffer of its rank, in floats
} RunPart;

typedef struct {
    GPT2Config config;
    int num_ranks, num_parts;
    RunPart* parts;      // (num_parts), in the order of the arrays and of the files
    size_t* rank_floats; // (num_ranks): the size of each rank's buffer; 0 if a rank has no part
} RunParts;

static inline int run_parts_compare(const void* a, const void* b) {
    const RunPart *x = *(const RunPart*const*)a, *y = *(const RunPart*const*)b;
    if (x->floats != y->floats) { return x->floats > y->floats ? -1 : 1; }
    return x < y ? -1 : x > y;
}

// Deals the parts to the ranks, balanced by size: largest first, to the rank that has the least (Graham 1969, LPT). In the
// buffer of a rank they are in the order of `parts`; that of a single rank is weights, m, v (num_parameters each).
static inline void run_parts(RunParts* list, const GPT2Config* config, int num_ranks) {
    require(num_ranks > 0);
    memset(list, 0, sizeof(*list));
    list->config = *config;
    list->num_ranks = num_ranks;
    list->num_parts = 3 * (int)param_slot(config, NUM_PARAMS, 0);
    list->parts = (RunPart*)calloc_check((size_t)list->num_parts, sizeof(RunPart));
    list->rank_floats = (size_t*)calloc_check((size_t)num_ranks, sizeof(size_t));
    RunPart** by_size = (RunPart**)malloc_check((size_t)list->num_parts * sizeof(RunPart*));
    int n = 0;
    for (int array = 0; array < 3; array++) {
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int layer = 0; layer < param_copies(config, p); layer++) {
                RunPart part = {array, p, layer, 0, param_layer_size(config, p), 0};
                by_size[n] = &list->parts[n];
                list->parts[n++] = part;
            }
        }
    }
    qsort(by_size, (size_t)n, sizeof(*by_size), run_parts_compare);
    for (int i = 0; i < n; i++) {
        int least = 0;
        for (int r = 1; r < num_ranks; r++) {
            if (list->rank_floats[r] < list->rank_floats[least]) { least = r; }
        }
        by_size[i]->rank = least;
        list->rank_floats[least] += by_size[i]->floats;
    }
    free(by_size);
    memset(list->rank_floats, 0, (size_t)num_ranks * sizeof(size_t));
    for (int i = 0; i < n; i++) {
        RunPart* part = &list->parts[i];
        part->offset = list->rank_floats[part->rank];
        list->rank_floats[part->rank] += part->floats;
    }
}

static inline void run_parts_free(RunParts* list) {
    free(list->parts);
    free(list->rank_floats);
    memset(list, 0, sizeof(*list));
}

// ---- a save -----------------------------------------------------------------------

// The part of a process in one save.
typedef struct {
    int rank, num_ranks; // 0 <= rank < num_ranks
    uint64_t token;      // the same on all ranks, and different for each save and each attempt: a random number
    double limit_ms;     // for all ranks to come and to write; 0: 600,000. A result may take half as long again
    const int* stop;     // atomic, may be NULL; ends the save: 1 + the number of a rank that died, -1 for other reasons
    int* unheard;        // atomic, may be NULL; becomes 1 if this rank has failed and cannot tell the others, who wait
} RunRank;

enum {
    PARTS_LIMIT_MS = 600000,
    PARTS_RESULT_MS = 120000,   // at most, from the end of the hidden directory to the result
    PARTS_POLL_US = 500,        // the first pause between two looks at a directory; each is longer than the one before,
    PARTS_MAX_POLL_US = 100000, // up to this
    PARTS_MIN_REPORT = 2048,    // bytes of a report: room for any Error
    PARTS_REMOVALS = 100,       // attempts to remove a directory in which other ranks may still create files
    PARTS_ATTEMPTS = 3,         // to leave a result
    PARTS_RETRY_US = 10000      // between two of these attempts
};

typedef enum { PARTS_WITHDRAWN, PARTS_ABSENT, PARTS_CAME, PARTS_DONE } PartsProgress;

typedef struct {
    const char* out_dir;
    const RunState* state;
    const RunParts* list;
    const RunRank* me;
    const float* buffer; // (list->rank_floats[me->rank])
    double start_ms, limit_ms;
    Path hidden;            // the hidden directory; "": not found yet
    uint32_t identity;      // hash of what all ranks must agree on
    uint64_t data_begin[2]; // where the data begins in each of the two files
    uint32_t* sums;         // (num_parts): crc32c of each part as stored
    uint8_t* progress;      // (num_ranks), PartsProgress, from parts_look()
    int report_fd;          // the report, open for writing; -1 if it is not
} PartsSave;

static const char* const parts_files[2] = {"model.safetensors", "optimizer.safetensors"};

// Which of the two files holds a part.
static inline int parts_file(const RunPart* part) { return part->array > 0; }

static inline uint64_t parts_bytes(const PartsSave* s, const RunPart* part) {
    HfRows h = hf_rows(&s->list->config, part->p);
    return (uint64_t)h.rows * h.cols * sizeof(float);
}

// Initializes w and declares the tensors of one of the two files.
static inline void parts_declare(SafeWriter* w, const GPT2Config* config, int file) {
    static const char* const no_prefix[] = {""};
    safewriter_init(w);
    params_declare(w, config, file == 0 ? no_prefix : run_moment_prefixes, file == 0 ? 1 : 2, false);
}

static inline void parts_init(PartsSave* s) {
    const GPT2Config* c = &s->list->config;
    const int64_t common[] = {s->state->step,       s->me->num_ranks,
                              c->max_seq_len,       c->vocab_size,
                              c->padded_vocab_size, c->num_layers,
                              c->num_heads,         c->channels,
                              c->mlp_channels,      safe_bits_from_float(c->norm_epsilon),
                              c->activation,        c->unscaled_attention,
                              c->scale_by_layer,    c->untied_head};
    s->identity = crc32c(0, common, sizeof(common));
    s->start_ms = time_ms();
    s->limit_ms = s->me->limit_ms > 0.0 ? s->me->limit_ms : (double)PARTS_LIMIT_MS;
    s->report_fd = -1;
    s->sums = (uint32_t*)calloc_check((size_t)s->list->num_parts, sizeof(uint32_t));
    s->progress = (uint8_t*)calloc_check((size_t)s->me->num_ranks, 1);
    for (int file = 0; file < 2; file++) {
        SafeWriter w;
        parts_declare(&w, c, file);
        s->data_begin[file] = safewriter_data_begin(&w, NULL);
        safewriter_free(&w);
    }
}

// ---- the small files ----------------------------------------------------------------

// Writes the path of rank r's small file in dir to path.
static inline bool parts_path(const PartsSave* s, Path* path, const char* dir, int r, const char* suffix, Error* err) {
    char name[RUN_NAME];
    snprintf(name, sizeof(name), ".%016llx.%d%s", (unsigned long long)s->me->token, r, suffix);
    return run_path(path, dir, name, err);
}

// Sets s->progress from the names in dir. It lists the directory instead of looking for each name: a network file system
// remembers for a while that a name was not there, but opening a directory asks the server. False if there is no such
// directory.
static inline bool parts_look(const PartsSave* s, const char* path) {
    char prefix[32];
    int n = snprintf(prefix, sizeof(prefix), ".%016llx.", (unsigned long long)s->me->token);
    memset(s->progress, PARTS_WITHDRAWN, (size_t)s->me->num_ranks);
    DIR* dir = opendir(path);
    if (!dir) { return false; }
    for (struct dirent* e = readdir(dir); e; e = readdir(dir)) {
        if (strncmp(e->d_name, prefix, (size_t)n) != 0) { continue; }
        const char* number = e->d_name + n;
        size_t digits = strspn(number, "0123456789");
        int r = digits > 0 && digits < 9 ? atoi(number) : -1;
        if (r < 0 || r >= s->me->num_ranks) { continue; }
        const char* suffix = number + digits;
        uint8_t progress = suffix[0] == '\0' ? PARTS_DONE : strcmp(suffix, ".new") == 0 ? PARTS_CAME : PARTS_ABSENT;
        if (progress > s->progress[r]) { s->progress[r] = progress; }
    }
    closedir(dir);
    return true;
}

// Looks for a directory out_dir/PREFIXstep_N-PID of this step, with any PID, in which the small file of rank r is complete.
// Writes its path to path.
static inline bool parts_find(const PartsSave* s, const char* prefix, int r, Path* path) {
    DIR* dir = opendir(s->out_dir);
    bool found = false;
    if (!dir) { return false; }
    for (struct dirent* e = readdir(dir); e && !found; e = readdir(dir)) {
        int64_t step = -1;
        if (run_pid_of_hidden_name(e->d_name, prefix, &step) == 0 || step != s->state->step) { continue; }
        found =
            run_path(path, s->out_dir, e->d_name, NULL) && parts_look(s, path->text) && s->progress[r] == PARTS_DONE;
    }
    closedir(dir);
    return found;
}

// Writes all bytes at the offset. False: errno says why.
static inline bool parts_write_at(int fd, const void* data, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pwrite(fd, (const char*)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) { continue; }
        if (n == 0) { errno = ENOSPC; }
        if (n <= 0) { return false; }
        done += (size_t)n;
    }
    return true;
}

// Creates a small file with this text; it is not synced.
static inline bool parts_put(const char* path, const char* text, Error* err) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && parts_write_at(fd, text, strlen(text), 0);
    int reason = errno;
    if (fd >= 0 && close(fd) != 0 && ok) {
        reason = errno;
        ok = false;
    }
    return ok || error_set(err, "%s: cannot write: %s", path, strerror(reason));
}

// Returns the text of a small file, which the caller frees. NULL if it cannot be read or does not end in a newline: then it
// is not complete yet.
static inline char* parts_get(const char* path) {
    struct stat st;
    FILE* f = fopen(path, "rb");
    if (!f) { return NULL; }
    size_t size = fstat(fileno(f), &st) == 0 && st.st_size > 0 && st.st_size < 1 << 24 ? (size_t)st.st_size : 0;
    char* text = (char*)malloc_check(size + 1);
    size_t n = fread(text, 1, size, f);
    fclose(f);
    text[n] = '\0';
    if (n > 0 && n == size && strlen(text) == n && text[n - 1] == '\n') { return text; }
    free(text);
    return NULL;
}

// ---- waiting ------------------------------------------------------------------------

static inline int parts_stopped(const PartsSave* s) {
    return s->me->stop ? __atomic_load_n(s->me->stop, __ATOMIC_ACQUIRE) : 0;
}

// True once rank 0 has begun to remove or to publish the hidden directory.
static inline bool parts_gone(const PartsSave* s) {
    Path sign;
    return !parts_path(s, &sign, s->hidden.text, 0, "", NULL) || !file_exists(sign.text);
}

// Sleeps before the next look. False, at once, if the save has been stopped or the time is over: that look is the last one.
static inline bool parts_pause(const PartsSave* s, useconds_t* poll_us, double end_ms) {
    if (parts_stopped(s) || time_ms() > end_ms) { return false; }
    usleep(*poll_us);
    *poll_us = *poll_us * 3 / 2;
    if (*poll_us > PARTS_MAX_POLL_US) { *poll_us = PARTS_MAX_POLL_US; }
    return true;
}

// Sets the error of a wait that ended in vain: it names the rank that died, or those that have not written their parts.
// Returns false.
static inline bool parts_blame(const PartsSave* s, Error* err) {
    char why[64] = "when the save was stopped", who[256] = "";
    size_t used = 0;
    int missing = 0, absent = 0, stopped = parts_stopped(s);
    if (stopped > 0) { return error_set(err, "rank %d died during the save", stopped - 1); }
    if (!stopped) { snprintf(why, sizeof(why), "within %.3g s", 1e-3 * s->limit_ms); }
    if (!s->hidden.text[0]) { return error_set(err, "rank 0 had not begun the checkpoint %s", why); }
    if (!parts_look(s, s->hidden.text)) {
        return error_set(err, "rank 0 had ended the save and left no result %s", why);
    }
    for (int r = 1; r < s->me->num_ranks; r++) {
        if (s->progress[r] == PARTS_DONE || r == s->me->rank) { continue; }
        absent += s->progress[r] <= PARTS_ABSENT;
        if (missing++ < 8) { used += (size_t)snprintf(who + used, sizeof(who) - used, "%s%d", used ? ", " : "", r); }
    }
    if (missing == 0) { return error_set(err, "rank 0 had not published the checkpoint %s", why); }
    return error_set(err, "rank%s %s%s had not %s %s", missing > 1 ? "s" : "", who, missing > 8 ? ", ..." : "",
                     absent == missing ? "come to save" : "written all parts", why);
}

// ---- parts --------------------------------------------------------------------------

// Converts and writes one part at its offset; *crc receives its crc32c. floats (hf_chunk_size) is scratch.
static inline bool parts_write_part(const PartsSave* s, const RunPart* part, int fd, uint64_t offset, float* floats,
                                    uint32_t* crc) {
    HfRows h = hf_rows(&s->list->config, part->p);
    *crc = 0;
    for (size_t r = 0; r < h.rows; r += h.step) {
        size_t n = model_min(h.rows - r, h.step), bytes = n * h.cols * sizeof(float);
        const float* chunk = hf_chunk(s->buffer + part->offset, part->p, &h, r, n, floats);
        *crc = crc32c(*crc, chunk, bytes);
        if (!parts_write_at(fd, chunk, bytes, offset)) { return false; }
        offset += bytes;
    }
    return true;
}

// Writes this rank's parts to one of the two files and syncs it.
static inline bool parts_write_file(const PartsSave* s, int file, float* floats, Error* err) {
    Path path;
    int fd = -1;
    bool ok = true;
    uint64_t offset = s->data_begin[file];
    if (!run_path(&path, s->hidden.text, parts_files[file], err)) { return false; }
    for (int i = 0; i < s->list->num_parts && ok; i++) {
        const RunPart* part = &s->list->parts[i];
        if (parts_file(part) != file) { continue; }
        if (part->rank == s->me->rank) {
            bool late = time_ms() > s->start_ms + s->limit_ms;
            ok = !late || error_set(err, "%s: not written within %.3g s", path.text, 1e-3 * s->limit_ms);
            ok = ok && (!parts_stopped(s) || parts_blame(s, err));
            if (!ok) { break; }
            if (fd < 0) { fd = open(path.text, O_WRONLY | O_CLOEXEC); } // no other rank's bytes are touched
            ok = fd >= 0 && parts_write_part(s, part, fd, offset, floats, &s->sums[i]);
            if (!ok) { error_set(err, "%s: write: %s", path.text, strerror(errno)); }
        }
        offset += parts_bytes(s, part);
    }
    if (fd < 0) { return ok; }
    if (ok && sync_to_medium(fd) != 0) { ok = error_set(err, "%s: fsync: %s", path.text, strerror(errno)); }
    if (close(fd) != 0 && ok) { ok = error_set(err, "%s: close: %s", path.text, strerror(errno)); }
    return ok;
}

// Fails if one of this rank's weights is not finite.
static inline bool parts_check(const PartsSave* s, Error* err) {
    const GPT2Config* config = &s->list->config;
    for (int i = 0; i < s->list->num_parts; i++) {
        const RunPart* part = &s->list->parts[i];
        if (part->rank != s->me->rank || part->array != 0) { continue; }
        size_t n = stored_values(config, part->p);
        if (!values_check(config, part->p, part->layer, 0, s->buffer + part->offset, n, FLT_MAX, err)) { return false; }
    }
    return true;
}

static inline bool parts_write(const PartsSave* s, Error* err) {
    if (!parts_check(s, err)) { return false; }
    float* floats = (float*)malloc_check(hf_chunk_size(&s->list->config) * sizeof(float));
    bool ok = parts_write_file(s, 0, floats, err) && parts_write_file(s, 1, floats, err);
    free(floats);
    return ok;
}

// ---- every rank but 0 -----------------------------------------------------------------

static inline size_t parts_report_bytes(const PartsSave* s) {
    size_t bytes = 16 + 9 * (size_t)s->list->num_parts; // the sums of all parts: more than needed
    return bytes < PARTS_MIN_REPORT ? (size_t)PARTS_MIN_REPORT : bytes;
}

// Takes over the file that rank 0 has created for the report.
static inline bool parts_come(PartsSave* s, Error* err) {
    Path path, given;
    if (!parts_path(s, &path, s->hidden.text, s->me->rank, ".new", err) ||
        !parts_path(s, &given, s->hidden.text, s->me->rank, ".open", err)) {
        return false;
    }
    if (rename(given.text, path.text) != 0) {
        return error_set(err, "%s: cannot rename: %s", given.text, strerror(errno));
    }
    s->report_fd = open(path.text, O_WRONLY | O_CLOEXEC);
    return s->report_fd >= 0 || error_set(err, "%s: cannot open: %s", path.text, strerror(errno));
}

// For a rank that cannot report its failure: removes the file for the report, which tells rank 0 as much.
static inline bool parts_withdraw(const PartsSave* s) {
    static const char* const suffixes[] = {".new", ".open"};
    Path path;
    bool removed = false;
    for (int i = 0; i < 2; i++) {
        removed |= parts_path(s, &path, s->hidden.text, s->me->rank, suffixes[i], NULL) && unlink(path.text) == 0;
    }
    return removed;
}

// Writes the report: the sums of this rank's parts, or if failure is not NULL why there are none.
static inline bool parts_report(PartsSave* s, const char* failure, Error* err) {
    Path path, final_path;
    size_t bytes = parts_report_bytes(s), used;
    if (!parts_path(s, &path, s->hidden.text, s->me->rank, ".new", err) ||
        !parts_path(s, &final_path, s->hidden.text, s->me->rank, "", err)) {
        return false;
    }
    char* text = (char*)malloc_check(bytes + 1);
    used = (size_t)snprintf(text, bytes, "%08x %s\n", s->identity, failure ? failure : "ok");
    for (int i = 0; !failure && i < s->list->num_parts; i++) {
        if (s->list->parts[i].rank != s->me->rank) { continue; }
        used += (size_t)snprintf(text + used, bytes - used, "%08x\n", s->sums[i]);
    }
    memset(text + used, ' ', bytes - used);
    text[bytes - 1] = '\n';
    if (s->report_fd < 0) { s->report_fd = open(path.text, O_WRONLY | O_CLOEXEC); }
    bool ok = s->report_fd >= 0 && parts_write_at(s->report_fd, text, bytes, 0) && sync_to_medium(s->report_fd) == 0;
    int reason = errno;
    free(text);
    if (s->report_fd >= 0 && close(s->report_fd) != 0 && ok) {
        reason = errno;
        ok = false;
    }
    s->report_fd = -1;
    if (!ok) { return error_set(err, "%s: cannot write: %s", path.text, strerror(reason)); }
    return rename(path.text, final_path.text) == 0 ||
           error_set(err, "%s: cannot rename: %s", path.text, strerror(errno));
}

// If rank 0 has left a result for this rank, takes it away, sets *saved, and err to the reason of a failure.
static inline bool parts_take_result(const PartsSave* s, bool* saved, Error* err) {
    Path dir, path;
    if (!parts_find(s, ".end-", s->me->rank, &dir) || !parts_path(s, &path, dir.text, s->me->rank, "", NULL)) {
        return false;
    }
    char* text = parts_get(path.text);
    if (!text) { return false; }
    *saved = strcmp(text, "saved\n") == 0;
    if (!*saved) {
        text[strlen(text) - 1] = '\0';
        error_set(err, "%s", text);
    }
    free(text);
    unlink(path.text);
    rmdir(dir.text); // fails unless this was the last one
    return true;
}

// Waits until rank 0 has created the files. False: rank 0 failed before, or the time is over.
static inline bool parts_await_files(PartsSave* s, Error* err) {
    useconds_t poll_us = PARTS_POLL_US;
    bool saved = false;
    for (bool over = false;; over = !parts_pause(s, &poll_us, s->start_ms + s->limit_ms)) {
        if (parts_find(s, ".tmp-", 0, &s->hidden)) { return true; }
        s->hidden.text[0] = '\0';
        if (parts_take_result(s, &saved, err)) {
            return saved ? error_set(err, "rank 0 saved without rank %d", s->me->rank) : false;
        }
        if (over) { return parts_blame(s, err); }
    }
}

// Waits for the result. Rank 0 has begun before begin_ms, so it ends within limit_ms of then, but for its last steps: it has
// half as long again for those.
static inline bool parts_await_result(const PartsSave* s, double begin_ms, Error* err) {
    useconds_t poll_us = PARTS_POLL_US;
    double end_ms = begin_ms + 1.5 * s->limit_ms;
    bool saved = false, gone = false;
    for (bool over = false;; over = !parts_pause(s, &poll_us, end_ms)) {
        bool was_gone = gone;
        gone = parts_gone(s);
        if (gone && !was_gone) { // the result follows the removal or the renaming of the directory
            double soon_ms = time_ms() + fmin(0.5 * s->limit_ms, PARTS_RESULT_MS);
            end_ms = end_ms < soon_ms ? end_ms : soon_ms;
            poll_us = PARTS_POLL_US;
        }
        if (parts_take_result(s, &saved, err)) { return saved; }
        if (over) { return parts_blame(s, err); }
    }
}

static inline bool parts_follow(PartsSave* s, Error* err) {
    Error own, result;
    if (!parts_await_files(s, err)) { return false; }
    double begin_ms = time_ms();
    bool ok = parts_come(s, &own) && parts_write(s, &own) && parts_report(s, NULL, &own);
    // if rank 0 has given up, files are missing: the reason is in the result
    bool gone = !ok && parts_gone(s), reported = ok || (!gone && parts_report(s, own.text, NULL));
    gone = gone || (!reported && parts_gone(s));
    if (!reported && !gone) {
        fprintf(stderr, "warning: rank %d: %s\n", s->me->rank, own.text); // rank 0 learns no more than that it failed
        if (!parts_withdraw(s)) {
            if (s->me->unheard) { __atomic_store_n(s->me->unheard, 1, __ATOMIC_RELEASE); }
            return error_set(err, "%s", own.text); // nobody will answer
        }
    }
    bool saved = parts_await_result(s, begin_ms, &result);
    if (saved && ok) { return true; }
    return error_set(err, "%s", ok || gone ? result.text : own.text);
}

// ---- rank 0 ---------------------------------------------------------------------------

// Creates one of the two files with its header and its full size.
static inline bool parts_create(const PartsSave* s, int file, SavedFile* saved, Error* err) {
    Path path;
    SafeWriter w;
    if (!run_path(&path, s->hidden.text, parts_files[file], err)) { return false; }
    parts_declare(&w, &s->list->config, file);
    if (!safewriter_begin(&w, path.text, err)) { return false; }
    snprintf(saved->name, sizeof(saved->name), "%s", parts_files[file]);
    return safewriter_end_header(&w, err, &saved->bytes, &saved->crc);
}

// Creates the file for the report of each other rank, with blanks in it, so that it can be written even when the disk has
// become full.
static inline bool parts_make_room(const PartsSave* s, Error* err) {
    size_t bytes = parts_report_bytes(s);
    Path path;
    char* blanks = (char*)malloc_check(bytes + 1);
    bool ok = true;
    memset(blanks, ' ', bytes);
    blanks[bytes] = '\0';
    for (int r = 1; r < s->me->num_ranks && ok; r++) {
        ok = parts_path(s, &path, s->hidden.text, r, ".open", err) && parts_put(path.text, blanks, err);
    }
    free(blanks);
    return ok;
}

// Creates everything but the data of the parts and state.json, then the sign for the other ranks. files, in the order of
// run_write_files(): the first is the model, the last the optimizer; the crc of these two is that of their headers.
static inline bool parts_create_all(const PartsSave* s, const RunState* state, const Tokenizer* tokenizer,
                                    SavedFile* files, int* num_files, Error* err) {
    Path sign;
    *num_files = 3;
    return parts_create(s, 0, &files[0], err) &&
           model_save_hf_texts(s->hidden.text, &state->config, false, run_tokens(state->eot_id, tokenizer), &files[1],
                               err) &&
           run_write_vocabulary(s->hidden.text, tokenizer, files, num_files, err) &&
           parts_create(s, 1, &files[(*num_files)++], err) && parts_make_room(s, err) &&
           parts_path(s, &sign, s->hidden.text, 0, "", err) && parts_put(sign.text, "", err);
}

// Reads the sums that rank r reported. False: it reported a failure, or saves something else.
static inline bool parts_read_report(const PartsSave* s, int r, Error* err) {
    Path path;
    char* at = NULL;
    if (!parts_path(s, &path, s->hidden.text, r, "", err)) { return false; }
    char* text = parts_get(path.text);
    if (!text) { return error_set(err, "rank %d: %s: cannot be read", r, path.text); }
    uint32_t identity = (uint32_t)strtoul(text, &at, 16);
    bool ok = strncmp(at, " ok\n", 4) == 0;
    if (!ok) {
        at += strspn(at, " ");
        at[strcspn(at, "\n")] = '\0';
        error_set(err, "rank %d: %s", r, at);
    } else if (identity != s->identity) {
        ok = error_set(err, "rank %d: it saves another step or model, or with another number of ranks", r);
    }
    at += 4;
    for (int i = 0; ok && i < s->list->num_parts; i++) {
        char* end = at;
        if (s->list->parts[i].rank != r) { continue; }
        s->sums[i] = (uint32_t)strtoul(at, &end, 16);
        ok = end == at + 8 || error_set(err, "rank %d: %s: is damaged", r, path.text);
        at = end + 1;
    }
    free(text);
    return ok;
}

// Waits for the reports of all other ranks; ends at the first failure. A file that is renamed during a look may be in the list
// under neither name, and a report is renamed twice: a rank that is missing in three looks has withdrawn.
static inline bool parts_await_reports(const PartsSave* s, Error* err) {
    useconds_t poll_us = PARTS_POLL_US;
    int num_read = 1, *missed = (int*)calloc_check((size_t)s->me->num_ranks, sizeof(int));
    bool ok = true, over = false, *read = (bool*)calloc_check((size_t)s->me->num_ranks, sizeof(bool));
    while (ok && num_read < s->me->num_ranks) {
        int before = num_read;
        if (!parts_look(s, s->hidden.text)) { memset(s->progress, PARTS_ABSENT, (size_t)s->me->num_ranks); }
        for (int r = 1; ok && r < s->me->num_ranks; r++) {
            missed[r] = s->progress[r] == PARTS_WITHDRAWN ? missed[r] + 1 : 0;
            if (!read[r] && missed[r] == 3) {
                ok = error_set(err, "rank %d: cannot write to %s, and so cannot say why", r, s->out_dir);
            }
            if (read[r] || s->progress[r] != PARTS_DONE) { continue; }
            ok = parts_read_report(s, r, err);
            read[r] = true;
            num_read++;
        }
        if (!ok || num_read > before) { continue; }
        ok = !over || parts_blame(s, err);
        over = ok && !parts_pause(s, &poll_us, s->start_ms + s->limit_ms);
    }
    free(read);
    free(missed);
    return ok;
}

// Combines the sums, removes the small files and writes state.json.
static inline bool parts_complete(const PartsSave* s, const RunState* state, SavedFile* files, int num_files,
                                  Error* err) {
    Path path;
    for (int i = 0; i < s->list->num_parts; i++) {
        const RunPart* part = &s->list->parts[i];
        SavedFile* file = parts_file(part) == 0 ? &files[0] : &files[num_files - 1];
        file->crc = crc32c_combine(file->crc, s->sums[i], parts_bytes(s, part));
    }
    for (int r = 0; r < s->me->num_ranks; r++) {
        if (!parts_path(s, &path, s->hidden.text, r, "", err)) { return false; }
        if (unlink(path.text) != 0) { return error_set(err, "%s: cannot remove: %s", path.text, strerror(errno)); }
    }
    return run_write_state(s->hidden.text, state, files, num_files, err) && sync_directory(s->hidden.text, err);
}

// Creates dir, if necessary, and rank r's small file in it.
static inline bool parts_leave(const PartsSave* s, const char* dir, int r, const char* text, Error* err) {
    Path path;
    bool ok = false;
    if (!parts_path(s, &path, dir, r, "", err)) { return false; }
    for (int i = 0; i < PARTS_ATTEMPTS && !ok; i++) {
        if (i > 0) { usleep(PARTS_RETRY_US); }
        ok = mkdir(dir, 0777) == 0 || errno == EEXIST || error_set(err, "%s: cannot create: %s", dir, strerror(errno));
        ok = ok && parts_put(path.text, text, err);
    }
    return ok;
}

// Leaves the result for each of the other ranks: failure is NULL, or the reason. Each rank removes its own. The result of
// rank 0 keeps the directory from being removed before all results exist.
static inline bool parts_leave_results(const PartsSave* s, const char* failure, Error* err) {
    Path dir, own;
    char name[RUN_NAME], text[sizeof(err->text) + 16];
    run_hidden_name(name, ".end-", s->state->step);
    snprintf(text, sizeof(text), "%s\n", failure ? failure : "saved");
    if (!run_path(&dir, s->out_dir, name, err) || !parts_path(s, &own, dir.text, 0, "", err)) { return false; }
    bool ok = parts_leave(s, dir.text, 0, "", err);
    for (int r = 1; r < s->me->num_ranks && ok; r++) { ok = parts_leave(s, dir.text, r, text, err); }
    unlink(own.text);
    rmdir(dir.text); // fails unless all ranks have already taken theirs
    return ok;
}

static inline bool parts_lead(PartsSave* s, const Tokenizer* tokenizer, Error* err) {
    SavedFile files[RUN_MAX_FILES];
    RunState state = run_saved_state(s->state, tokenizer);
    Error reason, other;
    Path sign;
    char failure[sizeof(reason.text) + 16];
    int num_files = 0;
    memset(files, 0, sizeof(files));
    bool created = run_create_hidden(s->out_dir, state.step, &s->hidden, &reason);
    bool ok = created && parts_create_all(s, &state, tokenizer, files, &num_files, &reason) && parts_write(s, &reason);
    bool reports = ok && parts_await_reports(s, &reason), others_failed = ok && !reports;
    ok = reports && parts_complete(s, &state, files, num_files, &reason) &&
         run_publish(s->out_dir, s->hidden.text, state.step, &reason);
    // the sign goes first: then the others know why their files are no longer there. One that does not know it yet may create
    // its report while the directory is being removed.
    if (created && parts_path(s, &sign, s->hidden.text, 0, "", NULL)) { unlink(sign.text); }
    bool removed = !created || run_remove_directory(s->hidden.text, &other);
    for (int i = 1; i < PARTS_REMOVALS && !removed; i++) {
        usleep(PARTS_RETRY_US);
        removed = run_remove_directory(s->hidden.text, &other);
    }
    if (!removed) { fprintf(stderr, "warning: %s\n", other.text); }
    snprintf(failure, sizeof(failure), "%s%s", others_failed ? "" : "rank 0: ", ok ? "" : reason.text);
    if (!parts_leave_results(s, ok ? NULL : failure, &other) && ok) {
        fprintf(stderr, "warning: the checkpoint is saved, but other ranks do not know: %s\n", other.text);
    }
    return ok || error_set(err, "%s", reason.text);
}

// Saves the checkpoint out_dir/step_%08d of state->step together with the other ranks, each of which calls this at about the
// same time with the parts that run_parts() gave it in buffer (parts->rank_floats[rank]). state->step and state->config are
// those of rank 0 on all ranks; the rest of state, and tokenizer, is read by rank 0 alone. Like run_save(): an existing
// checkpoint of the same step is replaced, and after a failure older ones are untouched. Every rank returns the same, unless
// a rank dies or a result cannot be left; a failure of another rank is named: "rank 2: ...". With one rank it is run_save().
static inline bool run_save_parts(const char* out_dir, const RunState* state, const RunParts* parts, const RunRank* me,
                                  const float* buffer, const Tokenizer* tokenizer, Error* err) {
    PartsSave s;
    size_t n = num_parameters(&state->config);
    require(me->num_ranks == parts->num_ranks && me->rank >= 0 && me->rank < me->num_ranks);
    require(memcmp(&state->config, &parts->config, sizeof(GPT2Config)) == 0);
    if (me->num_ranks == 1) { return run_save(out_dir, state, buffer, buffer + n, buffer + 2 * n, tokenizer, err); }
    require(run_state_valid(state));
    memset(&s, 0, sizeof(s));
    s.out_dir = out_dir;
    s.state = state;
    s.list = parts;
    s.me = me;
    s.buffer = buffer;
    parts_init(&s);
    bool ok = me->rank == 0 ? parts_lead(&s, tokenizer, err) : parts_follow(&s, err);
    if (s.report_fd >= 0) { close(s.report_fd); }
    free(s.sums);
    free(s.progress);
    return ok;
}

#endif
