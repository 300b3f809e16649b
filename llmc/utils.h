/*
Error handling, memory, files and time for all programs. C11, also compiles as C++17.

There are two kinds of failure:
- Errors in the user's input (files, formats, flags): the function returns false and fills an Error with one line that
  names the file, the reason and, if there is one, the remedy. The caller prints it or tries something else.
- Unrecoverable errors (out of memory, a violated precondition): die() or require() prints one line and exits with 1.
*/
#ifndef LLMC_UTILS_H
#define LLMC_UTILS_H

#define LLMC_VERSION "2.0" // what --version prints

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
// -ffast-math removes the checks for NaN and infinity, and rewrites the rounding on which the exponential function and
// the compensated sums are built: the programs would compute other numbers without a word.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "this code needs IEEE arithmetic: compile without -Ofast, -ffast-math and -ffinite-math-only"
#endif

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "crc32c.h"

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define PRINTF_LIKE(fmt, first)
#endif

// ---- text that came from outside ------------------------------------------------
// File names, tokens and strings in files may contain characters that command a terminal. Everything that is printed goes
// through one of the functions below.

// Returns the length of the UTF-8 character at s, 1 to 4. If it is not well-formed, returns 0 and sets *bad to the
// number of bytes to be replaced by one U+FFFD. Unicode 15, section 3.9, table 3-7: no overlong forms, no surrogates,
// nothing above U+10FFFF.
static inline size_t utf8_length(const uint8_t* s, size_t n, size_t* bad) {
    uint8_t c = s[0], low = 0x80, high = 0xBF;
    *bad = 1;
    if (c < 0x80) { return 1; }
    if (c < 0xC2 || c > 0xF4) { return 0; }
    size_t length = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (c == 0xE0) { low = 0xA0; }
    if (c == 0xED) { high = 0x9F; }
    if (c == 0xF0) { low = 0x90; }
    if (c == 0xF4) { high = 0x8F; }
    for (size_t i = 1; i < length; i++) {
        if (i >= n || s[i] < low || s[i] > high) { return 0; }
        *bad = i + 1;
        low = 0x80;
        high = 0xBF;
    }
    return length;
}

// True if the UTF-8 character at s (length bytes) may command a terminal or reorder its line: control characters (C0 but for
// newline and tab, DEL, C1) and bidirectional controls (U+061C, U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069).
static inline bool utf8_is_control(const uint8_t* s, size_t length) {
    if (length == 1) { return (s[0] < 0x20 && s[0] != '\n' && s[0] != '\t') || s[0] == 0x7F; }
    if (length == 2) { return (s[0] == 0xC2 && s[1] < 0xA0) || (s[0] == 0xD8 && s[1] == 0x9C); }
    if (length != 3 || s[0] != 0xE2) { return false; }
    return (s[1] == 0x80 && (s[2] == 0x8E || s[2] == 0x8F || (s[2] >= 0xAA && s[2] <= 0xAE))) ||
           (s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9);
}

// Replaces control characters and invalid UTF-8 in text (n bytes) by '?', in place. keep_lines: newline and tab stay.
// Returns the new number of bytes, at most n.
static inline size_t mask_controls(char* text, size_t n, bool keep_lines) {
    size_t used = 0, bad;
    for (size_t i = 0; i < n;) {
        const uint8_t* s = (const uint8_t*)text + i;
        size_t length = utf8_length(s, n - i, &bad);
        bool masked = length == 0 || utf8_is_control(s, length) || (!keep_lines && length == 1 && s[0] < 0x20);
        size_t skip = length == 0 ? bad : length;
        if (masked) {
            text[used++] = '?';
        } else {
            memmove(text + used, text + i, length);
            used += length;
        }
        i += skip;
    }
    return used;
}

// Like vsnprintf, but masks control characters: the result is one line.
PRINTF_LIKE(3, 0) static inline void format_line(char* out, size_t size, const char* fmt, va_list args) {
    int n = vsnprintf(out, size, fmt, args);
    size_t length = n < 0 ? 0 : (size_t)n < size ? (size_t)n : size - 1;
    out[mask_controls(out, length, false)] = '\0';
}

#ifdef __cplusplus
#define ONE_PER_PROGRAM inline // also where a program is compiled in parts
#else
#define ONE_PER_PROGRAM static
#endif
ONE_PER_PROGRAM void (*on_print)(void); // print_line() and die() call it before they print, if it is set

