// Part of a program that hello.mk builds for a CPU: after main, prints the bugs that the emulation has found, such as races
// and accesses past the end of an allocation. The programs of dev/cuda need no such file, because their harness does it.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cuda_runtime.h"

static void print_findings() {
    int count;
    const char* text = emulation_findings(&count);
    if (count == 0) { return; }
    fflush(NULL);
    fprintf(stderr, "error: %s\n", text);
    _exit(EXIT_FAILURE);
}

static const int registered = atexit(print_findings);
