// What a test prints on stdout, for checks of it.
#ifndef DEV_TEST_CAPTURE_H
#define DEV_TEST_CAPTURE_H

#include "../test.h"

static char printed[1 << 14]; // the output on stdout between capture_begin() and capture_end()
static int real_stdout;

static inline const char* capture_path(void) {
    static char path[256];
    snprintf(path, sizeof(path), "%s/stdout", test_dir());
    return path;
}

static inline void capture_begin(void) {
    fflush(stdout);
    real_stdout = dup(STDOUT_FILENO);
    int fd = open(capture_path(), O_RDWR | O_CREAT | O_TRUNC, 0666);
    if (real_stdout < 0 || fd < 0 || dup2(fd, STDOUT_FILENO) < 0) { die("%s: %s", capture_path(), strerror(errno)); }
    close(fd);
}

static inline void capture_end(void) {
    fflush(stdout);
    dup2(real_stdout, STDOUT_FILENO);
    close(real_stdout);
    FILE* f = fopen(capture_path(), "rb");
    size_t n = f ? fread(printed, 1, sizeof(printed) - 1, f) : 0;
    printed[n] = '\0';
    if (f) { fclose(f); }
}

#endif