// Prints one line and a newline; control characters are masked. For messages that contain names from outside.
PRINTF_LIKE(2, 3) static inline void print_line(FILE* f, const char* fmt, ...) {
    char line[4 * 4096];
    va_list args;
    va_start(args, fmt);
    format_line(line, sizeof(line), fmt, args);
    va_end(args);
    if (on_print) { on_print(); }
    fprintf(f, "%s\n", line);
}

// ---- errors -------------------------------------------------------------------

typedef struct {
    char text[1024]; // one line without a newline or other control characters
} Error;

PRINTF_LIKE(2, 3) static inline void error_fill(Error* err, const char* fmt, ...) {
    if (!err) { return; }
    va_list args;
    va_start(args, fmt);
    format_line(err->text, sizeof(err->text), fmt, args);
    va_end(args);
}

__attribute__((always_inline)) static inline bool error_false(int ignored) { return (void)ignored, false; }

// Fills err (may be NULL) and evaluates to false, for: return error_set(err, "%s: ...", path);
// It is a macro so that the compiler sees the constant false; otherwise it would warn that variables which are set only
// on success may be uninitialized.
#define error_set(...) error_false((error_fill(__VA_ARGS__), 0))

ONE_PER_PROGRAM char message_prefix[32]; // begins the message of die(), after "error: "
// die() calls it, if it is set; false: the reason need not be printed
ONE_PER_PROGRAM bool (*on_die)(const char* reason);
// Prints one line to stderr and exits 1.
PRINTF_LIKE(1, 2) __attribute__((noreturn)) static inline void die(const char* fmt, ...) {
    char line[2048];
    va_list args;
    va_start(args, fmt);
    format_line(line, sizeof(line), fmt, args);
    va_end(args);
    fflush(stdout);
    bool print = !on_die || on_die(line);
    if (on_print) { on_print(); }
    // a single call: several threads and programs may share stderr
    if (print) { fprintf(stderr, "error: %s%s\n", message_prefix, line); }
    exit(EXIT_FAILURE);
}

// Checks a precondition of a function. Unlike assert, it is never compiled out.
#define require(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { die("%s:%d: %s needs %s", __FILE__, __LINE__, __func__, #cond); }                               \
    } while (0)

// ---- standard streams -----------------------------------------------------------

// Opens /dev/null as each of the descriptors 0, 1 and 2 that is closed, so that no file gets their number and receives what
// is printed. Every main() calls this first.
static inline void open_standard_streams(void) {
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) == -1 && errno == EBADF) {
            // open() takes the lowest free number, and all smaller ones are in use
            if (open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) != fd) { exit(EXIT_FAILURE); }
        }
    }
}

// ---- memory -------------------------------------------------------------------

static inline void* malloc_check(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    if (!p) { die("out of memory: cannot allocate %zu bytes", bytes); }
    return p;
}

static inline void* calloc_check(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size ? size : 1);
    if (!p) { die("out of memory: cannot allocate %zu x %zu bytes", count, size); }
    return p;
}

static inline void* realloc_check(void* old, size_t bytes) {
    void* p = realloc(old, bytes ? bytes : 1);
    if (!p) { die("out of memory: cannot allocate %zu bytes", bytes); }
    return p;
}

static inline char* strdup_check(const char* s) {
    size_t n = strlen(s) + 1;
    return (char*)memcpy(malloc_check(n), s, n);
}
// The same for a text that settings may point into until the program ends. All of them stay reachable, so none is a leak.
static inline char* keep_text(const char* s) {
    static char* newest = NULL;
    char* copy = (char*)malloc_check(sizeof(newest) + strlen(s) + 1);
    memcpy(copy, &newest, sizeof(newest));
    newest = copy;
    return strcpy(copy + sizeof(newest), s);
}

// ---- numbers ------------------------------------------------------------------

// Formats a float with the fewest digits (at least 6) that read back as the same float.
static inline void format_float(char* buf, size_t size, float v) {
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(buf, size, "%.*g", digits, (double)v);
        if (strtof(buf, NULL) == v) { return; }
    }
}

// The shortest decimal number that rounds to the float x, as a user would have typed it: 0.02 instead of 0.0199999996.
static inline double as_typed(float x) {
    char text[64];
    format_float(text, sizeof(text), x);
    return strtod(text, NULL);
}

// Formats bytes as "1.25 GB", or where that has few digits as "12.5 MB". Returns buf.
static inline const char* format_bytes(char* buf, size_t size, double bytes) {
    bool small = bytes < 1e8;
    snprintf(buf, size, small ? "%.1f MB" : "%.2f GB", bytes * (small ? 1e-6 : 1e-9));
    return buf;
}

