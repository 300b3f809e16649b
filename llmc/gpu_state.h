/*
Clock and power of a GPU while it works, and what held its clock down: the same work takes longer on a card that is hot or
at its power limit. They are read from NVML, the library of the driver behind nvidia-smi. Nothing is ever set.

    static GpuState gpu;
    gpu_state_open(&gpu, "0000:3B:00.0");   // before the work: NVML takes its time to start
    gpu_state_begin(&gpu);
    ...                                     // the work; a thread reads clock and power meanwhile
    gpu_state_end(&gpu);
    gpu_state_print(&gpu, stdout);          // two lines; or one, which says why nothing was read
    gpu_state_close(&gpu);

NVML is found at run time: the program compiles without nvml.h, and runs without libnvidia-ml.so.1, which containers and WSL
may lack. The values and layouts below are those of nvml.h of CUDA 13. C11, also compiles as C++17.
*/
#ifndef LLMC_GPU_STATE_H
#define LLMC_GPU_STATE_H

#include "utils.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>

// ---- what nvml.h declares ---------------------------------------------------------

typedef struct nvmlDevice_st* NvmlDevice;
typedef int NvmlResult; // 0: success

enum { NVML_CLOCK_OF_SMS = 1, NVML_POWER_INSTANT = 186 }; // NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT

// nvmlFieldValue_t. The value is an unsigned int, a double if type is 0, or another integer, whose low half is the same.
typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    int type;
    NvmlResult result;
    unsigned value, high_half;
} NvmlField;

typedef struct {
    NvmlResult (*init)(void);
    NvmlResult (*shutdown)(void);
    const char* (*error_string)(NvmlResult);
    NvmlResult (*device_by_bus_id)(const char*, NvmlDevice*);
    NvmlResult (*clock_info)(NvmlDevice, int clock, unsigned* mhz);
    NvmlResult (*power_usage)(NvmlDevice, unsigned* mw);
    NvmlResult (*power_limit)(NvmlDevice, unsigned* mw);
    NvmlResult (*field_values)(NvmlDevice, int count, NvmlField*);
    NvmlResult (*clock_reasons)(NvmlDevice, unsigned long long* reasons); // may be NULL
} Nvml;

// ---- a card -----------------------------------------------------------------------

// Bits of nvmlClocksEventReasons that slow a busy card down. Not among them: 0x01, the card is idle.
enum { GPU_HW_SLOWDOWN = 0x08, GPU_HW_SLOWDOWN_CAUSES = 0xC0, NUM_GPU_LIMITS = 7 };
static const struct {
    unsigned bits;
    const char* name;
} gpu_limits[NUM_GPU_LIMITS] = {{0x04, "the power limit"},
                                {0x20 | 0x40, "the temperature"},
                                {0x80, "the power supply (power brake)"},
                                {GPU_HW_SLOWDOWN, "the card's protection against heat and peaks of power"},
                                {0x02, "the applications clock that is set"},
                                {0x10, "another card of its sync boost group"},
                                {0x100, "the display's clock setting"}};

typedef struct {
    int num;
    double sum, min, max;
} GpuReadings;

typedef struct {
    Nvml nvml;
    NvmlDevice device; // NULL: not open
    pthread_t thread;
    bool running;           // the thread
    int stop;               // atomic: the thread shall end
    GpuReadings mhz, watts; // SM clock, power of the whole board
    double limit_watts;     // 0: not known
    int num_reasons;        // readings of what limits the clock
    int held[NUM_GPU_LIMITS];
    Error error; // why nothing is read; "": no error
} GpuState;

// Loads NVML, which stays loaded. Returns false, with the reason in s->error, if it is not there.
static inline bool gpu_state_load(GpuState* s) {
    static const struct {
        const char* name;
        size_t offset;
    } functions[] = {{"nvmlInit_v2", offsetof(Nvml, init)},
                     {"nvmlShutdown", offsetof(Nvml, shutdown)},
                     {"nvmlErrorString", offsetof(Nvml, error_string)},
                     {"nvmlDeviceGetHandleByPciBusId_v2", offsetof(Nvml, device_by_bus_id)},
                     {"nvmlDeviceGetClockInfo", offsetof(Nvml, clock_info)},
                     {"nvmlDeviceGetPowerUsage", offsetof(Nvml, power_usage)},
                     {"nvmlDeviceGetEnforcedPowerLimit", offsetof(Nvml, power_limit)},
                     {"nvmlDeviceGetFieldValues", offsetof(Nvml, field_values)}};
    const char* file = "libnvidia-ml.so.1";
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!library) { return error_set(&s->error, "NVML, the driver's library: %s", dlerror()); }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void* symbol = dlsym(library, functions[i].name);
        if (!symbol) { return error_set(&s->error, "%s: has no %s", file, functions[i].name); }
        memcpy((char*)&s->nvml + functions[i].offset, &symbol, sizeof(symbol)); // POSIX: a function pointer fits
    }
    void* reasons = dlsym(library, "nvmlDeviceGetCurrentClocksEventReasons"); // in older drivers it has the other name
    if (!reasons) { reasons = dlsym(library, "nvmlDeviceGetCurrentClocksThrottleReasons"); }
    memcpy(&s->nvml.clock_reasons, &reasons, sizeof(reasons));
    return true;
}

