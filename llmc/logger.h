/*
The logs of a training run, in its output directory: main.log (in llm.c's format, which existing notebooks parse),
log.jsonl (the same data and more, one JSON object per line) and a TensorBoard event file. Also formats llm.c's step
line for the terminal.

Every line is a single write(2), so a killed process loses none of them. If a write fails, a warning is printed once to
stderr, the partial line is truncated, and the run continues. Such lines stay in memory and are tried again before each
later one; a killed process loses them. Formats: TFRecord framing with the Event and Summary messages of TensorBoard's
event.proto and summary.proto; RFC 8259 for JSON.
*/
#ifndef LLMC_LOGGER_H
#define LLMC_LOGGER_H

#include "utils.h"
#include <float.h>
#include <dirent.h>
#include <math.h>

enum {
    EVENT_MAX_VALUES = 8, // scalars in one event
    EVENT_MAX_TAG = 64,   // bytes of a tag
    EVENT_MAX_BYTES = 64 + EVENT_MAX_VALUES * (EVENT_MAX_TAG + 16),
    LOG_MAX_PENDING = 16 << 20 // bytes of a file that wait in memory until they can be written: about 80,000 steps
};

// ---- text for the terminal ----------------------------------------------------------

enum { NOTABLE_Z_SCORE = 2 }; // one value in twenty is farther from the mean

// Formats "(+2.50z)". A z-score within NOTABLE_Z_SCORE, and NaN, whose window is not full yet, give "".
static inline void format_z_score(char* buf, size_t size, double z) {
    buf[0] = '\0';
    if (fabs(z) > NOTABLE_Z_SCORE) { snprintf(buf, size, "(%+.2fz)", z); }
}

// Formats llm.c's step line without a newline; small z-scores are omitted. step: the number to print (llm.c counts from
// 1). ms: time of the step. rate: for example "45.7% bf16 MFU". Returns the result of snprintf.
static inline int format_step_line(char* buf, size_t size, int64_t step, int64_t num_steps, double loss, double loss_z,
                                   double norm, double norm_z, double lr, double ms, const char* rate,
                                   double tokens_per_second) {
    char loss_score[32], norm_score[32];
    format_z_score(loss_score, sizeof(loss_score), loss_z);
    format_z_score(norm_score, sizeof(norm_score), norm_z);
    return snprintf(buf, size, "step %4lld/%lld | loss %7.6f %s| norm %6.4f %s| lr %.2e | %.2f ms | %s | %.0f tok/s",
                    (long long)step, (long long)num_steps, loss, loss_score, norm, norm_score, lr, ms, rate,
                    tokens_per_second);
}

// ---- JSON ---------------------------------------------------------------------------

// Formats a JSON number with the fewest digits (at least 6) that read back as v; if v is exactly a float, as that
// float. NaN and infinity become null.
static inline void log_json_number(char* buf, size_t size, double v) {
    bool is_float = fabs(v) <= (double)FLT_MAX && (double)(float)v == v;
    snprintf(buf, size, "null");
    for (int digits = 6; isfinite(v) && digits <= 17; digits++) {
        snprintf(buf, size, "%.*g", digits, v);
        if (is_float ? strtof(buf, NULL) == (float)v : strtod(buf, NULL) == v) { return; }
    }
}

// Escapes text (n bytes) for a JSON string and writes it without quotes to out, which has room for 6 n bytes. Invalid
// UTF-8 becomes U+FFFD. Returns the number of bytes written.
static inline size_t log_json_escape(char* out, const char* text, size_t n) {
    static const char* hex = "0123456789abcdef";
    const uint8_t* s = (const uint8_t*)text;
    char* p = out;
    for (size_t i = 0; i < n;) {
        size_t bad, length = utf8_length(s + i, n - i, &bad);
        uint8_t c = s[i];
        if (length == 0) {
            memcpy(p, "\xEF\xBF\xBD", 3);
            p += 3;
            i += bad;
            continue;
        }
        if (c == '"' || c == '\\' || c == '\n' || c == '\t' || c == '\r') {
            *p++ = '\\';
            *p++ = (char)(c == '\n' ? 'n' : c == '\t' ? 't' : c == '\r' ? 'r' : c);
        } else if (c < 0x20 || c == 0x7F) {
            memcpy(p, "\\u00", 4);
            p[4] = hex[c >> 4];
            p[5] = hex[c & 15];
            p += 6;
        } else {
            memcpy(p, s + i, length);
            p += length;
        }
        i += length;
    }
    return (size_t)(p - out);
}