// ---- time ---------------------------------------------------------------------

// Monotonic time in milliseconds.
static inline double time_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// Formats "42s", "3m07s", "2h05m", "3d04h"; "?" if seconds is not a valid duration. Returns the result of snprintf.
static inline int format_duration(char* buf, size_t size, double seconds) {
    if (!(seconds >= 0 && seconds < 1e14)) { return snprintf(buf, size, "?"); }
    long long s = (long long)(seconds + 0.5);
    if (s < 60) { return snprintf(buf, size, "%llds", s); }
    if (s < 3600) { return snprintf(buf, size, "%lldm%02llds", s / 60, s % 60); }
    if (s < 86400) { return snprintf(buf, size, "%lldh%02lldm", s / 3600, s / 60 % 60); }
    return snprintf(buf, size, "%lldd%02lldh", s / 86400, s / 3600 % 24);
}

// ---- paths --------------------------------------------------------------------

// The path of a file. Linux refuses more than 4095 bytes. The array has room for a file's name or a suffix behind these,
// so that Linux refuses a path that is too long, instead of opening the file whose path is its beginning.
typedef struct {
    char text[4200];
} Path;
enum { PATH_LIMIT = 4096 }; // bytes of the longest path that Linux takes, with the 0 at its end

// Formats a path. Returns false if it has PATH_LIMIT bytes or more.
PRINTF_LIKE(2, 3) static inline bool path_set(Path* path, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(path->text, sizeof(path->text), fmt, args);
    va_end(args);
    return n >= 0 && n < PATH_LIMIT;
}

// Returns the directory of a file or glob pattern; "." if path contains no slash.
static inline Path directory_of(const char* path) {
    Path dir;
    path_set(&dir, "%s", path);
    char* slash = strrchr(dir.text, '/');
    if (!slash) {
        path_set(&dir, ".");
    } else {
        slash[slash == dir.text] = '\0';
    }
    return dir;
}

// ---- reading files ------------------------------------------------------------

// A read-only private mapping of a whole file. If another process truncates the file, reading it may raise SIGBUS.
typedef struct {
    const uint8_t* data; // (size); never NULL after a successful map_file(), even if the file is empty
    size_t size;         // bytes
} MappedFile;

static inline bool map_file(MappedFile* file, const char* path, Error* err) {
    file->data = (const uint8_t*)"";
    file->size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO is refused below instead of being waited for
    if (fd < 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        error_set(err, "%s: %s", path, strerror(errno));
        close(fd);
        return false;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return error_set(err, "%s: %s", path, S_ISDIR(st.st_mode) ? "is a directory, expected a file" : "not a file");
    }
    if (st.st_size > 0) {
        void* p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            error_set(err, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
            close(fd);
            return false;
        }
        file->data = (const uint8_t*)p;
        file->size = (size_t)st.st_size;
    }
    close(fd);
    return true;
}

static inline void unmap_file(MappedFile* file) {
    if (file->size > 0) { munmap((void*)file->data, file->size); }
    file->data = (const uint8_t*)"";
    file->size = 0;
}

// Tells this program from others, also from other builds of it: its size and crc32c. 0 where /proc is not there.
static inline uint64_t hash_of_program(void) {
    MappedFile file;
    if (!map_file(&file, "/proc/self/exe", NULL)) { return 0; }
    uint64_t hash = (uint64_t)file.size << 32 | crc32c(0, file.data, file.size);
    unmap_file(&file);
    return hash;
}

static inline bool file_exists(const char* path) { return access(path, F_OK) == 0; }

static inline bool is_directory(const char* path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// Like mkdir -p: creates path and its parents. Succeeds if the directory already exists.
static inline bool make_directories(const char* path, Error* err) {
    Path buf;
    size_t n = strlen(path);
    if (n == 0 || n >= PATH_LIMIT) { return error_set(err, "'%s': not a usable directory name", path); }
    memcpy(buf.text, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (buf.text[i] != '/' && buf.text[i] != '\0') { continue; }
        char saved = buf.text[i];
        buf.text[i] = '\0';
        if (mkdir(buf.text, 0777) != 0 && errno != EEXIST) {
            return error_set(err, "%s: %s", buf.text, strerror(errno));
        }
        buf.text[i] = saved;
    }
    if (!is_directory(path)) { return error_set(err, "%s: exists and is not a directory", path); }
    return true;
}

// ---- writing files ------------------------------------------------------------

// fsync(2) that also empties the drive's cache; on macOS, fsync() alone does not.
static inline int sync_to_medium(int fd) {
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0) { return 0; } // not every file system supports it
#endif
    return fsync(fd);
}

