/*
CRC-32C (Castagnoli), polynomial 0x82F63B78 (reflected): the checksum of checkpoint files and of TensorBoard records.
Source: RFC 3720, appendix B.4; crc32c(0, "123456789", 9) == 0xe3069283.
*/
#ifndef LLMC_CRC32C_H
#define LLMC_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
// table-driven, one byte at a time: for machines without SSE4.2
static inline uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
    static uint32_t table[256];
    static int ready = 0; // no lock: if two threads fill the table, both write the same values
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int k = 0; k < 8; k++) { c = (c >> 1) ^ (0x82F63B78u & (0u - (c & 1))); }
            __atomic_store_n(&table[i], c, __ATOMIC_RELAXED);
        }
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    const uint8_t* p = (const uint8_t*)data;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) { crc = table[(crc ^ p[i]) & 255] ^ (crc >> 8); }
    return ~crc;
}

// Instructions of SSE4.2, as assembly: the compiler's own names for them want its permission to use SSE4.2 in the whole
// function, in a different way for each compiler, and nvcc takes none of these.
#if defined(__x86_64__) && defined(__GNUC__)
#define CRC32C_SSE42
static inline uint32_t crc32c_sse42(uint32_t crc, const void* data, size_t bytes) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t c = ~crc;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        __asm__("crc32q %1, %0" : "+r"(c) : "r"(word));
    }
    for (; bytes > 0; bytes--, p++) { __asm__("crc32b %1, %k0" : "+r"(c) : "q"(*p)); }
    return ~(uint32_t)c;
}
#endif

// Continues a checksum: given the crc of all earlier bytes (0 if there are none), returns the crc of these bytes
// followed by data.
static inline uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
#ifdef CRC32C_SSE42
    if (__builtin_cpu_supports("sse4.2")) { return crc32c_sse42(crc, data, bytes); }
#endif
    return crc32c_portable(crc, data, bytes);
}

// The product of two polynomials modulo the one above. Bit 31 is the coefficient of x^0, as everywhere here.
static inline uint32_t crc32c_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) { product ^= b; }
        b = (b >> 1) ^ (0x82F63B78u & (0u - (b & 1)));
    }
    return product;
}

// Returns the crc of A followed by B, given the crc of each and the number of bytes of B: crc_a * x^(8 bytes_b) + crc_b.
// Source: zlib 1.3, crc32.c, crc32_combine64().
static inline uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
    uint32_t power = 1u << 31, square = 1u << 23; // x^0 and x^8
    for (; bytes_b > 0; bytes_b >>= 1) {
        if (bytes_b & 1) { power = crc32c_multiply(power, square); }
        square = crc32c_multiply(square, square);
    }
    return crc32c_multiply(power, crc_a) ^ crc_b;
}

#endif
