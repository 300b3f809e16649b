/*
The activations of the MLP and their derivatives, once for all kernels: training and generation compute the same function. GPT-2's is
GELU in its tanh form, which kernels have in their epilogues; the others (activate()) are passes of their own.

    gelu(x) = x / 2 (1 + tanh(u)) = x sigmoid(2u)        u = sqrt(2/pi) (x + 0.044715 x^3)

The code uses the sigmoid, which loses no digits where tanh(u) is near -1. Under --use_fast_math tanhf would become
tanh.approx, which is off by 5e-4: for x < -2 that is more than an ulp of bf16. Both functions return NaN for NaN, and a
finite value for every finite x.

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
*/
#pragma once

#include "activation.h"
#include "cuda_common.cuh"
#include "ptx.cuh"
#include <type_traits>

// x sigmoid(2u) = x / (1 + exp(-2u)). The factor log2(e), for exp2, is part of a and b. Where x^3 overflows, the
// sigmoid is 1 or 0.
__device__ inline float gelu(float x) {
    const float a = -2.3022081984f; // -2 sqrt(2/pi) log2(e)
    const float b = -0.1029432396f; // 0.044715 a
    return x * rcp_approx(1.0f + exp2_approx(x * (a + b * x * x)));
}

// The derivative of gelu: s + x s (1 - s) 2u' with s = sigmoid(2u). 1 - s is computed as e s with e = exp(-2u), which
// loses no digits where s is near 1. Beyond +-9 the slope is 1 or 0 up to 1e-26: there x^2 stays at 81, and e is limited
// in e s, which keeps every factor finite. NaN passes through s, although fminf drops it.
__device__ inline float gelu_slope(float x) {
    const float a = 1.5957691216f, b = 0.0713548163f; // 2u = a x + b x^3; b = 0.044715 a
    float xx = fminf(x * x, 81.0f);
    float e = exp2_approx(x * (-a * LOG2E - b * LOG2E * xx)), s = rcp_approx(1.0f + e);
    return s + x * s * (fminf(e, 0x1p126f) * s) * (a + 3.0f * b * xx);
}

// gelu(x), with the same bits, and in *slope its derivative. With y = gelu(x) = x s, it is s + (y - y s) 2u'. Where s is
// near 1, y - y s has lost digits, but is small: the slope's error is below 1e-4, and slopes are stored in 16 bits. 2u' is
// limited to 19, its value at x = +-9, where s (1 - s) is 0 up to 1e-26: so the product is not 0 * inf.
__device__ inline float gelu_and_slope(float x, float* slope) {
    const float a = -2.3022081984f, b = -0.1029432396f; // as in gelu()
    float inner = a + b * x * x, s = rcp_approx(1.0f + exp2_approx(x * inner)), y = x * s;
    float u2 = fminf(inner * -2.0794415417f - 3.1915382432f, 19.0f); // 2u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2)
    *slope = s + (y - y * s) * u2;
    return y;
}

__device__ inline float sigmoid(float x) { return rcp_approx(1.0f + exp2_approx(-LOG2E * x)); }

// Exact GELU, x times the normal distribution function of x, and in *slope its derivative, which adds x times the density. Both functions
// are computed at -|x|, where the distribution is the density times a polynomial of 1 / (1 + 0.21 |x|), as in train_gpt2.c, with a relative
// error below 1e-6. Beyond 40 the density is 0. Returns NaN for NaN, with a slope of 1.
__device__ inline float exact_gelu_and_slope(float x, float* slope) {
    float a = fminf(fabsf(x), 40.0f), t = rcp_approx(1.0f + 0.21f * a), density = exp2_approx(-0.5f * LOG2E * a * a);
    float p = 0.36072847f + t * (-0.33986497f + t * (0.28814301f + t * -0.07258017f));
    p = t * (0.08370179f + t * (0.08522033f + t * (0.06819454f + t * (0.12852621f + t * (-0.10206924f + t * p)))));
    float below = density * p, slope_below = density * (p - 0.3989422804f * a);
    *slope = x < 0.0f ? slope_below : 1.0f - slope_below;
    return x * (x < 0.0f ? below : 1.0f - below);
}

