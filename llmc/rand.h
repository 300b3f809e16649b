/*
Random numbers: PyTorch's generator and its normal_(), bit for bit, so that a new model starts from the same weights as
in PyTorch and llm.c; a small generator for the sampler; and permutations for shuffling data.

Sources: Matsumoto and Nishimura 1998 (mt19937); Box and Muller 1958; Vigna 2016, arXiv:1402.6246 (xorshift64*);
Steele, Lea and Flood 2014 (splitmix64); Lemire 2019, arXiv:1805.10941 (bounded draws). PyTorch's use of them:
ATen/core/DistributionsHelper.h, ATen/native/cpu/DistributionTemplates.h, ATen/native/cpu/avx_mathfun.h.
*/
#ifndef LLMC_RAND_H
#define LLMC_RAND_H

#include "utils.h"
#include <math.h>

#if defined(__GNUC__)
#define RAND_INLINE static inline __attribute__((always_inline))
#else
#define RAND_INLINE static inline
#endif

// ---- mt19937 --------------------------------------------------------------------

enum { MT19937_N = 624, MT19937_M = 397 };

typedef struct {
    uint32_t state[MT19937_N];
    uint32_t index;  // index of the next word of state to return
    bool has_cached; // mt19937_normal() computes normals in pairs: `cached` holds the second one
    double cached;   // standard normal
} Mt19937;

static inline void mt19937_seed(Mt19937* mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < MT19937_N; i++) {
        uint32_t last = mt->state[i - 1];
        mt->state[i] = 1812433253u * (last ^ (last >> 30)) + i;
    }
    mt->index = MT19937_N;
    mt->has_cached = false;
    mt->cached = 0.0;
}

