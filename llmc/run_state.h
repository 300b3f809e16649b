/*
Checkpoints of a training run. Each one is a directory that Hugging Face's from_pretrained can open, and from which the
run resumes bit for bit.

    log/step_00000100/config.json, generation_config.json, model.safetensors (fp32)
                      vocab.json, merges.txt (tokenizer_config.json, gpt2_tokenizer.bin if the
                      vocabulary needs them)
                      optimizer.safetensors: AdamW's moments m.NAME and v.NAME of every parameter, in fp32, with the
                      names and shapes of model.safetensors; where Muon updates a matrix, m is its momentum and v is 0
                      state.json: the rest of the state, plus the size and crc32c of every file listed above and a
                      crc32c of state.json itself

A checkpoint is written to a hidden directory; every file and the directory are fsynced; the directory is renamed; then
out_dir is fsynced. So a checkpoint is either complete or absent under its final name, even after a power failure. A
single flipped bit in any of its files is detected on loading. A run uses this header as follows, with stop.h:

    run_install_signal_handlers();
    run_remove_leftovers(out_dir, &err);
    if (run_find_newest(out_dir, &path, false, &err)) { run_load(path.text, &state, params, m, v, &err); }
    for (...) {
        ... one step ...
        if (run_stop_signal || it is time) { run_save(out_dir, &state, params, m, v, &tokenizer, &err); }
        run_prune(out_dir, 3, 1000, &err);
        if (run_stop_signal) { break; }
    }

Only one run at a time may write to an out_dir: run_lock() sees to that.
*/
#ifndef LLMC_RUN_STATE_H
#define LLMC_RUN_STATE_H

#include "checkpoint.h"
#include "crc32c.h"
#include "dataloader.h"
#include "gpt2.h"
#include "json.h"
#include "outlier_detector.h"
#include "tokenizer.h"
#include "utils.h"
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <sys/file.h>

// ---- directories ------------------------------------------------------------------

enum { RUN_NAME = 64 };

// Writes "dir/name" to out.
static inline bool run_path(Path* out, const char* dir, const char* name, Error* err) {
    return path_set(out, "%s/%s", dir, name) || error_set(err, "%.200s...: the directory name is too long", dir);
}

// Writes "step_00000100" to name (RUN_NAME bytes).
static inline void run_step_name(char* name, int64_t step) { snprintf(name, RUN_NAME, "step_%08lld", (long long)step); }

// Returns 100 for "step_00000100", and -1 for a name that run_step_name() would not produce.
static inline int64_t run_step_of_name(const char* name) {
    char want[RUN_NAME];
    if (strncmp(name, "step_", 5) != 0 || strlen(name) > 5 + 18) { return -1; }
    if (strspn(name + 5, "0123456789") != strlen(name + 5)) { return -1; }
    int64_t step = (int64_t)strtoll(name + 5, NULL, 10);
    run_step_name(want, step);
    return strcmp(want, name) == 0 ? step : -1;
}

// While a checkpoint is being written or removed, it has the hidden name .tmp-step_00000100-PID, which no reader opens.
// If the file system cannot exchange two directories atomically, the checkpoint that is being replaced is briefly
// called .old-step_00000100-PID. .end-step_00000100-PID holds the result of a save by several ranks, see run_parts.h.
static inline void run_hidden_name(char* name, const char* prefix, int64_t step) {
    snprintf(name, RUN_NAME, "%sstep_%08lld-%ld", prefix, (long long)step, (long)getpid());
}

// Returns the PID in a hidden name and stores its step in *step; returns 0 for any other name.
static inline long run_pid_of_hidden_name(const char* name, const char* prefix, int64_t* step) {
    char part[RUN_NAME];
    size_t n = strlen(prefix);
    const char* dash = strrchr(name, '-');
    if (strncmp(name, prefix, n) != 0 || !dash || dash < name + n) { return 0; }
    size_t length = (size_t)(dash - (name + n));
    if (length >= sizeof(part)) { return 0; }
    memcpy(part, name + n, length);
    part[length] = '\0';
    *step = run_step_of_name(part);
    size_t digits = strspn(dash + 1, "0123456789");
    return *step >= 0 && digits > 0 && digits < 10 && dash[1 + digits] == '\0' ? strtol(dash + 1, NULL, 10) : 0;
}

// ---- the owner of an output directory ---------------------------------------------

// Locks out_dir for this process, with flock(2) on out_dir/run.lock. The kernel releases the lock when the process ends,
// even after kill -9. Returns a file descriptor that stays open for the rest of the run; -1 if another process holds the
// lock (err names it) or if the file cannot be created. On a file system without locks it warns and returns -2.
static inline int run_lock(const char* out_dir, Error* err) {
    Path path;
    char owner[256];
    if (!run_path(&path, out_dir, "run.lock", err)) { return -1; }
    int fd = open(path.text, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) { return error_set(err, "%s: cannot create: %s", path.text, strerror(errno)), -1; }
    int reason = EWOULDBLOCK;
    // a run that is refused, for its flags or its data, holds the lock for a moment only: wait for half a second
    for (int attempt = 0; attempt < 50 && reason == EWOULDBLOCK; attempt++) {
        if (attempt > 0) { usleep(10000); }
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) { return fd; }
        reason = errno;
    }
    ssize_t n = pread(fd, owner, sizeof(owner) - 1, 0);
    close(fd);
    if (reason == EWOULDBLOCK) {
        owner[n > 0 ? n : 0] = '\0';
        owner[strcspn(owner, "\n")] = '\0';
        error_set(err, "%s is in use by %s: wait until that run ends, or give another -o", out_dir,
                  owner[0] ? owner : "a run that is just starting");
        return -1;
    }
    print_line(stderr, "warning: %s: cannot lock: %s; make sure that no other run writes to %s", path.text,
               strerror(reason), out_dir);
    return -2;
}

// Writes who holds the lock to run.lock, for the message of run_lock() in other processes: process, host, start time.
static inline void run_sign_lock(int fd) {
    char text[256], host[128] = "", when[32];
    time_t now = time(NULL);
    struct tm local;
    if (fd < 0) { return; }
    if (gethostname(host, sizeof(host) - 1) != 0) { strcpy(host, "unknown host"); }
    strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", localtime_r(&now, &local));
    int n = snprintf(text, sizeof(text), "process %ld on %s, since %s\n", (long)getpid(), host, when);
    // a failure, of a full disk for instance, only makes that message less precise
    if (ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)n, 0) < 0) { return; }
}

