/*
Takes the place of llmc/ptx.cuh when `make cpu` builds for a CPU: the same functions, by the semantics that the PTX ISA
gives their instructions. That file describes them. What needs compute capability 9.0 ends the launch by name: the
harness does not launch such kernels here.
*/
#pragma once

#include <cuda.h>
#include <cuda_fp8.h>

#include "cuda_common.cuh"

// ---- defined in ptx.cpp ----------------------------------------------------------------------------------

void emulation_cp_async(void* shared, const void* global, int bytes, bool valid);
void cp_async_commit();
void emulation_cp_async_wait(int pending);
void emulation_ldmatrix(uint32_t r[4], const void* row, bool transposed);
const void* emulation_shared_pointer(uint32_t address);
void emulation_mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool is_half);
int load_acquire(const int* p);
void store_release(int* p, int x);
void add_release(int* p, int x);

// ---- compute capability 8.0 and below ------------------------------------------------------------------------

inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// inline here, so that a report names the line of the kernel
inline void cp_async_16(void* shared, const void* global, bool valid = true) {
    emulation_cp_async(shared, global, 16, valid);
}
inline void cp_async_4(void* shared, const void* global, bool valid = true) {
    emulation_cp_async(shared, global, 4, valid);
}
template <int pending> inline void cp_async_wait() { emulation_cp_async_wait(pending); }

inline void ldmatrix_x4(uint32_t r[4], const void* row) { emulation_ldmatrix(r, row, false); }
inline void ldmatrix_x4_trans(uint32_t r[4], const void* row) { emulation_ldmatrix(r, row, true); }
inline void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    emulation_ldmatrix(r, emulation_shared_pointer(address), false);
}
inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    emulation_ldmatrix(r, emulation_shared_pointer(address), true);
}

inline void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
    emulation_mma(d, a, b0, b1, false);
}
inline void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, half) {
    emulation_mma(d, a, b0, b1, true);
}
// Lane t of a quad has columns 2t and 2t + 1 of tiles 0 to 3; afterwards it has the eight columns of tile t.
inline void mma_quad_transpose(float v[4][2]) {
    int quad = (int)emulation_thread_index().x % 32 & ~3, t = (int)emulation_thread_index().x & 3;
    float out[8];
    for (int source = 0; source < 4; source++) {
        for (int e = 0; e < 2; e++) {
            for (int tile = 0; tile < 4; tile++) {
                float x = __shfl_sync(0xFFFFFFFFu, v[tile][e], quad + source);
                if (tile == t) { out[2 * source + e] = x; }
            }
        }
    }
    memcpy(v, out, sizeof(out));
}

