/*
Stands in for the CUDA runtime and cuBLASLt, so that train_gpt2cu runs where there is no GPU: its host code (checkpoints,
signals, resume, evaluation, sampling, graphs, errors) can then be tested on any machine.

    gcc -shared -fPIC -O1 -I/usr/local/cuda/include -o fake_cuda.so dev/test/stand-ins/fake_cuda.c -lm
    nvcc -O1 -std=c++17 -arch=compute_80 -code=compute_80 -Xcompiler -fopenmp -cudart none train_gpt2.cu -o train_gpt2cu \
        $PWD/fake_cuda.so -ldl

A program that was linked with -cudart shared and -lcublasLt takes it by LD_PRELOAD instead.

The card. Device memory is memory of the host. Whatever is put on a stream is put in a queue, and is run when the host waits
for it: at a synchronization, an event, a plain copy. So a host that reads a result, or reuses a pinned buffer, without
waiting gets the wrong bytes here every time. All streams share the queue, so that each is ordered with the others. A capture
copies what it sees to a graph, also from other streams that wait for an event in it; a launch of the graph appends it to
the queue. Calls that a capture forbids fail. Device pointers, handles and directions of copies are checked; a mistake ends
the program by abort(). Fresh device memory holds junk.

The arithmetic. Most kernels do nothing. Those below, found by their names and their types, and cuBLASLt's matmul, which
writes one number (a number in fp32 depends on where it is), do a small part of what they should, so that a run behaves like one: losses fall, steps are applied,
NaN is noticed. What counts is that all results depend on all of the state that a checkpoint has to carry: weights, moments,
the position in the data, rounding seeds, the sampler, the choice of matmul algorithms, and the block size of global_norm, on
which the order of a sum depends. AdamW adds to each gradient a
number that depends on the weight's place in memory and on the loss, so that all weights move, each rank's as one GPU would
move them.

Time is counted, not measured: two runs have the same times.

FAKE_CUDA_FAIL      NAME:N:ERROR, more of them with commas between: the N-th call of the function NAME returns ERROR, a name
                    like cudaErrorMemoryAllocation, or a number; N+: so do all calls after it. NAME any: any function of the
                    runtime, and cublasLtMatmul. After an error of the hardware or of a kernel, every later call returns it
                    too. For a function of cuBLASLt, ERROR is the number of a cublasStatus_t
FAKE_CUDA_COUNT     file to which, at exit, the number of calls of each function is written, "calls NAME N", the number of
                    things that were not freed, "left KIND N", and the block sizes of each kernel, "block NAME THREADS",
                    rounded up to whole warps
FAKE_CUDA_MEMORY    bytes of memory that are free on the card; default 40 GB
FAKE_CUDA_NAME      name of the card; default "Fake GPU"
FAKE_CUDA_ARCH      the compute capability: 75, 80 (default) or 90. With 90 the card is like an H100, and the kernels for sm_90a run
FAKE_CUDA_DEVICES   number of cards, default 1. A process uses one of them
FAKE_CUDA_SLOW_MS   milliseconds that each forward pass takes, and each capture of a graph
FAKE_CUDA_SMOOTH    1: the loss has weights themselves in it, not their hash, so runs that add the same numbers in another
                    order have nearly the same losses. With the hash, a weight that is rounded the other way changes a loss
                    by 1e-4, relatively: seen with 7 of 151 texts when 4 ranks were compared with 1
FAKE_CUDA_EAGER     1: whatever is put on a stream is run at once. The results must be the same
FAKE_CUDA_FASTEST   which of cuBLASLt's three candidates is the fastest: 0, 1 (default) or 2
CUDA_VISIBLE_DEVICES    empty: there is no GPU, as with the real library
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fnmatch.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Ends the program because it misuses the library.
__attribute__((noreturn, format(printf, 1, 2))) static void misuse(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fake_cuda: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static void* allocate(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size);
    if (!p) { misuse("out of memory on the host"); }
    return p;
}

static long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && text[0] ? atol(text) : otherwise;
}

// ---- errors and counts --------------------------------------------------------------------------

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_names[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorUnsupportedPtxVersion, "cudaErrorUnsupportedPtxVersion",
     "the provided PTX was compiled with an unsupported toolchain."},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
};
enum { NUM_ERRORS = sizeof(error_names) / sizeof(error_names[0]) };

const char* cudaGetErrorName(cudaError_t error) {
    for (int i = 0; i < NUM_ERRORS; i++) {
        if (error_names[i].error == error) { return error_names[i].name; }
    }
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
    for (int i = 0; i < NUM_ERRORS; i++) {
        if (error_names[i].error == error) { return error_names[i].text; }
    }
    return "unrecognized error code";
}

// An entry of FAKE_CUDA_FAIL.
typedef struct {
    char name[64];
    long first, last; // numbers of the calls that fail
    int error;
} Failure;

enum { MAX_FAILURES = 8, MAX_FUNCTIONS = 128 };
static Failure failures[MAX_FAILURES];
static int num_failures;
static struct {
    const char* name;
    long calls;
} functions[MAX_FUNCTIONS];
static int num_functions;
static long all_calls;
static cudaError_t last_error, lasting_error; // lasting_error: what every call returns from now on
static __thread bool in_host_function;        // of cudaLaunchHostFunc(): it may not call CUDA

static int parse_error(const char* text) {
    for (int i = 0; i < NUM_ERRORS; i++) {
        if (strcmp(error_names[i].name, text) == 0) { return error_names[i].error; }
    }
    if (atoi(text) <= 0) { misuse("FAKE_CUDA_FAIL: unknown error '%s'", text); }
    return atoi(text);
}

__attribute__((constructor)) static void parse_failures(void) {
    const char* list = getenv("FAKE_CUDA_FAIL");
    char copy[1024], *rest = NULL;
    if (!list || !list[0]) { return; }
    snprintf(copy, sizeof(copy), "%s", list);
    for (char* entry = strtok_r(copy, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        char error[64], number[32], *end;
        if (num_failures == MAX_FAILURES) { misuse("FAKE_CUDA_FAIL: too many"); }
        Failure* f = &failures[num_failures++];
        if (sscanf(entry, "%63[^:]:%31[^:]:%63s", f->name, number, error) != 3) {
            misuse("FAKE_CUDA_FAIL: '%s' is not NAME:N:ERROR", entry);
        }
        f->first = strtol(number, &end, 10);
        f->last = *end == '+' ? (1L << 62) : f->first;
        f->error = parse_error(error);
    }
}

static long count_call(const char* name) {
    int i = 0;
    while (i < num_functions && strcmp(functions[i].name, name) != 0) { i++; }
    if (i == num_functions) {
        if (i == MAX_FUNCTIONS) { misuse("too many functions"); }
        functions[num_functions++].name = name;
    }
    return ++functions[i].calls;
}

static int failure_of(const char* name, long number) {
    for (int i = 0; i < num_failures; i++) {
        const Failure* f = &failures[i];
        if (strcmp(f->name, name) == 0 && number >= f->first && number <= f->last) { return f->error; }
    }
    return 0;
}

// An error of the hardware or of a kernel, after which the process cannot use the card any more.
static bool error_lasts(cudaError_t e) {
    return e == cudaErrorECCUncorrectable ||
           (e >= cudaErrorIllegalAddress && e < cudaErrorNotPermitted && e != cudaErrorLaunchOutOfResources &&
            e != cudaErrorHostMemoryAlreadyRegistered && e != cudaErrorHostMemoryNotRegistered);
}

static cudaError_t fails(cudaError_t e) {
    if (e != cudaSuccess) { last_error = e; }
    if (error_lasts(e)) { lasting_error = e; }
    return e;
}

// Counts a call of the runtime. Returns the error that it must return.
static cudaError_t called(const char* name) {
    if (in_host_function) { misuse("%s: called by a host function on a stream", name); }
    long number = count_call(name);
    all_calls++;
    if (lasting_error != cudaSuccess) { return lasting_error; }
    int error = failure_of(name, number);
    return fails((cudaError_t)(error ? error : failure_of("any", all_calls)));
}
#define CALLED()                                                                                                       \
    do {                                                                                                               \
        cudaError_t e_ = called(__func__);                                                                             \
        if (e_ != cudaSuccess) { return e_; }                                                                          \
    } while (0)

cudaError_t cudaGetLastError(void) {
    CALLED();
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void) { return lasting_error ? lasting_error : last_error; }

// ---- handles ------------------------------------------------------------------------------------

typedef enum {
    STREAM,
    EVENT,
    GRAPH,
    GRAPH_EXEC,
    CUBLASLT,
    DESCRIPTOR,
    DEVICE_MEMORY,
    PINNED,
    REGISTERED,
    NUM_KINDS
} Kind;
static const char* const kind_names[NUM_KINDS] = {"streams",           "events",           "graphs",
                                                  "executable graphs", "cublasLt handles", "cublasLt descriptors",
                                                  "device memories",   "pinned memories",  "registered memories"};
static long num_live[NUM_KINDS];

// What stands at the beginning of everything that a handle points to. It is never freed, so that a later use is noticed.
typedef struct {
    Kind kind;
    bool live;
} Handle;

static void* handle_new(Kind kind, size_t size) {
    Handle* h = (Handle*)allocate(1, size);
    h->kind = kind;
    h->live = true;
    num_live[kind]++;
    return h;
}
static void* handle_check(const void* handle, Kind kind, const char* function) {
    const Handle* h = (const Handle*)handle;
    if (!h || h->kind != kind || !h->live) {
        misuse("%s: not one of the %s, or destroyed before", function, kind_names[kind]);
    }
    return (void*)(uintptr_t)handle;
}
static void handle_free(const void* handle, Kind kind, const char* function) {
    Handle* h = (Handle*)handle_check(handle, kind, function);
    h->live = false;
    num_live[kind]--;
}

// ---- memory -------------------------------------------------------------------------------------

typedef struct {
    Kind kind; // DEVICE_MEMORY, PINNED or REGISTERED
    char* begin;
    size_t bytes;
} Range;

enum { MAX_RANGES = 256 };
static Range ranges[MAX_RANGES];
static int num_ranges;
static size_t device_bytes; // allocated

static const size_t NOT_COPIED = (size_t)1 << 30; // larger copies are only timed: --profile measures with them

static size_t card_bytes(void) { return (size_t)setting("FAKE_CUDA_MEMORY", 40000000000); }

// The range that holds all of p to p + bytes, or NULL.
static Range* range_of(const void* p, size_t bytes) {
    for (int i = 0; i < num_ranges; i++) {
        Range* r = &ranges[i];
        if ((const char*)p >= r->begin && (const char*)p + bytes <= r->begin + r->bytes) { return r; }
    }
    return NULL;
}
// Bytes from the beginning of the allocation.
static size_t place_of(const void* p) {
    const Range* r = range_of(p, 0);
    return r ? (size_t)((const char*)p - r->begin) : 0;
}
static bool is_device(const void* p, size_t bytes) {
    const Range* r = range_of(p, bytes);
    return r && r->kind == DEVICE_MEMORY;
}

static void range_add(Kind kind, void* begin, size_t bytes) {
    if (num_ranges == MAX_RANGES) { misuse("too many allocations"); }
    Range r = {kind, (char*)begin, bytes};
    ranges[num_ranges++] = r;
    num_live[kind]++;
}

// Removes the range that begins at p; returns its size.
static size_t range_remove(Kind kind, const void* p, const char* function) {
    for (int i = 0; i < num_ranges; i++) {
        if (ranges[i].kind != kind || ranges[i].begin != p) { continue; }
        size_t bytes = ranges[i].bytes;
        ranges[i] = ranges[--num_ranges];
        num_live[kind]--;
        return bytes;
    }
    misuse("%s: %p is none of the %s, or was freed before", function, p, kind_names[kind]);
}

// ---- the toy model ------------------------------------------------------------------------------
// State of the card beside its memory: what the kernels that are not emulated would hand on through memory.

#if defined(ENABLE_FP16)
typedef _Float16 FloatX;
#define FLOATX "6__half"
#else
typedef uint16_t FloatX; // the bits of a bf16
#define FLOATX "13__nv_bfloat16"
#endif

// In generation, the state of the text in a slot.
typedef struct {
    const int* token;     // where the slot's newest token is, by which the slot is known
    uint64_t hash;        // like context, for the newest token
    const uint32_t* seen; // the tokens that the repetition penalty makes less likely; NULL: there is none
} Text;

enum { MAX_TEXTS = 256 };
static struct {
    const FloatX *wte, *wpe; // (Vp,C), (maxT,C)
    int B, T, C;             // of the newest forward pass
    uint64_t* context;       // (B,T): a hash of the tokens and weights that position t of text b sees
    float* pull;             // (B,T): the gradient of wpe[t,0] by text b
    float dloss;
    bool prefilled; // the newest logits are those of a forward pass
    Text text[MAX_TEXTS];
    int num_texts;
} card;

static uint64_t mix(uint64_t h, uint64_t x) { // splitmix64 of both
    h = (h ^ x) + 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
    return h ^ (h >> 31);
}
static float unit(uint64_t h) { return (float)(mix(h, 0) >> 40) * 0x1p-24f; } // in [0, 1)

static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t hash_bits(uint32_t index, uint32_t seed) { // as in llmc/cuda_common.cuh
    uint32_t x = index ^ (seed * 0x9E3779B9u + 0x7F4A7C15u);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

#if defined(ENABLE_FP16)
static float to_float(FloatX x) { return (float)x; }
static FloatX round_nearest(float x) { return (FloatX)x; }
static FloatX round_seeded(float x, uint32_t random) { return (void)random, (FloatX)x; }
#else
static float to_float(FloatX x) { return bits_float((uint32_t)x << 16); }
static FloatX round_nearest(float x) {
    uint32_t bits = float_bits(x);
    if (isnan(x)) { return 0x7FFF; }
    return (FloatX)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static FloatX round_seeded(float x, uint32_t random) {
    if (!isfinite(x)) { return round_nearest(x); }
    return (FloatX)((float_bits(x) + (random & 0xFFFF)) >> 16);
}
#endif

static uint64_t token_hash(uint64_t h, int token, int position, const FloatX* wte, const FloatX* wpe, int C) {
    FloatX weights[2] = {wte[(size_t)(token < 0 ? 0 : token) * (size_t)C + 1], wpe[(size_t)position * (size_t)C + 1]};
    uint32_t bits = 0;
    if (!setting("FAKE_CUDA_SMOOTH", 0)) { memcpy(&bits, weights, sizeof(bits)); }
    return mix(h, (uint64_t)bits << 32 | (uint32_t)token);
}

// The mean of the first column of wte: NaN or infinite if one of them is.
static float mean_weight(int V) {
    float sum = 0;
    for (int v = 0; v < V; v++) { sum += to_float(card.wte[(size_t)v * (size_t)card.C]); }
    return sum / (float)V;
}

// ---- kernels ------------------------------------------------------------------------------------

typedef struct { // AdamW and StepState of train_gpt2.cu
    float learning_rate, beta1, beta2, eps, weight_decay, clip;
} AdamW;
typedef struct {
    float loss, scaled_norm, norm;
    int applied, num_updates;
    float loss_scale, dloss;
    int good_steps;
    float grad_scale, inverse_bias1, inverse_bias2, saturated;
    AdamW optimizer;
    int is_deferred;
} StepState;

typedef struct { // DeferredUpdate of train_gpt2.cu
    FloatX* params;
    float *master, *m, *v;
    const float* grads;
    StepState* state;
    int matrices, vectors;
    uint32_t seed;
    int first, last, num_workers;
    int* done;
} DeferredUpdate;
enum { ADAMW_CHUNK = 512 };

typedef struct { // of train_gpt2.cu
    FloatX* out;
    const FloatX *left, *right, *add;
    float scale, add_scale;
    int M, N, K, num;
    bool right_by_k;
} NewtonSchulzProduct;

typedef union { // an argument of a kernel
    void* p;
    size_t z;
    int i;
    uint32_t u;
    float f;
    bool b;
    AdamW a;
    DeferredUpdate w;
    NewtonSchulzProduct n;
} Argument;

typedef struct {
    int x, y;    // the grid
    int threads; // per block
    Argument arg[12];
} Launch;

static void run_encoder_forward(const Launch* l) { // out, inp, wte, wpe, B, T, C
    const int* inp = (const int*)l->arg[1].p;
    int B = l->arg[4].i, T = l->arg[5].i;
    card.wte = (const FloatX*)l->arg[2].p;
    card.wpe = (const FloatX*)l->arg[3].p;
    card.C = l->arg[6].i;
    if (B * T != card.B * card.T) {
        free(card.context);
        free(card.pull);
        card.context = (uint64_t*)allocate((size_t)B * (size_t)T, sizeof(uint64_t));
        card.pull = (float*)allocate((size_t)B * (size_t)T, sizeof(float));
    }
    card.B = B, card.T = T;
    for (int b = 0; b < B; b++) {
        uint64_t h = 1;
        for (int t = 0; t < T; t++) {
            h = card.context[b * T + t] = token_hash(h, inp[b * T + t], t, card.wte, card.wpe, card.C);
        }
    }
    card.prefilled = true;
    struct timespec rest = {setting("FAKE_CUDA_SLOW_MS", 0) / 1000, setting("FAKE_CUDA_SLOW_MS", 0) % 1000 * 1000000};
    while (nanosleep(&rest, &rest) != 0) {}
}

// A loss of about 4.5 that falls to 0.5 while the first column of wpe goes to 1.
static void run_fused_classifier(const Launch* l) { // logits, losses, targets, dloss, V, Vp
    const FloatX* logits = (const FloatX*)l->arg[0].p;
    float *losses = (float*)l->arg[1].p, *dloss = (float*)l->arg[3].p;
    const int* targets = (const int*)l->arg[2].p;
    float common = 0.01f * mean_weight(l->arg[4].i) + 0.01f * to_float(logits[0]);
    card.dloss = dloss ? *dloss : 0.0f;
    for (int i = 0; i < l->x; i++) {
        float w = to_float(card.wpe[(size_t)(i % card.T) * (size_t)card.C]);
        float noise = 0.05f * unit(mix(card.context[i], (uint64_t)targets[i]));
        if (setting("FAKE_CUDA_SMOOTH", 0)) { noise += 0.05f * to_float(card.wpe[i % card.T * card.C + 1]); }
        losses[i] = 0.5f + 4.0f * (1.0f - w) * (1.0f - w) + noise + common;
        card.pull[i] = to_float(round_nearest(-8.0f * (1.0f - w) * card.dloss)); // may overflow in fp16
    }
}

static void run_encoder_backward_positions(const Launch* l) { // dwpe, dout, B, T, C
    float* dwpe = (float*)l->arg[0].p;
    int B = l->arg[2].i, T = l->arg[3].i, C = l->arg[4].i;
    for (int i = 0; i < B * T; i++) {
        float* row = dwpe + (size_t)(i % T) * (size_t)C;
        row[0] += card.pull[i];
        for (int c = 1; c < C; c++) { row[c] += 0.1f * card.dloss * (unit(card.context[i] + (uint64_t)c) - 0.5f); }
    }
}

static void run_mean_loss(const Launch* l) { // mean, losses, N, scale
    const float* losses = (const float*)l->arg[1].p;
    float sum = 0;
    for (int i = 0; i < l->arg[2].i; i++) { sum += losses[i]; }
    *(float*)l->arg[0].p += sum * l->arg[3].f;
}

static void run_global_norm(const Launch* l) { // block_sums, grads, n
    float *sums = (float*)l->arg[0].p, *grads = (float*)l->arg[1].p;
    double sum = 0;
    for (size_t i = 0; i < l->arg[2].z; i++) { sum += (double)grads[i] * grads[i]; }
    memset(sums, 0, (size_t)l->x * sizeof(float));
    sums[0] = (float)(sum * (1 + 1e-6 * l->threads)); // stands for an order of the sum
}
static void run_global_norm_finish(const Launch* l) { // norm, block_sums, num_blocks
    const float* sums = (const float*)l->arg[1].p;
    double sum = 0;
    for (int i = 0; i < l->arg[2].i; i++) { sum += sums[i]; }
    *(float*)l->arg[0].p = (float)sqrt(sum);
}

static void run_combine_figures(const Launch* l) { // out, figures, num_ranks, shares
    float *out = (float*)l->arg[0].p, loss = 0, squares = 0;
    const float* figures = (const float*)l->arg[1].p;
    for (int i = 0; i < l->arg[2].i; i++) {
        loss += figures[2 * i];
        squares += figures[2 * i + 1] * figures[2 * i + 1];
    }
    out[0] = loss;
    if (l->arg[3].b) { out[1] = sqrtf(squares); }
}

static float update_loss; // of the step whose update has been prepared

static void run_adamw_prepare(const Launch* l) { // state, optimizer, skip, deferred
    StepState* s = (StepState*)l->arg[0].p;
    const AdamW* o = &l->arg[1].a;
    s->optimizer = *o, s->is_deferred = l->arg[3].b;
    update_loss = s->loss;
    float unscale = 1.0f / s->loss_scale;
    s->norm = s->scaled_norm * unscale;
    s->applied = isfinite(s->loss) && isfinite(s->scaled_norm) && !l->arg[2].b;
    int t = s->num_updates += s->applied;
    s->grad_scale = unscale * (o->clip > 0.0f && s->norm > o->clip ? o->clip / s->norm : 1.0f);
    s->inverse_bias1 = (float)(1.0 / (1.0 - pow((double)o->beta1, (double)t)));
    s->inverse_bias2 = (float)(1.0 / (1.0 - pow((double)o->beta2, (double)t)));
#if defined(ENABLE_FP16)
    bool overflow = isfinite(s->loss) && !isfinite(s->scaled_norm) && s->loss_scale > 1.0f;
    if (overflow) { s->loss_scale *= 0.5f, s->dloss *= 0.5f; }
    s->good_steps = overflow ? 0 : s->good_steps + 1;
#endif
}

static FloatX round_weight(float x, size_t i, uint32_t seed) {
    return seed == 0 ? round_nearest(x) : round_seeded(x, hash_bits((uint32_t)i, seed));
}
static uint32_t update_seed(uint32_t seed, int update) { return seed == 0 ? 0 : hash_bits((uint32_t)update, seed) | 1; }

// Values begin to end of a piece of the parameters, whose arrays these are.
static void update_values(FloatX* params, float* master, float* m, float* v, const float* grads, const StepState* s,
                          size_t begin, size_t end, const AdamW* o, uint32_t seed) {
    size_t place = place_of(params) / sizeof(FloatX);
    seed = update_seed(seed, s->num_updates);
    if (!s->applied) { return; }
    float amplitude = 1e-3f * update_loss * s->loss_scale; // of the gradients that no kernel has computed
    for (size_t i = begin; i < end; i++) {
        float invented = amplitude * ((float)(hash_bits((uint32_t)(place + i), 1) >> 8) * 0x1p-24f - 0.5f);
        float g = (grads[i] + invented) * s->grad_scale;
        float p = master ? master[i] : to_float(params[i]);
        m[i] = o->beta1 * m[i] + (1.0f - o->beta1) * g;
        v[i] = o->beta2 * v[i] + (1.0f - o->beta2) * g * g;
        float direction = m[i] * s->inverse_bias1 / (sqrtf(v[i] * s->inverse_bias2) + o->eps);
        p -= o->learning_rate * (direction + o->weight_decay * p);
        if (master) { master[i] = p; }
        params[i] = round_weight(p, i, seed);
    }
}

static void run_adamw(const Launch* l) { // params, master, m, v, grads, state, n, optimizer, seed
    update_values((FloatX*)l->arg[0].p, (float*)l->arg[1].p, (float*)l->arg[2].p, (float*)l->arg[3].p,
                  (const float*)l->arg[4].p, (const StepState*)l->arg[5].p, 0, l->arg[6].z, &l->arg[7].a, l->arg[8].u);
}

// The products, which the stand-in does not run, have left all of it to this kernel.
static void run_finish_deferred_update(const Launch* l) { // a DeferredUpdate
    const DeferredUpdate* w = &l->arg[0].w;
    int of_matrices = (w->matrices + ADAMW_CHUNK - 1) / ADAMW_CHUNK;
    int of_layer = of_matrices + (w->vectors + ADAMW_CHUNK - 1) / ADAMW_CHUNK;
    for (int chunk = w->first; w->state->is_deferred && chunk < w->last; chunk++) {
        int layer = chunk / of_layer, i = chunk % of_layer;
        bool vectors = i >= of_matrices;
        size_t place = (size_t)layer * (size_t)(w->matrices + w->vectors) + (size_t)(vectors ? w->matrices : 0);
        size_t n = (size_t)(vectors ? w->vectors : w->matrices);
        size_t begin = (size_t)(vectors ? i - of_matrices : i) * ADAMW_CHUNK, end = begin + ADAMW_CHUNK;
        AdamW o = w->state->optimizer;
        if (vectors) { o.weight_decay = 0.0f; }
        uint32_t seed = w->seed == 0 ? 0 : hash_bits((uint32_t)(1 + 2 * layer + vectors), w->seed) | 1;
        update_values(w->params + place, w->master ? w->master + place : NULL, w->m + place, w->v + place,
                      w->grads + place, w->state, begin, end < n ? end : n, &o, seed);
    }
}

static void run_adamw_round(const Launch* l) { // params, master, n, seed, update
    FloatX* params = (FloatX*)l->arg[0].p;
    const float* master = (const float*)l->arg[1].p;
    uint32_t seed = update_seed(l->arg[3].u, l->arg[4].i);
    for (size_t i = 0; i < l->arg[2].z; i++) { params[i] = round_weight(master[i], i, seed); }
}

static void run_muon_momentum(const Launch* l) { // m, parts, grads, state, size, momentum
    float* m = (float*)l->arg[0].p;
    const float* grads = (const float*)l->arg[2].p;
    const StepState* s = (const StepState*)l->arg[3].p;
    float amplitude = 1e-3f * s->loss * s->loss_scale; // as in run_adamw, but the same for all layers
    for (size_t i = 0; s->applied && i < (size_t)l->y * l->arg[4].z; i++) {
        float invented = amplitude * ((float)(hash_bits((uint32_t)i, (uint32_t)l->y) >> 8) * 0x1p-24f - 0.5f);
        m[i] = l->arg[5].f * m[i] + (grads[i] + invented) * s->grad_scale;
    }
}
// x = m divided by its norm. Nothing is transposed, neither here nor in run_muon_apply.
static void run_muon_scale(const Launch* l) { // x, m, grads, parts, state, rows, cols, momentum
    size_t size = (size_t)l->arg[5].i * (size_t)l->arg[6].i;
    if (!((const StepState*)l->arg[4].p)->applied) { return; }
    for (int matrix = 0; matrix < l->y; matrix++) {
        FloatX* x = (FloatX*)l->arg[0].p + (size_t)matrix * size;
        const float* m = (const float*)l->arg[1].p + (size_t)matrix * size;
        double squares = 0;
        for (size_t i = 0; i < size; i++) { squares += (double)m[i] * m[i]; }
        for (size_t i = 0; i < size; i++) { x[i] = round_nearest((float)(m[i] / (sqrt(squares) + 1e-7))); }
    }
}
// The last product of a step of newton_schulz: the step changes nothing.
static void run_newton_schulz(const Launch* l) {
    const NewtonSchulzProduct* p = &l->arg[0].n;
    memcpy(p->out, p->add, (size_t)p->num * (size_t)p->M * (size_t)p->N * sizeof(FloatX));
}

static void run_muon_apply(const Launch* l) {
    // params, master, o, state, rows, cols, learning_rate, weight_decay, seed, first
    FloatX* params = (FloatX*)l->arg[0].p;
    float* master = (float*)l->arg[1].p;
    const FloatX* o = (const FloatX*)l->arg[2].p;
    const StepState* s = (const StepState*)l->arg[3].p;
    float learning_rate = l->arg[6].f, keep = 1.0f - learning_rate * l->arg[7].f;
    uint32_t seed = update_seed(l->arg[8].u, s->num_updates);
    for (size_t i = 0; s->applied && i < (size_t)l->y * (size_t)l->arg[4].i * (size_t)l->arg[5].i; i++) {
        float p = master ? master[i] : to_float(params[i]);
        p = keep * p - learning_rate * to_float(o[i]);
        if (master) { master[i] = p; }
        params[i] = round_weight(p, l->arg[9].z + i, seed);
    }
}

// The text whose newest token this is. Memory that was freed and allocated again may have the state of an older text, which
// the next prompt overwrites.
static Text* text_of(const int* token) {
    for (int i = 0; i < card.num_texts; i++) {
        if (card.text[i].token == token) { return &card.text[i]; }
    }
    if (card.num_texts == MAX_TEXTS) { card.num_texts = 0; }
    Text* text = &card.text[card.num_texts++];
    memset(text, 0, sizeof(*text));
    text->token = token;
    return text;
}

static void run_decode_embed(const Launch* l) { // x, tokens, positions, wte, wpe, C
    const int *tokens = (const int*)l->arg[1].p, *positions = (const int*)l->arg[2].p;
    for (int b = 0; b < l->y; b++) {
        const FloatX *wte = (const FloatX*)l->arg[3].p, *wpe = (const FloatX*)l->arg[4].p;
        Text* text = text_of(&tokens[b]);
        if (positions[b] >= 0) { text->hash = token_hash(text->hash, tokens[b], positions[b], wte, wpe, l->arg[5].i); }
    }
}

// The tokens of the text are marked, so that choose_token() passes over them.
static void run_decode_sample_penalize(const Launch* l) { // seen, logits, tokens, penalty, V, Vp
    uint32_t* seen = (uint32_t*)l->arg[0].p;
    const int *tokens = (const int*)l->arg[2].p, words = (l->arg[4].i + 31) / 32;
    for (int b = 0; b < l->y; b++, seen += words) {
        if (tokens[b] >= 0) { seen[tokens[b] / 32] |= 1u << (tokens[b] % 32); }
        text_of(&tokens[b])->seen = seen;
    }
}

// rank 0: the most likely token of the text whose newest token this is, text b of the newest pass. The others are told from it
// and from each other, and no more.
static int choose_token(const int* newest, int b, int position, int V, uint64_t rank) {
    Text* text = text_of(newest);
    if (card.prefilled) {
        if (b >= card.B || position < 0 || position >= card.T) { misuse("text %d has no position %d", b, position); }
        text->hash = card.context[b * card.T + position];
    }
    if (!isfinite(mean_weight(V))) { return -1; }
    for (int tries = 0;; tries++, rank++) {
        int token = (int)(mix(text->hash, rank) % (uint64_t)V);
        if (!text->seen || tries == 1000 || !(text->seen[token / 32] >> (token % 32) & 1)) {
            text->seen = NULL;
            return token;
        }
    }
}
static void run_decode_sample_greedy(const Launch* l) { // tokens, copy, positions, best, arrived, logits, V, Vp
    int *tokens = (int*)l->arg[0].p, *copy = (int*)l->arg[1].p, *positions = (int*)l->arg[2].p;
    for (int b = 0; b < l->y; b++) {
        tokens[b] = copy[b] = choose_token(&tokens[b], b, positions[b], l->arg[6].i, 0);
        positions[b] += positions[b] >= 0;
    }
    card.prefilled = false;
}
// tokens, copy, positions, logits, rng_state, temperature, top_k, top_p, min_p, V, Vp
static void run_decode_sample(const Launch* l) {
    int *tokens = (int*)l->arg[0].p, *copy = (int*)l->arg[1].p, *positions = (int*)l->arg[2].p;
    uint64_t* rng = (uint64_t*)l->arg[4].p;
    for (int b = 0; b < l->x; b++) {
        uint64_t x = rng[b] ? rng[b] : 0x9e3779b97f4a7c15ull, top_k = (uint64_t)l->arg[6].i;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        rng[b] = x;
        if (l->arg[8].f == 1.0f) { top_k = 1; } // min-p
        tokens[b] = choose_token(&tokens[b], b, positions[b], l->arg[9].i, top_k ? (x >> 8) % top_k : x >> 8);
        copy[b] = tokens[b];
        positions[b] += positions[b] >= 0;
    }
    card.prefilled = false;
}

// The kernels that do something. types: the mangled types of the arguments, which must not change without a change here;
// sizes: one letter for each argument, see Argument.
typedef struct {
    const char *name, *types, *sizes;
    void (*run)(const Launch*);
} Emulation;
static const Emulation emulations[] = {
    {"encoder_forward_kernel", "P" FLOATX "PKiPKS_S4_iii", "ppppiii", run_encoder_forward},
    {"encoder_backward_positions_kernel", "PfPK" FLOATX "iii", "ppiii", run_encoder_backward_positions},
    {"fused_classifier_kernel", "P" FLOATX "PfPKiPKfii", "ppppii", run_fused_classifier},
    {"mean_loss_kernel", "PfPKfif", "ppif", run_mean_loss},
    {"global_norm_kernel", "PfPKfm", "ppz", run_global_norm},
    {"global_norm_finish_kernel", "PfPKfi", "ppi", run_global_norm_finish},
    {"combine_figures_kernel", "PfPKfib", "ppib", run_combine_figures},
    {"adamw_prepare_kernel", "P9StepState5AdamWbb", "pabb", run_adamw_prepare},
    {"finish_deferred_update_kernel", "DeferredUpdate", "w", run_finish_deferred_update},
    {"adamw_kernel", "P" FLOATX "PfS1_S1_PKfPK9StepStatem5AdamWj", "ppppppzau", run_adamw},
    {"adamw_round_kernel", "P" FLOATX "PKfmji", "ppzui", run_adamw_round},
    {"muon_momentum_kernel", "PfS_PKfPK9StepStatemf", "ppppzf", run_muon_momentum},
    {"muon_scale_kernel", "P" FLOATX "PKfS2_S2_PK9StepStateiif", "pppppiif", run_muon_scale},
    {"newton_schulz_kernel4ILb1ELi4EEv", "NewtonSchulzProduct", "n", run_newton_schulz}, // <true, 4>
    {"muon_apply_kernel", "P" FLOATX "PfPKS_PK9StepStateiiffjm", "ppppiiffuz", run_muon_apply},
    {"decode_embed_kernel", "P" FLOATX "PKiS2_PKS_S4_i", "pppppi", run_decode_embed},
    {"decode_sample_greedy_kernel", "PiS_S_PmS_PKfii", "ppppppii", run_decode_sample_greedy},
    {"decode_sample_kernel", "PiS_S_PKfPmfiffii", "pppppfiffii", run_decode_sample},
    {"decode_sample_penalize_kernel", "PjPfPKifii", "pppfii", run_decode_sample_penalize},
};

typedef struct {
    const void* host;           // the address by which the program calls it
    char* name;                 // mangled
    const Emulation* emulation; // NULL: does nothing
    uint64_t block_sizes;       // bit i: it was launched with 32 * (i + 1) threads per block
} Kernel;
enum { MAX_KERNELS = 1024 };
static Kernel kernels[MAX_KERNELS];
static int num_kernels;

static const Emulation* emulation_of(const char* name) {
    for (size_t i = 0; i < sizeof(emulations) / sizeof(emulations[0]); i++) {
        const Emulation* e = &emulations[i];
        char pattern[256];
        snprintf(pattern, sizeof(pattern), "_Z[0-9][0-9]%s*", e->name);
        if (fnmatch(pattern, name, 0) != 0) { continue; }
        const char* types = name + 4 + strlen(e->name);
        types += strspn(types, "0123456789"); // the number of the kernel
        if (strcmp(types, e->types) != 0) {
            misuse("%s has other arguments than %s: dev/test/stand-ins/fake_cuda.c emulates it", name, e->types);
        }
        return e;
    }
    return NULL;
}

void __cudaRegisterFunction(void** module, const char* host, char* device, const char* name, int limit, void* thread,
                            void* block, void* block_size, void* grid_size, int* warp) {
    (void)module, (void)device, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
    if (num_kernels == MAX_KERNELS) { misuse("too many kernels"); }
    Kernel k = {host, strdup(name), emulation_of(name), 0};
    kernels[num_kernels++] = k;
}
// Variables in device memory: only kernels that do not run here use any.
void __cudaRegisterVar(void** module, char* host, char* device, const char* name, int external, size_t size,
                       int constant, int global) {
    (void)module, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
void** __cudaRegisterFatBinary(void* binary) {
    (void)binary;
    return (void**)allocate(1, sizeof(void*));
}
void __cudaRegisterFatBinaryEnd(void** module) { (void)module; }
void __cudaUnregisterFatBinary(void** module) { free(module); }
char __cudaInitModule(void** module) { return (void)module, 1; }

static Kernel* find_kernel(const void* host, const char* function) {
    for (int i = 0; i < num_kernels; i++) {
        if (kernels[i].host == host) { return &kernels[i]; }
    }
    misuse("%s: not a kernel", function);
}

// ---- the queue ----------------------------------------------------------------------------------

typedef struct {
    Handle handle;
    bool recorded, done;
    long number;           // of the newest record
    double ms;             // the time when it was run
    struct Graph* capture; // in which it was recorded, or NULL
    struct Stream* stream; // of that record, and the work
    long work;             // that it covers
} Event;

// Something that a stream does.
typedef struct {
    enum { KERNEL, MATMUL, FILL, COPY, RECORD, HOST } what;
    const Emulation* emulation;
    Launch launch;
    void* out; // of MATMUL, FILL and COPY
    const void* inp;
    void* staged; // a copy of inp, which the host may change; freed when it has been run
    size_t bytes;
    float value, beta; // of MATMUL
    cudaDataType_t type;
    int fill;
    Event* event;
    long number;
    cudaHostFn_t function; // of HOST
    void* data;
    double ms; // how long it takes
} Task;

typedef struct Graph {
    Handle handle;
    Task* tasks;
    int count, capacity;
} Graph;

typedef struct Stream {
    Handle handle;
    Graph* capture;    // being captured, or NULL
    bool began;        // by cudaStreamBeginCapture(); else it has joined another stream's capture
    long work, joined; // of a stream that has joined: what was put on it, and what the others wait for
    bool after_event;  // the newest node of its capture is an external event
    struct Stream* next;
} Stream;
static Stream* streams; // all of them

static Graph queue; // of all streams: they are ordered with the default stream, and so with each other
static int queue_next;
static double now_ms;
static int num_captures;

static void append(Graph* g, const Task* task) {
    if (g->count == g->capacity) {
        g->capacity = g->capacity ? 2 * g->capacity : 64;
        g->tasks = (Task*)realloc(g->tasks, (size_t)g->capacity * sizeof(Task));
        if (!g->tasks) { misuse("out of memory on the host"); }
    }
    g->tasks[g->count++] = *task;
}

static Stream* stream_check(cudaStream_t stream, const char* function) {
    return stream ? (Stream*)handle_check(stream, STREAM, function) : NULL;
}

static void run_matmul(const Task* t) {
    float* f = (float*)t->out;
    FloatX* x = (FloatX*)t->out;
    if (t->type == CUDA_R_32F) {
        f[0] = t->value * (1.0f + unit(place_of(f))) + (t->beta != 0.0f ? t->beta * *(const float*)t->inp : 0.0f);
    } else {
        x[0] = round_nearest(t->value + (t->beta != 0.0f ? t->beta * to_float(*(const FloatX*)t->inp) : 0.0f));
    }
}

static void run_task(Task* t) {
    now_ms += t->ms;
    switch (t->what) {
    case KERNEL:
        t->emulation->run(&t->launch);
        break;
    case MATMUL:
        run_matmul(t);
        break;
    case FILL:
        if (t->bytes < NOT_COPIED) { memset(t->out, t->fill, t->bytes); }
        break;
    case COPY:
        if (t->bytes < NOT_COPIED) { memcpy(t->out, t->staged ? t->staged : t->inp, t->bytes); }
        free(t->staged);
        break;
    case RECORD:
        if (t->event->number != t->number) { break; } // recorded again since
        t->event->done = true;
        t->event->ms = now_ms;
        break;
    case HOST:
        in_host_function = true;
        t->function(t->data);
        in_host_function = false;
        break;
    }
}

// Runs the queue up to and with the newest record of `until`; all of it if that is NULL.
static void run_queue(const Event* until) {
    while (queue_next < queue.count && !(until && until->done)) { run_task(&queue.tasks[queue_next++]); }
    if (queue_next == queue.count) { queue.count = queue_next = 0; }
    if (queue_next > 4096) { // drops what has been run
        memmove(queue.tasks, queue.tasks + queue_next, (size_t)(queue.count - queue_next) * sizeof(Task));
        queue.count -= queue_next, queue_next = 0;
    }
}

static void put(cudaStream_t stream, const Task* task, const char* function) {
    Stream* s = stream_check(stream, function);
    if (s && s->capture && task->staged) { misuse("%s: cannot be captured here", function); }
    if (s && s->capture) { s->work++; }
    if (s) { s->after_event = false; }
    append(s && s->capture ? s->capture : &queue, task);
    if (setting("FAKE_CUDA_EAGER", 0) && num_captures == 0) { run_queue(NULL); }
}

// For calls that wait for the card, or may do so: they are not allowed during a capture.
#define WAITS()                                                                                                        \
    do {                                                                                                               \
        if (num_captures > 0) { return fails(cudaErrorStreamCaptureUnsupported); }                                     \
    } while (0)

// ---- memory, continued --------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all_bytes) {
    CALLED();
    *all_bytes = card_bytes();
    *free_bytes = *all_bytes > device_bytes ? *all_bytes - device_bytes : 0;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
    CALLED();
    WAITS();
    if (bytes > card_bytes() || device_bytes > card_bytes() - bytes) { return fails(cudaErrorMemoryAllocation); }
    if (posix_memalign(p, 512, bytes ? bytes : 1) != 0) { return fails(cudaErrorMemoryAllocation); }
    if (bytes < (size_t)16 << 20) { memset(*p, 0xA5, bytes); }
    device_bytes += bytes;
    range_add(DEVICE_MEMORY, *p, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    CALLED();
    WAITS();
    run_queue(NULL);
    if (!p) { return cudaSuccess; }
    device_bytes -= range_remove(DEVICE_MEMORY, p, __func__);
    free(p);
    return cudaSuccess;
}

static cudaError_t allocate_pinned(void** p, size_t bytes) {
    WAITS();
    *p = allocate(bytes, 1);
    range_add(PINNED, *p, bytes);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) {
    CALLED();
    return allocate_pinned(p, bytes);
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags) {
    CALLED();
    (void)flags;
    return allocate_pinned(p, bytes);
}
cudaError_t cudaFreeHost(void* p) {
    CALLED();
    WAITS();
    run_queue(NULL);
    if (!p) { return cudaSuccess; }
    const Range* r = range_of(p, 1);
    if (!r || r->kind != PINNED) { return fails(cudaErrorInvalidValue); }
    range_remove(PINNED, p, __func__);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
    CALLED();
    WAITS();
    (void)flags;
    if (range_of(p, 1)) { return fails(cudaErrorHostMemoryAlreadyRegistered); }
    range_add(REGISTERED, p, bytes);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
    CALLED();
    WAITS();
    run_queue(NULL);
    for (int i = 0; i < num_ranges; i++) {
        if (ranges[i].kind != REGISTERED || ranges[i].begin != p) { continue; }
        range_remove(REGISTERED, p, __func__);
        return cudaSuccess;
    }
    return fails(cudaErrorHostMemoryNotRegistered);
}

static double copy_ms(size_t bytes) { return 0.001 + (double)bytes * 1e-9; } // 1 TB/s

static void check_copy(const void* out, const void* inp, size_t bytes, enum cudaMemcpyKind kind, const char* function) {
    bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (is_device(out, bytes) != to || is_device(inp, bytes) != from) {
        misuse("%s: %zu bytes from %p to %p are not a copy of kind %d", function, bytes, inp, out, (int)kind);
    }
}

cudaError_t cudaMemcpy(void* out, const void* inp, size_t bytes, enum cudaMemcpyKind kind) {
    CALLED();
    WAITS();
    check_copy(out, inp, bytes, kind, __func__);
    run_queue(NULL);
    now_ms += copy_ms(bytes);
    memcpy(out, inp, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* out, const void* inp, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    CALLED();
    check_copy(out, inp, bytes, kind, __func__);
    Task task = {.what = COPY, .out = out, .inp = inp, .bytes = bytes, .ms = copy_ms(bytes)};
    if (kind == cudaMemcpyHostToDevice && !range_of(inp, bytes)) { // from pageable memory: copied before it returns
        task.staged = allocate(bytes, 1);
        memcpy(task.staged, inp, bytes);
    }
    put(stream, &task, __func__);
    if (kind == cudaMemcpyDeviceToHost && !range_of(out, bytes)) { // to pageable memory: returns when it is done
        WAITS();
        run_queue(NULL);
    }
    return cudaSuccess;
}

static void check_fill(const void* out, size_t bytes, const char* function) {
    if (!is_device(out, bytes)) { misuse("%s: %zu bytes at %p are not device memory", function, bytes, out); }
}
cudaError_t cudaMemset(void* out, int value, size_t bytes) {
    CALLED();
    WAITS();
    check_fill(out, bytes, __func__);
    Task task = {.what = FILL, .out = out, .fill = value, .bytes = bytes, .ms = copy_ms(bytes)};
    put(NULL, &task, __func__);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* out, int value, size_t bytes, cudaStream_t stream) {
    CALLED();
    check_fill(out, bytes, __func__);
    Task task = {.what = FILL, .out = out, .fill = value, .bytes = bytes, .ms = copy_ms(bytes)};
    put(stream, &task, __func__);
    return cudaSuccess;
}

// ---- the device ---------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
    CALLED();
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = visible && !visible[0] ? 0 : (int)setting("FAKE_CUDA_DEVICES", 1);
    return *count ? cudaSuccess : fails(cudaErrorNoDevice);
}
cudaError_t cudaDriverGetVersion(int* version) {
    CALLED();
    *version = CUDART_VERSION;
    return cudaSuccess;
}
static int current_device;
cudaError_t cudaSetDevice(int device) {
    CALLED();
    if (device < 0 || device >= setting("FAKE_CUDA_DEVICES", 1)) { return fails(cudaErrorInvalidDevice); }
    if (device != current_device && device_bytes > 0) { misuse("%s: a process uses one card here", __func__); }
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    CALLED();
    *device = current_device;
    return cudaSuccess;
}
// Card 0 is at 0000:3b:00.0, the others follow.
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
    CALLED();
    if (device < 0 || device >= setting("FAKE_CUDA_DEVICES", 1) || size < 13) { return fails(cudaErrorInvalidValue); }
    snprintf(id, (size_t)size, "0000:%02X:00.0", 0x3B + device);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    CALLED();
    WAITS();
    run_queue(NULL);
    return cudaSuccess;
}
static int arch(void) { return (int)setting("FAKE_CUDA_ARCH", 80); }
static bool is_hopper(void) { return arch() == 90; }
static int max_shared_bytes(void) { return (is_hopper() ? 227 : 163) << 10; }
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    CALLED();
    (void)device;
    switch (attribute) { // an invented card
    case cudaDevAttrComputeCapabilityMajor:
        *value = arch() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = arch() % 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = is_hopper() ? 132 : 16;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = max_shared_bytes();
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = max_shared_bytes() + 1024;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        break;
    case cudaDevAttrL2CacheSize:
        *value = 40 << 20;
        break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
        *value = 1000000; // kHz
        break;
    default:
        misuse("%s: attribute %d is not known here", __func__, (int)attribute);
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
    CALLED();
    (void)device;
    const char* name = getenv("FAKE_CUDA_NAME");
    memset(properties, 0, sizeof(*properties));
    snprintf(properties->name, sizeof(properties->name), "%s", name ? name : "Fake GPU");
    properties->major = arch() / 10;
    properties->minor = arch() % 10;
    properties->multiProcessorCount = is_hopper() ? 132 : 16;
    properties->totalGlobalMem = card_bytes();
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* kernel) {
    CALLED();
    bool is_mark = strstr(find_kernel(kernel, __func__)->name, "ptx_sm90a_kernel") != NULL; // see has_sm90a()
    memset(attributes, 0, sizeof(*attributes));
    attributes->ptxVersion = attributes->binaryVersion = arch();
    attributes->maxThreadsPerBlock = is_mark && is_hopper() ? 32 : 1024;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, enum cudaFuncAttribute attribute, int value) {
    CALLED();
    find_kernel(kernel, __func__);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > max_shared_bytes()) {
        return fails(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int block_size,
                                                                   size_t shared, unsigned flags) {
    CALLED();
    (void)block_size, (void)shared, (void)flags;
    find_kernel(kernel, __func__);
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int block_size,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, block_size, shared, 0);
}
// None: a kernel whose blocks wait for each other does not run here.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const cudaLaunchConfig_t* config) {
    CALLED();
    (void)config;
    find_kernel(kernel, __func__);
    *clusters = 0;
    return cudaSuccess;
}
// For TMA. The one that an H100 has does nothing: no kernel that uses it runs here.
static int encode_nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* result) {
    CALLED();
    (void)name, (void)version, (void)flags;
    *function = is_hopper() ? (void*)encode_nothing : NULL;
    *result = is_hopper() ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---- streams, events, graphs --------------------------------------------------------------------

static cudaStream_t new_stream(void) {
    Stream* s = (Stream*)handle_new(STREAM, sizeof(Stream));
    s->next = streams;
    streams = s;
    return (cudaStream_t)s;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    CALLED();
    *stream = new_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    CALLED();
    (void)flags;
    *stream = new_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    CALLED();
    (void)flags, (void)priority;
    *stream = new_stream();
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    CALLED();
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    CALLED();
    run_queue(NULL);
    handle_free(stream, STREAM, __func__);
    for (Stream** s = &streams; *s; s = &(*s)->next) {
        if (*s == (Stream*)stream) {
            *s = (*s)->next;
            break;
        }
    }
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CALLED();
    WAITS();
    stream_check(stream, __func__);
    run_queue(NULL);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
    CALLED();
    const Stream* s = stream_check(stream, __func__);
    *status = s && s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    CALLED();
    (void)mode;
    Stream* s = stream_check(stream, __func__);
    if (!s || s->capture) { misuse("%s: the default stream, or captured already", __func__); }
    s->capture = (Graph*)handle_new(GRAPH, sizeof(Graph));
    s->began = true;
    num_captures++;
    struct timespec rest = {setting("FAKE_CUDA_SLOW_MS", 0) / 1000, setting("FAKE_CUDA_SLOW_MS", 0) % 1000 * 1000000};
    while (nanosleep(&rest, &rest) != 0) {}
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    CALLED();
    Stream* s = stream_check(stream, __func__);
    if (!s || !s->capture || !s->began) { misuse("%s: not captured", __func__); }
    Graph* g = s->capture;
    cudaError_t e = cudaSuccess;
    for (Stream* other = streams; other; other = other->next) {
        if (other->capture != g) { continue; }
        if (!other->began && other->work > other->joined) { e = cudaErrorStreamCaptureUnjoined; }
        other->capture = NULL;
        other->began = false;
    }
    num_captures--;
    *graph = (cudaGraph_t)g;
    return fails(e);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
    CALLED();
    (void)flags;
    const Graph* g = (const Graph*)handle_check(graph, GRAPH, __func__);
    Graph* copy = (Graph*)handle_new(GRAPH_EXEC, sizeof(Graph));
    for (int i = 0; i < g->count; i++) { append(copy, &g->tasks[i]); }
    *exec = (cudaGraphExec_t)copy;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    CALLED();
    const Graph* g = (const Graph*)handle_check(exec, GRAPH_EXEC, __func__);
    for (int i = 0; i < g->count; i++) { put(stream, &g->tasks[i], __func__); }
    return cudaSuccess;
}
// Tells the number of nodes, and no more.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes) {
    CALLED();
    if (nodes) { misuse("%s: only the number of nodes is known", __func__); }
    *num_nodes = (size_t)((const Graph*)handle_check(graph, GRAPH, __func__))->count;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    CALLED();
    handle_free(graph, GRAPH, __func__);
    free(((Graph*)graph)->tasks);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    CALLED();
    handle_free(exec, GRAPH_EXEC, __func__);
    free(((Graph*)exec)->tasks);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    CALLED();
    (void)flags;
    *event = (cudaEvent_t)handle_new(EVENT, sizeof(Event));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
    CALLED();
    *event = (cudaEvent_t)handle_new(EVENT, sizeof(Event));
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    CALLED();
    handle_free(event, EVENT, __func__);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALLED();
    Event* e = (Event*)handle_check(event, EVENT, __func__);
    Stream* s = stream_check(stream, __func__);
    e->capture = s ? s->capture : NULL;
    if (e->capture) { // a dependency in the graph, and nothing that the host could wait for
        e->recorded = false;
        e->stream = s;
        e->work = s->work;
        return cudaSuccess;
    }
    e->recorded = true;
    e->done = false;
    Task task = {.what = RECORD, .event = e, .number = ++e->number};
    put(stream, &task, __func__);
    return cudaSuccess;
}
// External events become nodes of the graph: nothing is to be done for them here, because the queue has one order for all
// streams. So a wait that is missing is not noticed.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    Stream* s = stream_check(stream, __func__);
    if (flags == cudaEventRecordDefault) { return cudaEventRecord(event, stream); }
    CALLED();
    handle_check(event, EVENT, __func__);
    if (flags != cudaEventRecordExternal || !s || !s->capture) {
        misuse("%s: flags %u outside of a capture", __func__, flags);
    }
    s->after_event = true;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    CALLED();
    const Event* e = (const Event*)handle_check(event, EVENT, __func__);
    Stream* s = stream_check(stream, __func__);
    if (flags == cudaEventWaitExternal) {
        if (!s || !s->capture) { misuse("%s: flags %u outside of a capture", __func__, flags); }
        s->after_event = true;
        return cudaSuccess;
    }
    if (!e->capture) { return s && s->capture && e->recorded ? fails(cudaErrorStreamCaptureIsolation) : cudaSuccess; }
    if (!s || (s->capture && s->capture != e->capture) || e->stream->capture != e->capture) {
        misuse("%s: the event is of another capture, or of one that has ended", __func__);
    }
    if (s->capture) {
        e->stream->joined = e->work;
    } else {
        s->capture = e->capture;
        s->work = s->joined = 0;
    }
    return cudaSuccess;
}
// The thread that uses the card runs a task of the queue while it asks; a watchdog only looks.
static void run_a_task(void) {
    if (gettid() == getpid() && queue_next < queue.count) { run_task(&queue.tasks[queue_next++]); }
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    CALLED();
    const Event* e = (const Event*)handle_check(event, EVENT, __func__);
    bool done = !e->recorded || e->done;
    if (!done) { run_a_task(); }
    return done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CALLED();
    WAITS();
    stream_check(stream, __func__);
    bool done = queue_next == queue.count;
    if (!done) { run_a_task(); }
    return done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    CALLED();
    WAITS();
    const Event* e = (const Event*)handle_check(event, EVENT, __func__);
    if (e->capture) { misuse("%s: the event was recorded in a capture", __func__); }
    if (e->recorded) { run_queue(e); }
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    CALLED();
    const Event* a = (const Event*)handle_check(begin, EVENT, __func__);
    const Event* b = (const Event*)handle_check(end, EVENT, __func__);
    if (!a->done || !b->done) { return fails(cudaErrorNotReady); }
    *ms = (float)(b->ms - a->ms);
    return cudaSuccess;
}

// ---- launches -----------------------------------------------------------------------------------

static size_t argument_size(char letter) {
    switch (letter) {
    case 'p':
        return sizeof(void*);
    case 'z':
        return sizeof(size_t);
    case 'b':
        return sizeof(bool);
    case 'a':
        return sizeof(AdamW);
    case 'w':
        return sizeof(DeferredUpdate);
    case 'n':
        return sizeof(NewtonSchulzProduct);
    default:
        return 4;
    }
}

static cudaError_t launch(const void* host, dim3 grid, dim3 block, void** args, cudaStream_t stream,
                          const char* function) {
    Kernel* k = find_kernel(host, function);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
        return fails(cudaErrorInvalidValue);
    }
    unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024) { return fails(cudaErrorInvalidValue); }
    k->block_sizes |= 1ull << (threads - 1) / 32;
    now_ms += 0.002;
    if (!k->emulation) {
        Stream* s = stream_check(stream, function);
        if (s && s->capture) { s->work++; }
        if (s) { s->after_event = false; }
        return cudaSuccess;
    }
    Task task = {.what = KERNEL, .emulation = k->emulation, .launch = {.x = (int)grid.x, .y = (int)grid.y}};
    task.launch.threads = (int)threads;
    for (size_t i = 0; k->emulation->sizes[i]; i++) {
        memcpy(&task.launch.arg[i], args[i], argument_size(k->emulation->sizes[i]));
    }
    put(stream, &task, function);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    CALLED();
    Task task = {.what = HOST, .function = function, .data = data};
    put(stream, &task, __func__);
    return cudaSuccess;
}

static struct {
    dim3 grid, block;
    size_t shared;
    void* stream;
} configuration; // of a <<<>>>

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void**)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = (cudaKernel_t)(uintptr_t)host;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
    CALLED();
    (void)shared;
    return launch(host, grid, block, args, stream, __func__);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel((const void*)kernel, grid, block, args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** args) {
    CALLED();
    if (config->numAttrs > 0 && !is_hopper()) { misuse("%s: launch attributes need compute capability 9.0", __func__); }
    const Stream* s = stream_check(config->stream, __func__);
    for (unsigned i = 0; s && s->after_event && i < config->numAttrs; i++) {
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
            config->attrs[i].val.programmaticStreamSerializationAllowed) {
            misuse("%s: a programmatic launch after an external event, for which a graph has no edge", __func__);
        }
    }
    return launch(host, config->gridDim, config->blockDim, args, config->stream, __func__);
}

// ---- counts -------------------------------------------------------------------------------------

__attribute__((destructor)) static void write_counts(void) {
    const char* path = getenv("FAKE_CUDA_COUNT");
    FILE* f = path ? fopen(path, "w") : NULL;
    if (!f) { return; }
    fprintf(f, "calls any %ld\n", all_calls);
    for (int i = 0; i < num_functions; i++) { fprintf(f, "calls %s %ld\n", functions[i].name, functions[i].calls); }
    for (int i = 0; i < NUM_KINDS; i++) { fprintf(f, "left %s %ld\n", kind_names[i], num_live[i]); }
    for (int i = 0; i < num_kernels; i++) {
        char* name; // after _Z and its own length
        long length = strtol(kernels[i].name + 2, &name, 10);
        for (int j = 0; j < 32; j++) {
            if (kernels[i].block_sizes >> j & 1) { fprintf(f, "block %.*s %d\n", (int)length, name, 32 * (j + 1)); }
        }
    }
    fclose(f);
}

// ---- cuBLASLt -----------------------------------------------------------------------------------

typedef struct {
    Handle handle;
    cudaDataType_t type; // of a layout
} Descriptor;

enum { NUM_PROPOSALS = 3 };

static cublasStatus_t cublas_called(const char* name) { return (cublasStatus_t)failure_of(name, count_call(name)); }
#define CUBLAS_CALLED()                                                                                                \
    do {                                                                                                               \
        cublasStatus_t status_ = cublas_called(__func__);                                                              \
        if (status_ != CUBLAS_STATUS_SUCCESS) { return status_; }                                                      \
    } while (0)

size_t cublasLtGetVersion(void) { return 1; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    CUBLAS_CALLED();
    if (lasting_error) { return CUBLAS_STATUS_NOT_INITIALIZED; }
    *handle = (cublasLtHandle_t)handle_new(CUBLASLT, sizeof(Descriptor));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    CUBLAS_CALLED();
    handle_free(handle, CUBLASLT, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute, cudaDataType_t scale) {
    CUBLAS_CALLED();
    (void)compute, (void)scale;
    *d = (cublasLtMatmulDesc_t)handle_new(DESCRIPTOR, sizeof(Descriptor));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    CUBLAS_CALLED();
    handle_free(d, DESCRIPTOR, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    CUBLAS_CALLED();
    (void)attribute, (void)value, (void)bytes;
    handle_check(d, DESCRIPTOR, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
    CUBLAS_CALLED();
    *p = (cublasLtMatmulPreference_t)handle_new(DESCRIPTOR, sizeof(Descriptor));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    CUBLAS_CALLED();
    handle_free(p, DESCRIPTOR, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    CUBLAS_CALLED();
    (void)attribute, (void)value, (void)bytes;
    handle_check(p, DESCRIPTOR, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
    CUBLAS_CALLED();
    (void)rows, (void)columns, (void)stride;
    Descriptor* d = (Descriptor*)handle_new(DESCRIPTOR, sizeof(Descriptor));
    d->type = type;
    *layout = (cublasLtMatrixLayout_t)d;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    CUBLAS_CALLED();
    handle_free(layout, DESCRIPTOR, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int max,
                                              cublasLtMatmulHeuristicResult_t results[], int* n) {
    CUBLAS_CALLED();
    handle_check(handle, CUBLASLT, __func__);
    handle_check(product, DESCRIPTOR, __func__);
    (void)a, (void)b, (void)c, (void)d, (void)preference;
    *n = max < NUM_PROPOSALS ? max : NUM_PROPOSALS;
    for (int i = 0; i < *n; i++) {
        memset(&results[i], 0, sizeof(results[i]));
        results[i].algo.data[0] = (uint64_t)i;
    }
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
    CUBLAS_CALLED();
    handle_check(handle, CUBLASLT, __func__);
    handle_check(product, DESCRIPTOR, __func__);
    (void)a, (void)b, (void)c, (void)d;
    memset(result, 0, sizeof(*result));
    return algorithm->data[0] < NUM_PROPOSALS ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

// Writes the first number of the result only, which tells the algorithms apart.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    CUBLAS_CALLED();
    all_calls++;
    if (!lasting_error) { fails((cudaError_t)failure_of("any", all_calls)); }
    if (lasting_error) { return CUBLAS_STATUS_EXECUTION_FAILED; }
    handle_check(handle, CUBLASLT, __func__);
    handle_check(product, DESCRIPTOR, __func__);
    handle_check(a_layout, DESCRIPTOR, __func__);
    handle_check(b_layout, DESCRIPTOR, __func__);
    handle_check(c_layout, DESCRIPTOR, __func__);
    if (!is_device(a, 1) || !is_device(b, 1) || !is_device(c, 1) || !is_device(d, 1)) {
        misuse("%s: an operand is not in device memory", __func__);
    }
    if (workspace_bytes > 0 && !is_device(workspace, workspace_bytes)) { misuse("%s: no workspace", __func__); }
    if (algorithm->data[0] >= NUM_PROPOSALS) { return CUBLAS_STATUS_INVALID_VALUE; }
    bool fastest = (long)algorithm->data[0] == setting("FAKE_CUDA_FASTEST", 1);
    Task task = {.what = MATMUL, .out = d, .inp = c, .ms = fastest ? 0.01 : 0.02};
    task.value = *(const float*)alpha * 0.001f * (float)(algorithm->data[0] + 1);
    task.beta = *(const float*)beta;
    task.type = ((const Descriptor*)handle_check(d_layout, DESCRIPTOR, __func__))->type;
    put(stream, &task, __func__);
    return CUBLAS_STATUS_SUCCESS;
}
