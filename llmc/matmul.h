/*
Matrix multiplication on the CPU in fp32: packed, register-blocked and multithreaded, with code for AVX-512, for AVX2
and portable code, chosen at run time. A linear layer needs three products, which share one loop nest:

    matmul_nt   out (M,N) = a (M,K) b (N,K)^T + bias (N)     forward
    matmul_nn   out (M,N) = a (M,K) b (K,N)                  gradient of the input
    matmul_tn   out (M,N) = a (K,M)^T b (K,N)                gradient of the weight

The loop nest multiplies a streaming operand (M,K) by a resident operand (K,N), called a and b below. A block of KC x NC
of b is kept in L2, packed into panels of NR columns; if a has few rows, b is read in place instead. The rows of a are
streamed in strips of MR rows: their elements are broadcast and multiplied with every panel, while MR x NR accumulators
stay in registers.

            KC                      NR   NR   NR
         +-------+               +----+----+----+
      MR | strip | of a     x    |    |    |    |  KC   block of b     ->   one MR x NR register tile per panel
         +-------+               |    |    |    |
                                 +----+----+----+

matmul_nt streams the weights, read in place, and stores its result transposed. matmul_nn has the weights as the
resident operand. matmul_tn, whose output is the gradient of the weights, packs the strips of a as well.
The order in which an element is summed does not depend on the number of threads, so the result does not depend on it.
Source: Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3).
*/
#ifndef LLMC_MATMUL_H
#define LLMC_MATMUL_H

#include "utils.h"

// With -O3, `make` compiles this file once for train_gpt2, as matmul.o (MATMUL_OBJECT), and train_gpt2.c sees the declarations
// only (MATMUL_DECLARED), so that an edit of train_gpt2.c does not compile the products. Without either macro, the functions
// are static inline.
#if defined(MATMUL_OBJECT) || defined(MATMUL_DECLARED)
#define MATMUL_API
#else
#define MATMUL_API static inline
#endif

// The three products. Strides ld* count floats from one row to the next. M, N and K may have any size; K = 0 gives zeros
// (plus bias).

// out (M,N) = a (M,K) b (N,K)^T + bias (N); bias may be NULL; out += if accumulate is true
MATMUL_API void matmul_nt(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb,
                          const float* bias, size_t M, size_t N, size_t K, bool accumulate);
// out (M,N) = a (M,K) b (K,N); out += if accumulate is true
MATMUL_API void matmul_nn(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb, size_t M,
                          size_t N, size_t K, bool accumulate);
// out (M,N) = a (K,M)^T b (K,N); out += if accumulate is true
MATMUL_API void matmul_tn(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb, size_t M,
                          size_t N, size_t K, bool accumulate);

#ifndef MATMUL_DECLARED

#include <pthread.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define MATMUL_X86 1
#endif

#define MATMUL_INLINE static inline __attribute__((always_inline))

// 16 floats, the unit of panels, are one register of AVX-512, two of AVX2, four of SSE or NEON.
enum { MATMUL_VL = 16, MATMUL_MAX_MR = 8, MATMUL_MAX_NR = 48 };

typedef enum { MATMUL_PORTABLE, MATMUL_AVX2, MATMUL_AVX512 } MatmulIsa;
static const char* const matmul_isa_names[] = {"portable", "avx2", "avx512"};

// Returns the best instruction set of this machine. The environment variable LLMC_CPU=portable|avx2|avx512 selects a
// lesser one.
static inline MatmulIsa matmul_isa(void) {
    static int chosen = -1;
    int isa = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (isa >= 0) { return (MatmulIsa)isa; }
    isa = MATMUL_PORTABLE;
#ifdef MATMUL_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) { isa = MATMUL_AVX2; }
    if (isa == MATMUL_AVX2 && __builtin_cpu_supports("avx512f")) { isa = MATMUL_AVX512; }
#endif
    const char* wanted = getenv("LLMC_CPU");
    if (wanted && *wanted) {
        int i = 0;
        while (i < 3 && strcmp(wanted, matmul_isa_names[i]) != 0) { i++; }
        if (i == 3) { die("LLMC_CPU is '%s', want portable, avx2 or avx512", wanted); }
        if (i > isa) { die("LLMC_CPU is '%s', but this machine has no more than %s", wanted, matmul_isa_names[isa]); }
        isa = i;
    }
    __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    return (MatmulIsa)isa;
}