// True if out_dir/run.lock is still the file that run_lock() has locked, or if there is no lock (negative). False if the
// directory or that file was removed or replaced: what is there now may belong to another run.
static inline bool run_owns(const char* out_dir, int lock, Error* err) {
    Path path;
    struct stat held, named;
    if (lock < 0) { return true; }
    if (!run_path(&path, out_dir, "run.lock", err)) { return false; }
    if (fstat(lock, &held) != 0) { return error_set(err, "%s: %s", path.text, strerror(errno)); }
    bool found = stat(path.text, &named) == 0;
    if (found && held.st_dev == named.st_dev && held.st_ino == named.st_ino) {
        futimens(lock, NULL); // what removes old files from /tmp leaves it
        return true;
    }
    return error_set(err, "%s, which this run has locked, %s: the directory may be another run's now", path.text,
                     found             ? "was replaced"
                     : errno == ENOENT ? "is gone"
                                       : strerror(errno));
}

// ---- removing what dead runs left ---------------------------------------------------

// Removes a directory that contains only plain files. Succeeds if the directory does not exist.
static inline bool run_remove_directory(const char* path, Error* err) {
    DIR* dir = opendir(path);
    if (!dir) { return errno == ENOENT || error_set(err, "%s: %s", path, strerror(errno)); }
    bool ok = true;
    for (struct dirent* e = readdir(dir); e; e = readdir(dir)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) { continue; }
        if (unlinkat(dirfd(dir), e->d_name, 0) != 0 && errno != ENOENT && ok) {
            ok = error_set(err, "%s/%s: cannot remove: %s", path, e->d_name, strerror(errno));
        }
    }
    closedir(dir);
    if (ok && rmdir(path) != 0 && errno != ENOENT) {
        ok = error_set(err, "%s: cannot remove: %s", path, strerror(errno));
    }
    return ok;
}