// ---- TensorBoard events ---------------------------------------------------------------

static inline uint32_t event_masked_crc32c(const void* data, size_t bytes) {
    uint32_t c = crc32c(0, data, bytes);
    return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

static inline void event_put_le(uint8_t* out, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; i++) { out[i] = (uint8_t)(v >> (8 * i)); }
}

static inline size_t event_put_varint(uint8_t* out, uint64_t v) {
    size_t n = 0;
    for (; v >= 0x80; v >>= 7) { out[n++] = (uint8_t)(v | 0x80); }
    out[n++] = (uint8_t)v;
    return n;
}

// Writes a protobuf field of type string or message: key byte, length, bytes. Returns its size.
static inline size_t event_put_field(uint8_t* out, uint8_t key, const void* data, size_t bytes) {
    out[0] = key;
    size_t n = 1 + event_put_varint(out + 1, bytes);
    memcpy(out + n, data, bytes);
    return n + bytes;
}

// Writes an Event as a TFRecord to out (EVENT_MAX_BYTES + 64): wall_time (seconds since 1970), step, then `body`, which
// holds the remaining fields. step < 0: the field is omitted. Returns the size of the record.
//
//     0        8            12        12 + n         16 + n
//     | length | crc(length) | data (n) | crc(data) |
static inline size_t event_record(uint8_t* out, double wall_time, int64_t step, const uint8_t* body, size_t bytes) {
    uint64_t bits;
    uint8_t* data = out + 12;
    size_t n = 0;
    memcpy(&bits, &wall_time, sizeof(bits));
    data[n++] = 0x09; // field 1, wall_time, double
    event_put_le(data + n, bits, 8);
    n += 8;
    if (step >= 0) {
        data[n++] = 0x10; // field 2, step, varint
        n += event_put_varint(data + n, (uint64_t)step);
    }
    memcpy(data + n, body, bytes);
    n += bytes;
    event_put_le(out, n, 8);
    event_put_le(out + 8, event_masked_crc32c(out, 8), 4);
    event_put_le(data + n, event_masked_crc32c(data, n), 4);
    return 12 + n + 4;
}

// Writes a record with num_values scalars of a step, tags[i] = values[i], to out (EVENT_MAX_BYTES + 64). Returns its
// size.
static inline size_t event_scalars(uint8_t* out, double wall_time, int64_t step, const char* const* tags,
                                   const double* values, int num_values) {
    uint8_t summary[EVENT_MAX_BYTES], body[EVENT_MAX_BYTES + 16];
    size_t n = 0;
    require(num_values <= EVENT_MAX_VALUES);
    for (int i = 0; i < num_values; i++) {
        uint8_t value[EVENT_MAX_TAG + 16];
        uint32_t bits;
        float v = (float)values[i];
        size_t tag_bytes = strlen(tags[i]);
        require(tag_bytes <= EVENT_MAX_TAG);
        size_t m = event_put_field(value, 0x0a, tags[i], tag_bytes); // Value.tag
        memcpy(&bits, &v, sizeof(bits));
        value[m++] = 0x15; // Value.simple_value, float
        event_put_le(value + m, bits, 4);
        n += event_put_field(summary + n, 0x0a, value, m + 4); // Summary.value
    }
    return event_record(out, wall_time, step, body, event_put_field(body, 0x2a, summary, n)); // Event.summary
}

// ---- the files ------------------------------------------------------------------------

typedef struct {
    int fd;        // -1: not open
    int64_t size;  // size in bytes, complete lines or records only
    char* pending; // lines or records that could not be written yet
    size_t pending_bytes;
    Path path;
} LogFile;

typedef struct Logger {
    bool active; // false: all calls are no-ops
    bool failed; // a write has failed, and a warning was printed; error holds the first failure
    bool lost;   // lines are missing
    LogFile text, json, events;
    Error error;
} Logger;

static inline double event_wall_time_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline bool log_path(LogFile* file, const char* dir, const char* name, Error* err) {
    file->fd = -1;
    int n = snprintf(file->path.text, sizeof(file->path.text), "%s/%s", dir, name);
    return n < PATH_LIMIT - 16 ? true : error_set(err, "%.200s...: path too long", dir);
}

// Opens file->path for appending.
static inline bool log_open(LogFile* file, int flags, Error* err) {
    file->fd = open(file->path.text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | flags, 0666);
    if (file->fd < 0) { return error_set(err, "%s: cannot open the log: %s", file->path.text, strerror(errno)); }
    struct stat st;
    file->size = fstat(file->fd, &st) == 0 ? (int64_t)st.st_size : 0;
    return true;
}

