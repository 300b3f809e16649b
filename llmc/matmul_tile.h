/*
The inner loops of matmul.h, which includes this file once for each width of vector registers. MATMUL_FLOATS is the
number of floats in a register: the compiler keeps the accumulators in registers only if their type is as wide as these
are. With vectors of 16 floats, gcc 12 keeps the accumulators of AVX2 code on the stack, and a product takes ten times
as long.
*/
#ifndef MATMUL_FLOATS
#include "matmul.h" // so that this file can be compiled by itself, too
#else
#define MATMUL_JOIN2(A, B) A##B
#define MATMUL_JOIN(A, B) MATMUL_JOIN2(A, B)
#define Vector MATMUL_JOIN(MatmulVector, MATMUL_FLOATS)
#define MATMUL_PARTS (MATMUL_VL / MATMUL_FLOATS) // registers for 16 floats

typedef float Vector __attribute__((vector_size(MATMUL_FLOATS * 4)));

// Stores a register tile: whole ones at once, the others through memory.
MATMUL_INLINE void MATMUL_JOIN(matmul_store, MATMUL_FLOATS)(Vector sum[MATMUL_MAX_MR][3 * MATMUL_PARTS],
                                                            const MatmulArgs* g, const int mr, const int nv, size_t m,
                                                            size_t rows, size_t n0, size_t cols,
                                                            const bool accumulate) {
    const int num = nv * MATMUL_PARTS;
    if (!g->out_transposed && rows == (size_t)mr && cols == (size_t)(nv * MATMUL_VL)) {
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            float* o = g->out + (m + (size_t)i) * g->ldo + n0;
#pragma GCC unroll 12
            for (int v = 0; v < num; v++) {
                if (accumulate) {
                    Vector old;
                    memcpy(&old, o + v * MATMUL_FLOATS, sizeof(old));
                    sum[i][v] += old;
                }
                memcpy(o + v * MATMUL_FLOATS, &sum[i][v], sizeof(Vector));
            }
        }
        return;
    }
    float tile[MATMUL_MAX_MR * MATMUL_MAX_NR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 12
        for (int v = 0; v < num; v++) {
            memcpy(tile + i * MATMUL_MAX_NR + v * MATMUL_FLOATS, &sum[i][v], sizeof(Vector));
        }
    }
    matmul_store_tile(g, m, n0, tile, rows, cols, accumulate);
}

// The register tile: mr x (nv * 16) accumulators, summed over the block's kb steps. a has strides a_row and a_col; b
// is one panel (kb, nv * 16) with stride b_step. mr and nv are compile-time constants at every call, so that the
// accumulators stay in registers. If rows < mr, the tile's rows beyond `rows` repeat the last row and are not stored.
MATMUL_INLINE void MATMUL_JOIN(matmul_tile, MATMUL_FLOATS)(const MatmulArgs* g, const MatmulBlock* block, const int mr,
                                                           const int nv, const float* a, const size_t a_row,
                                                           const size_t a_col, const float* b, size_t b_step, size_t m,
                                                           size_t rows, size_t n, size_t cols) {
    const size_t K = block->kb, n0 = block->n0 + n;
    const int num = nv * MATMUL_PARTS; // registers for a row
    Vector sum[MATMUL_MAX_MR][3 * MATMUL_PARTS];
    const float* row[MATMUL_MAX_MR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        row[i] = a + (size_t)((size_t)i < rows ? (size_t)i : rows - 1) * a_row;
#pragma GCC unroll 12
        for (int v = 0; v < num; v++) { sum[i][v] = (Vector){0}; }
    }
    if (!g->out_transposed) { // prefetch the output's cache lines, which are written after the K steps
        for (size_t i = 0; i < rows; i++) {
            const float* o = g->out + (m + i) * g->ldo + n0;
            for (int v = 0; v < nv; v++) { __builtin_prefetch(o + v * MATMUL_VL, 1); }
        }
    }
    if (block->with_bias && g->row_bias) {
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            float bias = g->row_bias[m + ((size_t)i < rows ? (size_t)i : rows - 1)];
#pragma GCC unroll 12
            for (int v = 0; v < num; v++) { sum[i][v] += bias; }
        }
    }
    for (size_t k = 0; k < K; k++) {
        Vector x[3 * MATMUL_PARTS];
#pragma GCC unroll 12
        for (int v = 0; v < num; v++) { memcpy(&x[v], b + v * MATMUL_FLOATS, sizeof(Vector)); }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            float y = row[i][k * a_col];
#pragma GCC unroll 12
            for (int v = 0; v < num; v++) { sum[i][v] += x[v] * y; }
        }
        b += b_step;
    }
    MATMUL_JOIN(matmul_store, MATMUL_FLOATS)(sum, g, mr, nv, m, rows, n0, cols, block->accumulate);
}