static inline int run_compare_steps(const void* a, const void* b) {
    int64_t x = *(const int64_t*)a, y = *(const int64_t*)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

// Lists the steps of all checkpoints in out_dir, newest first, without checking that they are complete. The caller
// frees *steps. Returns false if out_dir cannot be read.
static inline bool run_list_steps(const char* out_dir, int64_t** steps, int* num_steps, Error* err) {
    *steps = NULL;
    *num_steps = 0;
    DIR* dir = opendir(out_dir);
    if (!dir) { return error_set(err, "%s: %s", out_dir, strerror(errno)); }
    for (struct dirent* e = readdir(dir); e; e = readdir(dir)) {
        int64_t step = run_step_of_name(e->d_name);
        if (step < 0) { continue; }
        *steps = (int64_t*)realloc_check(*steps, (size_t)(*num_steps + 1) * sizeof(**steps));
        (*steps)[(*num_steps)++] = step;
    }
    closedir(dir);
    if (*num_steps > 0) { qsort(*steps, (size_t)*num_steps, sizeof(**steps), run_compare_steps); }
    return true;
}

// True if out_dir contains a checkpoint, intact or damaged.
static inline bool run_has_checkpoints(const char* out_dir) {
    int64_t* steps = NULL;
    int num_steps = 0;
    Error err;
    bool any = is_directory(out_dir) && run_list_steps(out_dir, &steps, &num_steps, &err) && num_steps > 0;
    free(steps);
    return any;
}

// Handles one directory entry of out_dir, which may be the leftover of a dead run; see run_remove_leftovers().
static inline bool run_remove_leftover(const char* out_dir, const char* name, Error* err) {
    static const char* const prefixes[] = {".tmp-", ".old-", ".end-"};
    Path path, final_path;
    char step_name[RUN_NAME];
    for (int i = 0; i < 3; i++) {
        int64_t step = -1;
        long pid = run_pid_of_hidden_name(name, prefixes[i], &step);
        if (pid == 0) { continue; }
        // an entry with our own PID also comes from a dead run, because this run has not written anything yet
        if (pid != (long)getpid() && (kill((pid_t)pid, 0) == 0 || errno == EPERM)) { continue; }
        run_step_name(step_name, step);
        if (!run_path(&path, out_dir, name, err) || !run_path(&final_path, out_dir, step_name, err)) { return false; }
        if (i == 1 && !file_exists(final_path.text)) { // the run died between the two renames of run_publish()
            return rename(path.text, final_path.text) == 0 ||
                   error_set(err, "%s: cannot rename: %s", path.text, strerror(errno));
        }
        return run_remove_directory(path.text, err);
    }
    return true;
}

// Removes the half-written and half-removed checkpoints that dead runs left in out_dir. Must be called at the start of
// a run, before anything is read or saved. Succeeds if out_dir does not exist.
static inline bool run_remove_leftovers(const char* out_dir, Error* err) {
    DIR* dir = opendir(out_dir);
    if (!dir) { return errno == ENOENT || error_set(err, "%s: %s", out_dir, strerror(errno)); }
    bool ok = true;
    for (struct dirent* e = readdir(dir); e; e = readdir(dir)) {
        ok = run_remove_leftover(out_dir, e->d_name, ok ? err : NULL) && ok;
    }
    closedir(dir);
    return ok;
}

// Gives the directory tmp_path, which is already synced to disk, its final name. If out_dir already has a checkpoint of
// this step, the two are exchanged atomically, so that tmp_path then holds the old one; the caller removes it.
// On false out_dir is unchanged, or, if only its fsync failed, contains the new checkpoint.
static inline bool run_publish(const char* out_dir, const char* tmp_path, int64_t step, Error* err) {
    Path final_path, old_path;
    char name[RUN_NAME];
    run_step_name(name, step);
    if (!run_path(&final_path, out_dir, name, err)) { return false; }
    run_hidden_name(name, ".old-", step);
    if (!run_path(&old_path, out_dir, name, err)) { return false; }
    bool replace = file_exists(final_path.text), exchanged = false;
#ifdef RENAME_EXCHANGE
    exchanged = replace && renameat2(AT_FDCWD, tmp_path, AT_FDCWD, final_path.text, RENAME_EXCHANGE) == 0;
    if (replace && !exchanged && errno != EINVAL && errno != ENOSYS) {
        return error_set(err, "%s: cannot replace: %s", final_path.text, strerror(errno));
    }
#endif
    // if the file system cannot exchange, there are two renames instead; if the process dies between them,
    // run_remove_leftovers() of the next run restores the old checkpoint
    bool moved = replace && !exchanged;
    if (moved && rename(final_path.text, old_path.text) != 0) {
        return error_set(err, "%s: cannot replace: %s", final_path.text, strerror(errno));
    }
    if (!exchanged && rename(tmp_path, final_path.text) != 0) {
        error_set(err, "%s: cannot rename %s: %s", final_path.text, tmp_path, strerror(errno));
        if (moved && rename(old_path.text, final_path.text) != 0) {
            error_set(err, "%s: cannot rename: %s; the checkpoint is now %s", final_path.text, strerror(errno),
                      old_path.text);
        }
        return false;
    }
    bool ok = sync_directory(out_dir, err);
    return (!moved || run_remove_directory(old_path.text, ok ? err : NULL)) && ok;
}

// ---- checksums ----------------------------------------------------------------------

// Computes the size and crc32c of a file. It uses read(2), because a bad sector then gives an error; in a mapping it
// would raise SIGBUS.
static inline bool run_sum_file(const char* path, uint64_t* bytes, uint32_t* crc, Error* err) {
    enum { CHUNK = 1 << 18 }; // 256 KB: stays in the L2 cache between read() and crc32c()
    *bytes = 0;
    *crc = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
    uint8_t* buffer = (uint8_t*)malloc_check(CHUNK);
    ssize_t n = 1;
    while (n > 0) {
        n = read(fd, buffer, CHUNK);
        if (n < 0 && errno == EINTR) {
            n = 1;
            continue;
        }
        if (n > 0) {
            *crc = crc32c(*crc, buffer, (size_t)n);
            *bytes += (uint64_t)n;
        }
    }
    if (n < 0) { error_set(err, "%s: %s", path, strerror(errno)); }
    free(buffer);
    close(fd);
    return n == 0;
}

// Compares the size and crc32c of one checkpoint file with those in state.json.
static inline bool run_check_file(const char* dir, const SavedFile* file, Error* err) {
    Path path;
    struct stat st;
    uint64_t bytes = 0;
    uint32_t crc = 0;
    if (!run_path(&path, dir, file->name, err)) { return false; }
    if (stat(path.text, &st) != 0) { return error_set(err, "%s: %s", path.text, strerror(errno)); }
    if ((uint64_t)st.st_size != file->bytes) {
        return error_set(err, "%s: has %lld bytes, state.json says %llu", path.text, (long long)st.st_size,
                         (unsigned long long)file->bytes);
    }
    if (!run_sum_file(path.text, &bytes, &crc, err)) { return false; }
    if (bytes != file->bytes || crc != file->crc) {
        return error_set(err, "%s: is damaged: its crc32c is %08x, state.json says %08x", path.text, crc, file->crc);
    }
    return true;
}

// ---- state.json ----------------------------------------------------------------------

enum { RUN_VERSION = 1, RUN_MAX_FILES = 32, RUN_TEXT = 16, RUN_MAX_STATE_BYTES = 1 << 20 };
enum { RUN_MAX_FP8 = 4094 }; // tensors with a scale; even, so that RunState has no padding behind them
// The largest step, number of tokens or epoch in state.json: a run can count on from it without an overflow.
static const int64_t run_max_count = (int64_t)1 << 60;

// The state of a run, except params, m and v. Plain data; zero a RunState before filling it, so that memcmp can compare
// two of them.
typedef struct {
    GPT2Config config;
    int64_t step;                  // optimizer steps taken so far, skipped ones included; names the directory
    int64_t num_tokens_seen;       // tokens trained on so far
    int64_t skipped_steps;         // steps whose update was skipped: outlier, or not finite
    double loss_scale;             // fp16: the factor by which all gradients are scaled; otherwise 1
    int64_t loss_scale_good_steps; // finite steps since loss_scale was last changed
    uint64_t sampler_rng;
    int32_t eot_id;     // id of end-of-text, -1 if there is none; run_save() takes it from the tokenizer if it has one
    bool has_tokenizer; // vocab.json and merges.txt are in the directory; set by run_save()
    double best_val_loss; // the lowest validation loss so far; infinite before the first one

    // settings, which run_print_changes() compares
    int32_t B, T;               // sequences per micro-batch, tokens per sequence
    int64_t total_batch_tokens; // tokens per step
    uint64_t seed;
    char schedule[RUN_TEXT];  // learning rate schedule
    char optimizer[RUN_TEXT]; // adamw or muon
    int64_t num_steps, warmup_steps;
    double learning_rate, final_fraction; // see LrSchedule
    double weight_decay, beta1, beta2, eps, grad_clip;
    double muon_learning_rate, muon_momentum; // 0 without Muon
    double skip_loss_z, skip_norm_z;          // an update whose z-score is larger is skipped; 0: never

    DataLoaderState loader;
    OutlierDetector loss_outliers, norm_outliers;

    // with --fp8: the largest absolute value of each quantized tensor in the steps so far, decayed, from which its next
    // scale is computed; num_fp8 0: not known. They are 0 for tensors that only later stages than fp8_stage quantize
    int32_t fp8_stage, num_fp8;
    float fp8_largest[RUN_MAX_FP8]; // the first num_fp8 are valid, finite and at least 0; all others are 0
} RunState;

typedef enum { RUN_INT32, RUN_INT64, RUN_UINT64, RUN_FLOAT, RUN_DOUBLE, RUN_BOOL, RUN_STRING } RunFieldKind;

typedef struct {
    const char* key;
    RunFieldKind kind;
    bool setting;  // comes from a flag: run_print_changes() reports it if it differs after a resume
    bool optional; // checkpoints of version 1.0 and earlier lack it: the member then keeps the value that it had
    size_t offset;
} RunField;

#define RUN_FIELD(key, kind, setting, member)                                                                          \
    { key, kind, setting, false, offsetof(RunState, member) }
#define RUN_LATER_FIELD(key, kind, setting, member)                                                                    \
    { key, kind, setting, true, offsetof(RunState, member) }

// Drives writing, reading and comparing state.json. A member of RunState is saved only if it is listed here; the two
// outlier windows and fp8_largest are the exceptions.
static const RunField run_fields[] = {
    RUN_FIELD("step", RUN_INT64, false, step),
    RUN_FIELD("num_tokens_seen", RUN_INT64, false, num_tokens_seen),
    RUN_FIELD("skipped_steps", RUN_INT64, false, skipped_steps),
    RUN_FIELD("loss_scale", RUN_DOUBLE, false, loss_scale),
    RUN_FIELD("loss_scale_good_steps", RUN_INT64, false, loss_scale_good_steps),
    RUN_FIELD("sampler_rng", RUN_UINT64, false, sampler_rng),
    RUN_FIELD("eot_id", RUN_INT32, false, eot_id),
    RUN_FIELD("has_tokenizer", RUN_BOOL, false, has_tokenizer),
    RUN_FIELD("max_seq_len", RUN_INT32, false, config.max_seq_len),
    RUN_FIELD("vocab_size", RUN_INT32, false, config.vocab_size),
    RUN_FIELD("padded_vocab_size", RUN_INT32, false, config.padded_vocab_size),
    RUN_FIELD("num_layers", RUN_INT32, false, config.num_layers),
    RUN_FIELD("num_heads", RUN_INT32, false, config.num_heads),
    RUN_FIELD("channels", RUN_INT32, false, config.channels),
    RUN_LATER_FIELD("mlp_channels", RUN_INT32, false, config.mlp_channels),
    RUN_LATER_FIELD("norm_epsilon", RUN_FLOAT, false, config.norm_epsilon),
    RUN_LATER_FIELD("activation", RUN_INT32, false, config.activation),
    RUN_LATER_FIELD("unscaled_attention", RUN_INT32, false, config.unscaled_attention),
    RUN_LATER_FIELD("scale_by_layer", RUN_INT32, false, config.scale_by_layer),
    RUN_LATER_FIELD("untied_head", RUN_INT32, false, config.untied_head),
    RUN_FIELD("batch_size", RUN_INT32, true, B),
    RUN_FIELD("seq_len", RUN_INT32, true, T),
    RUN_FIELD("total_batch_tokens", RUN_INT64, true, total_batch_tokens),
    RUN_FIELD("seed", RUN_UINT64, true, seed),
    RUN_FIELD("schedule", RUN_STRING, true, schedule),
    RUN_FIELD("num_steps", RUN_INT64, true, num_steps),
    RUN_FIELD("warmup_steps", RUN_INT64, true, warmup_steps),
    RUN_FIELD("learning_rate", RUN_DOUBLE, true, learning_rate),
    RUN_FIELD("final_fraction", RUN_DOUBLE, true, final_fraction),
    RUN_FIELD("weight_decay", RUN_DOUBLE, true, weight_decay),
    RUN_FIELD("beta1", RUN_DOUBLE, true, beta1),
    RUN_FIELD("beta2", RUN_DOUBLE, true, beta2),
    RUN_FIELD("eps", RUN_DOUBLE, true, eps),
    RUN_FIELD("grad_clip", RUN_DOUBLE, true, grad_clip),
    RUN_FIELD("skip_loss_z", RUN_DOUBLE, true, skip_loss_z),
    RUN_FIELD("skip_norm_z", RUN_DOUBLE, true, skip_norm_z),
    RUN_FIELD("loader_epoch", RUN_INT64, false, loader.epoch),
    RUN_FIELD("loader_shard", RUN_INT64, false, loader.shard),
    RUN_FIELD("loader_position", RUN_INT64, false, loader.position),
    RUN_FIELD("loader_seed", RUN_UINT64, false, loader.seed),
    RUN_FIELD("loader_shuffle", RUN_INT64, false, loader.shuffle),
    RUN_FIELD("loader_T", RUN_INT64, false, loader.T),
    RUN_FIELD("loader_num_shards", RUN_INT64, false, loader.num_shards),
    RUN_FIELD("loader_num_tokens", RUN_INT64, false, loader.num_tokens),
    RUN_LATER_FIELD("loader_fingerprint", RUN_UINT64, false, loader.fingerprint),
    RUN_LATER_FIELD("best_val_loss", RUN_DOUBLE, false, best_val_loss),
    RUN_LATER_FIELD("optimizer", RUN_STRING, true, optimizer),
    RUN_LATER_FIELD("muon_learning_rate", RUN_DOUBLE, true, muon_learning_rate),
    RUN_LATER_FIELD("muon_momentum", RUN_DOUBLE, true, muon_momentum),
    RUN_LATER_FIELD("fp8_stage", RUN_INT32, true, fp8_stage),
};
#undef RUN_FIELD
#undef RUN_LATER_FIELD

enum { RUN_NUM_FIELDS = sizeof(run_fields) / sizeof(run_fields[0]) };

// Formats a double so that it reads back as the same bits (NaN as a NaN). Infinities and NaN become strings, because
// JSON numbers cannot express them.
static inline void run_format_double(char* out, size_t size, double x) {
    if (isfinite(x)) {
        for (int digits = 1; digits <= 17; digits++) { // the first that is read back as the same number; 17 always are
            snprintf(out, size, "%.*g", digits, x);
            if (strtod(out, NULL) == x) { break; }
        }
    } else {
        snprintf(out, size, "\"%s\"", isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
    }
}

static inline bool run_read_double(double* out, const JsonValue* v) {
    if (v && v->type == JSON_NUMBER) {
        *out = v->number;
        return true;
    }
    if (!v || v->type != JSON_STRING) { return false; }
    bool nan = strcmp(v->string, "nan") == 0, plus = strcmp(v->string, "inf") == 0;
    if (!nan && !plus && strcmp(v->string, "-inf") != 0) { return false; }
    *out = nan ? (double)NAN : plus ? (double)INFINITY : -(double)INFINITY;
    return true;
}

// Writes the field's value as JSON to out (64 bytes).
static inline void run_format_field(char* out, const RunField* f, const RunState* state) {
    enum { SIZE = 64 };
    const char* p = (const char*)state + f->offset;
    switch (f->kind) {
    case RUN_INT32:
        snprintf(out, SIZE, "%d", *(const int32_t*)p);
        break;
    case RUN_INT64:
        snprintf(out, SIZE, "%lld", (long long)*(const int64_t*)p);
        break;
    case RUN_UINT64: // as a string, because many JSON readers keep only 53 bits of a number
        snprintf(out, SIZE, "\"%llu\"", (unsigned long long)*(const uint64_t*)p);
        break;
    case RUN_FLOAT:
        format_float(out, SIZE, *(const float*)p);
        break;
    case RUN_DOUBLE:
        run_format_double(out, SIZE, *(const double*)p);
        break;
    case RUN_BOOL:
        snprintf(out, SIZE, "%s", *(const bool*)p ? "true" : "false");
        break;
    case RUN_STRING:
        snprintf(out, SIZE, "\"%.*s\"", RUN_TEXT - 1, p);
        break;
    }
}

static inline bool run_read_uint64(uint64_t* out, const JsonValue* v, int base, size_t max_digits) {
    const char* digits = base == 16 ? "0123456789abcdef" : "0123456789";
    if (!v || v->type != JSON_STRING || v->length == 0 || v->length > max_digits) { return false; }
    if (strspn(v->string, digits) != v->length) { return false; }
    errno = 0;
    *out = (uint64_t)strtoull(v->string, NULL, base);
    return errno == 0;
}

static inline bool run_read_field(RunState* state, const RunField* f, const JsonValue* root, const char* where,
                                  Error* err) {
    char* p = (char*)state + f->offset;
    const JsonValue* v = json_get(root, f->key);
    const char* text = NULL;
    int64_t n = 0;
    double number = 0.0;
    if (f->optional && !v) { return true; }
    switch (f->kind) {
    case RUN_INT32:
        if (!json_int(root, f->key, INT32_MIN, INT32_MAX, &n, where, err)) { return false; }
        *(int32_t*)p = (int32_t)n;
        return true;
    case RUN_INT64:
        return json_int(root, f->key, 0, run_max_count, (int64_t*)p, where, err);
    case RUN_UINT64:
        return run_read_uint64((uint64_t*)p, v, 10, 20) ||
               error_set(err, "%s: \"%s\" is missing or not a number in quotes", where, f->key);
    case RUN_FLOAT:
        if (!json_number(root, f->key, -3.4e38, 3.4e38, &number, where, err)) { return false; }
        *(float*)p = (float)number;
        return true;
    case RUN_DOUBLE:
        return run_read_double((double*)p, v) || error_set(err, "%s: \"%s\" is missing or not a number", where, f->key);
    case RUN_BOOL:
        return json_bool(root, f->key, (bool*)p, where, err);
    case RUN_STRING:
        break;
    }
    if (!json_string(root, f->key, &text, where, err)) { return false; }
    if (strlen(text) >= RUN_TEXT) { return error_set(err, "%s: \"%s\" is too long", where, f->key); }
    memset(p, 0, RUN_TEXT);
    memcpy(p, text, strlen(text));
    return true;
}

static inline void run_write_outliers(FileWriter* w, const char* key, const OutlierDetector* d) {
    char number[64];
    writer_printf(w, "  \"%s\": {\"index\": %d, \"window\": [", key, d->index);
    for (int i = 0; i < d->count; i++) {
        run_format_double(number, sizeof(number), d->window[i]);
        writer_printf(w, "%s%s", i ? ", " : "", number);
    }
    writer_printf(w, "]},\n");
}

static inline bool run_read_outliers(OutlierDetector* d, const JsonValue* root, const char* key, const char* where,
                                     Error* err) {
    const JsonValue *v, *window;
    int64_t index = 0;
    outlier_init(d);
    if (!json_want(root, key, JSON_OBJECT, &v, where, err)) { return false; }
    if (!json_int(v, "index", 0, OUTLIER_WINDOW - 1, &index, where, err)) { return false; }
    if (!json_want(v, "window", JSON_ARRAY, &window, where, err)) { return false; }
    bool ok = window->count <= OUTLIER_WINDOW;
    for (size_t i = 0; ok && i < window->count; i++) { ok = run_read_double(&d->window[i], &window->items[i]); }
    d->index = (int32_t)index;
    d->count = ok ? (int32_t)window->count : 0;
    ok = ok && outlier_valid(d);
    return ok || error_set(err, "%s: \"%s\" is not a valid window of losses or norms", where, key);
}

static inline bool run_fp8_valid(const RunState* state) {
    bool ok = state->num_fp8 >= 0 && state->num_fp8 <= RUN_MAX_FP8;
    for (int i = 0; ok && i < state->num_fp8; i++) {
        ok = state->fp8_largest[i] >= 0.0f && isfinite(state->fp8_largest[i]);
    }
    return ok;
}

static inline void run_write_fp8(FileWriter* w, const RunState* state) {
    if (state->num_fp8 == 0) { return; }
    writer_printf(w, "  \"fp8_largest\": [");
    for (int i = 0; i < state->num_fp8; i++) {
        writer_printf(w, "%s%.9g", i ? ", " : "", (double)state->fp8_largest[i]);
    }
    writer_printf(w, "],\n");
}

// Leaves *state as it is if there is no such list, as in a checkpoint without --fp8.
static inline bool run_read_fp8(RunState* state, const JsonValue* root, const char* where, Error* err) {
    static const char key[] = "fp8_largest";
    const JsonValue* list;
    if (!json_get(root, key)) { return true; }
    if (!json_want(root, key, JSON_ARRAY, &list, where, err)) { return false; }
    bool ok = list->count > 0 && list->count <= RUN_MAX_FP8;
    for (size_t i = 0; ok && i < list->count; i++) {
        const JsonValue* v = &list->items[i];
        // 9 digits of the largest float, 3.40282347e38, are a little above it
        ok = v->type == JSON_NUMBER && v->number >= 0 && v->number <= 3.4028235e38;
        state->fp8_largest[i] = ok ? (float)v->number : 0.0f;
    }
    state->num_fp8 = ok ? (int32_t)list->count : 0;
    return ok || error_set(err, "%s: \"%s\" is not a list of 1 to %d floats, finite and at least 0", where, key,
                           (int)RUN_MAX_FP8);
}

// The end of state.json: the crc32c of all bytes before this text.
#define RUN_SUM_LINE "  \"state_crc32c\": \"%08x\"\n}\n"
enum { RUN_SUM_BYTES = 31 };

static inline bool run_write_state(const char* dir, const RunState* state, const SavedFile* files, int num_files,
                                   Error* err) {
    Path path;
    char value[64];
    FileWriter w;
    if (!run_path(&path, dir, "state.json", err) || !writer_open(&w, path.text, err)) { return false; }
    writer_printf(&w, "{\n  \"version\": %d,\n  \"program\": \"train_gpt2\",\n", (int)RUN_VERSION);
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        run_format_field(value, &run_fields[i], state);
        writer_printf(&w, "  \"%s\": %s,\n", run_fields[i].key, value);
    }
    run_write_outliers(&w, "loss_outliers", &state->loss_outliers);
    run_write_outliers(&w, "norm_outliers", &state->norm_outliers);
    run_write_fp8(&w, state);
    writer_printf(&w, "  \"files\": [\n");
    for (int i = 0; i < num_files; i++) {
        writer_printf(&w, "    {\"name\": \"%s\", \"bytes\": %llu, \"crc32c\": \"%08x\"}%s\n", files[i].name,
                      (unsigned long long)files[i].bytes, files[i].crc, i + 1 < num_files ? "," : "");
    }
    writer_printf(&w, "  ],\n");
    writer_printf(&w, RUN_SUM_LINE, w.crc);
    return writer_close(&w, err);
}

static inline bool run_read_files(SavedFile* files, int* num_files, const JsonValue* root, const char* where,
                                  Error* err) {
    const JsonValue* list;
    if (!json_want(root, "files", JSON_ARRAY, &list, where, err)) { return false; }
    if (list->count > RUN_MAX_FILES) { return error_set(err, "%s: \"files\" has too many entries", where); }
    *num_files = (int)list->count;
    for (int i = 0; i < *num_files; i++) {
        const char* name = "";
        int64_t bytes = 0;
        uint64_t crc;
        memset(&files[i], 0, sizeof(files[i]));
        if (!json_string(&list->items[i], "name", &name, where, err)) { return false; }
        if (!json_int(&list->items[i], "bytes", 0, INT64_MAX, &bytes, where, err)) { return false; }
        if (!run_read_uint64(&crc, json_get(&list->items[i], "crc32c"), 16, 8)) {
            return error_set(err, "%s: \"crc32c\" is missing or not a checksum in quotes", where);
        }
        // only plain names, so that a manipulated list cannot make us read outside the directory
        if (strlen(name) >= sizeof(files[i].name) || strchr(name, '/') || name[0] == '.' || name[0] == '\0') {
            return error_set(err, "%s: \"files\" contains a name that no checkpoint file has", where);
        }
        memcpy(files[i].name, name, strlen(name));
        files[i].bytes = (uint64_t)bytes;
        files[i].crc = (uint32_t)crc;
    }
    return true;
}

// The list must name all required files: a required file that is not listed would not be checked at all.
static inline bool run_check_files(const SavedFile* files, int num_files, const char* where, Error* err) {
    static const char* const wanted[] = {"config.json", "model.safetensors", "optimizer.safetensors"};
    for (int i = 0; i < 3; i++) {
        bool found = false;
        for (int j = 0; j < num_files; j++) { found |= strcmp(files[j].name, wanted[i]) == 0; }
        if (!found) { return error_set(err, "%s: \"files\" does not name %s", where, wanted[i]); }
    }
    return true;
}

static inline bool run_parse_state(const JsonValue* root, RunState* state, SavedFile* files, int* num_files,
                                   const char* where, Error* err) {
    const char* program = "";
    int64_t version = 0;
    if (!json_int(root, "version", 0, INT64_MAX, &version, where, err)) { return false; }
    if (version != RUN_VERSION) {
        return error_set(err, "%s: version %lld, but this program reads version %d", where, (long long)version,
                         (int)RUN_VERSION);
    }
    if (!json_string(root, "program", &program, where, err)) { return false; }
    if (strcmp(program, "train_gpt2") != 0) {
        return error_set(err, "%s: not written by train_gpt2, but by %s", where, program);
    }
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        if (!run_read_field(state, &run_fields[i], root, where, err)) { return false; }
    }
    if (!json_get(root, "mlp_channels")) { gpt2_defaults(&state->config); } // version 1.0 had only GPT-2's values
    // AdamW's bias correction takes the number of updates, step - skipped_steps
    if (state->skipped_steps > state->step) {
        return error_set(err, "%s: \"skipped_steps\" is %lld, more than all %lld steps", where,
                         (long long)state->skipped_steps, (long long)state->step);
    }
    return config_check(&state->config, where, err) &&
           run_read_outliers(&state->loss_outliers, root, "loss_outliers", where, err) &&
           run_read_outliers(&state->norm_outliers, root, "norm_outliers", where, err) &&
           run_read_fp8(state, root, where, err) && run_read_files(files, num_files, root, where, err) &&
           run_check_files(files, *num_files, where, err);
}