// Writes lines or records, all of them or none: if the write fails, what was written of them is removed again.
static inline bool log_write(LogFile* file, const char* data, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = write(file->fd, data + done, bytes - done);
        if (n < 0 && errno == EINTR) { continue; }
        if (n == 0) { errno = ENOSPC; }
        if (n <= 0) { break; }
        done += (size_t)n;
    }
    if (done == bytes) {
        file->size += (int64_t)bytes;
        return true;
    }
    int error = errno;
    if (done > 0 && ftruncate(file->fd, (off_t)file->size) != 0) {
        // the partial line cannot be removed, and lines after it could not be parsed: stop writing this file
        close(file->fd);
        file->fd = -1;
    }
    errno = error;
    return false;
}

// Appends a line or a record. What cannot be written now, on a full disk for example, is tried again by the next call.
static inline void log_append(Logger* l, LogFile* file, const void* data, size_t bytes) {
    if (file->fd < 0) { return; }
    if (file->pending_bytes > 0 && log_write(file, file->pending, file->pending_bytes)) { file->pending_bytes = 0; }
    if (file->pending_bytes == 0 && (bytes == 0 || log_write(file, (const char*)data, bytes))) { return; }
    if (!l->failed) {
        error_set(&l->error, "%s: cannot write the log: %s", file->path.text, strerror(errno));
        print_line(stderr, "warning: %s; the run continues, and writes these lines later", l->error.text);
        l->failed = true;
    }
    if (file->fd < 0 || file->pending_bytes + bytes > LOG_MAX_PENDING) {
        l->lost = true;
    } else if (bytes > 0) {
        file->pending = (char*)realloc_check(file->pending, file->pending_bytes + bytes);
        memcpy(file->pending + file->pending_bytes, data, bytes);
        file->pending_bytes += bytes;
    }
}

// Returns the step of a line that begins with prefix and a number, or -1 if the line does not.
static inline int64_t log_line_step(const char* line, size_t bytes, const char* prefix) {
    size_t skip = strlen(prefix), i = skip;
    int64_t step = 0;
    if (bytes < skip || memcmp(line, prefix, skip) != 0) { return -1; }
    for (; i < bytes && line[i] >= '0' && line[i] <= '9'; i++) {
        if (__builtin_mul_overflow(step, (int64_t)10, &step) ||
            __builtin_add_overflow(step, (int64_t)(line[i] - '0'), &step)) {
            return INT64_MAX;
        }
    }
    return i > skip ? step : -1;
}

// Drops an incomplete last line and all lines of steps after resume_step; keeps lines without a step. If there is
// anything to drop, writes a new file and renames it, so that a crash leaves either the old file or the new one.
static inline bool log_cut(const char* path, const char* prefix, int64_t resume_step, Error* err) {
    MappedFile old;
    Path temp;
    if (!file_exists(path)) { return true; }
    if (!map_file(&old, path, err)) { return false; }
    const char* text = (const char*)old.data;
    FileWriter w;
    bool cutting = false, ok = true; // cutting: a line has been dropped, so the writer is open
    path_set(&temp, "%s.tmp", path);
    for (size_t at = 0; at < old.size && ok;) {
        const char* newline = (const char*)memchr(text + at, '\n', old.size - at);
        size_t bytes = newline ? (size_t)(newline - text) + 1 - at : old.size - at;
        bool keep = newline && log_line_step(text + at, bytes, prefix) <= resume_step;
        if (!keep && !cutting) {
            ok = cutting = writer_open(&w, temp.text, err);
            if (ok) { writer_put(&w, text, at); }
        } else if (keep && cutting) {
            writer_put(&w, text + at, bytes);
        }
        at += bytes;
    }
    unmap_file(&old);
    if (!cutting) { return ok; }
    ok = writer_close(&w, err);
    if (ok && rename(temp.text, path) != 0) { ok = error_set(err, "%s: rename: %s", path, strerror(errno)); }
    if (!ok) { unlink(temp.text); }
    return ok;
}

// The time in the name of the next event file: now, or, if the clock was set back, a second after the newest file in dir,
// because TensorBoard reads the files in the order of their names.
static inline long long events_name_time(const char* dir, double now) {
    long long newest = (long long)now - 1;
    DIR* d = opendir(dir);
    for (struct dirent* e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        long long time = strncmp(e->d_name, "events.out.tfevents.", 20) == 0 ? strtoll(e->d_name + 20, NULL, 10) : 0;
        if (time > newest && time < 10000000000LL - 2) { newest = time; } // the name has ten digits
    }
    if (d) { closedir(d); }
    return newest + 1;
}

