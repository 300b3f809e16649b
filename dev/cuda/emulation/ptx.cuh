/*
Takes the place of llmc/ptx.cuh when `make cpu` builds for a CPU: the same functions, by the semantics that the PTX ISA
gives their instructions. That file describes them.
*/
#pragma once

#include <cuda.h>
#include <cuda_fp8.h>
#include <sm90.h>

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
uint64_t load_relaxed(const uint64_t* p);
ulonglong2 load_relaxed_pair(const uint64_t* p);
void store_relaxed(uint64_t* p, uint64_t x);
uint4 load_relaxed_16(const uint4* p);
void store_relaxed_16(uint4* p, uint4 x);
inline void store_relaxed_pair(uint64_t* p, ulonglong2 x) { store_relaxed(p, x.x), store_relaxed(p + 1, x.y); }

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
inline uint32_t pack_e5m2x4(float a, float b, float c, float d) {
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E5M2);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E5M2);
    return low | high << 16;
}
inline half2 unpack_e4m3x2(uint32_t bits) {
    return {half(emulation_e4m3_value((uint8_t)bits)), half(emulation_e4m3_value((uint8_t)(bits >> 8)))};
}

// The approximations are exact here, except that they flush subnormals to 0 as the instructions do.
inline float emulation_flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }
inline float exp2_approx(float x) { return emulation_flushed(exp2f(x)); }
inline float rcp_approx(float x) { return emulation_flushed(1.0f / emulation_flushed(x)); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float min_or_nan(float x, float y) { return x <= y ? x : y < x ? y : NAN; }

inline int warp_uniform(int x) { return __reduce_max_sync(0xFFFFFFFFu, x); }
inline void named_barrier_sync(int id, int threads) { emulation_named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) { emulation_named_barrier(id, threads, false); }
template <int n> inline void wgmma_hold(float (&x)[n]) { emulation_wgmma_hold(x, sizeof(x)); }
template <int n> inline void wgmma_hold(uint32_t (&x)[n]) { emulation_wgmma_hold(x, sizeof(x)); }
template <int n> inline void hold_packed(int4 (&)[n]) {}
template <class T> inline T* hold_pointer(T* p) { return p; }

// ---- compute capability 9.0, defined in sm90.cpp ----------------------------------------------------------------

template <int> __global__ void ptx_sm90a_kernel() {}
inline bool has_sm90a() { return emulation_arch() == 90; }
template <class SMem> inline SMem& shared_aligned_1024(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return *reinterpret_cast<SMem*>(dynamic_shared + (1024 - address % 1024) % 1024);
}

template <int rank>
inline CUtensorMap tensor_map(const floatX* tensor, const int (&sizes)[rank], const int (&box_sizes)[rank]) {
    CUtensorMap map;
    bool tma_accepts_alignment_sizes_and_box =
        emulation_tensor_map(&map, tensor, rank, sizes, box_sizes, (int)sizeof(floatX));
    require(tma_accepts_alignment_sizes_and_box);
    return map;
}
inline CUtensorMap tensor_map_heads(const floatX* tensor, int B, int T, int num_vectors, int box_tokens) {
    return tensor_map(tensor, {64, num_vectors, T, B}, {64, 1, box_tokens, 1});
}

inline void mbarrier_wait_cluster(uint64_t* barrier, int parity) { mbarrier_wait(barrier, parity); }

inline void tma_load_2d(void* shared, const void* map, int x, int y, uint64_t* barrier) {
    emulation_tma_load(shared, map, 2, x, y, 0, 0, barrier, 0);
}
inline void tma_load_2d_once(void* shared, const void* map, int x, int y, uint64_t* barrier) {
    emulation_tma_load(shared, map, 2, x, y, 0, 0, barrier, 0);
}
inline void tma_load_2d_multicast(void* shared, const void* map, int x, int y, uint64_t* barrier, uint16_t blocks) {
    emulation_tma_load(shared, map, 2, x, y, 0, 0, barrier, blocks);
}
inline void tma_load_3d(void* shared, const void* map, int x, int y, int z, uint64_t* barrier) {
    emulation_tma_load(shared, map, 3, x, y, z, 0, barrier, 0);
}
inline void tma_load_4d(void* shared, const void* map, int x, int y, int z, int w, uint64_t* barrier) {
    emulation_tma_load(shared, map, 4, x, y, z, w, barrier, 0);
}
inline void tma_load_4d_once(void* shared, const void* map, int x, int y, int z, int w, uint64_t* barrier) {
    emulation_tma_load(shared, map, 4, x, y, z, w, barrier, 0);
}
inline void tma_prefetch_map(const void*) {}
inline void bulk_prefetch(const void*, int) {}
inline void tma_prefetch_4d(const void*, int, int, int, int) {}
inline void tma_store_2d(const void* map, const void* shared, int x, int y) {
    emulation_tma_store(map, shared, 2, x, y, 0, 0);
}
inline void tma_store_3d(const void* map, const void* shared, int x, int y, int z) {
    emulation_tma_store(map, shared, 3, x, y, z, 0);
}
inline void tma_store_4d(const void* map, const void* shared, int x, int y, int z, int w) {
    emulation_tma_store(map, shared, 4, x, y, z, w);
}
template <int pending> inline void tma_store_wait() { emulation_tma_store_wait(pending); }

template <int> inline void warpgroup_more_registers() {}
template <int> inline void warpgroup_fewer_registers() {}

inline uint64_t wgmma_descriptor(const void* matrix) {
    uint64_t address = (shared_address(matrix) & 0x3FFFF) >> 4;
    return address | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
inline uint64_t wgmma_descriptor_transposed(const void* matrix, int box_bytes) {
    return (wgmma_descriptor(matrix) & ~((uint64_t)0x3FFF << 16)) | (uint64_t)(box_bytes >> 4) << 16;
}
template <int pending> inline void wgmma_wait() { emulation_wgmma_wait(pending); }

inline int emulation_wgmma_type(__nv_bfloat16) { return WGMMA_BF16; }
inline int emulation_wgmma_type(half) { return WGMMA_F16; }

#define EMULATION_WGMMA(name, columns, a_transposed, b_transposed)                                                     \
    template <class T> inline void name(float* d, uint64_t a, uint64_t b, int accumulate, T) {                         \
        emulation_wgmma(d, NULL, a, b, columns, emulation_wgmma_type(T()), a_transposed, b_transposed, accumulate);    \
    }
#define EMULATION_WGMMA_REGISTERS(name, columns, b_transposed)                                                         \
    template <class T> inline void name(float* d, const uint32_t* a, uint64_t b, int accumulate, T) {                  \
        emulation_wgmma(d, a, 0, b, columns, emulation_wgmma_type(T()), false, b_transposed, accumulate);              \
    }
#define EMULATION_WGMMA_NEW(name, columns, a_transposed, b_transposed)                                                 \
    template <class T> inline void name(float* d, uint64_t a, uint64_t b, T) {                                         \
        emulation_wgmma(d, NULL, a, b, columns, emulation_wgmma_type(T()), a_transposed, b_transposed, false);         \
    }
#define EMULATION_WGMMA_FP8(name, columns, type)                                                                       \
    inline void name(float* d, uint64_t a, uint64_t b, int accumulate) {                                               \
        emulation_wgmma(d, NULL, a, b, columns, type, false, false, accumulate);                                       \
    }
EMULATION_WGMMA(wgmma_64x16x16, 16, false, false)
EMULATION_WGMMA(wgmma_64x32x16, 32, false, false)
EMULATION_WGMMA(wgmma_64x64x16, 64, false, false)
EMULATION_WGMMA(wgmma_64x64x16_transposed, 64, true, true)
EMULATION_WGMMA(wgmma_64x128x16, 128, false, false)
EMULATION_WGMMA(wgmma_64x192x16, 192, false, false)
EMULATION_WGMMA(wgmma_64x192x16_transposed, 192, true, true)
EMULATION_WGMMA(wgmma_64x192x16_transposed_b, 192, false, true)
EMULATION_WGMMA(wgmma_64x256x16, 256, false, false)
EMULATION_WGMMA(wgmma_64x256x16_transposed, 256, true, true)
EMULATION_WGMMA_REGISTERS(wgmma_64x16x16, 16, false)
EMULATION_WGMMA_REGISTERS(wgmma_64x32x16, 32, false)
EMULATION_WGMMA_REGISTERS(wgmma_64x64x16, 64, false)
EMULATION_WGMMA_REGISTERS(wgmma_64x64x16_transposed, 64, true)
EMULATION_WGMMA_REGISTERS(wgmma_64x128x16_transposed, 128, true)
EMULATION_WGMMA_REGISTERS(wgmma_64x192x16, 192, false)
EMULATION_WGMMA_REGISTERS(wgmma_64x256x16, 256, false)
EMULATION_WGMMA_NEW(wgmma_64x64x16_new, 64, false, false)
template <class T> inline void wgmma_64x64x16_new(float* d, const uint32_t* a, uint64_t b, T) {
    wgmma_64x64x16(d, a, b, 0, T());
}
EMULATION_WGMMA_NEW(wgmma_64x64x16_transposed_new, 64, true, true)
EMULATION_WGMMA_NEW(wgmma_64x128x16_new, 128, false, false)
EMULATION_WGMMA_FP8(wgmma_64x128x32_e4m3, 128, WGMMA_E4M3)
EMULATION_WGMMA_FP8(wgmma_64x192x32_e4m3, 192, WGMMA_E4M3)
EMULATION_WGMMA_FP8(wgmma_64x256x32_e4m3, 256, WGMMA_E4M3)
EMULATION_WGMMA_FP8(wgmma_64x192x32_e5m2_e4m3, 192, WGMMA_E5M2_E4M3)
EMULATION_WGMMA_FP8(wgmma_64x256x32_e5m2_e4m3, 256, WGMMA_E5M2_E4M3)