inline uint32_t pack_16x2(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline uint32_t pack_16x2(float low, float high, half) {
    half2 x = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float2 unpack_16x2(uint32_t bits, __nv_bfloat16) {
    __nv_bfloat162 x;
    memcpy(&x, &bits, sizeof(x));
    return __bfloat1622float2(x);
}
inline float2 unpack_16x2(uint32_t bits, half) {
    half2 x;
    memcpy(&x, &bits, sizeof(x));
    return __half22float2(x);
}
inline uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

// The approximations are exact here, except that they flush subnormals to 0 as the instructions do.
inline float emulation_flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }
inline float exp2_approx(float x) { return emulation_flushed(exp2f(x)); }
inline float rcp_approx(float x) { return emulation_flushed(1.0f / emulation_flushed(x)); }
inline float tanh_approx(float x) { return tanhf(x); }

inline int warp_uniform(int x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
inline void named_barrier_sync(int id, int threads) { emulation_named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) { emulation_named_barrier(id, threads, false); }
template <int n> inline void wgmma_hold(float (&)[n]) {} // only about registers
template <int n> inline void wgmma_hold(uint32_t (&)[n]) {}

// ---- compute capability 9.0: not emulated ------------------------------------------------------------------------

inline bool has_sm90a() { return false; }
template <class SMem> inline SMem& shared_aligned_1024(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return *reinterpret_cast<SMem*>(dynamic_shared + (1024 - address % 1024) % 1024);
}
template <int rank> inline CUtensorMap tensor_map(const floatX*, const int (&)[rank], const int (&)[rank]) {
    emulation_unsupported("TMA");
}
inline CUtensorMap tensor_map_heads(const floatX*, int, int, int, int) { emulation_unsupported("TMA"); }
inline uint64_t wgmma_descriptor(const void*) { emulation_unsupported("wgmma"); }
inline uint64_t wgmma_descriptor_transposed(const void*, int) { emulation_unsupported("wgmma"); }
inline int cluster_rank() { emulation_unsupported("clusters"); }

// a function that takes anything, because nothing is done with it
#define EMULATION_MISSING(function, what)                                                                              \
    template <class... Arguments> inline void function(Arguments&&...) { emulation_unsupported(what); }
#define EMULATION_MISSING_NUMBER(function, what)                                                                       \
    template <int> inline void function() { emulation_unsupported(what); }
EMULATION_MISSING(mbarrier_init, "mbarrier")
EMULATION_MISSING(mbarrier_init_fence, "mbarrier")
EMULATION_MISSING(mbarrier_arrive, "mbarrier")
EMULATION_MISSING(mbarrier_arrive_expect, "mbarrier")
EMULATION_MISSING(mbarrier_wait, "mbarrier")
EMULATION_MISSING(mbarrier_arrive_cluster, "clusters")
EMULATION_MISSING(mbarrier_wait_cluster, "clusters")
EMULATION_MISSING(cluster_sync, "clusters")
EMULATION_MISSING(store_cluster_async, "clusters")
EMULATION_MISSING(bulk_copy_cluster, "clusters")
EMULATION_MISSING(store_async_cluster, "clusters")
EMULATION_MISSING(tma_load_2d, "TMA")
EMULATION_MISSING(tma_load_4d, "TMA")
EMULATION_MISSING(tma_load_2d_once, "TMA")
EMULATION_MISSING(tma_load_4d_once, "TMA")
EMULATION_MISSING(tma_load_2d_multicast, "TMA")
EMULATION_MISSING(tma_store_2d, "TMA")
EMULATION_MISSING(tma_store_4d, "TMA")
EMULATION_MISSING(tma_store_fence, "TMA")
EMULATION_MISSING(tma_store_commit, "TMA")
EMULATION_MISSING_NUMBER(tma_store_wait, "TMA")
EMULATION_MISSING(tma_store_wait_written, "TMA")
EMULATION_MISSING(tma_prefetch_map, "TMA")
EMULATION_MISSING(tma_prefetch_4d, "TMA")
EMULATION_MISSING(async_proxy_fence, "TMA")
EMULATION_MISSING(bulk_load, "bulk copies")
EMULATION_MISSING(bulk_store, "bulk copies")
EMULATION_MISSING(bulk_add, "bulk copies")
EMULATION_MISSING_NUMBER(warpgroup_more_registers, "wgmma")
EMULATION_MISSING_NUMBER(warpgroup_fewer_registers, "wgmma")
EMULATION_MISSING(wgmma_fence, "wgmma")
EMULATION_MISSING(wgmma_commit, "wgmma")
EMULATION_MISSING_NUMBER(wgmma_wait, "wgmma")
EMULATION_MISSING(wgmma_64x64x16, "wgmma")
EMULATION_MISSING(wgmma_64x64x16_new, "wgmma")
EMULATION_MISSING(wgmma_64x64x16_transposed, "wgmma")
EMULATION_MISSING(wgmma_64x64x16_transposed_new, "wgmma")
EMULATION_MISSING(wgmma_64x128x16, "wgmma")
EMULATION_MISSING(wgmma_64x128x16_new, "wgmma")
EMULATION_MISSING(wgmma_64x192x16, "wgmma")
EMULATION_MISSING(wgmma_64x192x16_transposed, "wgmma")
EMULATION_MISSING(wgmma_64x192x16_transposed_b, "wgmma")
EMULATION_MISSING(wgmma_64x256x16, "wgmma")
EMULATION_MISSING(wgmma_64x256x16_transposed, "wgmma")
EMULATION_MISSING(wgmma_64x128x32_e4m3, "wgmma")
EMULATION_MISSING(wgmma_64x192x32_e4m3, "wgmma")
EMULATION_MISSING(wgmma_64x256x32_e4m3, "wgmma")
EMULATION_MISSING(stmatrix_x4, "stmatrix")
