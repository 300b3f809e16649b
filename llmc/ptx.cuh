/*
One wrapper for each PTX instruction that CUDA C++ has no name for. Names, shapes and layouts are those of the PTX ISA,
in the sections named after the instructions.

    devices               what a wrapper needs, and whether this device has it
    shared memory         addresses and alignment
    cp.async              copies of 4 or 16 bytes from global to shared memory
    ldmatrix, stmatrix    four 8x8 matrices between shared memory and registers
    mma                   products of a warp, and how to pack their operands
    wgmma                 products of a warpgroup: operands in shared memory; a in registers; transposed operands;
                          products that overwrite; 8-bit elements
    TMA                   tensor maps; loads; stores; copies of contiguous bytes, and additions
    mbarrier              barriers that count arrivals and bytes
    clusters              blocks that reach each other's shared memory
    global memory         acquire, release and relaxed accesses
    warps                 named barriers, setmaxnreg, warp-uniform values
    arithmetic            approximations, conversions to 8 bits
    the compiler          values whose origin it must not see

Wrappers of PTX_SM80 need compute capability 8.0, those of PTX_SM90A need sm_90a. Compiled for an older device, those of
PTX_SM90A for anything but sm_90a, they execute a trap. So a launcher checks compiled_arch() or has_sm90a() before it
launches a kernel that uses them.
*/
#pragma once

#include <cuda.h>
#include <cuda_fp8.h>

#include "cuda_common.cuh"

// ---- devices --------------------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define PTX_SM80(...) __trap()
#else
#define PTX_SM80(...) asm volatile(__VA_ARGS__)
#endif
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PTX_SM90A(...) __trap()
#else
#define PTX_SM90A(...) asm volatile(__VA_ARGS__)
#endif

// has_sm90a() is true if this device runs the binary's sm_90a code: then kernels with wrappers of PTX_SM90A may be
// launched. compiled_arch() returns 90 for sm_90a and for sm_90. So an empty kernel is compiled with a launch bound of
// 32 threads for sm_90a and of 64 threads for anything else, and has_sm90a() queries that bound.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PTX_SM90A_MARK 32
#else
#define PTX_SM90A_MARK 64
#endif
template <int> __global__ void __launch_bounds__(PTX_SM90A_MARK) ptx_sm90a_kernel() {}
inline bool has_sm90a() {
    cudaFuncAttributes attributes;
    if (device_is_supposed()) { return true; }
    cudaCheck(cudaFuncGetAttributes(&attributes, (const void*)ptx_sm90a_kernel<0>));
    return attributes.maxThreadsPerBlock == 32;
}

// ---- shared memory --------------------------------------------------------------------------------------------------

// Converts a pointer to the 32-bit shared-memory address that PTX instructions take.
__device__ inline uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// A block's dynamic shared memory as an SMem, aligned to the 1024 bytes that TMA's swizzle needs. The runtime aligns it
// to less, so launchers request 1024 bytes more than sizeof(SMem).
template <class SMem> __device__ inline SMem& shared_aligned_1024(unsigned char* dynamic_shared) {
    uint32_t address = shared_address(dynamic_shared);
    return *reinterpret_cast<SMem*>(dynamic_shared + (1024 - address % 1024) % 1024);
}

// ---- cp.async: 4 or 16 bytes from global to shared memory, without passing through registers ------------------------

// Both addresses are aligned to 16 bytes. With valid == false it writes zeros and does not read global memory.
__device__ inline void cp_async_16(void* shared, const void* global, bool valid = true) {
    PTX_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
             "r"(valid ? 16 : 0)
             : "memory");
}
// Like cp_async_16, but copies 4 bytes; both addresses are aligned to 4.
__device__ inline void cp_async_4(void* shared, const void* global, bool valid = true) {
    PTX_SM80("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(shared)), "l"(global),
             "r"(valid ? 4 : 0)
             : "memory");
}
__device__ inline void cp_async_commit() { PTX_SM80("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most the `pending` newest of this thread's committed groups are still in flight. A barrier must follow
// before other threads read the copied data.
template <int pending> __device__ inline void cp_async_wait() {
    PTX_SM80("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// ---- ldmatrix, stmatrix: four 8x8 matrices of 16-bit elements between shared memory and registers -------------------

// Lane i passes the address of row i % 8 of matrix i / 8: 16 bytes, aligned to 16. Then r[j] of lane i holds two
// elements of matrix j, the lower column in the lower half; with _trans every matrix is transposed on the way. The
// lanes' elements:
//
//     column     0 1  |  2 3  |  4 5  |  6 7
//     row 0   lane  0 |     1 |     2 |     3         lane i: row i / 4, columns 2 * (i % 4) and 2 * (i % 4) + 1
//     row 1   lane  4 |     5 |     6 |     7
//     ...
//     row 7   lane 28 |    29 |    30 |    31
__device__ inline void ldmatrix_x4(uint32_t r[4], const void* row) {
    PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(shared_address(row))
             : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t r[4], const void* row) {
    PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(shared_address(row))
             : "memory");
}

// The same two loads by shared-memory address, for loops that reach all rows from one address by constant offsets.
__device__ inline void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(address)
             : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    PTX_SM80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
             : "r"(address)
             : "memory");
}

// The inverse of ldmatrix_x4, from compute capability 9.0 on.
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t r[4]) {
    PTX_SM90A("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]), "r"(r[1]),
              "r"(r[2]), "r"(r[3])
              : "memory");
}
// The same, with every matrix transposed on the way.
__device__ inline void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]) {
    PTX_SM90A("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(r[0]),
              "r"(r[1]), "r"(r[2]), "r"(r[3])
              : "memory");
}