template <Activation kind> __device__ float activate(float x) {
    float slope; // not used
    if (kind == ACT_GELU_TANH) { return gelu(x); }
    if (kind == ACT_GELU) { return exact_gelu_and_slope(x, &slope); }
    if (kind == ACT_RELU) { return x > 0.0f ? x : x != x ? x : 0.0f; }
    if (kind == ACT_RELU_SQUARED) { return x < 0.0f ? 0.0f : x * x; }
    if (kind == ACT_SILU) { return x * sigmoid(x); }
    return 2.0f * sigmoid(2.0f * x) - 1.0f; // tanh
}
// The derivative of activate() at x. NaN gives NaN.
template <Activation kind> __device__ float activation_slope(float x) {
    if (kind == ACT_GELU_TANH) { return gelu_slope(x); }
    if (kind == ACT_GELU) {
        float slope;
        exact_gelu_and_slope(x, &slope);
        return x != x ? x : slope;
    }
    if (kind == ACT_RELU) { return x > 0.0f ? 1.0f : x != x ? x : 0.0f; }
    if (kind == ACT_RELU_SQUARED) { return x < 0.0f ? 0.0f : 2.0f * x; }
    float s = sigmoid(kind == ACT_SILU ? x : 2.0f * x);
    if (kind == ACT_SILU) { return s + (x != x ? x : fminf(fmaxf(x, -100.0f), 100.0f)) * s * (1.0f - s); }
    return 4.0f * s * (1.0f - s); // 1 - tanh(x)^2
}

// activate(x), and in *slope activation_slope(x), with the same bits but for NaN.
template <Activation kind> __device__ float activate_and_slope(float x, float* slope) {
    if (kind == ACT_GELU) { return exact_gelu_and_slope(x, slope); }
    *slope = activation_slope<kind>(x);
    return activate<kind>(x);
}

// Calls use(kind), where kind.value is a constant, for an activation.
template <class Use> void with_activation(Activation kind, Use use) {
    switch (kind) {
    case ACT_GELU_TANH:
        return use(std::integral_constant<Activation, ACT_GELU_TANH>());
    case ACT_GELU:
        return use(std::integral_constant<Activation, ACT_GELU>());
    case ACT_RELU:
        return use(std::integral_constant<Activation, ACT_RELU>());
    case ACT_RELU_SQUARED:
        return use(std::integral_constant<Activation, ACT_RELU_SQUARED>());
    case ACT_SILU:
        return use(std::integral_constant<Activation, ACT_SILU>());
    case ACT_TANH:
        return use(std::integral_constant<Activation, ACT_TANH>());
    }
}

// Whether a product is followed by GELU, and what the forward pass keeps of it for the backward pass, (N,C): GELU's argument, or
// its slope there. NULL converts to "no GELU".
struct GeluSaved {
    floatX* tensor;
    bool is_slope;
    bool is_not_kept = false; // GELU of which nothing is kept, where no backward pass follows
    GeluSaved(floatX* tensor = NULL, bool is_slope = false) : tensor(tensor), is_slope(is_slope) {}
    static GeluSaved not_kept() {
        GeluSaved saved;
        saved.is_not_kept = true;
        return saved;
    }
    bool has_gelu() const { return tensor || is_not_kept; }
};

// The same by tanh.approx, whose error is 2^-11: gelu(x) within 5e-4 |x|, the slope within 1e-3. Half the instructions, for
// results that are rounded to 8 bits. Returns NaN for infinities, too.
__device__ inline float gelu_and_slope_approx(float x, float* slope) {
    const float a = 0.7978845608f, b = 0.0356774081f; // u = x (a + b x^2)
    float xx = x * x, t = tanh_approx(x * fmaf(b, xx, a)), half = 0.5f * x;
    *slope = fmaf(half * fmaf(-t, t, 1.0f), fmaf(3.0f * b, xx, a), fmaf(0.5f, t, 0.5f));
    return fmaf(half, t, half);
}