// Makes the file `bytes` long and reserves the blocks for them. A file system that cannot reserve only sets the size.
static inline bool reserve_file(int fd, uint64_t bytes) {
#ifdef FALLOC_FL_KEEP_SIZE // the system has fallocate()
    int result = fallocate(fd, 0, 0, (off_t)bytes);
    while (result != 0 && errno == EINTR) { result = fallocate(fd, 0, 0, (off_t)bytes); }
    // not posix_fallocate(): where the file system cannot reserve, it would write to every block
    if (result == 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)) { return result == 0; }
#endif
    return ftruncate(fd, (off_t)bytes) == 0;
}

// A buffered writer that computes the crc32c of all it writes and remembers the first error. After an error, further
// calls write nothing, and writer_close() reports the error. The file is synced before it is closed.
typedef struct {
    int fd;
    Path path;
    uint8_t* buffer; // (WRITER_BUFFER)
    size_t used;     // bytes in buffer
    uint64_t bytes;  // bytes put so far, including those in the buffer
    uint32_t crc;    // crc32c of these bytes
    bool failed;
    Error error; // the first error
} FileWriter;

enum { WRITER_BUFFER = 1 << 20 };

static inline void writer_fail(FileWriter* w, const char* what) {
    if (!w->failed) { error_set(&w->error, "%s: %s: %s", w->path.text, what, strerror(errno)); }
    w->failed = true;
}

// Creates or truncates path. After a successful open the caller must call writer_close().
static inline bool writer_open(FileWriter* w, const char* path, Error* err) {
    memset(w, 0, sizeof(*w));
    path_set(&w->path, "%s", path);
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0) { return error_set(err, "%s: cannot create: %s", path, strerror(errno)); }
    w->buffer = (uint8_t*)malloc_check(WRITER_BUFFER);
    return true;
}

static const volatile sig_atomic_t* writers_stop; // if set: a signal that has arrived makes all writers fail

static inline void writer_flush(FileWriter* w) {
    size_t done = 0;
    if (writers_stop && *writers_stop) {
        errno = EINTR;
        writer_fail(w, "write");
    }
    while (!w->failed && done < w->used) {
        ssize_t n = write(w->fd, w->buffer + done, w->used - done);
        if (n < 0 && errno == EINTR) { continue; }
        if (n == 0) { errno = ENOSPC; }
        if (n <= 0) {
            writer_fail(w, "write");
            break;
        }
        done += (size_t)n;
    }
    w->used = 0;
}

static inline void writer_put(FileWriter* w, const void* data, size_t bytes) {
    const uint8_t* p = (const uint8_t*)data;
    w->bytes += bytes;
    while (bytes > 0 && !w->failed) {
        size_t room = WRITER_BUFFER - w->used, n = bytes < room ? bytes : room;
        memcpy(w->buffer + w->used, p, n);
        w->crc = crc32c(w->crc, w->buffer + w->used, n);
        w->used += n;
        p += n;
        bytes -= n;
        if (w->used == WRITER_BUFFER) { writer_flush(w); }
    }
}

PRINTF_LIKE(2, 3) static inline void writer_printf(FileWriter* w, const char* fmt, ...) {
    char buf[8192];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(buf, sizeof(buf), fmt, args);
    va_end(args);
    require(n >= 0 && n < (int)sizeof(buf));
    writer_put(w, buf, (size_t)n);
}

// Flushes, syncs and closes the file. Returns false if anything since writer_open() failed.
static inline bool writer_close(FileWriter* w, Error* err) {
    writer_flush(w);
    if (!w->failed && sync_to_medium(w->fd) != 0) { writer_fail(w, "fsync"); }
    if (close(w->fd) != 0) { writer_fail(w, "close"); }
    free(w->buffer);
    w->buffer = NULL;
    return w->failed ? error_set(err, "%s", w->error.text) : true;
}

// Syncs a directory, so that renames and new files in it survive a power failure.
static inline bool sync_directory(const char* path, Error* err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return error_set(err, "%s: %s", path, strerror(errno)); }
    bool ok = sync_to_medium(fd) == 0 || errno == EINVAL; // EINVAL: the file system cannot sync directories
    if (!ok) { error_set(err, "%s: fsync: %s", path, strerror(errno)); }
    close(fd);
    return ok;
}

#endif