// Reads state.json of the checkpoint `dir` into state and files (RUN_MAX_FILES entries), after checking its own crc32c.
// The files that it lists are not opened.
static inline bool run_read_state(const char* dir, RunState* state, SavedFile* files, int* num_files, Error* err) {
    Path path;
    char sum_line[64];
    MappedFile file;
    JsonDoc doc;
    memset(state, 0, sizeof(*state));
    state->best_val_loss = INFINITY;
    strcpy(state->optimizer, "adamw"); // the only one before the field
    if (!run_path(&path, dir, "state.json", err) || !map_file(&file, path.text, err)) { return false; }
    bool ok = file.size > RUN_SUM_BYTES && file.size <= RUN_MAX_STATE_BYTES;
    if (ok) {
        size_t summed = file.size - RUN_SUM_BYTES;
        snprintf(sum_line, sizeof(sum_line), RUN_SUM_LINE, crc32c(0, file.data, summed));
        ok = memcmp(file.data + summed, sum_line, RUN_SUM_BYTES) == 0;
    }
    if (!ok) { error_set(err, "%s: is damaged: the crc32c in its last line does not match", path.text); }
    if (ok && (ok = json_parse(&doc, (const char*)file.data, file.size, path.text, err))) {
        ok = run_parse_state(doc.root, state, files, num_files, path.text, err);
        json_free(&doc);
    }
    unmap_file(&file);
    return ok;
}

