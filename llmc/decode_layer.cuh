// The layers of a model as decode_layers() takes them, shared by train_gpt2.cu and the ladder dev/cuda/decode_layer.cu.
#pragma once

#include "cuda_common.cuh"

// A layer for B texts: x (B,C) inout, keys, values (B,capacity,C), position (B), and the layer's parameters.
struct DecodeLayer {
    floatX *x, *keys, *values;
    const int* position;
    int C, NH, capacity;
    float epsilon; // added to the variance in the layernorms
    const floatX *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    const floatX *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
};
// All layers. Their weights and caches lie at equal distances, in elements.
struct DecodeLayers {
    DecodeLayer first;
    int num;
    size_t weights, cache; // from one layer to the next
    __host__ __device__ DecodeLayer operator[](int i) const {
        DecodeLayer l = first;
        size_t w = i * weights;
        l.ln1w += w, l.ln1b += w, l.qkvw += w, l.qkvb += w, l.attprojw += w, l.attprojb += w;
        l.ln2w += w, l.ln2b += w, l.fcw += w, l.fcb += w, l.fcprojw += w, l.fcprojb += w;
        l.keys += i * cache, l.values += i * cache;
        return l;
    }
};
