/*
A matrix of weights as the kernels of generation read it: in floatX, or in 8 bits (type W below is int8_t or e4m3).
Generation is bound by reading weights, and 8 bits are half as many bytes.

    weight[row][k] = values[row][k] * scales[row]        a row is an output channel

A kernel multiplies x by the values, which are exact in float, bf16 and fp16, and multiplies each sum by its row's
scale. A load takes x128::size weights, as many as a load of x: 16 bytes of floatX, or 8 bytes of int8 or e4m3.

Source: formats of 8-bit floats: Micikevicius et al. 2022, arXiv:2209.05433.
*/
#pragma once

#include "cuda_common.cuh"
#include "ptx.cuh"

enum WeightFormat { WEIGHTS_FULL, WEIGHTS_INT8, WEIGHTS_FP8 }; // floatX, int8, e4m3

struct WeightMatrix {
    const void* values;  // (OC,K) of `format`
    const float* scales; // (OC); NULL for WEIGHTS_FULL
    WeightFormat format;
    WeightMatrix(const floatX* weight) : values(weight), scales(NULL), format(WEIGHTS_FULL) {}
    WeightMatrix(const void* values, const float* scales, WeightFormat format)
        : values(values), scales(scales), format(format) {}
    double bytes(double OC, double K) const { // of a matrix (OC,K) with its scales
        return format == WEIGHTS_FULL ? OC * K * sizeof(floatX) : OC * K + OC * sizeof(float);
    }
};

// A product of generation: out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual. A NULL pointer and its operation are left out.
struct DecodeProduct {
    const floatX *x, *norm_weight, *norm_bias; // (B,K), (K), (K)
    WeightMatrix weight;                       // (OC,K)
    const floatX *bias, *residual;             // (OC), (B,OC), which may be out itself
    int B, K, OC;
    bool gelu;
    float epsilon; // added to the variance in the layernorm
    double flops() const { return 2.0 * B * OC * K; }
    double bytes(size_t of_out) const { // that it must move; of_out: of an element of out
        double elements = (double)B * K + (residual ? (double)B * OC : 0.0);
        return weight.bytes(OC, K) + elements * sizeof(floatX) + (double)B * OC * of_out;
    }
};

// Calls launch(W()) with the type of the matrix's values.
template <class Launch> void weight_dispatch(const WeightMatrix& weight, Launch launch) {
    if (weight.format == WEIGHTS_FULL) { launch(floatX()); }
    if (weight.format == WEIGHTS_INT8) { launch(int8_t()); }
    if (weight.format == WEIGHTS_FP8) { launch(__nv_fp8_e4m3()); }
}

// A row's scale is its largest |weight| / weight_largest(). weight_rounded: the value nearest to x = weight / scale.
__host__ __device__ inline float weight_largest(int8_t) { return 127.0f; }
__host__ __device__ inline float weight_largest(__nv_fp8_e4m3) { return 448.0f; }
__device__ inline int8_t weight_rounded(float x, int8_t) { return (int8_t)(isfinite(x) ? (int)rintf(x) : 0); }
__device__ inline __nv_fp8_e4m3 weight_rounded(float x, __nv_fp8_e4m3) { return (__nv_fp8_e4m3)x; }

// ---- the bits of x128::size neighbouring weights of type W ----------------------------------------------------------

template <int bytes> struct WeightBitsOf;
template <> struct WeightBitsOf<16> { typedef int4 type; };
template <> struct WeightBitsOf<8> { typedef int2 type; };
template <> struct WeightBitsOf<4> { typedef int type; };
template <class W> using WeightBits = typename WeightBitsOf<(int)sizeof(W) * x128::size>::type;

// x = the weights as floats. int8: with its upper bit flipped, a byte u stands for u - 128, and 0x4B0000uu is the float
// 2^23 + u.
__device__ inline void weight_floats(float (&x)[x128::size], int4 bits, floatX) {
    x128 elements = vec128_from_bits<floatX>(bits);
#pragma unroll
    for (int e = 0; e < x128::size; e++) { x[e] = (float)elements[e]; }
}
__device__ inline void weight_floats(float (&x)[x128::size], WeightBits<int8_t> bits, int8_t) {
    uint32_t words[x128::size / 4];
    memcpy(words, &bits, sizeof(words));
#pragma unroll
    for (int e = 0; e < x128::size; e++) {
        uint32_t flipped = words[e / 4] ^ 0x80808080u;
        x[e] = __uint_as_float(__byte_perm(flipped, 0x4B000000u, 0x7440 | e % 4)) - (float)((1 << 23) + 128);
    }
}
__device__ inline void weight_floats(float (&x)[x128::size], WeightBits<__nv_fp8_e4m3> bits, __nv_fp8_e4m3) {
    uint32_t words[x128::size / 4];
    memcpy(words, &bits, sizeof(words));
#pragma unroll
    for (int e = 0; e < x128::size; e += 2) {
        float2 pair = __half22float2(unpack_e4m3x2(words[e / 4] >> e % 4 * 8));
        x[e] = pair.x, x[e + 1] = pair.y;
    }
}

#if !defined(ENABLE_FP32)
// pairs[i] = weights 2i and 2i + 1 in floatX, the first one in the lower half: an operand of mma.
__device__ inline void weight_pairs(uint32_t (&pairs)[4], int4 bits, floatX) {
    pairs[0] = bits.x, pairs[1] = bits.y, pairs[2] = bits.z, pairs[3] = bits.w;
}
// int8 to fp16: 0x64uu is 1024 + u, see weight_floats. To bf16, of which only 7 bits are free: with a byte's upper bit
// set to 0, 0x43bb is 128 + its lower bits; that minus 128 or, where the upper bit was set, 256.
__device__ inline void weight_pairs(uint32_t (&pairs)[4], int2 bits, int8_t) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t word = i < 2 ? bits.x : bits.y;
#if defined(ENABLE_FP16)
        uint32_t lower = __byte_perm(word ^ 0x80808080u, 0x64, i % 2 ? 0x4342 : 0x4140), upper = 0x64806480u;
        half2 a, b;
#else
        uint32_t both = __byte_perm(word, 0x43, i % 2 ? 0x4342 : 0x4140);
        uint32_t lower = both & 0xFF7FFF7Fu, upper = both & 0xFF80FF80u;
        __nv_bfloat162 a, b;
#endif
        memcpy(&a, &lower, sizeof(a)), memcpy(&b, &upper, sizeof(b));
        a = __hsub2(a, b);
        memcpy(&pairs[i], &a, sizeof(a));
    }
}
__device__ inline void weight_pairs(uint32_t (&pairs)[4], int2 bits, __nv_fp8_e4m3) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        half2 pair = unpack_e4m3x2((uint32_t)(i < 2 ? bits.x : bits.y) >> i % 2 * 16);
#if defined(ENABLE_FP16)
        memcpy(&pairs[i], &pair, sizeof(pair));
#else
        float2 x = __half22float2(pair);
        pairs[i] = pack_16x2(x.x, x.y, floatX());
#endif
    }
}
#endif