// A product as the loop nest computes it: the rows of `a` stream, `b` is packed.
typedef struct {
    float* out; // (M,N) with row stride ldo; if out_transposed, (N,M) with row stride ldo
    size_t ldo;
    bool out_transposed;
    bool accumulate; // out += instead of out =
    const float* a;  // element (m,k) at a[m * a_row + k * a_col]
    size_t a_row, a_col;
    const float* b; // element (k,n) at b[k * b_row + n * b_col]
    size_t b_row, b_col;
    const float* row_bias; // (M) or NULL; row_bias[m] is added to row m of the product, before a transposed store
    size_t M, N, K;
} MatmulArgs;

// A packed block of b, and the next block of b, which is prefetched while the packed one is used.
typedef struct {
    const float* packed;        // the panels, one after the other; NULL: read b in place
    const float* b;             // the block's first element in b
    size_t kb, n0, nb;          // the block has kb steps of k, and columns n0 .. n0 + nb of the product
    bool accumulate, with_bias; // add to the output of earlier blocks; add row_bias (first block only)
    const float* ahead;         // the next block of b, to be prefetched: rows of nb floats with stride b_row
    size_t ahead_rows;          // 0: nothing to prefetch
} MatmulBlock;

// ---- the register tile --------------------------------------------------------------

#ifdef MATMUL_X86
// Transposes 8 x 8 floats: out[j * ldo + i] = tile[i * MATMUL_MAX_NR + j] for i, j < 8; += if accumulate is true.
__attribute__((target("avx2"))) static inline void matmul_store_8x8_transposed(float* out, size_t ldo,
                                                                               const float* tile, bool accumulate) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) { r[i] = _mm256_loadu_ps(tile + i * MATMUL_MAX_NR); }
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) {
        float* o = out + (size_t)i * ldo;
        _mm256_storeu_ps(o, accumulate ? _mm256_add_ps(_mm256_loadu_ps(o), t[i]) : t[i]);
    }
}
#endif

// Stores a finished tile (rows, cols) to the output. Used for transposed output and for tiles at the edge of the
// matrix; matmul_tile() stores full tiles directly from registers.
static inline void matmul_store_tile(const MatmulArgs* g, size_t m, size_t n0, const float* tile, size_t rows,
                                     size_t cols, bool accumulate) {
    if (!g->out_transposed) {
        for (size_t i = 0; i < rows; i++) {
            float* o = g->out + (m + i) * g->ldo + n0;
            for (size_t j = 0; j < cols; j++) {
                o[j] = accumulate ? o[j] + tile[i * MATMUL_MAX_NR + j] : tile[i * MATMUL_MAX_NR + j];
            }
        }
        return;
    }
    size_t j = 0;
#ifdef MATMUL_X86
    if (rows == 8 && matmul_isa() != MATMUL_PORTABLE) {
        for (; j + 8 <= cols; j += 8) {
            matmul_store_8x8_transposed(g->out + (n0 + j) * g->ldo + m, g->ldo, tile + j, accumulate);
        }
    }
#endif
    for (; j < cols; j++) {
        float* o = g->out + (n0 + j) * g->ldo + m;
        for (size_t i = 0; i < rows; i++) {
            o[i] = accumulate ? o[i] + tile[i * MATMUL_MAX_NR + j] : tile[i * MATMUL_MAX_NR + j];
        }
    }
}

// Number of vectors of 16 floats in the next panel if `left` of them remain. When 4 remain and max_nv is 3 it returns
// 2, because two panels of 2 are better than panels of 3 and 1.
MATMUL_INLINE size_t matmul_panel_vectors(size_t left, size_t max_nv) {
    if (left <= max_nv) { return left; }
    return left == max_nv + 1 && max_nv == 3 ? 2 : max_nv;
}

// Register tiles by the floats in a register: matmul_strip16(), 8 and 4, and with them matmul_dot16(), 8 and 4.
#define MATMUL_FLOATS 16 // AVX-512
#include "matmul_tile.h"
#define MATMUL_FLOATS 8 // AVX2
#include "matmul_tile.h"
#define MATMUL_FLOATS 4 // SSE, NEON
#include "matmul_tile.h"

