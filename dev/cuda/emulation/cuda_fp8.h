/*
e4m3 and e5m2 for a CPU. e4m3: 1 sign bit, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, 0x7F is NaN, the
largest value is 448. e5m2: the upper 8 bits of an fp16 number; the largest value is 57344. Rounding is to nearest, ties
to even, and saturates.
*/
#pragma once

#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
typedef uint8_t __nv_fp8_storage_t;
typedef uint16_t __nv_fp8x2_storage_t;

uint8_t emulation_e4m3_bits(float x);
float emulation_e4m3_value(uint8_t bits);
uint8_t emulation_e5m2_bits(float x);
inline float emulation_e5m2_value(uint8_t bits) { return emulation_half_value((uint16_t)(bits << 8)); }

struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float x) : __x(emulation_e4m3_bits(x)) {}
    explicit operator float() const { return emulation_e4m3_value(__x); }
};
struct __nv_fp8_e5m2 {
    uint8_t __x;
    __nv_fp8_e5m2() = default;
    explicit __nv_fp8_e5m2(float x) : __x(emulation_e5m2_bits(x)) {}
    explicit operator float() const { return emulation_e5m2_value(__x); }
};
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t type) {
    return type == __NV_E5M2 ? emulation_e5m2_bits(x) : emulation_e4m3_bits(x);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation,
                                                     __nv_fp8_interpretation_t type) {
    return (__nv_fp8x2_storage_t)(__nv_cvt_float_to_fp8(x.x, saturation, type) |
                                  __nv_cvt_float_to_fp8(x.y, saturation, type) << 8);
}