RAND_INLINE uint32_t mt19937_mix(uint32_t upper, uint32_t lower) {
    uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (y >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

RAND_INLINE uint32_t mt19937_temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// Advances all 624 words of the state. The loops have no modulo, so that compilers can vectorize them.
static inline void mt19937_twist(Mt19937* mt) {
    uint32_t* s = mt->state;
    const int shift = MT19937_N - MT19937_M;
    for (int i = 0; i < shift; i++) { s[i] = s[i + MT19937_M] ^ mt19937_mix(s[i], s[i + 1]); }
    for (int i = shift; i < MT19937_N - 1; i++) { s[i] = s[i - shift] ^ mt19937_mix(s[i], s[i + 1]); }
    s[MT19937_N - 1] = s[MT19937_M - 1] ^ mt19937_mix(s[MT19937_N - 1], s[0]);
    mt->index = 0;
}

static inline uint32_t mt19937_u32(Mt19937* mt) {
    if (mt->index == MT19937_N) { mt19937_twist(mt); }
    return mt19937_temper(mt->state[mt->index++]);
}

// the low 24 bits divided by 2^24: in [0, 1)
RAND_INLINE float mt19937_to_float(uint32_t u) { return (float)(int32_t)(u & 0xffffffu) * (1.0f / 16777216.0f); }

static inline float mt19937_uniform(Mt19937* mt) { return mt19937_to_float(mt19937_u32(mt)); }

// In [0, 1): the low 53 bits of a 64-bit number whose upper half is the first of two draws.
static inline double mt19937_uniform_double(Mt19937* mt) {
    uint64_t high = mt19937_u32(mt), low = mt19937_u32(mt);
    return (double)(((high << 32) | low) & ((1ull << 53) - 1)) * (1.0 / 9007199254740992.0);
}

// Fills out (n) with the results of n calls of mt19937_uniform(), but processes a whole block of the state at a time.
static inline void mt19937_fill_uniform(Mt19937* mt, float* out, size_t n) {
    while (n > 0) {
        if (mt->index == MT19937_N) { mt19937_twist(mt); }
        size_t left = MT19937_N - mt->index, m = n < left ? n : left;
        const uint32_t* s = mt->state + mt->index;
        for (size_t i = 0; i < m; i++) { out[i] = mt19937_to_float(mt19937_temper(s[i])); }
        mt->index += (uint32_t)m;
        out += m;
        n -= m;
    }
}

// ---- normals ----------------------------------------------------------------------

// For blocks of 16 normals, PyTorch computes logarithm, sine and cosine with the single-precision Cephes polynomials,
// built by a compiler that contracts multiply-add pairs to fma. Here every contracted pair is an explicit fmaf, and no
// other product is followed by an addition, so that compiler flags which keep IEEE arithmetic cannot change a bit.
// libm's functions give other results.

RAND_INLINE float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

RAND_INLINE uint32_t bits_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// log(x), x in (0, 1]
RAND_INLINE float normal_log(float x) {
    uint32_t bits = bits_from_float(x);
    float e = (float)((int32_t)(bits >> 23) - 126);
    x = float_from_bits((bits & 0x007fffffu) | 0x3f000000u); // mantissa in [0.5, 1)
    float below = x < 0.707106781186547524f ? 1.0f : 0.0f;   // if below sqrt(1/2), double it, so that x - 1 is near 0
    x = (x - 1.0f) + (below != 0.0f ? x : 0.0f);
    e -= below;
    float z = x * x;
    float y = 7.0376836292e-2f;
    y = __builtin_fmaf(y, x, -1.1514610310e-1f);
    y = __builtin_fmaf(y, x, 1.1676998740e-1f);
    y = __builtin_fmaf(y, x, -1.2420140846e-1f);
    y = __builtin_fmaf(y, x, 1.4249322787e-1f);
    y = __builtin_fmaf(y, x, -1.6668057665e-1f);
    y = __builtin_fmaf(y, x, 2.0000714765e-1f);
    y = __builtin_fmaf(y, x, -2.4999993993e-1f);
    y = __builtin_fmaf(y, x, 3.3333331174e-1f);
    y = __builtin_fmaf(y * x, z, e * -2.12194440e-4f); // ln 2 = 0.693359375 - 2.12194440e-4
    y = __builtin_fmaf(-z, 0.5f, y);
    return __builtin_fmaf(e, 0.693359375f, x + y);
}

// sin(x) and cos(x), x in [0, 2 pi)
RAND_INLINE void normal_sincos(float x, float* sine, float* cosine) {
    int32_t octant = ((int32_t)(x * 1.27323954473516f) + 1) & ~1; // even octant: nearest multiple of pi / 2
    float y = (float)octant;
    x = __builtin_fmaf(y, -0.78515625f, x); // x - octant * pi / 4, with pi / 4 in three parts
    x = __builtin_fmaf(y, -2.4187564849853515625e-4f, x);
    x = __builtin_fmaf(y, -3.77489497744594108e-8f, x);
    float z = x * x;
    float c = __builtin_fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f);
    c = __builtin_fmaf(c, z, 4.166664568298827e-2f);
    c = __builtin_fmaf(c * z, z, z * -0.5f) + 1.0f;
    float s = __builtin_fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f);
    s = __builtin_fmaf(s, z, -1.6666654611e-1f);
    s = __builtin_fmaf(s * z, x, x);
    bool swap = (octant & 2) != 0; // odd multiples of pi / 2 swap sine and cosine
    uint32_t sine_sign = (uint32_t)(octant & 4) << 29, cosine_sign = (uint32_t)(~(octant - 2) & 4) << 29;
    *sine = float_from_bits(bits_from_float(swap ? c : s) ^ sine_sign);
    *cosine = float_from_bits(bits_from_float(swap ? s : c) ^ cosine_sign);
}

// Turns uniforms in [0, 1) into normals, in place; inout (16 * num_blocks). In a block of 16, value j is paired with
// value j + 8.
RAND_INLINE void box_muller_blocks(float* inout, size_t num_blocks, float mean, float std) {
    const float two_pi = (float)(2.0 * 3.14159265358979323846);
    for (size_t b = 0; b < num_blocks; b++, inout += 16) {
        float radius[8], sine[8], cosine[8];
        for (int j = 0; j < 8; j++) { radius[j] = -2.0f * normal_log(1.0f - inout[j]); } // 1 - u is in (0, 1]
        for (int j = 0; j < 8; j++) { radius[j] = sqrtf(radius[j]); }
        for (int j = 0; j < 8; j++) { normal_sincos(two_pi * inout[j + 8], &sine[j], &cosine[j]); }
        for (int j = 0; j < 8; j++) {
            inout[j] = __builtin_fmaf(radius[j] * cosine[j], std, mean);
            inout[j + 8] = __builtin_fmaf(radius[j] * sine[j], std, mean);
        }
    }
}

static inline void box_muller_portable(float* inout, size_t num_blocks, float mean, float std) {
    box_muller_blocks(inout, num_blocks, mean, std);
}