// Creates a new event file. Its name contains the time, host, process and a counter, so that it never exists already.
static inline bool events_open(Logger* l, const char* dir, int64_t resume_step, Error* err) {
    char host[128] = "localhost", name[320];
    uint8_t record[EVENT_MAX_BYTES + 64], body[32];
    double now = event_wall_time_s();
    if (gethostname(host, sizeof(host)) != 0) { strcpy(host, "localhost"); }
    host[sizeof(host) - 1] = '\0';
    for (char* p = host; *p; p++) {
        if (*p == '/') { *p = '_'; }
    }
    long long name_time = events_name_time(dir, now);
    for (int n = 0;; n++) {
        snprintf(name, sizeof(name), "events.out.tfevents.%010lld.%s.%d.%d", name_time, host, (int)getpid(), n);
        if (!log_path(&l->events, dir, name, err)) { return false; }
        if (log_open(&l->events, O_EXCL, err)) { break; }
        if (!file_exists(l->events.path.text)) { return false; }
    }
    size_t bytes = event_put_field(body, 0x1a, "brain.Event:2", 13); // Event.file_version
    log_append(l, &l->events, record, event_record(record, now, -1, body, bytes));
    if (resume_step >= 0) {
        // Event.session_log with status START: readers discard the data of older files from this step on
        static const uint8_t start[2] = {0x08, 0x01};
        bytes = event_put_field(body, 0x3a, start, sizeof(start));
        log_append(l, &l->events, record, event_record(record, now, resume_step + 1, body, bytes));
    }
    return true;
}

// Closes the files. Returns false if lines since logger_open() are missing in them. May be called on a zeroed Logger that
// was never opened.
static inline bool logger_close(Logger* l, Error* err) {
    LogFile* files[3] = {&l->text, &l->json, &l->events};
    if (!l->active) { return true; }
    l->active = false;
    for (int i = 0; i < 3; i++) {
        log_append(l, files[i], NULL, 0); // what is pending
        if (files[i]->pending_bytes > 0) { l->lost = true; }
        if (files[i]->fd >= 0 && close(files[i]->fd) != 0 && !l->lost) {
            l->lost = true;
            error_set(&l->error, "%s: close: %s", files[i]->path.text, strerror(errno));
        }
        files[i]->fd = -1;
        free(files[i]->pending);
    }
    return l->lost ? error_set(err, "%s; lines are missing", l->error.text) : true;
}

// Renames a log that an earlier run or another program left, path, to path.1, or path.2 if that exists, and so on.
// Succeeds if there is no such file, and leaves an empty file and what is not a file as they are.
static inline bool log_move_aside(const char* path, Error* err) {
    struct stat st;
    Path aside;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0) { return true; }
    for (int n = 1; n < 1000000; n++) {
        path_set(&aside, "%s.%d", path, n);
        if (lstat(aside.text, &st) == 0) { continue; }
        if (rename(path, aside.text) != 0) {
            return error_set(err, "%s: cannot rename to %s: %s", path, aside.text, strerror(errno));
        }
        print_line(stderr, "%s was there already: renamed to %s", path, aside.text);
        return true;
    }
    return error_set(err, "%s: cannot be moved aside, all names up to %s are taken", path, aside.text);
}

// Opens the logs in dir, which is created if necessary; if dir is NULL or "", nothing is logged. resume_step -1 is a new
// run: a main.log or log.jsonl that is already there is moved aside. Otherwise the run resumes after resume_step: lines
// of later steps, which a run wrote after its last checkpoint, are dropped. If a file cannot be opened, returns false
// and leaves nothing open.
static inline bool logger_open(Logger* l, const char* dir, int64_t resume_step, Error* err) {
    memset(l, 0, sizeof(*l));
    l->text.fd = l->json.fd = l->events.fd = -1;
    if (!dir || !dir[0]) { return true; }
    bool resume = resume_step >= 0;
    bool ok = make_directories(dir, err) && log_path(&l->text, dir, "main.log", err) &&
              log_path(&l->json, dir, "log.jsonl", err);
    if (ok && resume) {
        ok = log_cut(l->text.path.text, "s:", resume_step, err) &&
             log_cut(l->json.path.text, "{\"step\":", resume_step, err) && sync_directory(dir, err);
    } else if (ok) {
        ok = log_move_aside(l->text.path.text, err) && log_move_aside(l->json.path.text, err);
    }
    l->active = true;
    ok = ok && log_open(&l->text, 0, err) && log_open(&l->json, 0, err) && events_open(l, dir, resume_step, err);
    if (!ok) { logger_close(l, NULL); }
    return ok;
}