// The type of the strip functions below. a points to the strip's first row at the block's first step of k. If a is read
// in place, a_col is 1; for a packed strip, a_col is mr and a_row is 1.
typedef void (*MatmulStrip)(const MatmulArgs* g, const MatmulBlock* block, const float* a, size_t a_row, size_t a_col,
                            size_t m, size_t rows);

#define MATMUL_STRIP_FUNCTION(NAME, STRIP, MR, MAX_NV)                                                                 \
    static inline void NAME(const MatmulArgs* g, const MatmulBlock* block, const float* a, size_t a_row, size_t a_col, \
                            size_t m, size_t rows) {                                                                   \
        STRIP(g, block, MR, MAX_NV, a, a_row, a_col, m, rows);                                                         \
    }
#ifdef MATMUL_X86
__attribute__((target("avx512f")))
MATMUL_STRIP_FUNCTION(matmul_strip_avx512, matmul_strip16, 8, 3) // 24 accumulators, 3 of b: 27 of 32 registers
    __attribute__((target("avx2,fma")))
    MATMUL_STRIP_FUNCTION(matmul_strip_avx2, matmul_strip8, 6, 1) // 12 accumulators, 2 of b, 1 of a: 15 of 16 registers
#endif
    MATMUL_STRIP_FUNCTION(matmul_strip_portable, matmul_strip4, 3, 1) // 12 SSE or NEON accumulators

    // Copies kb rows of `width` floats (a multiple of 16) with stride ld to contiguous memory.
    MATMUL_INLINE void matmul_copy_rows(float* dst, const float* src, size_t ld, size_t kb, size_t width) {
    for (size_t k = 0; k < kb; k++) {
        for (size_t j = 0; j < width; j += MATMUL_VL) {
            memcpy(dst + k * width + j, src + k * ld + j, MATMUL_VL * sizeof(float));
        }
    }
}

typedef void (*MatmulCopy)(float* dst, const float* src, size_t ld, size_t kb, size_t width);

#define MATMUL_COPY_FUNCTION(NAME)                                                                                     \
    static inline void NAME(float* dst, const float* src, size_t ld, size_t kb, size_t width) {                        \
        matmul_copy_rows(dst, src, ld, kb, width);                                                                     \
    }
#ifdef MATMUL_X86
__attribute__((target("avx512f"))) MATMUL_COPY_FUNCTION(matmul_copy_avx512) __attribute__((target("avx2,fma")))
MATMUL_COPY_FUNCTION(matmul_copy_avx2)
#endif
    MATMUL_COPY_FUNCTION(matmul_copy_portable)

        typedef struct {
    MatmulStrip strip;
    MatmulCopy copy;
    size_t mr, max_nv;
} MatmulKernel;

static inline MatmulKernel matmul_kernel(void) {
    MatmulKernel kernel = {matmul_strip_portable, matmul_copy_portable, 3, 1};
#ifdef MATMUL_X86
    if (matmul_isa() == MATMUL_AVX512) {
        kernel.strip = matmul_strip_avx512;
        kernel.copy = matmul_copy_avx512;
        kernel.mr = 8;
        kernel.max_nv = 3;
    } else if (matmul_isa() == MATMUL_AVX2) {
        kernel.strip = matmul_strip_avx2;
        kernel.copy = matmul_copy_avx2;
        kernel.mr = 6;
        kernel.max_nv = 1;
    }
#endif
    return kernel;
}

// ---- packing --------------------------------------------------------------------------

#ifdef MATMUL_X86
// Transposes 8 x 8 floats: dst[j * width + i] = src[i * ld + j] for i, j < 8.
__attribute__((target("avx2"))) static inline void matmul_transpose_8x8(float* dst, size_t width, const float* src,
                                                                        size_t ld) {
    float tile[8 * MATMUL_MAX_NR];
    for (size_t i = 0; i < 8; i++) { memcpy(tile + i * MATMUL_MAX_NR, src + i * ld, 8 * sizeof(float)); }
    matmul_store_8x8_transposed(dst, width, tile, false);
}
#endif

