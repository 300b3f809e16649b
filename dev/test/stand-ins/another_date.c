/*
A library for LD_PRELOAD that shifts the wall clock by DAYS days. Monotonic clocks and the times of files are unchanged, so make
and find, which compare the latter with the clock, see the true date. The tests give the same verdict on any date:

    gcc -shared -fPIC -o /tmp/another_date.so dev/test/stand-ins/another_date.c
    DAYS=65 LD_PRELOAD=/tmp/another_date.so ASAN_OPTIONS=verify_asan_link_order=0 make test
*/
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec* t) {
    int rc = (int)syscall(SYS_clock_gettime, clock, t);
    const char *days = getenv("DAYS"), *program = program_invocation_short_name;
    if (rc == 0 && days && strcmp(program, "find") != 0 && strcmp(program, "make") != 0 &&
        (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        t->tv_sec += atol(days) * 86400;
    }
    return rc;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
    struct timespec t;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &t) != 0) { return -1; }
    now->tv_sec = t.tv_sec, now->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t* out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) { *out = t.tv_sec; }
    return t.tv_sec;
}
