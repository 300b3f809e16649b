/*
Stands in for libnvidia-ml.so.1 in tests: one card, whose readings are chosen.

    gcc -shared -fPIC -O1 -o libnvidia-ml.so.1 dev/test/stand-ins/fake_nvml.c         found by LD_LIBRARY_PATH
    gcc -DOLD ...                                                           an older driver: other names, and no present power

It ends the program by abort() if it is called before nvmlInit_v2() or after nvmlShutdown(), or with another card.

FAKE_NVML_BUS_ID    where the card is; default 0000:3B:00.0, which is where fake_cuda.c has card 0
FAKE_NVML_CLOCK     MHz, several of them with commas between: the N-th reading takes the N-th, and then again from the first
FAKE_NVML_POWER     milliwatts, likewise
FAKE_NVML_REASONS   what limits the clock, likewise: bits, as 0x24
FAKE_NVML_FAIL      NAME:RESULT: the function NAME returns the nvmlReturn_t of the number RESULT
FAKE_NVML_COUNT     file to which nvmlShutdown() writes the number of readings and their sums, "clock N SUM", "power N SUM"
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, CLOCK_SM = 1, POWER_INSTANT = 186, TYPE_UNSIGNED = 1 };

static struct card { int open; } card;
static struct { unsigned long long num, sum; } clocks, powers, reasons;

static void check(const struct card* c, const char* function) {
    if (c == &card && card.open == 1) { return; }
    fprintf(stderr, "fake_nvml: %s: NVML is not open, or another card\n", function);
    abort();
}

static int failure(const char* function) {
    const char* text = getenv("FAKE_NVML_FAIL");
    size_t n = strlen(function);
    return text && strncmp(text, function, n) == 0 && text[n] == ':' ? atoi(text + n + 1) : 0;
}

// Entry i of a list with commas, beginning again after the last.
static unsigned long long entry(const char* name, const char* otherwise, unsigned long long i) {
    const char* list = getenv(name);
    unsigned long long n = 1;
    list = list ? list : otherwise;
    for (const char* c = list; *c; c++) { n += *c == ','; }
    for (i %= n; i > 0; i--) { list = strchr(list, ',') + 1; }
    return strtoull(list, NULL, 0);
}

int nvmlInit_v2(void) {
    int result = failure(__func__);
    card.open += result == 0;
    return result;
}
int nvmlShutdown(void) {
    check(&card, __func__);
    card.open = 0;
    const char* path = getenv("FAKE_NVML_COUNT");
    FILE* f = path ? fopen(path, "w") : NULL;
    if (!f) { return 0; }
    fprintf(f, "clock %llu %llu\npower %llu %llu\n", clocks.num, clocks.sum, powers.num, powers.sum);
    fclose(f);
    return 0;
}
const char* nvmlErrorString(int result) {
    return result == NOT_SUPPORTED ? "Not Supported" : result == NOT_FOUND ? "Not Found" : "Unknown Error";
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, struct card** c) {
    check(&card, __func__);
    const char* known = getenv("FAKE_NVML_BUS_ID");
    if (strcmp(bus_id, known ? known : "0000:3B:00.0") != 0) { return NOT_FOUND; }
    *c = &card;
    return failure(__func__);
}
int nvmlDeviceGetClockInfo(struct card* c, int clock, unsigned* mhz) {
    check(c, __func__);
    if (failure(__func__)) { return failure(__func__); }
    *mhz = clock == CLOCK_SM ? (unsigned)entry("FAKE_NVML_CLOCK", "1755", clocks.num++) : 1;
    clocks.sum += *mhz;
    return 0;
}
static unsigned power(void) {
    unsigned mw = (unsigned)entry("FAKE_NVML_POWER", "655000", powers.num++);
    powers.sum += mw;
    return mw;
}
int nvmlDeviceGetPowerUsage(struct card* c, unsigned* mw) {
    check(c, __func__);
    if (failure(__func__)) { return failure(__func__); }
#ifdef OLD
    *mw = power();
#else
    *mw = 1; // the mean over a second, which is not wanted
#endif
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(struct card* c, unsigned* mw) {
    check(c, __func__);
    *mw = 700000;
    return failure(__func__);
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union {
        double number;
        unsigned integer;
    } value;
} Field;
int nvmlDeviceGetFieldValues(struct card* c, int num, Field* fields) {
    check(c, __func__);
    for (int i = 0; i < num; i++) {
        fields[i].result = failure(__func__) ? failure(__func__) : fields[i].field == POWER_INSTANT ? 0 : NOT_SUPPORTED;
#ifdef OLD
        fields[i].result = NOT_SUPPORTED;
#endif
        if (fields[i].result != 0) { continue; }
        fields[i].type = TYPE_UNSIGNED;
        fields[i].value.integer = power();
    }
    return 0;
}

#ifdef OLD
#define nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons
#endif
int nvmlDeviceGetCurrentClocksEventReasons(struct card* c, unsigned long long* bits) {
    check(c, __func__);
    *bits = entry("FAKE_NVML_REASONS", "0", reasons.num++);
    return failure("nvmlDeviceGetCurrentClocksEventReasons");
}
