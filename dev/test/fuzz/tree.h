/*
Directory trees and child processes, for whole_program.c: lists, copies, compares and removes trees; runs a program with
limits and collects what it prints. C11.
*/
#ifndef LLMC_FUZZ_TREE_H
#define LLMC_FUZZ_TREE_H

#include "mutate.h"
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { TREE_PATH = 1024 };

PRINTF_LIKE(2, 3) static inline void join_path(char* out, const char* fmt, ...) { // out: (TREE_PATH)
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(out, TREE_PATH, fmt, args);
    va_end(args);
    if (n < 0 || n >= TREE_PATH) { die("%.200s...: the path is too long", out); }
}

// ---- trees --------------------------------------------------------------------------

typedef struct {
    char path[512]; // relative to the top of the tree
    mode_t type;    // S_IFREG, S_IFDIR, S_IFLNK ...
    uint64_t bytes; // of a plain file
    uint32_t crc;   // crc32c of a plain file, if sums were asked for
} TreeFile;

// Everything below a directory, sorted by path, so that the same tree always has the same order.
typedef struct {
    TreeFile* items;
    size_t count, capacity;
} TreeList;

static inline void tree_free(TreeList* list) {
    free(list->items);
    memset(list, 0, sizeof(*list));
}

static inline int tree_compare_paths(const void* a, const void* b) {
    return strcmp(((const TreeFile*)a)->path, ((const TreeFile*)b)->path);
}

static inline void tree_walk(TreeList* list, const char* top, const char* below_top, bool sums) {
    char dir[TREE_PATH], path[TREE_PATH];
    join_path(dir, "%s/%s", top, below_top);
    DIR* d = opendir(dir);
    for (struct dirent* e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) { continue; }
        join_path(path, "%s/%s", dir, e->d_name);
        if (lstat(path, &st) != 0) { continue; }
        if (list->count == list->capacity) {
            list->capacity = 2 * list->capacity + 128;
            list->items = (TreeFile*)realloc_check(list->items, list->capacity * sizeof(TreeFile));
        }
        TreeFile* f = &list->items[list->count++];
        memset(f, 0, sizeof(*f));
        snprintf(f->path, sizeof(f->path), "%s%s%s", below_top, below_top[0] ? "/" : "", e->d_name);
        f->type = st.st_mode & S_IFMT;
        if (S_ISREG(st.st_mode)) {
            f->bytes = (uint64_t)st.st_size;
            if (sums) { run_sum_file(path, &f->bytes, &f->crc, NULL); }
        } else if (S_ISDIR(st.st_mode)) {
            char next[sizeof(f->path)];
            memcpy(next, f->path, sizeof(next)); // the list may move
            tree_walk(list, top, next, sums);
        }
    }
    if (d) { closedir(d); }
}

// Lists the tree below `top`; nothing if it does not exist. The caller frees the list.
static inline TreeList tree_list(const char* top, bool sums) {
    TreeList list = {0};
    tree_walk(&list, top, "", sums);
    if (list.count > 0) { qsort(list.items, list.count, sizeof(TreeFile), tree_compare_paths); }
    return list;
}

// Removes the tree with its top. Succeeds if it does not exist. Tries again for a second, because a process that was just
// ended may still write to it.
static inline void tree_remove(const char* top) {
    char path[TREE_PATH];
    for (int attempt = 0; attempt < 100; attempt++) {
        TreeList list = tree_list(top, false);
        for (size_t i = list.count; i-- > 0;) { // a directory comes before its contents
            join_path(path, "%s/%s", top, list.items[i].path);
            remove(path);
        }
        tree_free(&list);
        if (rmdir(top) == 0 || errno == ENOENT) { return; }
        usleep(10000);
    }
    die("%s: cannot remove: %s", top, strerror(errno));
}

static inline void tree_make(const char* dir) {
    Error err;
    if (!make_directories(dir, &err)) { die("%s", err.text); }
}

