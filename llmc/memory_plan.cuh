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
