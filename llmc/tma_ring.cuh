// The barriers of a ring of stages in shared memory, which one thread fills by TMA and warps read.
#pragma once

#include "ptx.cuh"

// A thread's place in a ring of n stages, where a step's number would be divided too often or n is not known to the compiler. parity: of
// the phase in which the stage becomes full.
struct TmaRingPlace {
    int stage = 0, parity = 0;
    __device__ void next(int n) {
        if (++stage == n) { stage = 0, parity ^= 1; }
    }
};

// A ring of n stages in shared memory, between a thread that loads and warps that read. Step i uses stage i % n.
template <int n> struct TmaRing {
    // Loads complete full, which readers wait for. Readers arrive at empty, which the loading thread waits for.
    uint64_t full[n], empty[n];

    // One thread calls this, and then mbarrier_init_fence(). releases: how many arrivals make a stage empty
    __device__ void init(int releases) {
        for (int s = 0; s < n; s++) { mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], releases); }
    }
    // Waits until the stage of step i is empty. Returns the barrier at which its `bytes` must arrive.
    __device__ uint64_t* acquire(int i, int bytes) {
        mbarrier_wait(&empty[i % n], (i / n + 1) % 2);
        mbarrier_arrive_expect(&full[i % n], bytes);
        return &full[i % n];
    }
    __device__ uint64_t* acquire(TmaRingPlace place, int bytes) {
        mbarrier_wait(&empty[place.stage], place.parity ^ 1);
        mbarrier_arrive_expect(&full[place.stage], bytes);
        return &full[place.stage];
    }
    // Waits until the stage of step i is full.
    __device__ void wait(int i) { mbarrier_wait(&full[i % n], i / n % 2); }
    __device__ void wait(TmaRingPlace place) { mbarrier_wait(&full[place.stage], place.parity); }
};