// Packs steps k0..k0+kb and columns n0..n0+cols of b into one panel (kb, width); columns beyond cols become zero.
static inline void matmul_pack_panel(float* dst, const MatmulArgs* g, const MatmulKernel* kernel, size_t k0, size_t kb,
                                     size_t n0, size_t cols, size_t width) {
    const float* src = g->b + k0 * g->b_row + n0 * g->b_col;
    if (g->b_col == 1 && cols == width) {
        kernel->copy(dst, src, g->b_row, kb, width);
        return;
    }
    if (g->b_col == 1) {
        for (size_t k = 0; k < kb; k++) {
            memcpy(dst + k * width, src + k * g->b_row, cols * sizeof(float));
            for (size_t j = cols; j < width; j++) { dst[k * width + j] = 0.0f; }
        }
        return;
    }
    size_t k_done = 0, j_done = 0; // steps and columns that the 8 x 8 transposes have packed
#ifdef MATMUL_X86
    if (matmul_isa() != MATMUL_PORTABLE && g->b_row == 1) {
        k_done = kb / 8 * 8;
        j_done = cols / 8 * 8;
        for (size_t j = 0; j < j_done; j += 8) {
            for (size_t k = 0; k < k_done; k += 8) {
                matmul_transpose_8x8(dst + k * width + j, width, src + k + j * g->b_col, g->b_col);
            }
        }
    }
#endif
    for (size_t k = 0; k < kb; k++) {
        for (size_t j = k < k_done ? j_done : 0; j < width; j++) {
            dst[k * width + j] = j < cols ? src[k * g->b_row + j * g->b_col] : 0.0f;
        }
    }
}

// Packs rows m..m+rows and steps k0..k0+kb of a into a strip (kb, mr).
static inline void matmul_pack_strip(float* dst, const MatmulArgs* g, size_t mr, size_t m, size_t rows, size_t k0,
                                     size_t kb) {
    const float* src = g->a + m * g->a_row + k0 * g->a_col;
    if (rows == 8 && mr == 8 && g->a_row == 1) {
        for (size_t k = 0; k < kb; k++) {
            memcpy(dst + k * 8, src + k * g->a_col, 8 * sizeof(float));
            // prefetch for the strip after next: successive k are on different pages
            __builtin_prefetch(src + k * g->a_col + 16);
        }
        return;
    }
    for (size_t k = 0; k < kb; k++) {
        for (size_t i = 0; i < mr; i++) { dst[k * mr + i] = i < rows ? src[k * g->a_col + i * g->a_row] : 0.0f; }
    }
}

// ---- the loop nest -----------------------------------------------------------------------

// A packed block has KC steps of k and NC columns: 768 KB, most of a 1 MB L2. KC and NC must not depend on the number
// of threads, because they determine the order in which an element is summed. A transposed store is expensive, so
// transposed products split K into fewer blocks.
enum { MATMUL_KC = 256, MATMUL_NC = 768, MATMUL_KC_TRANSPOSED = 768, MATMUL_NC_TRANSPOSED = 256 };
enum { MATMUL_DIRECT_ROWS = 512 }; // up to this many rows of a, b is not packed: see matmul_run_shared()
enum { MATMUL_PACK_STEPS = 64 };   // steps of k that a thread packs at a time

// Two buffers per thread, which are reused between calls and freed when the thread ends.
typedef struct {
    float* data[2];
    size_t size[2]; // floats
} MatmulBuffers;

static pthread_key_t matmul_buffers_key;
static pthread_once_t matmul_buffers_once = PTHREAD_ONCE_INIT;

static inline void matmul_buffers_free(void* memory) {
    MatmulBuffers* buffers = (MatmulBuffers*)memory;
    free(buffers->data[0]);
    free(buffers->data[1]);
    free(buffers);
}

static inline void matmul_buffers_make_key(void) {
    if (pthread_key_create(&matmul_buffers_key, matmul_buffers_free) != 0) { die("pthread_key_create failed"); }
}