// ---- mma: d (16x8) += a (16x16) b (16x8), accumulated in fp32 -------------------------------------------------------

// The elements that a lane holds, as (row, column), with g = lane / 4 and t = lane % 4. Each register of a and b holds
// two 16-bit elements; "2t.." are columns (rows for b) 2t and 2t + 1, the first one in the lower half.
//   a[0] (g, 2t..)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)      a is 16x16, row-major
//   b[0] (2t.., g)  b[1] (2t+8.., g)                                            b is 16x8, k by n
//   d[0] (g, 2t)  d[1] (g, 2t+1)  d[2] (g+8, 2t)  d[3] (g+8, 2t+1)              d is 16x8
// The accumulator fragment d, which lane holds which element:
//     column       0 1    2 3    4 5    6 7
//     row 0     lane 0      1      2      3       held as d[0] d[1]
//     ...
//     row 7     lane 28    29     30     31       held as d[0] d[1]
//     row 8     lane 0      1      2      3       held as d[2] d[3]
//     ...
//     row 15    lane 28    29     30     31       held as d[2] d[3]
// The unnamed last parameter, here and in the wrappers below, only selects the type of the elements.
__device__ inline void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
    PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
             "{%0, %1, %2, %3};\n"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_16x8x16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, half) {
    PTX_SM80("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
             "{%0, %1, %2, %3};\n"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Transposes within each quad (lanes 4g .. 4g + 3) one row of four neighbouring 16x8 tiles. Before, lane t of the quad
// has columns 2t and 2t + 1 of every tile j, as v[j]. Afterwards it has the eight columns of tile t, as v[0..3], in
// order, so that it can store them in one access. All 32 lanes must call it. Which lane t has which column of the row:
//
//     tile          0        1        2        3
//     before    00112233 00112233 00112233 00112233
//     after     00000000 11111111 22222222 33333333
__device__ inline void mma_quad_transpose(float v[4][2]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    for (int e = 0; e < 2; e++) {
        for (int j = 0; j < 4; j += 2) {
            float got = __shfl_xor_sync(0xFFFFFFFFu, odd ? v[j][e] : v[j + 1][e], 1);
            v[j][e] = odd ? got : v[j][e];
            v[j + 1][e] = odd ? v[j + 1][e] : got;
        }
        for (int j = 0; j < 2; j++) {
            float got = __shfl_xor_sync(0xFFFFFFFFu, upper ? v[j][e] : v[j + 2][e], 2);
            v[j][e] = upper ? got : v[j][e];
            v[j + 2][e] = upper ? v[j + 2][e] : got;
        }
    }
}
// Rounds two floats to nearest and packs them, `low` in the lower half. This turns accumulators into an operand.
__device__ inline uint32_t pack_16x2(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
__device__ inline uint32_t pack_16x2(float low, float high, half) {
    half2 x = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
// The inverse of pack_16x2: the lower half is x, the upper half y.
__device__ inline float2 unpack_16x2(uint32_t bits, __nv_bfloat16) {
    __nv_bfloat162 x;
    memcpy(&x, &bits, sizeof(x));
    return __bfloat1622float2(x);
}
__device__ inline float2 unpack_16x2(uint32_t bits, half) {
    half2 x;
    memcpy(&x, &bits, sizeof(x));
    return __half22float2(x);
}

// ---- wgmma: d (64xN) += a (64x16) b (16xN), by the four warps of a warpgroup ----------------------------------------
// The products are asynchronous: wgmma_fence(), then the wgmmas, then wgmma_commit() makes them a group. wgmma_wait()
// waits until at most `pending` of the warpgroup's newest groups are in flight.

__device__ inline void wgmma_fence() { PTX_SM90A("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { PTX_SM90A("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int pending> __device__ inline void wgmma_wait() {
    PTX_SM90A("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}
// The compiler does not know that a wgmma reads and writes registers asynchronously, after it was issued. A call of
// wgmma_hold(x) before wgmma_fence() makes sure that x is computed before the fence. A call after wgmma_wait() makes
// sure that x is not used, and its registers are not reused, before the wait.
template <int n> __device__ inline void wgmma_hold(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) { asm volatile("" : "+f"(x[i])::"memory"); }
}
template <int n> __device__ inline void wgmma_hold(uint32_t (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) { asm volatile("" : "+r"(x[i])::"memory"); }
}
// Describes an operand in shared memory: rows of 64 16-bit elements along k, as TMA writes them with
// CU_TENSOR_MAP_SWIZZLE_128B, 1024 bytes per group of 8 rows. The operand is aligned to 1024 bytes. The address is in
// units of 16 bytes: adding 2 to a descriptor moves 16 columns (32 bytes) along k.
__device__ inline uint64_t wgmma_descriptor(const void* matrix) {
    uint64_t address = (shared_address(matrix) & 0x3FFFF) >> 4;
    uint64_t group_stride = 1024 >> 4;
    return address | (uint64_t)1 << 16 | group_stride << 32 | (uint64_t)1 << 62; // 1 << 62: the 128-byte swizzle
}

// The accumulator (64xN) is a grid of 16x8 tiles, each a fragment d of mma_16x8x16. Warp w (of four) holds one row of
// tiles, and d[4j .. 4j + 3] are its tile at columns 8j .. 8j + 7:
//
//     columns          0-7        8-15      16-23      ...     N-8..N-1
//     rows  0-15    d[0..3]    d[4..7]   d[8..11]      ...     of warp 0      in each tile lane 4g + t holds
//     rows 16-31    d[0..3]    d[4..7]   d[8..11]      ...     of warp 1      (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
//     rows 32-47    d[0..3]    d[4..7]   d[8..11]      ...     of warp 2
//     rows 48-63    d[0..3]    d[4..7]   d[8..11]      ...     of warp 3
//
// With accumulate == 0 the old values of d are overwritten.

// Macros that write the functions of the tables below.
//
//     num_d         floats of d in a thread
//     SHARED        a is a wgmma_descriptor
//     REGISTERS     a is the fragment a of mma_16x8x16 for rows 16 * (warp % 4). The caller must not modify it before a wgmma_wait()
//                   that covers this wgmma's group
//     ADD           with the argument `accumulate`
//     NEW           without it, for the first product of a chain: the compiler knows that the old values of d are dead, so it can
//                   use their registers before the call
//     operands      a and b by their numbers in the asm statement: those of d come first
//     accumulates   scale-d by its number, or 0
//     flags         , imm-trans-a, imm-trans-b. Only 16 bits have them, and only an a in shared memory has imm-trans-a.
#define WGMMA_A_SHARED uint64_t a
#define WGMMA_A_REGISTERS const uint32_t a[4]
#define WGMMA_OPERAND_SHARED "l"(a)
#define WGMMA_OPERAND_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA_TYPE_ADD(type) int accumulate, type
#define WGMMA_TYPE_NEW(type) type
#define WGMMA_LAST_ADD , "r"(accumulate)
#define WGMMA_LAST_NEW
#define WGMMA_D1_ADD(x) "+f"(x)
#define WGMMA_D1_NEW(x) "=f"(x)
#define WGMMA_D8(io, i)                                                                                                \
    WGMMA_D1_##io(d[i]), WGMMA_D1_##io(d[i + 1]), WGMMA_D1_##io(d[i + 2]), WGMMA_D1_##io(d[i + 3]),                    \
        WGMMA_D1_##io(d[i + 4]), WGMMA_D1_##io(d[i + 5]), WGMMA_D1_##io(d[i + 6]), WGMMA_D1_##io(d[i + 7])
#define WGMMA_D16(io, i) WGMMA_D8(io, i), WGMMA_D8(io, i + 8)
#define WGMMA_D32(io, i) WGMMA_D16(io, i), WGMMA_D16(io, i + 16)
#define WGMMA_D64(io, i) WGMMA_D32(io, i), WGMMA_D32(io, i + 32)
#define WGMMA_D96(io, i) WGMMA_D64(io, i), WGMMA_D32(io, i + 64)
#define WGMMA_D128(io, i) WGMMA_D64(io, i), WGMMA_D64(io, i + 64)
// d[0] to d[num_d - 1] by their numbers in the asm statement.
#define WGMMA_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES16 WGMMA_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES32                                                                                                  \
    WGMMA_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, "                                                         \
                  "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES64                                                                                                  \
    WGMMA_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, "                                          \
                  "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "                                            \
                  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES96                                                                                                  \
    WGMMA_NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, "                                          \
                  "%75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "                                            \
                  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES128                                                                                                 \
    WGMMA_NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "                                   \
                  "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "                                 \
                  "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(num_d, shape, types, where, io, operands, accumulates, flags)                                            \
    PTX_SM90A("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulates ", 0;\n"                                                 \
              "wgmma.mma_async.sync.aligned." shape ".f32." types " "                                                  \
              "{" WGMMA_NAMES##num_d "}, " operands ", p, 1, 1" flags ";\n}\n"                                         \
              : WGMMA_D##num_d(io, 0)                                                                                  \
              : WGMMA_OPERAND_##where, "l"(b)WGMMA_LAST_##io)
#define WGMMA_16_BITS(name, num_d, shape, where, io, operands, accumulates, flags)                                     \
    __device__ inline void name(float d[num_d], WGMMA_A_##where, uint64_t b, WGMMA_TYPE_##io(__nv_bfloat16)) {         \
        WGMMA(num_d, shape, "bf16.bf16", where, io, operands, accumulates, flags);                                     \
    }                                                                                                                  \
    __device__ inline void name(float d[num_d], WGMMA_A_##where, uint64_t b, WGMMA_TYPE_##io(half)) {                  \
        WGMMA(num_d, shape, "f16.f16", where, io, operands, accumulates, flags);                                       \
    }

// K-major: a is stored as (m,k), b as (n,k).
WGMMA_16_BITS(wgmma_64x16x16, 8, "m64n16k16", SHARED, ADD, "%8, %9", "%10", ", 0, 0");
WGMMA_16_BITS(wgmma_64x32x16, 16, "m64n32k16", SHARED, ADD, "%16, %17", "%18", ", 0, 0");
WGMMA_16_BITS(wgmma_64x64x16, 32, "m64n64k16", SHARED, ADD, "%32, %33", "%34", ", 0, 0");
WGMMA_16_BITS(wgmma_64x128x16, 64, "m64n128k16", SHARED, ADD, "%64, %65", "%66", ", 0, 0");
WGMMA_16_BITS(wgmma_64x192x16, 96, "m64n192k16", SHARED, ADD, "%96, %97", "%98", ", 0, 0");
WGMMA_16_BITS(wgmma_64x256x16, 128, "m64n256k16", SHARED, ADD, "%128, %129", "%130", ", 0, 0");
WGMMA_16_BITS(wgmma_64x64x16_new, 32, "m64n64k16", SHARED, NEW, "%32, %33", "0", ", 0, 0");
WGMMA_16_BITS(wgmma_64x128x16_new, 64, "m64n128k16", SHARED, NEW, "%64, %65", "0", ", 0, 0");
WGMMA_16_BITS(wgmma_64x16x16, 8, "m64n16k16", REGISTERS, ADD, "{%8, %9, %10, %11}, %12", "%13", ", 0");
WGMMA_16_BITS(wgmma_64x32x16, 16, "m64n32k16", REGISTERS, ADD, "{%16, %17, %18, %19}, %20", "%21", ", 0");
WGMMA_16_BITS(wgmma_64x64x16, 32, "m64n64k16", REGISTERS, ADD, "{%32, %33, %34, %35}, %36", "%37", ", 0");
WGMMA_16_BITS(wgmma_64x192x16, 96, "m64n192k16", REGISTERS, ADD, "{%96, %97, %98, %99}, %100", "%101", ", 0");
WGMMA_16_BITS(wgmma_64x256x16, 128, "m64n256k16", REGISTERS, ADD, "{%128, %129, %130, %131}, %132", "%133", ", 0");
WGMMA_16_BITS(wgmma_64x64x16_new, 32, "m64n64k16", REGISTERS, NEW, "{%32, %33, %34, %35}, %36", "0", ", 0");

// MN-major: b is stored as (k,n) and, if it is in shared memory, a as (k,m): the wgmma_descriptor of rows (k) of 64 elements, as TMA
// writes them with CU_TENSOR_MAP_SWIZZLE_128B. Adding 128 moves 16 rows (2048 bytes) along k.
WGMMA_16_BITS(wgmma_64x64x16_transposed, 32, "m64n64k16", REGISTERS, ADD, "{%32, %33, %34, %35}, %36", "%37", ", 1");
WGMMA_16_BITS(wgmma_64x64x16_transposed, 32, "m64n64k16", SHARED, ADD, "%32, %33", "%34", ", 1, 1");
WGMMA_16_BITS(wgmma_64x64x16_transposed_new, 32, "m64n64k16", SHARED, NEW, "%32, %33", "0", ", 1, 1");

// Describes an operand whose rows run along m or n, one row per k. It consists of boxes of 64 columns, as TMA writes them
// with CU_TENSOR_MAP_SWIZZLE_128B; the next 64 columns are box_bytes further. PTX calls this the leading-dimension byte
// offset. Adding 128 to a descriptor moves 16 rows (2048 bytes) along k.
//
//     columns       0 .. 63   64 .. 127   128 .. 191  ...
//     k = 0         box 0     box 1       box 2             each row of a box is 128 bytes, 8 rows are 1024 bytes
//     k = 1         box 0     box 1       box 2             (the stride-dimension byte offset)
//     ...
__device__ inline uint64_t wgmma_descriptor_transposed(const void* matrix, int box_bytes) {
    const uint64_t leading_offset = (uint64_t)0x3FFF << 16; // bits 16 to 29
    return (wgmma_descriptor(matrix) & ~leading_offset) | (uint64_t)(box_bytes >> 4) << 16;
}
// MN-major, with a wgmma_descriptor_transposed. _b: only b is MN-major; a is stored as (m,k) and has a wgmma_descriptor.
WGMMA_16_BITS(wgmma_64x128x16_transposed, 64, "m64n128k16", REGISTERS, ADD, "{%64, %65, %66, %67}, %68", "%69", ", 1");
WGMMA_16_BITS(wgmma_64x192x16_transposed, 96, "m64n192k16", SHARED, ADD, "%96, %97", "%98", ", 1, 1");
WGMMA_16_BITS(wgmma_64x256x16_transposed, 128, "m64n256k16", SHARED, ADD, "%128, %129", "%130", ", 1, 1");
WGMMA_16_BITS(wgmma_64x192x16_transposed_b, 96, "m64n192k16", SHARED, ADD, "%96, %97", "%98", ", 0, 1");

// 8 bits per element, e4m3 or e5m2: d (64xN) += a (64x32) b (32xN), otherwise as wgmma_64x128x16 and the wider ones.
// 128 elements along k take as many bytes as 64 16-bit elements, so descriptors and the steps between them are the
// same. Accumulators are fp32, but the tensor core aligns the terms of a sum to the largest one and keeps about 14 bits
// of them (DeepSeek-AI 2024, arXiv:2412.19437, section 3.5.2). Both operands have k as their contiguous dimension: the
// flags that transpose an operand exist for 16-bit types only.
#define WGMMA_8_BITS(name, num_d, shape, types, operands, accumulates)                                                 \
    __device__ inline void name(float d[num_d], WGMMA_A_SHARED, uint64_t b, int accumulate) {                          \
        WGMMA(num_d, shape, types, SHARED, ADD, operands, accumulates, "");                                            \
    }
WGMMA_8_BITS(wgmma_64x128x32_e4m3, 64, "m64n128k32", "e4m3.e4m3", "%64, %65", "%66");
WGMMA_8_BITS(wgmma_64x192x32_e4m3, 96, "m64n192k32", "e4m3.e4m3", "%96, %97", "%98");
WGMMA_8_BITS(wgmma_64x256x32_e4m3, 128, "m64n256k32", "e4m3.e4m3", "%128, %129", "%130");
// The same with an `a` of e5m2; b is e4m3.
WGMMA_8_BITS(wgmma_64x192x32_e5m2_e4m3, 96, "m64n192k32", "e5m2.e4m3", "%96, %97", "%98");
WGMMA_8_BITS(wgmma_64x256x32_e5m2_e4m3, 128, "m64n256k32", "e5m2.e4m3", "%128, %129", "%130");

// ---- TMA: one thread starts a copy of a box of a tensor, or of contiguous bytes -------------------------------------

// Runs on the host. Describes to TMA a contiguous tensor of these sizes, the innermost dimension first, and the box
// that one copy moves. Boxes get the 128-byte swizzle that wgmma reads, so they are at most 64 16-bit elements wide. A
// load fills what is outside the tensor with zeros, a store skips it. Kernels take the result as a parameter `const
// __grid_constant__ CUtensorMap`. The tensor and each of its rows must be aligned to 16 bytes.
//
// The swizzle: a row of a box is 128 bytes, 8 chunks of 16 bytes. Position p of row r holds chunk p ^ (r % 8), so the
// same chunk of 8 neighbouring rows, which ldmatrix and wgmma read at once, is in 8 different groups of 4 banks. The
// hardware takes r % 8 from the address, so boxes are aligned to 1024 bytes.
//
//     position   0 1 2 3 4 5 6 7
//     row 0      0 1 2 3 4 5 6 7        the digits are the chunks
//     row 1      1 0 3 2 5 4 7 6
//     row 2      2 3 0 1 6 7 4 5
//     row 3      3 2 1 0 7 6 5 4
//     ...
//     row 7      7 6 5 4 3 2 1 0        row 8 is like row 0
//
// Boxes that are 64 bytes wide get the 64-byte swizzle: position p of row r holds chunk p ^ (r / 2 % 4), and the box is
// aligned to 512 bytes.
template <int rank>
CUtensorMap tensor_map(const floatX* tensor, const int (&sizes)[rank], const int (&box_sizes)[rank]) {
    typedef CUresult Encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void* encode; // looked up in the driver at run time, so that the program need not link libcuda
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaCheck(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
#else
    cudaCheck(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found));
#endif
    require(found == cudaDriverEntryPointSuccess);
#if defined(ENABLE_FP32)
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
#elif defined(ENABLE_FP16)
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#else
    const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#endif
    cuuint64_t size[rank], stride[rank], bytes = sizeof(floatX); // stride[i]: in bytes, of dimension i + 1
    cuuint32_t box[rank], step[rank];
    for (int i = 0; i < rank; i++) {
        size[i] = (cuuint64_t)sizes[i], box[i] = (cuuint32_t)box_sizes[i], step[i] = 1;
        bytes *= size[i], stride[i] = bytes;
    }
    CUtensorMap map;
    bool narrow = box[0] * sizeof(floatX) == 64;
    CUresult result =
        ((Encode*)encode)(&map, type, rank, (void*)tensor, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS);
    return map;
}

// Map of (B,T,num_vectors,64), for example the heads of qkv; a box is one vector of each of box_tokens tokens. T is a
// dimension of its own: a box that extends past the end of a sequence reads zeros there and writes nothing there, so it
// never touches the next sequence.
inline CUtensorMap tensor_map_heads(const floatX* tensor, int B, int T, int num_vectors, int box_tokens) {
    return tensor_map(tensor, {64, num_vectors, T, B}, {64, 1, box_tokens, 1});
}
// Prefetches `map`, a CUtensorMap in the kernel's parameters, so that the first copy that uses it need not wait for it.
__device__ inline void tma_prefetch_map(const void* map) {
    PTX_SM90A("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Starts the copy of the box whose first element is in row y and column x. `map` is a CUtensorMap in the kernel's
// parameters (__grid_constant__). Elements outside the tensor become zeros. The bytes that arrive at `barrier` are all
// bytes of the box, these zeros included.
__device__ inline void tma_load_2d(void* shared, const void* map, int x, int y, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
              "[%4];\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
              : "memory");
}
// Like tma_load_2d, with three coordinates: x is the innermost dimension, then y, z.
__device__ inline void tma_load_3d(void* shared, const void* map, int x, int y, int z, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
              "[%1, {%2, %3, %4}], [%5];\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
              : "memory");
}
// Like tma_load_2d, with four coordinates: x is the innermost dimension, then y, z, w.
__device__ inline void tma_load_4d(void* shared, const void* map, int x, int y, int z, int w, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
              "[%1, {%2, %3, %4, %5}], [%6];\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
              : "memory");
}
// Like tma_load_2d, but copies the box to every block of the cluster whose bit is set in `blocks`. In each of them it
// goes to the same shared-memory address, and its bytes arrive at the barrier at the same address.
__device__ inline void tma_load_2d_multicast(void* shared, const void* map, int x, int y, uint64_t* barrier,
                                             uint16_t blocks) {
    PTX_SM90A("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
              "[%1, {%2, %3}], [%4], %5;\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
              : "memory");
}
// The cache policy that createpolicy.fractional.L2::evict_first makes for a fraction of 1, that is all of an access.
const uint64_t TMA_EVICT_FIRST = 0x12F0000000000000;
// Like tma_load_2d and tma_load_4d with an evict-first hint, for data that is not read again.
__device__ inline void tma_load_2d_once(void* shared, const void* map, int x, int y, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
              "[%1, {%2, %3}], [%4], %5;\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(TMA_EVICT_FIRST)
              : "memory");
}
__device__ inline void tma_load_4d_once(void* shared, const void* map, int x, int y, int z, int w, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
              "[%1, {%2, %3, %4, %5}], [%6], %7;\n" ::"r"(shared_address(shared)),
              "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "l"(TMA_EVICT_FIRST)
              : "memory");
}
// Starts a prefetch of a box into L2, where a later tma_load_4d finds it.
__device__ inline void tma_prefetch_4d(const void* map, int x, int y, int z, int w) {
    PTX_SM90A("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];\n" ::"l"(map), "r"(x), "r"(y), "r"(z),
              "r"(w)
              : "memory");
}

// Starts the copy of a box from shared memory to the tensor, where its first element is in row y and column x; elements
// outside the tensor are skipped. Before the copy, all threads that wrote the box call tma_store_fence() and then meet
// at a barrier. After it, the thread that started the copy calls tma_store_commit(), and tma_store_wait() before the
// box is overwritten or the block ends.
__device__ inline void tma_store_2d(const void* map, const void* shared, int x, int y) {
    PTX_SM90A("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map), "r"(x),
              "r"(y), "r"(shared_address(shared))
              : "memory");
}
// Like tma_store_2d, with three and with four coordinates, in the order of the loads.
__device__ inline void tma_store_3d(const void* map, const void* shared, int x, int y, int z) {
    PTX_SM90A("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n" ::"l"(map), "r"(x),
              "r"(y), "r"(z), "r"(shared_address(shared))
              : "memory");
}
__device__ inline void tma_store_4d(const void* map, const void* shared, int x, int y, int z, int w) {
    PTX_SM90A("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n" ::"l"(map),
              "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(shared))
              : "memory");
}
__device__ inline void tma_store_fence() { PTX_SM90A("fence.proxy.async.shared::cta;\n" ::: "memory"); }
__device__ inline void tma_store_commit() { PTX_SM90A("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until all but the `pending` newest of this thread's groups of stores have been read from shared memory.
template <int pending> __device__ inline void tma_store_wait() {
    PTX_SM90A("cp.async.bulk.wait_group.read %0;\n" ::"n"(pending) : "memory");
}
// Waits until all of this thread's stores are in global memory; tma_store_wait() only waits until they have been read
// from shared memory.
__device__ inline void tma_store_wait_written() { PTX_SM90A("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// Orders ordinary accesses and those of asynchronous copies with respect to each other, in shared and in global memory.
__device__ inline void async_proxy_fence() { PTX_SM90A("fence.proxy.async;\n" ::: "memory"); }

// Starts the copy of contiguous bytes, which arrive at `barrier`. As in the wrappers below, their number is a multiple
// of 16, and all addresses are aligned to 16.
__device__ inline void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
    PTX_SM90A("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                  shared_address(shared)),
              "l"(global), "r"(bytes), "r"(shared_address(barrier))
              : "memory");
}
// Starts a prefetch of `bytes` from p on into L2; both are multiples of 16.
__device__ inline void bulk_prefetch(const void* p, int bytes) {
    PTX_SM90A("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(p), "r"(bytes) : "memory");
}
// Starts a copy that belongs to a group of stores, like tma_store_2d: call tma_store_fence() before it,
// tma_store_commit() and a wait after it.
__device__ inline void bulk_store(void* global, const void* shared, int bytes) {
    PTX_SM90A("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
              "r"(shared_address(shared)), "r"(bytes)
              : "memory");
}
// Like bulk_store, but adds floats: global[i] += shared[i].
__device__ inline void bulk_add(float* global, const float* shared, int bytes) {
    PTX_SM90A("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(global),
              "r"(shared_address(shared)), "r"(bytes)
              : "memory");
}

// ---- mbarrier: a phase completes after `count` arrivals and all expected bytes --------------------------------------

__device__ inline void mbarrier_init(uint64_t* barrier, int count) {
    PTX_SM90A("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Call it after the inits and before the __syncthreads() that precedes the first use, so that TMA sees the inits too.
__device__ inline void mbarrier_init_fence() { PTX_SM90A("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
    PTX_SM90A("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives once, and adds `bytes` to the bytes that must arrive in this phase before it completes.
__device__ inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
    PTX_SM90A("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
              : "memory");
}
// Waits until the phase of this parity has completed. The first phase has parity 0, then 1, 0, ... On a fresh barrier a
// wait for parity 1 returns at once. A parity is one bit: it cannot tell a phase from the second-next one.
__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
    uint32_t done = 0;
    while (!done) {
        PTX_SM90A("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                  "selp.u32 %0, 1, 0, p;\n}\n"
                  : "=r"(done)
                  : "r"(shared_address(barrier)), "r"(parity)
                  : "memory");
    }
}
// Whether the phase of this parity has completed, without waiting.
__device__ inline bool mbarrier_has_completed(uint64_t* barrier, int parity) {
    uint32_t done = 0;
    PTX_SM90A("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
              "selp.u32 %0, 1, 0, p;\n}\n"
              : "=r"(done)
              : "r"(shared_address(barrier)), "r"(parity)
              : "memory");
    return done != 0;
}

// ---- clusters: blocks that reach each other's shared memory ---------------------------------------------------------

__device__ inline int cluster_rank() {
    int rank = 0;
    PTX_SM90A("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}
// A barrier of all threads of all blocks of the cluster.
__device__ inline void cluster_sync() {
    PTX_SM90A("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
// The two halves of cluster_sync(), between which a block may do other work. Of what came before, the others see only barriers that
// mbarrier_init_fence() followed: so there is no fence, which would wait for all memory accesses on their way.
__device__ inline void cluster_arrive_relaxed() { PTX_SM90A("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }
__device__ inline void cluster_wait() { PTX_SM90A("barrier.cluster.wait.acquire;\n" ::: "memory"); }
// Like mbarrier_arrive, but at the barrier with the address `barrier` in the shared memory of block `rank`. It is for a
// consumer's arrival at an empty barrier of another block: it signals that this thread has read its data. It does not
// make this thread's writes visible to that block, which would need a fence with at least cluster scope.
__device__ inline void mbarrier_arrive_cluster(uint64_t* barrier, int rank) {
    PTX_SM90A("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
              "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(barrier)),
              "r"(rank)
              : "memory");
}
// Like mbarrier_wait. Afterwards this thread also sees data that other blocks wrote by store_cluster_async().
__device__ inline void mbarrier_wait_cluster(uint64_t* barrier, int parity) {
    uint32_t done = 0;
    while (!done) {
        PTX_SM90A("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                  "selp.u32 %0, 1, 0, p;\n}\n"
                  : "=r"(done)
                  : "r"(shared_address(barrier)), "r"(parity)
                  : "memory");
    }
}
// Stores x in the shared memory of block `rank`, at the address that p has in this block, which is aligned to the size of x. The
// store is asynchronous: its bytes arrive there at the barrier with the address `barrier`, and it needs no fence.
#define PTX_STORE_CLUSTER_ASYNC(type, values, p, barrier, rank, ...)                                                   \
    PTX_SM90A("{\n.reg .b32 there, full;\nmapa.shared::cluster.u32 there, %0, %2;\n"                                   \
              "mapa.shared::cluster.u32 full, %1, %2;\n"                                                               \
              "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes." type " [there], " values                   \
              ", [full];\n}\n" ::"r"(shared_address(p)),                                                               \
              "r"(shared_address(barrier)), "r"(rank), __VA_ARGS__                                                     \
              : "memory")
__device__ inline void store_cluster_async(const uint32_t* p, uint32_t x, const uint64_t* barrier, int rank) {
    PTX_STORE_CLUSTER_ASYNC("b32", "%3", p, barrier, rank, "r"(x));
}
__device__ inline void store_cluster_async(const float* p, float x, const uint64_t* barrier, int rank) {
    PTX_STORE_CLUSTER_ASYNC("f32", "%3", p, barrier, rank, "f"(x));
}
__device__ inline void store_cluster_async(const float2* p, float2 x, const uint64_t* barrier, int rank) {
    PTX_STORE_CLUSTER_ASYNC("v2.f32", "{%3, %4}", p, barrier, rank, "f"(x.x), "f"(x.y));
}
__device__ inline void store_cluster_async(const int4* p, int4 x, const uint64_t* barrier, int rank) {
    PTX_STORE_CLUSTER_ASYNC("v4.b32", "{%3, %4, %5, %6}", p, barrier, rank, "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
// Copies `bytes` of this block's shared memory to block `rank`, to the place at which `to` lies in this block. They
// arrive at that block's barrier with the address `barrier`. As for bulk_store, call tma_store_fence() first; size and
// addresses are multiples of 16.
__device__ inline void bulk_copy_cluster(void* to, const void* from, int bytes, uint64_t* barrier, int rank) {
    PTX_SM90A(
        "{\n.reg .b32 to, barrier;\nmapa.shared::cluster.u32 to, %0, %4;\n"
        "mapa.shared::cluster.u32 barrier, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [barrier];\n}\n" ::"r"(
            shared_address(to)),
        "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

// ---- global memory: accesses that other blocks see ------------------------------------------------------------------

// A counter: one block writes it, another one waits for it.
__device__ inline int load_acquire(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// *p = x. A thread that reads x by load_acquire() also sees all that this thread had written, or seen, before the call.
__device__ inline void store_release(int* p, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(p), "r"(x) : "memory");
}
// *p += x. A thread that reads the sum by load_acquire() also sees all that this thread had written, or seen, before
// the call.
__device__ inline void add_release(int* p, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(p), "r"(x) : "memory");
}

// Relaxed accesses of 8 or 16 bytes: never torn, and not ordered with other accesses. A pair is two of them, and may be
// torn between them.
__device__ inline uint64_t load_relaxed(const uint64_t* p) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];\n" : "=l"(x) : "l"(p) : "memory");
    return x;
}
__device__ inline ulonglong2 load_relaxed_pair(const uint64_t* p) {
    ulonglong2 x;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n" : "=l"(x.x), "=l"(x.y) : "l"(p) : "memory");
    return x;
}
__device__ inline void store_relaxed(uint64_t* p, uint64_t x) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;\n" ::"l"(p), "l"(x) : "memory");
}
__device__ inline void store_relaxed_pair(uint64_t* p, ulonglong2 x) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};\n" ::"l"(p), "l"(x.x), "l"(x.y) : "memory");
}
// 16 bytes, aligned to 16, never torn.
__device__ inline uint4 load_relaxed_16(const uint4* p) {
    uint4 x = {};
    PTX_SM90A("{\n.reg .b128 x;\n.reg .b64 low, high;\nld.relaxed.gpu.global.b128 x, [%4];\nmov.b128 {low, high}, x;\n"
              "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}\n"
              : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
              : "l"(p)
              : "memory");
    return x;
}
__device__ inline void store_relaxed_16(uint4* p, uint4 x) {
    PTX_SM90A("{\n.reg .b128 x;\n.reg .b64 low, high;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
              "mov.b128 x, {low, high};\nst.relaxed.gpu.global.b128 [%0], x;\n}\n" ::"l"(p),
              "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
              : "memory");
}

// ---- warps ----------------------------------------------------------------------------------------------------------

// A barrier for some of a block's warps: id 1 to 15 (0 is __syncthreads). `threads` counts all threads that arrive at
// or sync on the barrier. sync waits for all of them, arrive does not wait.
__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// setmaxnreg: registers move from the producer's warps to the consumers'. All warps of a warpgroup call it.
// num_registers is the new limit per thread, a multiple of 8; warpgroup_more_registers() waits until enough registers
// of the block are free.
template <int num_registers> __device__ inline void warpgroup_more_registers() {
    PTX_SM90A("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(num_registers));
}
template <int num_registers> __device__ inline void warpgroup_fewer_registers() {
    PTX_SM90A("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(num_registers));
}

// Returns x, which must be the same in all lanes. The result comes from a warp reduction, so the compiler sees that it
// is warp-uniform, and keeps values that depend on it in uniform registers.
__device__ inline int warp_uniform(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, x);
#else
    return x;
#endif
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// 2^x in one instruction, within 2 ulp; 0 for -inf
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x in one instruction, within 1 ulp; 0 for +-inf and where the quotient is subnormal
__device__ inline float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// tanh(x) in one instruction, within 2^-11
__device__ inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The smaller of two numbers, NaN if one is NaN: fminf() would return the other.
__device__ inline float min_or_nan(float x, float y) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
#else
    return x <= y ? x : y < x ? y : NAN;
#endif
}

// Below compute capability 8.9 a conversion to 8 bits is dozens of instructions: a call costs less than its registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define PTX_INLINE_89 __noinline__
#else
#define PTX_INLINE_89 inline
#endif
// Rounds four floats to the nearest e4m3 and packs them, `a` in the lowest byte. Values beyond +-448 become +-448.
__device__ PTX_INLINE_89 uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}
// The same for e5m2, whose largest value is 57344.
__device__ inline uint32_t pack_e5m2x4(float a, float b, float c, float d) {
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E5M2);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E5M2);
    return low | high << 16;
}
// The two e4m3 in the lower 16 bits as fp16, which holds them exactly. Needs compute capability 8.9; compiled for an
// older device it executes a trap, because without the instruction it takes dozens.
__device__ inline half2 unpack_e4m3x2(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    __trap();
#endif
    return half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)bits, __NV_E4M3));
}

// ---- the compiler ---------------------------------------------------------------------------------------------------

// The compiler may unpack 16-bit elements once and keep the floats, which take twice the registers of x. After a call it
// has only x itself, and unpacks again.
template <int n> __device__ inline void hold_packed(int4 (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) { asm volatile("" : "+r"(x[i].x), "+r"(x[i].y), "+r"(x[i].z), "+r"(x[i].w)); }
}

// Returns p, and hides from the compiler that p does not change. Otherwise it keeps each address that follows from p in registers
// during a whole loop.
template <class T> __device__ inline T* hold_pointer(T* p) {
    asm volatile("" : "+l"(p));
    return p;
}