// Reads the state without the list of files, for example to learn the configuration before memory is allocated.
static inline bool run_load_state(const char* path, RunState* state, Error* err) {
    SavedFile files[RUN_MAX_FILES];
    int num_files;
    return run_read_state(path, state, files, &num_files, err);
}

// Prints a line for each setting whose value in the resumed run (`now`) differs from the saved one. Returns the number
// of lines.
static inline int run_print_changes(FILE* f, const RunState* saved, const RunState* now) {
    char a[64], b[64];
    int num_changes = 0;
    for (int i = 0; i < RUN_NUM_FIELDS; i++) {
        if (!run_fields[i].setting) { continue; }
        run_format_field(a, &run_fields[i], saved);
        run_format_field(b, &run_fields[i], now);
        if (strcmp(a, b) == 0) { continue; }
        fprintf(f, "changed since the checkpoint: %s %s, was %s\n", run_fields[i].key, b, a);
        num_changes++;
    }
    return num_changes;
}

// ---- saving --------------------------------------------------------------------------

// The tokens that a model's files name. Texts begin with end-of-text if the vocabulary names no other token for it.
// tokenizer may be NULL.
static inline ModelTokens run_tokens(int eot_id, const Tokenizer* tokenizer) {
    ModelTokens tokens = {tokenizer && tokenizer->bos_id >= 0 ? tokenizer->bos_id : eot_id, eot_id,
                          tokenizer ? tokenizer->pad_id : -1};
    return tokens;
}