// Multiplies a strip of mr rows of a, beginning with row m of the product, with all panels of a block.
MATMUL_INLINE void MATMUL_JOIN(matmul_strip, MATMUL_FLOATS)(const MatmulArgs* g, const MatmulBlock* block, const int mr,
                                                            const int max_nv, const float* a, size_t a_row,
                                                            size_t a_col, size_t m, size_t rows) {
    const float* packed = block->packed;
    size_t left = (block->nb + MATMUL_VL - 1) / MATMUL_VL;
    const size_t num_tiles = (left + (size_t)max_nv - 1) / (size_t)max_nv;
    size_t tile = 0;
    for (size_t n = 0; left > 0; tile++) {
        size_t nv = matmul_panel_vectors(left, (size_t)max_nv), width = nv * MATMUL_VL;
        size_t cols = block->nb - n < width ? block->nb - n : width;
        // while this tile is computed, prefetch one row of the next block of b
        size_t ahead = m / (size_t)mr * num_tiles + tile;
        if (ahead < block->ahead_rows) {
            const float* next = block->ahead + ahead * g->b_row;
            for (size_t j = 0; j < block->nb; j += MATMUL_VL) { __builtin_prefetch(next + j, 0, 2); }
        }
        const float* panel = block->packed ? packed : block->b + n;
        const size_t step = block->packed ? width : g->b_row;
#define MATMUL_TILE(NV)                                                                                                \
    if (a_col == 1) {                                                                                                  \
        MATMUL_JOIN(matmul_tile, MATMUL_FLOATS)(g, block, mr, NV, a, a_row, 1, panel, step, m, rows, n, cols);         \
    } else {                                                                                                           \
        MATMUL_JOIN(matmul_tile, MATMUL_FLOATS)(g, block, mr, NV, a, 1, (size_t)mr, panel, step, m, rows, n, cols);    \
    }
        if (nv == 1) {
            MATMUL_TILE(1)
        } else if (nv == 2 && max_nv >= 2) {
            MATMUL_TILE(2)
        } else if (nv == 3 && max_nv >= 3) {
            MATMUL_TILE(3)
        }
#undef MATMUL_TILE
        packed += block->kb * width;
        n += width;
        left -= nv;
    }
}

// The sum of the products of w (K) and x (K).
MATMUL_INLINE float MATMUL_JOIN(matmul_dot, MATMUL_FLOATS)(const float* w, const float* x, size_t K) {
    enum { NUM = MATMUL_PARTS > 2 ? 8 : 4 * MATMUL_PARTS, STEP = NUM * MATMUL_FLOATS };
    Vector sum[NUM];
    float total = 0.0f;
    size_t k = 0;
#pragma GCC unroll 8
    for (int v = 0; v < NUM; v++) { sum[v] = (Vector){0}; }
    for (; k + STEP <= K; k += STEP) {
#pragma GCC unroll 8
        for (int v = 0; v < NUM; v++) {
            Vector a, b;
            memcpy(&a, w + k + v * MATMUL_FLOATS, sizeof(a)), memcpy(&b, x + k + v * MATMUL_FLOATS, sizeof(b));
            sum[v] += a * b;
        }
    }
#pragma GCC unroll 8
    for (int v = 1; v < NUM; v++) { sum[0] += sum[v]; }
    for (int i = 0; i < MATMUL_FLOATS; i++) { total += sum[0][i]; }
    for (; k < K; k++) { total += w[k] * x[k]; }
    return total;
}

#undef MATMUL_JOIN2
#undef MATMUL_JOIN
#undef Vector
#undef MATMUL_PARTS
#undef MATMUL_FLOATS
#endif