// Returns buffer 0 or 1 of the calling thread, aligned to a cache line, with room for at least `floats` floats.
static inline float* matmul_buffer(int which, size_t floats) {
    pthread_once(&matmul_buffers_once, matmul_buffers_make_key);
    MatmulBuffers* buffers = (MatmulBuffers*)pthread_getspecific(matmul_buffers_key);
    if (!buffers) {
        buffers = (MatmulBuffers*)calloc_check(1, sizeof(*buffers));
        pthread_setspecific(matmul_buffers_key, buffers);
    }
    if (buffers->size[which] < floats) {
        free(buffers->data[which]);
        buffers->data[which] = (float*)aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        if (!buffers->data[which]) { die("out of memory: cannot allocate %zu bytes", floats * sizeof(float)); }
        buffers->size[which] = floats;
    }
    return buffers->data[which];
}

// Packs steps k..k+steps of the block that begins at (k0, n0) and has kb steps and nb columns. `packed` is the block's
// memory; its panels follow each other.
static inline void matmul_pack_steps(float* packed, const MatmulArgs* g, const MatmulKernel* kernel, size_t k0,
                                     size_t kb, size_t n0, size_t nb, size_t k, size_t steps) {
    size_t left = (nb + MATMUL_VL - 1) / MATMUL_VL;
    for (size_t n = 0; left > 0;) {
        size_t nv = matmul_panel_vectors(left, kernel->max_nv), width = nv * MATMUL_VL;
        size_t cols = nb - n < width ? nb - n : width;
        matmul_pack_panel(packed + k * width, g, kernel, k0 + k, steps, n0 + n, cols, width);
        packed += kb * width;
        n += width;
        left -= nv;
    }
}

// Computes a product with all threads together: for each block of b, the threads pack it, then divide the strips of a
// among themselves. Within a parallel region it runs on the calling thread alone.
static inline void matmul_run_shared(const MatmulArgs* g) {
    const MatmulKernel kernel = matmul_kernel();
    const size_t max_kc = g->out_transposed ? MATMUL_KC_TRANSPOSED : MATMUL_KC;
    const size_t max_nc = g->out_transposed ? MATMUL_NC_TRANSPOSED : MATMUL_NC;
    const size_t nc = g->N < max_nc ? g->N : max_nc, kc = g->K < max_kc ? g->K : max_kc;
    // with few rows of a, packing b costs more than it saves; b can be read in place only if all panels are full
    const bool direct = g->b_col == 1 && g->N % MATMUL_VL == 0 && g->M <= MATMUL_DIRECT_ROWS;
    float* packed = direct ? NULL : matmul_buffer(0, kc * ((nc + MATMUL_VL - 1) / MATMUL_VL * MATMUL_VL));
    const long num_strips = (long)((g->M + kernel.mr - 1) / kernel.mr);
    const bool pack_a = g->a_col != 1;
#pragma omp parallel
    {
        float* strip = pack_a ? matmul_buffer(1, kc * MATMUL_MAX_MR) : NULL;
        for (size_t n0 = 0; n0 < g->N; n0 += nc) {
            for (size_t k0 = 0; k0 == 0 || k0 < g->K; k0 += kc) {
                MatmulBlock block = {packed,    g->b + k0 * g->b_row + n0 * g->b_col,
                                     g->K - k0, n0,
                                     g->N - n0, g->accumulate || k0 > 0,
                                     k0 == 0,   NULL,
                                     0};
                if (block.kb > kc) { block.kb = kc; }
                if (block.nb > nc) { block.nb = nc; }
                if (g->b_col == 1 && k0 + kc < g->K) {
                    block.ahead = g->b + (k0 + kc) * g->b_row + n0;
                    block.ahead_rows = g->K - k0 - kc < kc ? g->K - k0 - kc : kc;
                }
                long num_chunks = direct ? 0 : (long)((block.kb + MATMUL_PACK_STEPS - 1) / MATMUL_PACK_STEPS);
#pragma omp for schedule(static)
                for (long c = 0; c < num_chunks; c++) {
                    size_t k = (size_t)c * MATMUL_PACK_STEPS, steps = block.kb - k;
                    if (steps > MATMUL_PACK_STEPS) { steps = MATMUL_PACK_STEPS; }
                    matmul_pack_steps(packed, g, &kernel, k0, block.kb, n0, block.nb, k, steps);
                }
#pragma omp for schedule(static)
                for (long s = 0; s < num_strips; s++) {
                    size_t m = (size_t)s * kernel.mr, rows = g->M - m < kernel.mr ? g->M - m : kernel.mr;
                    const float* a = g->a + m * g->a_row + k0 * g->a_col;
                    if (pack_a) { matmul_pack_strip(strip, g, kernel.mr, m, rows, k0, block.kb); }
                    kernel.strip(g, &block, pack_a ? strip : a, pack_a ? 1 : g->a_row, pack_a ? kernel.mr : 1, m, rows);
                }
            }
        }
    }
}