// Writes the vocabulary to dir and appends its files to `files`. tokenizer may be NULL.
static inline bool run_write_vocabulary(const char* dir, const Tokenizer* tokenizer, SavedFile* files, int* num_files,
                                        Error* err) {
    static const char* const vocabulary[] = {"vocab.json", "merges.txt", "tokenizer_config.json", "gpt2_tokenizer.bin"};
    Path path;
    if (!tokenizer) { return true; }
    if (!tokenizer_save(tokenizer, dir, err)) { return false; }
    for (int i = 0; i < (int)(sizeof(vocabulary) / sizeof(vocabulary[0])); i++) {
        if (!run_path(&path, dir, vocabulary[i], err)) { return false; }
        if (!file_exists(path.text)) { continue; }
        SavedFile* file = &files[(*num_files)++];
        snprintf(file->name, sizeof(file->name), "%s", vocabulary[i]);
        if (!run_sum_file(path.text, &file->bytes, &file->crc, err)) { return false; }
    }
    return true;
}

// True if run_read_state() accepts the state, once it is saved.
static inline bool run_state_valid(const RunState* state) {
    return state->step >= 0 && outlier_valid(&state->loss_outliers) && outlier_valid(&state->norm_outliers) &&
           run_fp8_valid(state);
}

// The state with what run_save() adds to it.
static inline RunState run_saved_state(const RunState* given, const Tokenizer* tokenizer) {
    RunState state = *given;
    state.has_tokenizer = tokenizer != NULL;
    if (tokenizer && tokenizer->eot_id >= 0) { state.eot_id = tokenizer->eot_id; }
    return state;
}

