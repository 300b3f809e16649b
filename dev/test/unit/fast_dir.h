// Directories of tests that write many files. Included after test.h.
#ifndef LLMC_TEST_FAST_DIR_H
#define LLMC_TEST_FAST_DIR_H

#include "../test.h"

// Returns dir/name, which stays allocated until the program ends.
static inline const char* in(const char* dir, const char* name) {
    static char** all; // keeps the strings reachable, so that they are not reported as leaks
    static int count;
    size_t size = strlen(dir) + strlen(name) + 2;
    all = (char**)realloc_check(all, (size_t)(count + 1) * sizeof(*all));
    all[count] = (char*)malloc_check(size);
    snprintf(all[count], size, "%s/%s", dir, name);
    return all[count++];
}

// A directory in memory, where a sync is free, if there is one: for tests that save many hundred times.
static char fast_path[64];
static inline void fast_remove(void) {
    char command[128];
    snprintf(command, sizeof(command), "rm -rf '%s'", fast_path);
    if (system(command) != 0) { fprintf(stderr, "cannot remove %s\n", fast_path); }
}
static inline const char* fast_dir(void) {
    if (!fast_path[0]) {
        strcpy(fast_path, "/dev/shm/llmc_test_XXXXXX");
        if (mkdtemp(fast_path)) {
            atexit(fast_remove);
        } else {
            strcpy(fast_path, test_dir());
        }
    }
    return fast_path;
}

// Returns the name of a directory that does not exist yet.
static inline const char* fresh(void) {
    static int count;
    char name[16];
    snprintf(name, sizeof(name), "%d", count++);
    return in(fast_dir(), name);
}

#endif