// Finds the card in NVML by its PCI bus id, as cudaDeviceGetPCIBusId() writes it: NVML numbers all cards of the machine,
// CUDA those of CUDA_VISIBLE_DEVICES, in another order. If that fails, gpu_state_print() says why, and the other functions
// do nothing.
static inline void gpu_state_open(GpuState* s, const char* bus_id) {
    memset(s, 0, sizeof(*s));
    if (!gpu_state_load(s)) { return; }
    NvmlResult result = s->nvml.init();
    if (result != 0) {
        error_set(&s->error, "NVML, the driver's library, does not start: %s", s->nvml.error_string(result));
        return;
    }
    result = s->nvml.device_by_bus_id(bus_id, &s->device);
    if (result != 0) {
        error_set(&s->error, "NVML does not give the card at %s: %s", bus_id, s->nvml.error_string(result));
        s->nvml.shutdown();
        s->device = NULL;
        return;
    }
    unsigned mw;
    s->limit_watts = s->nvml.power_limit(s->device, &mw) == 0 ? mw * 1e-3 : 0.0;
}

static inline void gpu_readings_add(GpuReadings* r, double value) {
    r->min = r->num == 0 || value < r->min ? value : r->min;
    r->max = r->num == 0 || value > r->max ? value : r->max;
    r->sum += value;
    r->num++;
}

// Reads the board's power in mW: the present one, or, where the driver does not give it, nvidia-smi's, which is a mean over
// a second on most cards.
static inline bool gpu_state_power(const GpuState* s, unsigned* mw) {
    NvmlField field = {NVML_POWER_INSTANT, 0, 0, 0, 0, 0, 0, 0};
    *mw = 0;
    if (s->nvml.field_values(s->device, 1, &field) == 0 && field.result == 0 && field.type != 0) { *mw = field.value; }
    return *mw > 0 || s->nvml.power_usage(s->device, mw) == 0;
}

// One reading of everything; what the driver does not give is left out.
static inline void gpu_state_read(GpuState* s) {
    unsigned mhz, mw;
    unsigned long long reasons;
    NvmlResult result = s->nvml.clock_info(s->device, NVML_CLOCK_OF_SMS, &mhz);
    if (result != 0) {
        error_set(&s->error, "NVML does not give the card's clock: %s", s->nvml.error_string(result));
    } else {
        gpu_readings_add(&s->mhz, mhz);
    }
    if (gpu_state_power(s, &mw)) { gpu_readings_add(&s->watts, mw * 1e-3); }
    if (!s->nvml.clock_reasons || s->nvml.clock_reasons(s->device, &reasons) != 0) { return; }
    if (reasons & GPU_HW_SLOWDOWN_CAUSES) { reasons &= ~(unsigned long long)GPU_HW_SLOWDOWN; } // it goes with its cause
    s->num_reasons++;
    for (int i = 0; i < NUM_GPU_LIMITS; i++) { s->held[i] += (reasons & gpu_limits[i].bits) != 0; }
}

static inline void* gpu_state_thread(void* state) {
    GpuState* s = (GpuState*)state;
    const struct timespec rest = {0, 5000000};
    do {
        gpu_state_read(s);
        nanosleep(&rest, NULL);
    } while (!__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE));
    return NULL;
}

// Starts a thread that reads clock, power and what limits the clock, at once and every 5 ms until gpu_state_end(). To be
// called once.
static inline void gpu_state_begin(GpuState* s) {
    if (!s->device) { return; }
    sigset_t all, before; // the main thread handles the signals
    s->stop = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(&s->thread, NULL, gpu_state_thread, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    s->running = !failed;
    if (failed) { error_set(&s->error, "no thread that reads them: %s", strerror(failed)); }
}

static inline void gpu_state_end(GpuState* s) {
    if (!s->running) { return; }
    __atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
    pthread_join(s->thread, NULL);
    s->running = false;
}

// Prints two lines: SM clock in MHz and board power in W, means over the readings; what held the clock down. Prints one line
// with the reason if there are no readings.
static inline void gpu_state_print(const GpuState* s, FILE* out) {
    const GpuReadings *mhz = &s->mhz, *watts = &s->watts;
    int num_limits = 0;
    if (mhz->num == 0) {
        print_line(out, "clock and power are not known: %s", s->error.text);
        return;
    }
    fprintf(out, "SM clock %.0f MHz (%.0f to %.0f), board power ", mhz->sum / mhz->num, mhz->min, mhz->max);
    if (watts->num == 0) {
        fprintf(out, "not known");
    } else {
        fprintf(out, "%.0f W (at most %.0f)", watts->sum / watts->num, watts->max);
    }
    if (s->limit_watts > 0) { fprintf(out, " of %.0f W allowed", s->limit_watts); }
    fprintf(out, ", %d readings\n", mhz->num);
    for (int i = 0; i < NUM_GPU_LIMITS; i++) {
        if (s->held[i] == 0) { continue; }
        fprintf(out, "%s by %s", num_limits++ ? "," : "clock held down", gpu_limits[i].name);
        if (s->held[i] < s->num_reasons) {
            fprintf(out, " in %.0f%% of the readings", 100.0 * s->held[i] / s->num_reasons);
        }
    }
    fprintf(out, "%s\n",
            num_limits > 0       ? ""
            : s->num_reasons > 0 ? "nothing held the clock down"
                                 : "the driver does not say whether something held the clock down");
}

static inline void gpu_state_close(GpuState* s) {
    if (s->device) { s->nvml.shutdown(); }
    s->device = NULL;
}

#endif