static const char* const run_moment_prefixes[] = {"m.", "v."};

// Writes all files of a checkpoint into dir, which is new and empty.
static inline bool run_write_files(const char* dir, const RunState* given, const float* params, const float* m,
                                   const float* v, const Tokenizer* tokenizer, Error* err) {
    const float* const moments[] = {m, v};
    RunState state = run_saved_state(given, tokenizer);
    SavedFile files[RUN_MAX_FILES];
    Path path;
    int num_files = 0;
    memset(files, 0, sizeof(files));
    return model_save_hf_files(dir, &state.config, params, false, run_tokens(state.eot_id, tokenizer), files,
                               &num_files, err) &&
           run_write_vocabulary(dir, tokenizer, files, &num_files, err) &&
           run_path(&path, dir, "optimizer.safetensors", err) &&
           params_save_safetensors(path.text, &state.config, moments, run_moment_prefixes, 2, false,
                                   &files[num_files++], err) &&
           run_write_state(dir, &state, files, num_files, err) && sync_directory(dir, err);
}

// Creates the empty hidden directory of a save, and out_dir if necessary. Writes its path to path.
static inline bool run_create_hidden(const char* out_dir, int64_t step, Path* path, Error* err) {
    char name[RUN_NAME];
    run_hidden_name(name, ".tmp-", step);
    if (!make_directories(out_dir, err) || !run_path(path, out_dir, name, err)) { return false; }
    // a dead run with the same PID may have left this directory
    if (!run_remove_directory(path->text, err)) { return false; }
    return mkdir(path->text, 0777) == 0 || error_set(err, "%s: cannot create: %s", path->text, strerror(errno));
}

// Saves the checkpoint out_dir/step_%08d of state->step; creates out_dir if necessary. params, m, v are fp32 arrays of
// num_parameters(config); tokenizer may be NULL. An existing checkpoint of the same step is replaced; at every moment
// the old or the new one exists. Weights that are not finite are not saved. If any operation fails, returns false with the reason in err, removes the hidden
// directory and leaves all older checkpoints untouched.
static inline bool run_save(const char* out_dir, const RunState* state, const float* params, const float* m,
                            const float* v, const Tokenizer* tokenizer, Error* err) {
    Path path;
    Error removal;
    require(run_state_valid(state));
    if (!params_check(&state->config, params, FLT_MAX, err)) { return false; }
    if (!run_create_hidden(out_dir, state->step, &path, err)) { return false; }
    bool ok = run_write_files(path.text, state, params, m, v, tokenizer, err) &&
              run_publish(out_dir, path.text, state->step, err);
    // if path still exists, it holds a failed save or, after an exchange, the checkpoint that was replaced
    if (!run_remove_directory(path.text, &removal)) { fprintf(stderr, "warning: %s\n", removal.text); }
    return ok;
}

// ---- finding and loading -----------------------------------------------------------------

static inline uint64_t run_total_bytes(const SavedFile* files, int num_files) {
    uint64_t bytes = 0;
    for (int i = 0; i < num_files; i++) { bytes += files[i].bytes; }
    return bytes;
}

// Whether a checkpoint could be begun in out_dir, which is created if necessary.
static inline bool run_can_begin(const char* out_dir, Error* err) {
    Path path;
    char name[RUN_NAME];
    snprintf(name, sizeof(name), ".probe-%ld", (long)getpid());
    if (!make_directories(out_dir, err) || !run_path(&path, out_dir, name, err)) { return false; }
    if (mkdir(path.text, 0777) != 0 && errno != EEXIST) {
        return error_set(err, "%s: cannot create: %s", path.text, strerror(errno));
    }
    rmdir(path.text);
    return true;
}

// True if the checkpoint at path is intact; reads every byte of it. If state.json can be read, *state holds its
// contents even when another file is damaged.
static inline bool run_verify(const char* path, RunState* state, Error* err) {
    SavedFile files[RUN_MAX_FILES];
    Error errors[RUN_MAX_FILES];
    bool good[RUN_MAX_FILES];
    int num_files = 0;
    if (!run_read_state(path, state, files, &num_files, err)) { return false; }
    // checks the two large files in parallel; for a few megabytes, waking up threads would cost more than it saves
#pragma omp parallel for schedule(dynamic, 1) if (run_total_bytes(files, num_files) > 1 << 24)
    for (int i = 0; i < num_files; i++) { good[i] = run_check_file(path, &files[i], &errors[i]); }
    for (int i = 0; i < num_files; i++) {
        if (!good[i]) { return error_set(err, "%s", errors[i].text); }
    }
    return true;
}

// Calls run_verify() on out_dir's checkpoint of the given step and writes its path to path. Also
// checks that state.json contains the step of the directory's name.
static inline bool run_verify_step(const char* out_dir, int64_t step, Path* path, Error* err) {
    char name[RUN_NAME];
    RunState state;
    run_step_name(name, step);
    if (!run_path(path, out_dir, name, err) || !run_verify(path->text, &state, err)) { return false; }
    return state.step == step || error_set(err, "%s: its state.json is for step %lld: was the directory renamed?",
                                           path->text, (long long)state.step);
}

// Takes a shared lock on the checkpoint at path, which keeps other processes from removing it (run_remove_step) until this
// process ends. Returns false if the checkpoint has just been removed or replaced.
static inline bool run_hold(const char* path) {
    struct stat held, named;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return false; }
    bool locked =
        flock(fd, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK; // no locks on this file system: go on without
    if (locked && fstat(fd, &held) == 0 && stat(path, &named) == 0 && held.st_ino == named.st_ino) { return true; }
    close(fd);
    return false;
}

