/*
gemm_adamw: AdamW during a matmul. DeferredUpdateWork has idle warps of gemm.cuh's blocks update the weights of later layers, as a
DeferredUpdate (llmc/adamw_state.cuh) describes; finish_deferred_update() updates the rest.
Constraint: pointers aligned to 16 bytes; DeferredUpdateWork: sm_90a.
Kernel 3 of matmul_adamw.cu, which has the other kernels and the errors.
*/
#pragma once

#include "../../llmc/adamw_state.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "adamw.cuh"
#include <algorithm>

// ==== promoted: gemm_adamw ====
// ---- the update during the next forward pass, in chunks, by idle warps of its matrix products: kernel 3 of matmul_adamw.cu ----

// One chunk of a DeferredUpdate, as a warp needs it.
struct AdamWChunk {
    size_t place; // of its piece in the arrays
    int begin, end;
    uint32_t seed;
    AdamW optimizer; // without decay for vectors
    __device__ AdamWChunk(const DeferredUpdate& w, const StepState& s, int chunk) : optimizer(s.optimizer) {
        int of_layer = w.chunks_of_layer(), of_matrices = w.chunks_of(w.matrices);
        int layer = chunk / of_layer, i = chunk % of_layer;
        bool decays = i < of_matrices;
        if (!decays) { optimizer.weight_decay = 0.0f; }
        place = layer * ((size_t)w.matrices + w.vectors) + (decays ? 0 : w.matrices);
        begin = (decays ? i : i - of_matrices) * DeferredUpdate::CHUNK;
        end = min(begin + DeferredUpdate::CHUNK, decays ? w.matrices : w.vectors);
        // pieces are numbered as in section 2 of train_gpt2.cu
        seed = w.seed == 0 ? 0 : adamw_seed(hash_bits(1 + 2 * layer + !decays, w.seed) | 1, s.num_updates);
    }
    // Updates four values, i to i + 3 of the piece.
    __device__ void update(const DeferredUpdate& w, const StepState& s, int i) const {
        size_t at = place + i;
        AdamWVector x;
        x.load(w.params, w.master, w.m, w.v, w.grads, at);
        x.update(w.params, w.master, w.m, w.v, s, optimizer, at, i, seed);
    }
};

// The work of a worker, until it has no chunk left or stop() is true for lane 0. All lanes of the warp call it.
template <class Stop>
__device__ inline void deferred_update_work(const DeferredUpdate& w, int worker, const Stop& stop) {
    const StepState s = *w.state;
    if (!s.is_deferred || !s.applied || worker >= w.num_workers) { return; }
    int lane = threadIdx.x % 32;
    int chunk = max(w.done[worker], ceil_div(w.first - worker, w.num_workers) * w.num_workers + worker);
#pragma unroll 1
    while (chunk < w.last && !__shfl_sync(0xFFFFFFFFu, stop(), 0)) {
        AdamWChunk c(w, s, chunk);
        chunk += w.num_workers;
        if (chunk < w.last && lane < 4) { // the next one's values
            AdamWChunk next(w, s, chunk);
            const float* from = lane == 0 ? w.m : lane == 1 ? w.v : lane == 2 ? w.grads : w.master;
            if (from) { bulk_prefetch(from + next.place + next.begin, (next.end - next.begin) * (int)sizeof(float)); }
        }
#pragma unroll 2 // 1% faster for product and update
        for (int i = c.begin + 4 * lane; i < c.end; i += 128) { c.update(w, s, i); }
    }
    __syncwarp();
    if (lane == 0) { w.done[worker] = chunk; }
}

// The deferred update as work for idle warps of gemm.cuh.
struct DeferredUpdateWork : DeferredUpdate {
    static constexpr bool WORKS = true;
    static constexpr int REGISTERS = 56; // nothing spills, neither here nor in the consumers, which then have 224
    __device__ void run(int warp, uint64_t* loaded) const {
        deferred_update_work(*this, blockIdx.x * 3 + warp,
                             [=] { return threadIdx.x % 32 == 0 && mbarrier_has_completed(loaded, 0); });
    }
};

// Updates the chunks that idle warps have not updated. A warp per chunk.
__global__ void __launch_bounds__(256) finish_deferred_update_kernel(const __grid_constant__ DeferredUpdate w) {
    int chunk = w.first + blockIdx.x * 8 + threadIdx.x / 32;
    grid_launch_dependents();
    grid_wait_dependency();
    const StepState s = *w.state;
    if (!s.is_deferred || !s.applied || chunk >= w.last || chunk < w.done[chunk % w.num_workers]) { return; }
    AdamWChunk c(w, s, chunk);
#pragma unroll
    for (int k = 0; k < DeferredUpdate::CHUNK / 128; k++) {
        int i = c.begin + 4 * (threadIdx.x % 32) + 128 * k;
        if (i < c.end) { c.update(w, s, i); }
    }
}

// Finishes the deferred update of the layers before `layer`, if exec has one: afterwards their weights may be read.
void finish_deferred_update(int layer, const Execution& exec) {
    if (!exec.update) { return; }
    DeferredUpdate w = *exec.update;
    w.last = std::min(w.last, layer * w.chunks_of_layer());
    if (!w.is_pending()) { return; }
    Op op(exec, 0, 0, "adamw, rest"); // idle warps may have updated most of the values, or all
    launch_early(finish_deferred_update_kernel, dim3(ceil_div(w.last - w.first, 8)), dim3(256), 0, exec, w);
    exec.update->first = w.last;
    if (!exec.update->is_pending()) { cudaCheck(cudaMemsetAsync(&w.state->is_deferred, 0, sizeof(int), exec.stream)); }
}
// ==== end promoted: gemm_adamw ====
