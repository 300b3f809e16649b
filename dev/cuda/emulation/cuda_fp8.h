/*
e4m3 for a CPU: 1 sign bit, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, 0x7F is NaN, the largest value
is 448. Rounding is to nearest, ties to even, and saturates.
*/
#pragma once

#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;

uint8_t emulation_e4m3_bits(float x);
float emulation_e4m3_value(uint8_t bits);

struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float x) : __x(emulation_e4m3_bits(x)) {}
    explicit operator float() const { return emulation_e4m3_value(__x); }
};
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t) {
    return (__nv_fp8x2_storage_t)(emulation_e4m3_bits(x.x) | emulation_e4m3_bits(x.y) << 8);
}
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t) {
    return emulation_e4m3_bits(x);
}