// Writes the path of the newest intact checkpoint of out_dir to path. For each newer, damaged one it
// prints a line with the reason to stderr. Returns false if there is no intact checkpoint. hold: another process may be
// saving to out_dir, so the checkpoint that is found is kept from being removed.
static inline bool run_find_newest(const char* out_dir, Path* path, bool hold, Error* err) {
    Path candidate;
    char name[RUN_NAME];
    int64_t* steps;
    int num_steps, num_gone = 0;
    bool found = false;
    Error reason;
    int lock = hold ? open(out_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (lock >= 0) { flock(lock, LOCK_SH); } // run_prune() waits for its next time
    for (int attempt = 0; attempt < 200 && !found; attempt++) {
        if (!run_list_steps(out_dir, &steps, &num_steps, err)) {
            if (lock >= 0) { close(lock); }
            return false;
        }
        num_gone = 0;
        for (int i = 0; i < num_steps && !found; i++) {
            run_step_name(name, steps[i]);
            bool held = !hold || (run_path(&candidate, out_dir, name, NULL) && run_hold(candidate.text));
            found = held && run_verify_step(out_dir, steps[i], &candidate, &reason);
            bool gone = hold && !found && (!held || !file_exists(candidate.text));
            num_gone += gone;
            if (!found && !gone) {
                fprintf(stderr, "passed over checkpoint step_%08lld: %s\n", (long long)steps[i], reason.text);
            }
        }
        free(steps);
        if (num_gone == 0) { break; } // otherwise a run replaced them meanwhile: look again
    }
    if (lock >= 0) { close(lock); } // the checkpoint that was found has a lock of its own
    if (!found && num_steps == 0) {
        return error_set(err, "%s: contains no checkpoint (no directory step_NNNNNNNN)", out_dir);
    }
    if (!found) { return error_set(err, "%s: none of its %d checkpoints is intact", out_dir, num_steps); }
    *path = candidate;
    return true;
}

// Loads the checkpoint at path. The caller must have checked it with run_find_newest() or run_verify(); the files'
// checksums are not computed again. params, m, v have num_parameters(state->config) elements; a checkpoint of another
// config is refused. On failure *state is unchanged. To learn the config beforehand, call run_load_state().
static inline bool run_load(const char* path, RunState* state, float* params, float* m, float* v, Error* err) {
    static const char* const no_prefix[] = {""};
    float* const moments[] = {m, v};
    Path model, optimizer;
    RunState saved;
    if (!run_load_state(path, &saved, err)) { return false; }
    const GPT2Config *a = &saved.config, *b = &state->config;
    if (memcmp(a, b, sizeof(*a)) != 0) {
        return error_set(err,
                         "%s: holds a model with L %d C %d F %d NH %d V %d (padded %d) T %d epsilon %g, this run's has "
                         "L %d C %d F %d NH %d V %d (padded %d) T %d epsilon %g",
                         path, a->num_layers, a->channels, a->mlp_channels, a->num_heads, a->vocab_size,
                         a->padded_vocab_size, a->max_seq_len, (double)a->norm_epsilon, b->num_layers, b->channels,
                         b->mlp_channels, b->num_heads, b->vocab_size, b->padded_vocab_size, b->max_seq_len,
                         (double)b->norm_epsilon);
    }
    if (!run_path(&model, path, "model.safetensors", err) ||
        !run_path(&optimizer, path, "optimizer.safetensors", err) ||
        !params_load_safetensors(model.text, a, &params, no_prefix, 1, err) ||
        !params_load_safetensors(optimizer.text, a, moments, run_moment_prefixes, 2, err)) {
        return false;
    }
    *state = saved;
    return true;
}

// ---- the best checkpoint -------------------------------------------------------------------

// Makes out_dir/best a symbolic link to the checkpoint of this step, atomically.
static inline bool run_mark_best(const char* out_dir, int64_t step, Error* err) {
    Path path, temp;
    char name[RUN_NAME];
    run_step_name(name, step);
    if (!run_path(&path, out_dir, "best", err) || !run_path(&temp, out_dir, ".best.tmp", err)) { return false; }
    unlink(temp.text);
    if (symlink(name, temp.text) != 0) { return error_set(err, "%s: cannot create: %s", temp.text, strerror(errno)); }
    if (rename(temp.text, path.text) != 0) {
        error_set(err, "%s: cannot replace: %s", path.text, strerror(errno));
        unlink(temp.text);
        return false;
    }
    return sync_directory(out_dir, err);
}

// The step of the checkpoint that out_dir/best points to; -1 if there is no such link.
static inline int64_t run_best_step(const char* out_dir) {
    Path path;
    char name[RUN_NAME];
    if (!run_path(&path, out_dir, "best", NULL)) { return -1; }
    ssize_t n = readlink(path.text, name, sizeof(name) - 1);
    name[n > 0 ? n : 0] = '\0';
    return run_step_of_name(name);
}

// ---- pruning -----------------------------------------------------------------------------

// Removes one checkpoint, unless another process is reading it (run_hold): it is then left for the next time. It is first
// renamed to a hidden name, so that no half-removed checkpoint is ever read.
static inline bool run_remove_step(const char* out_dir, int64_t step, Error* err) {
    Path path, hidden;
    char name[RUN_NAME];
    run_step_name(name, step);
    if (!run_path(&path, out_dir, name, err)) { return false; }
    run_hidden_name(name, ".tmp-", step);
    if (!run_path(&hidden, out_dir, name, err)) { return false; }
    int fd = open(path.text, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool in_use = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    bool renamed = in_use || rename(path.text, hidden.text) == 0;
    int reason = errno;
    if (fd >= 0) { close(fd); }
    if (in_use) { return true; }
    if (!renamed) { return error_set(err, "%s: cannot remove: %s", path.text, strerror(reason)); }
    return sync_directory(out_dir, err) && run_remove_directory(hidden.text, err);
}

// Keeps the newest `keep` checkpoints (0 keeps all), every checkpoint whose step is a multiple of major_every (0: no
// such exception), the best one (run_mark_best), and the newest intact one; to find it, checkpoints are read in full,
// newest first. Removes all others. While another process looks for a checkpoint (run_find_newest), removes nothing.
static inline bool run_prune(const char* out_dir, int keep, int major_every, Error* err) {
    Path path;
    int64_t* steps;
    int num_steps;
    require(keep >= 0 && major_every >= 0);
    if (keep == 0) { return true; }
    int lock = open(out_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // nobody looks for a checkpoint meanwhile
    bool busy = lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    bool ok = busy || run_list_steps(out_dir, &steps, &num_steps, err);
    if (busy || !ok) {
        if (lock >= 0) { close(lock); }
        return ok; // the next save removes what this one leaves
    }
    int newest_good = 0;
    if (num_steps > keep) {
        while (newest_good < num_steps && !run_verify_step(out_dir, steps[newest_good], &path, NULL)) { newest_good++; }
    }
    int64_t best = run_best_step(out_dir);
    for (int i = keep; ok && i < num_steps; i++) {
        bool spared = steps[i] == best || (major_every > 0 && steps[i] % major_every == 0);
        if (!spared && i != newest_good) { ok = run_remove_step(out_dir, steps[i], err); }
    }
    free(steps);
    if (lock >= 0) { close(lock); }
    return ok;
}

#endif
