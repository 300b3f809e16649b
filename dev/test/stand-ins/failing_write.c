/*
A library for LD_PRELOAD that makes one chosen file operation of a program fail, so that a test can try each of them:

    gcc -shared -fPIC -o build/failing_write.so dev/test/stand-ins/failing_write.c -ldl
    FAIL_DIR=log FAIL_COUNT_FILE=count LD_PRELOAD=build/failing_write.so ./train_gpt2 ...    counts the operations
    FAIL_DIR=log FAIL_AT=7 LD_PRELOAD=build/failing_write.so ./train_gpt2 ...                the seventh one fails

These operations are counted, from 1: write, pwrite, fallocate, fsync, close, rename, renameat2, mkdir and open with O_CREAT,
on FAIL_DIR and on everything in it. Reading, unlink and rmdir are not counted, because they also work on a full disk. The writes
inside of stdio cannot be intercepted here.

FAIL_DIR         the directory to watch; without it nothing happens
FAIL_AT          number of the operation that fails; 0 or unset: none
FAIL_ERRNO       the errno, a number; default ENOSPC. A failing close still closes the file, as on Linux
FAIL_MODE        once (default): only this operation fails; from: this one and all that follow, as on a full disk;
                 short: if it is a write or pwrite, it writes half of the bytes and succeeds;
                 kill: SIGKILL ends the process instead of the operation; term: the process receives SIGTERM before it
FAIL_SLOW_MS     every fsync takes this many milliseconds longer, as on a slow disk
FAIL_SLOW_OPEN_MS  opening a file there for reading takes this many milliseconds longer
FAIL_SLOW_SEND   RANK:N:S: the N-th send() of the process that starts with LLMC_RANK=RANK takes S seconds longer
FAIL_COUNT_FILE  the number of operations seen is written here at exit
FAIL_TRACE       a line "NUMBER OPERATION PATH" per operation is appended to this file; for two paths, it has the second;
                 and a line "NUMBER send RANK" for each send() of a rank, which have numbers of their own
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

typedef ssize_t (*WriteFn)(int, const void*, size_t);
typedef ssize_t (*PwriteFn)(int, const void*, size_t, off_t);
typedef ssize_t (*SendFn)(int, const void*, size_t, int);
typedef int (*FallocateFn)(int, int, off_t, off_t);
typedef int (*FdFn)(int);
typedef int (*OpenFn)(const char*, int, ...);
typedef int (*RenameFn)(const char*, const char*);
typedef int (*Renameat2Fn)(int, const char*, int, const char*, unsigned int);
typedef int (*MkdirFn)(const char*, mode_t);

static long num_calls; // atomic: checkpoints are written by a thread

static void* real(const char* name) {
    void* fn = dlsym(RTLD_NEXT, name);
    if (!fn) { abort(); }
    return fn;
}

// Resolves ".", ".." and links in path, whose last component need not exist. Used for FAIL_DIR too.
static bool resolve(char* out, const char* path) {
    char parent[PATH_MAX], buf[PATH_MAX];
    if (realpath(path, out)) { return true; }
    if (snprintf(parent, sizeof(parent), "%s", path) >= (int)sizeof(parent)) { return false; }
    size_t n = strlen(parent);
    while (n > 1 && parent[n - 1] == '/') { parent[--n] = '\0'; }
    char* slash = strrchr(parent, '/');
    const char* base = slash ? slash + 1 : parent;
    char name[NAME_MAX + 1];
    if (snprintf(name, sizeof(name), "%s", base) >= (int)sizeof(name)) { return false; }
    if (slash == parent) {
        strcpy(parent, "/");
    } else if (slash) {
        *slash = '\0';
    } else {
        strcpy(parent, ".");
    }
    if (!realpath(parent, buf)) { return false; }
    return snprintf(out, PATH_MAX, "%s/%s", buf, name) < PATH_MAX;
}

// Writes the resolved path to whole (PATH_MAX). False if it is not in FAIL_DIR.
static bool watched(char* whole, const char* path) {
    const char* dir = getenv("FAIL_DIR");
    char root[PATH_MAX];
    if (!dir || !resolve(root, dir) || !resolve(whole, path)) { return false; }
    size_t n = strlen(root);
    return strncmp(whole, root, n) == 0 && (whole[n] == '/' || whole[n] == '\0');
}

static const char* mode(void) {
    const char* m = getenv("FAIL_MODE");
    return m ? m : "once";
}

static void trace(long number, const char* what, const char* path) {
    const char* file = getenv("FAIL_TRACE");
    int fd = file ? ((OpenFn)real("open"))(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    char line[PATH_MAX + 64];
    if (fd < 0) { return; }
    int n = snprintf(line, sizeof(line), "%ld %s %s\n", number, what, path);
    if (((WriteFn)real("write"))(fd, line, (size_t)n) != n) { abort(); }
    ((FdFn)real("close"))(fd);
}

// Counts an operation if its path is watched. True if it must fail; errno is then set.
static bool fails(const char* what, const char* path) {
    char whole[PATH_MAX];
    int before = errno;
    if (!watched(whole, path)) {
        errno = before;
        return false;
    }
    const char *at = getenv("FAIL_AT"), *error = getenv("FAIL_ERRNO");
    long number = __atomic_add_fetch(&num_calls, 1, __ATOMIC_RELAXED), want = at ? atol(at) : 0;
    trace(number, what, whole);
    bool hit = number == want || (want > 0 && number > want && strcmp(mode(), "from") == 0);
    if (strcmp(mode(), "short") == 0 && strcmp(what, "write") != 0 && strcmp(what, "pwrite") != 0) { hit = false; }
    if (hit && strcmp(mode(), "kill") == 0) { kill(getpid(), SIGKILL); }
    if (hit && strcmp(mode(), "term") == 0) {
        raise(SIGTERM);
        hit = false;
    }
    errno = !hit ? before : error ? atoi(error) : ENOSPC;
    return hit;
}

static bool fails_fd(const char* what, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof(path) - 1);
    if (n <= 0) { return false; }
    path[n] = '\0';
    return fails(what, path);
}

ssize_t write(int fd, const void* data, size_t bytes) {
    if (fails_fd("write", fd)) {
        if (strcmp(mode(), "short") != 0) { return -1; }
        bytes = (bytes + 1) / 2;
    }
    return ((WriteFn)real("write"))(fd, data, bytes);
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
    if (fails_fd("pwrite", fd)) {
        if (strcmp(mode(), "short") != 0) { return -1; }
        bytes = (bytes + 1) / 2;
    }
    return ((PwriteFn)real("pwrite"))(fd, data, bytes, offset);
}

int fallocate(int fd, int flags, off_t offset, off_t bytes) {
    return fails_fd("fallocate", fd) ? -1 : ((FallocateFn)real("fallocate"))(fd, flags, offset, bytes);
}

int fsync(int fd) {
    const char* slow = getenv("FAIL_SLOW_MS");
    if (fails_fd("fsync", fd)) { return -1; }
    if (slow) { usleep((useconds_t)(1000 * atol(slow))); }
    return ((FdFn)real("fsync"))(fd);
}

int close(int fd) {
    bool fail = fails_fd("close", fd);
    int error = errno, result = ((FdFn)real("close"))(fd);
    if (fail) { errno = error; }
    return fail ? -1 : result;
}

int rename(const char* from, const char* to) { return fails("rename", to) ? -1 : ((RenameFn)real("rename"))(from, to); }

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) {
    if (to_dir == AT_FDCWD && fails("renameat2", to)) { return -1; }
    return ((Renameat2Fn)real("renameat2"))(from_dir, from, to_dir, to, flags);
}

int mkdir(const char* path, mode_t bits) { return fails("mkdir", path) ? -1 : ((MkdirFn)real("mkdir"))(path, bits); }

static int own_rank = -1; // the program takes it out of the environment
__attribute__((constructor)) static void find_rank(void) {
    const char* rank = getenv("LLMC_RANK");
    own_rank = rank ? atoi(rank) : -1;
}

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
    static long count; // atomic
    const char* slow = getenv("FAIL_SLOW_SEND");
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED), at;
    int rank, seconds;
    char text[32];
    snprintf(text, sizeof(text), "%d", own_rank);
    if (own_rank >= 0) { trace(number, "send", text); }
    if (slow && sscanf(slow, "%d:%ld:%d", &rank, &at, &seconds) == 3 && rank == own_rank && at == number) {
        sleep((unsigned)seconds);
    }
    return ((SendFn)real("send"))(fd, data, bytes, flags);
}

static int open_named(const char* name, const char* path, int flags, mode_t bits) {
    const char* slow = getenv("FAIL_SLOW_OPEN_MS");
    char whole[PATH_MAX];
    if ((flags & O_CREAT) && fails("open", path)) { return -1; }
    if (slow && !(flags & O_CREAT) && watched(whole, path)) { usleep((useconds_t)(1000 * atol(slow))); }
    return ((OpenFn)real(name))(path, flags, bits);
}

int open(const char* path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
    va_end(args);
    return open_named("open", path, flags, bits);
}

int open64(const char* path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t bits = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
    va_end(args);
    return open_named("open64", path, flags, bits);
}

__attribute__((destructor)) static void write_count(void) {
    const char* path = getenv("FAIL_COUNT_FILE");
    char text[32];
    int n = snprintf(text, sizeof(text), "%ld\n", num_calls);
    int fd = path ? ((OpenFn)real("open"))(path, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    if (fd < 0) { return; }
    if (((WriteFn)real("write"))(fd, text, (size_t)n) != n) { perror(path); }
    ((FdFn)real("close"))(fd);
}