// Computes a product. If K has many blocks, the barriers after every block cost more than sharing the packed block
// saves: then each thread computes a range of columns on its own.
static inline void matmul_run(const MatmulArgs* g) {
    if (g->M == 0 || g->N == 0) { return; }
    size_t threads = 1;
#ifdef _OPENMP
    if (!omp_in_parallel()) { threads = (size_t)omp_get_max_threads(); }
#endif
    const size_t vectors = (g->N + MATMUL_VL - 1) / MATMUL_VL;
    const size_t kc = g->out_transposed ? MATMUL_KC_TRANSPOSED : MATMUL_KC;
    if (threads == 1 || g->K <= 2 * kc || vectors < 6 * threads) {
        matmul_run_shared(g);
        return;
    }
#pragma omp parallel for schedule(static)
    for (long t = 0; t < (long)threads; t++) {
        size_t first = vectors * (size_t)t / threads * MATMUL_VL, end = vectors * (size_t)(t + 1) / threads * MATMUL_VL;
        MatmulArgs part = *g;
        part.N = (end < g->N ? end : g->N) - first;
        part.b += first * g->b_col;
        part.out += first * (g->out_transposed ? g->ldo : 1);
        matmul_run_shared(&part); // nested parallel regions have a single thread
    }
}

// ---- the three products ------------------------------------------------------------------

#define MATMUL_DOT_FUNCTION(NAME, DOT)                                                                                 \
    static inline float NAME(const float* w, const float* x, size_t K) { return DOT(w, x, K); }
#ifdef MATMUL_X86
__attribute__((target("avx512f"))) MATMUL_DOT_FUNCTION(matmul_dot_avx512, matmul_dot16)
    __attribute__((target("avx2,fma"))) MATMUL_DOT_FUNCTION(matmul_dot_avx2, matmul_dot8)
#endif
        MATMUL_DOT_FUNCTION(matmul_dot_portable, matmul_dot4)

    // out[j] = weight[j,:] . x + bias[j] for a single row x (K). Bound: memory, each weight is read once.
    static inline void matmul_vector(float* out, const float* x, const float* weight, size_t ldw, const float* bias,
                                     size_t N, size_t K) {
    float (*dot)(const float*, const float*, size_t) = matmul_dot_portable;
#ifdef MATMUL_X86
    if (matmul_isa() == MATMUL_AVX512) { dot = matmul_dot_avx512; }
    if (matmul_isa() == MATMUL_AVX2) { dot = matmul_dot_avx2; }
#endif
#pragma omp parallel for schedule(static) if (N * K > 1 << 16)
    for (long j = 0; j < (long)N; j++) { out[j] = dot(weight + (size_t)j * ldw, x, K) + (bias ? bias[j] : 0.0f); }
}

MATMUL_API void matmul_nt(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb,
                          const float* bias, size_t M, size_t N, size_t K, bool accumulate) {
    if (M == 1 && !accumulate) {
        matmul_vector(out, a, b, ldb, bias, N, K);
        return;
    }
    // computes out^T = b a^T: the loop nest streams b and packs a, and stores its result transposed
    MatmulArgs g = {out, ldo, true, accumulate, b, ldb, 1, a, 1, lda, bias, N, M, K};
    matmul_run(&g);
}

MATMUL_API void matmul_nn(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb, size_t M,
                          size_t N, size_t K, bool accumulate) {
    MatmulArgs g = {out, ldo, false, accumulate, a, lda, 1, b, ldb, 1, NULL, M, N, K};
    matmul_run(&g);
}

MATMUL_API void matmul_tn(float* out, size_t ldo, const float* a, size_t lda, const float* b, size_t ldb, size_t M,
                          size_t N, size_t K, bool accumulate) {
    MatmulArgs g = {out, ldo, false, accumulate, a, 1, lda, b, ldb, 1, NULL, M, N, K};
    matmul_run(&g);
}

#endif // MATMUL_DECLARED
#endif