// ---- what is logged ---------------------------------------------------------------------

PRINTF_LIKE(3, 4) static inline void log_printf(Logger* l, LogFile* file, const char* fmt, ...) {
    char line[1024];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    require(n >= 0 && n < (int)sizeof(line));
    log_append(l, file, line, (size_t)n);
}

static inline void log_scalars(Logger* l, int64_t step, const char* const* tags, const double* values, int num_values) {
    uint8_t record[EVENT_MAX_BYTES + 64];
    log_append(l, &l->events, record, event_scalars(record, event_wall_time_s(), step, tags, values, num_values));
}

// Logs a training step: its loss, learning rate, gradient norm, time and speed, and what --fp8 has saturated; -1: not
// measured, and not logged.
static inline void logger_train(Logger* l, int64_t step, double loss, double lr, double grad_norm, double time_ms,
                                double tokens_per_second, double fp8_saturated) {
    static const char* const tags[5] = {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second",
                                        "train/fp8_saturated"};
    double values[5] = {loss, lr, grad_norm, tokens_per_second, fp8_saturated};
    char number[5][32], saturated[64] = "";
    if (!l->active) { return; }
    for (int i = 0; i < 4; i++) { log_json_number(number[i], sizeof(number[i]), values[i]); }
    log_json_number(number[4], sizeof(number[4]), time_ms);
    bool measured = fp8_saturated >= 0;
    if (measured) { snprintf(saturated, sizeof(saturated), ",\"fp8_saturated\":%.0f", fp8_saturated); }
    log_printf(l, &l->text, "s:%lld trl:%.4f lr:%.6f norm:%.2f\n", (long long)step, loss, lr, grad_norm);
    log_printf(l, &l->json,
               "{\"step\":%lld,\"type\":\"train\",\"loss\":%s,\"lr\":%s,\"grad_norm\":%s,\"time_ms\":%s,"
               "\"tokens_per_second\":%s%s}\n",
               (long long)step, number[0], number[1], number[2], number[4], number[3], saturated);
    log_scalars(l, step, tags, values, measured ? 5 : 4);
}

// Logs a validation loss.
static inline void logger_val(Logger* l, int64_t step, double loss) {
    static const char* const tag = "val/loss";
    char number[32];
    if (!l->active) { return; }
    log_json_number(number, sizeof(number), loss);
    log_printf(l, &l->text, "s:%lld tel:%.4f\n", (long long)step, loss);
    log_printf(l, &l->json, "{\"step\":%lld,\"type\":\"val\",\"loss\":%s}\n", (long long)step, number);
    log_scalars(l, step, &tag, &loss, 1);
}

// Logs a HellaSwag accuracy, 0 to 1.
static inline void logger_eval(Logger* l, int64_t step, double accuracy) {
    static const char* const tag = "eval/hellaswag";
    char number[32];
    if (!l->active) { return; }
    log_json_number(number, sizeof(number), accuracy);
    log_printf(l, &l->text, "s:%lld eval:%.4f\n", (long long)step, accuracy);
    log_printf(l, &l->json, "{\"step\":%lld,\"type\":\"eval\",\"accuracy\":%s}\n", (long long)step, number);
    log_scalars(l, step, &tag, &accuracy, 1);
}

// Logs a checkpoint that could not be saved, to log.jsonl only.
static inline void logger_save_failed(Logger* l, int64_t step, const char* reason) {
    char escaped[6 * sizeof(((Error*)0)->text)];
    if (!l->active) { return; }
    size_t n = log_json_escape(escaped, reason, strlen(reason));
    log_printf(l, &l->json, "{\"step\":%lld,\"type\":\"save_failed\",\"error\":\"%.*s\"}\n", (long long)step,
               n < 512 ? (int)n : 512, escaped);
}

// Logs a generated sample of n arbitrary bytes, to log.jsonl only.
static inline void logger_text(Logger* l, int64_t step, const char* text, size_t n) {
    if (!l->active) { return; }
    require(n < SIZE_MAX / 8);
    char* line = (char*)malloc_check(6 * n + 96);
    size_t used = (size_t)snprintf(line, 64, "{\"step\":%lld,\"type\":\"text\",\"text\":\"", (long long)step);
    used += log_json_escape(line + used, text, n);
    memcpy(line + used, "\"}\n", 3);
    log_append(l, &l->json, line, used + 3);
    free(line);
}

#endif