// Copies a file; what is not a plain file is not copied.
static inline void copy_file(const char* from, const char* to) {
    Bytes b;
    if (!bytes_read(&b, from, NULL)) { return; }
    bytes_write(&b, to);
    bytes_free(&b);
}

// Copies the directories and plain files of a tree to the new directory `to`.
static inline void tree_copy(const char* from, const char* to) {
    TreeList list = tree_list(from, false);
    char a[TREE_PATH], b[TREE_PATH];
    tree_make(to);
    for (size_t i = 0; i < list.count; i++) {
        join_path(a, "%s/%s", from, list.items[i].path);
        join_path(b, "%s/%s", to, list.items[i].path);
        if (list.items[i].type == S_IFDIR) {
            tree_make(b);
        } else {
            copy_file(a, b);
        }
    }
    tree_free(&list);
}

static inline bool is_below(const char* path, const char* dir) {
    size_t n = strlen(dir);
    return n > 0 && strncmp(path, dir, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

// Compares two lists of the same tree. Returns the first path that was changed, added or removed and is not `except` or
// below it; NULL if there is none.
static inline const char* tree_difference(const TreeList* before, const TreeList* after, const char* except) {
    size_t i = 0, j = 0;
    while (i < before->count || j < after->count) {
        const TreeFile* a = i < before->count ? &before->items[i] : NULL;
        const TreeFile* b = j < after->count ? &after->items[j] : NULL;
        int order = !a ? 1 : !b ? -1 : strcmp(a->path, b->path);
        bool same = order == 0 && a->type == b->type && a->bytes == b->bytes && a->crc == b->crc;
        const char* path = order <= 0 ? a->path : b->path;
        if (!same && !is_below(path, except)) { return path; }
        i += order <= 0;
        j += order >= 0;
    }
    return NULL;
}

// ---- child processes -------------------------------------------------------------------

// What a child process left.
typedef struct {
    int status; // of waitpid(2)
    Bytes err;  // the first megabyte of its stderr, with a NUL after it
} Child;

static inline void child_limits(int seconds) {
    struct rlimit core = {0, 0}, file = {256 << 20, 256 << 20}; // bytes
    setrlimit(RLIMIT_CORE, &core);
    setrlimit(RLIMIT_FSIZE, &file);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    alarm((unsigned)seconds); // survives execv(), and no program handles SIGALRM
}

// Runs argv in the directory cwd, or, if argv is NULL, the function body(data), which may end the process. stdin is /dev/null;
// stdout and stderr go to the files out and err. After `seconds` the child is ended by SIGALRM.
static inline Child run_child(char* const* argv, void (*body)(void*), void* data, const char* cwd, const char* out,
                              const char* err, int seconds) {
    Child child;
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) { die("cannot start a process: %s", strerror(errno)); }
    if (pid == 0) {
        int fd_in = open("/dev/null", O_RDONLY), fd_out = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        int fd_err = open(err, O_WRONLY | O_CREAT | O_TRUNC, 0666);
        if (fd_in < 0 || fd_out < 0 || fd_err < 0 || dup2(fd_in, 0) < 0 || dup2(fd_out, 1) < 0 || dup2(fd_err, 2) < 0 ||
            chdir(cwd) != 0) {
            _exit(126);
        }
        for (int fd = 3; fd < 64; fd++) { close(fd); }
        child_limits(seconds);
        if (argv) {
            execv(argv[0], argv);
            dprintf(2, "cannot run %s: %s\n", argv[0], strerror(errno));
            _exit(127);
        }
        body(data);
        _exit(0);
    }
    while (waitpid(pid, &child.status, 0) < 0) {
        if (errno != EINTR) { die("waitpid: %s", strerror(errno)); }
    }
    if (!bytes_read(&child.err, err, NULL)) { memset(&child.err, 0, sizeof(child.err)); }
    if (child.err.size > MUTATE_MAX_BYTES) { bytes_resize(&child.err, MUTATE_MAX_BYTES); }
    bytes_add(&child.err, "", 1);
    child.err.size--;
    return child;
}

#endif
