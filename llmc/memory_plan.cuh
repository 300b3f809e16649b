/*
A plan of GPU memory: adds up what is needed before anything is allocated, then makes one allocation for all of it.

    Plan plan = {};
    float *m, *v;
    plan_add(&plan, PLAN_ADAMW, &m, n);
    plan_add(&plan, PLAN_ADAMW, &v, n);
    ... plan.total bytes are needed ...
    void* arena = plan_allocate(&plan, "the optimizer's state", &err);   // sets m and v
*/
#pragma once

#include "cuda_common.cuh"
#include "dataloader.h"
#include "ranks.h"
#include "utils.h"

enum PlanGroup { PLAN_WEIGHTS, PLAN_GRADIENTS, PLAN_ADAMW, PLAN_ACTIVATIONS, NUM_PLAN_GROUPS };
enum { MAX_PLAN_ENTRIES = 64, PLAN_ALIGNMENT = 256 };

struct Plan {
    int num_entries;
    struct {
        void** pointer; // plan_allocate sets *pointer
        size_t offset;  // in bytes, from the beginning of the arena
    } entries[MAX_PLAN_ENTRIES];
    size_t bytes[NUM_PLAN_GROUPS];
    size_t total; // bytes
};

template <class T> void plan_add(Plan* plan, PlanGroup group, T** pointer, size_t n) {
    require(plan->num_entries < MAX_PLAN_ENTRIES);
    size_t bytes = ceil_div(n * sizeof(T), (size_t)PLAN_ALIGNMENT) * PLAN_ALIGNMENT;
    plan->entries[plan->num_entries].pointer = (void**)pointer;
    plan->entries[plan->num_entries].offset = plan->total;
    plan->num_entries++;
    plan->bytes[group] += bytes;
    plan->total += bytes;
}

// Makes one zeroed allocation for all entries, for `what`, and sets their pointers. Returns the allocation, for cudaFree; NULL
// if there is no memory: the reason is then in err.
inline void* plan_allocate(const Plan* plan, const char* what, Error* err) {
    char* arena = (char*)device_malloc(plan->total, what, err);
    if (!arena) { return NULL; }
    cudaCheck(cudaMemset(arena, 0, plan->total));
    for (int i = 0; i < plan->num_entries; i++) { *plan->entries[i].pointer = arena + plan->entries[i].offset; }
    return arena;
}

// Whether `bytes` of the GPU's memory are free in addition to 128 MB, which stay free for a graph and kernels that are loaded late.
inline bool is_free(size_t bytes) {
    size_t free_bytes, all_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
    return bytes + (128 << 20) <= free_bytes;
}
// The largest n, from 1 to `most`, for which bytes_of(n) bytes are free. Returns 1 also if there is no memory for it.
template <class Bytes> int most_that_fit(int most, Bytes bytes_of) {
    while (most > 1 && !is_free(bytes_of(most))) { most--; }
    return most;
}

// Prints what a training run needs, with `unplanned` bytes for the driver and the libraries; `have` bytes are free on `device`.
// num_shares: ranks that share the optimizer's state.
inline void print_memory(const Plan* parameters, const Plan* activations, bool muon, int num_shares, size_t unplanned,
                         size_t have, const char* device) {
    char shared[64] = "";
    size_t need = parameters->total + activations->total + unplanned;
    if (num_shares > 1 && muon) { snprintf(shared, sizeof(shared), " (the largest of %d shares)", num_shares); }
    if (num_shares > 1 && !muon) { snprintf(shared, sizeof(shared), " (1/%d of it)", num_shares); }
    printf("memory: weights %.2f GB, gradients %.2f, %s %.2f%s, activations %.2f, library and driver %.2f: %.2f of the "
           "%.1f GB free on %s\n",
           (double)parameters->bytes[PLAN_WEIGHTS] * 1e-9, (double)parameters->bytes[PLAN_GRADIENTS] * 1e-9,
           muon ? "Muon and AdamW" : "AdamW", (double)parameters->bytes[PLAN_ADAMW] * 1e-9, shared,
           (double)activations->total * 1e-9, (double)unplanned * 1e-9, (double)need * 1e-9, (double)have * 1e-9,
           device);
}

// Ends the program with a message that says which flags would make the run fit. bytes_of(B, recompute): what a run needs with
// these values of -b and -r. have: bytes that are free on `device`.
template <class Bytes> __attribute__((noreturn)) void die_of_memory(Bytes bytes_of, int recompute, const Batch* batch,
                                                                    const char* device, size_t have) {
    char advice[512] = "";
    size_t need = bytes_of(batch->B, recompute), n = 0;
    for (int r = recompute + 1; r <= 2 && n == 0; r++) {
        size_t bytes = bytes_of(batch->B, r);
        if (bytes <= have) { n += snprintf(advice, sizeof(advice), "; -r %d needs %.2f", r, (double)bytes * 1e-9); }
    }
    for (int both = 0; both < 2 && (!both || n == 0); both++) { // a smaller -b; then -r 2 as well
        for (int b = batch->B / 2; b >= 1; b /= 2) {
            size_t bytes = bytes_of(b, both ? 2 : recompute);
            bool divides = batch->total % ((int64_t)b * batch->T * run_num_ranks) == 0;
            if (bytes > have || !divides) { continue; }
            n += snprintf(advice + n, sizeof(advice) - n, "; %s-b %d -d %lld needs %.2f for the same result",
                          both ? "-r 2 " : "", b, (long long)batch->total, (double)bytes * 1e-9);
            break;
        }
    }
    if (n == 0) { snprintf(advice, sizeof(advice), "; -r 2 and a smaller -b are not enough: take a smaller model"); }
    die("the run needs %.2f GB and %s has %.2f free%s%s", (double)need * 1e-9, device, (double)have * 1e-9,
        other_programs(need), advice);
}
