/*
half for a CPU: CUDA's names and rounding, to nearest, ties to even. Arithmetic is done in float and rounded once, which
for +, -, *, / gives the bits of fp16 arithmetic; __hfma2 is exact in double before it is rounded.
*/
#pragma once

#include "cuda_runtime.h"

uint16_t emulation_half_bits(float x);
uint16_t emulation_half_bits_of_double(double x);
float emulation_half_value(uint16_t bits);

struct alignas(2) __half {
    uint16_t bits;
    __half() = default;
    __half(float x) : bits(emulation_half_bits(x)) {}
    template <class T, class = typename std::enable_if<std::is_arithmetic<T>::value>::type> __half(T x)
        : bits(emulation_half_bits_of_double((double)x)) {}
    operator float() const { return emulation_half_value(bits); }
};
typedef __half half;
struct alignas(4) __half2 {
    half x, y;
};
typedef __half2 half2;

inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline float __half2float(half x) { return (float)x; }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline half2 __float2half2_rn(float x) { return {half(x), half(x)}; }
inline half2 __float22half2_rn(float2 x) { return {half(x.x), half(x.y)}; }
inline float2 __half22float2(half2 x) { return {(float)x.x, (float)x.y}; }
inline half2 __hadd2(half2 a, half2 b) { return {half((float)a.x + (float)b.x), half((float)a.y + (float)b.y)}; }
inline half2 __hsub2(half2 a, half2 b) { return {half((float)a.x - (float)b.x), half((float)a.y - (float)b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {half((float)a.x * (float)b.x), half((float)a.y * (float)b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) {
    return {half((double)(float)a.x * (float)b.x + (float)c.x), half((double)(float)a.y * (float)b.y + (float)c.y)};
}
