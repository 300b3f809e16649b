/*
__nv_bfloat16 for a CPU: CUDA's names and rounding, to nearest, ties to even; NaN becomes 0x7FFF.
*/
#pragma once

#include "cuda_runtime.h"

inline uint16_t emulation_bf16_bits(float x) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) { return 0x7FFF; }
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
uint16_t emulation_bf16_bits_of_double(double x);

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) : bits(emulation_bf16_bits(x)) {}
    template <class T, class = typename std::enable_if<std::is_arithmetic<T>::value>::type> __nv_bfloat16(T x)
        : bits(emulation_bf16_bits_of_double((double)x)) {}
    operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {(float)x.x, (float)x.y}; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__nv_bfloat16((float)a.x + (float)b.x), __nv_bfloat16((float)a.y + (float)b.y)};
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__nv_bfloat16((float)a.x - (float)b.x), __nv_bfloat16((float)a.y - (float)b.y)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__nv_bfloat16((float)a.x * (float)b.x), __nv_bfloat16((float)a.y * (float)b.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__nv_bfloat16((double)(float)a.x * (float)b.x + (float)c.x),
            __nv_bfloat16((double)(float)a.y * (float)b.y + (float)c.y)};
}