#if defined(__x86_64__) && defined(__GNUC__)
// the same code compiled for machines on which fmaf is an instruction instead of a call
__attribute__((target("avx2,fma"))) static inline void box_muller_avx2(float* inout, size_t num_blocks, float mean,
                                                                       float std) {
    box_muller_blocks(inout, num_blocks, mean, std);
}
#endif

static inline void box_muller(float* inout, size_t num_blocks, float mean, float std) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        box_muller_avx2(inout, num_blocks, mean, std);
        return;
    }
#endif
    box_muller_portable(inout, num_blocks, mean, std);
}

// Draws a normal in double precision, as PyTorch does for tensors of fewer than 16 elements.
static inline double mt19937_normal(Mt19937* mt, double mean, double std) {
    double value = mt->cached;
    if (!mt->has_cached) {
        double u1 = mt19937_uniform_double(mt), u2 = mt19937_uniform_double(mt);
        double radius = sqrt(-2.0 * log1p(-u2)), theta = 2.0 * 3.14159265358979323846 * u1;
        mt->cached = radius * sin(theta);
        value = radius * cos(theta);
    }
    mt->has_cached = !mt->has_cached;
    return __builtin_fma(value, std, mean);
}

// Fills out (n), bit-identical to torch.empty(n).normal_(mean, std) on an x86 CPU. mean and std are doubles, as in
// PyTorch, because n < 16 is computed in double precision. The uniforms of the whole tensor are drawn in order; each
// block is then transformed independently, so the result does not depend on the number of threads.
static inline void normal_fill(float* out, size_t n, double mean, double std, Mt19937* mt) {
    if (n < 16) {
        for (size_t i = 0; i < n; i++) { out[i] = (float)mt19937_normal(mt, mean, std); }
        return;
    }
    mt19937_fill_uniform(mt, out, n);
    const int64_t chunk = 512, num_blocks = (int64_t)(n / 16); // a thread processes 512 blocks, 32 KB, at a time
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (int64_t b = 0; b < num_blocks; b += chunk) {
        int64_t left = num_blocks - b;
        box_muller(out + 16 * b, (size_t)(left < chunk ? left : chunk), (float)mean, (float)std);
    }
    if (n % 16 != 0) { // like PyTorch, draw the last 16 values again and overwrite them
        mt19937_fill_uniform(mt, out + n - 16, 16);
        box_muller(out + n - 16, 1, (float)mean, (float)std);
    }
}

// ---- sampling and shuffling ---------------------------------------------------------

// xorshift64*. Any state is allowed, also 0.
static inline uint64_t random_u64(uint64_t* state) {
    uint64_t x = *state ? *state : 0x9e3779b97f4a7c15ull; // xorshift would never leave the state 0
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1dull;
}

static inline uint32_t random_u32(uint64_t* state) { return (uint32_t)(random_u64(state) >> 32); }

// in [0, 1), in steps of 2^-24 (float) and 2^-53 (double)
static inline float random_f32(uint64_t* state) { return (float)(random_u32(state) >> 8) * (1.0f / 16777216.0f); }
static inline double random_f64(uint64_t* state) {
    return (double)(random_u64(state) >> 11) * (1.0 / 9007199254740992.0);
}

// A bijective mix of 64 bits: turns seeds and counters that are close together into unrelated numbers.
static inline uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Draws from 0 .. n-1 with exactly equal probabilities; n > 0.
static inline uint32_t random_below(uint64_t* state, uint32_t n) {
    uint64_t product = (uint64_t)random_u32(state) * n;
    if ((uint32_t)product < n) {
        uint32_t rejected = (0u - n) % n; // 2^32 mod n: rejecting products whose low half is below it removes the bias
        while ((uint32_t)product < rejected) { product = (uint64_t)random_u32(state) * n; }
    }
    return (uint32_t)(product >> 32);
}

// Fills out (n) with a permutation of 0 .. n-1 that depends only on seed and n.
static inline void random_permutation(uint32_t* out, uint32_t n, uint64_t seed) {
    uint64_t state = splitmix64(seed);
    for (uint32_t i = 0; i < n; i++) { // inside-out Fisher-Yates: i goes to a random index j, the value at j moves to i
        uint32_t j = random_below(&state, i + 1);
        if (j != i) { out[i] = out[j]; }
        out[j] = i;
    }
}

#endif
