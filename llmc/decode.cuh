/*
The operations of generation in train_gpt2.cu: each works on the newest token of each of B texts. Their kernels come from
decode_matvec.cuh, decode_matmul.cuh, decode_attention.cuh, decode_layer.cuh and decode_sample.cuh in dev/cuda. Arguments and comments are
ordered as in section 1 of train_gpt2.cu.
*/
#pragma once

#include "cuda_common.cuh"
#include "weight_matrix.cuh"

// x (B,C) = wte[tokens (B)] + wpe[positions (B)]
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, const Execution& exec);
// out (B,OC) = gelu?(layernorm?(x (B,K)) weight (OC,K)^T + bias) + residual, for few rows, bound by reading the weights. A
// NULL argument and its operation are left out. A WeightMatrix (weight_matrix.cuh) is a floatX* or is in 8 bits.
// It is read before the previous kernel has ended (launch_early), so that kernel must not write it.
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec);
// logits (B,Vp) = layernorm(x (B,C)) wte (Vp,C)^T
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec);
// The same two on Hopper's tensor cores; false, and nothing launched, elsewhere. Here for 2 to 64 texts; a residual excludes gelu and norm.
bool decode_matmul(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec);
bool decode_matmul_runs(bool norm, int B, int K, int OC);
// logits (B,Vp) = layernorm(x (B,C)) wte (Vp,C)^T, for 1 to 64 texts where their x leaves room in shared memory, else for 2 to 32, with
// weights in 8 bits for any number from 2 on. wte is read as weight is in decode_matvec().
bool decode_matmul_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                        const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec);
// out (B,C) = attention of the query in qkv (B,3,C) to itself and to the positions[b] tokens before it. The key and value in
// qkv become row positions[b] of keys, values (B,capacity,C). A text with position -1 has ended and is left out.
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, const Execution& exec);
size_t decode_attention_scratch(int B, int C, int NH, int capacity);
// After a prompt: the keys and values in qkv (B,T,3,C) become rows 0 to T-1 of keys, values (B,capacity,C).
void decode_cache_fill(floatX* keys, floatX* values, const floatX* qkv, int B, int T, int C, int capacity,
                       const Execution& exec);
// Samples tokens (B) from the first V columns of logits (B,Vp), also to copy (B), which may be the host's memory;
// positions (B) += 1, except -1. tokens[b] = -1 means that no logit was finite. temperature 0: the largest logit; otherwise a draw
// with rng_state (B), by the rules of llmc/sampler.h. penalty 1: none; otherwise adds the newest tokens, in tokens, to the bits of
// seen (B, seen_words(V)), and applies sampler_penalize(). The caller zeroes scratch once, before the first call.
void decode_sample(int* tokens, int* copy, int* positions, float* scratch, float* logits, uint64_t* rng_state,
                   uint32_t* seen, float temperature, int top_k, float top_p, float min_p, float penalty, int B, int V,
                   int Vp, const Execution& exec);
size_t decode_sample_scratch(int B);

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
// All layers for B texts: x goes through them, and the keys and values of text b become row position[b] of its caches; a text with
// position -1 is left out. In one launch, by kernels for the sizes of GPT-2, of up to 16 texts for 124M and of one, with a capacity of
// up to 1024, for the others. decode_layers_runs() is false for other models, as those whose MLP's width F is not 4*C, and in fp32, on
// other GPUs than Hopper's, and where not all blocks run at once. packed (num_layers*12*C*C): what decode_layers_pack() makes of the
// matrices, to be made again when they change; the vectors are read from `layers`. The caller zeroes scratch once, before the first
// call. Weights, packed, caches and positions are read while the kernel before may still run: it must not write them, and must be an
// ordinary launch, as decode_embed's.
bool decode_layers_runs(int B, int C, int F, int NH, int capacity);
void decode_layers_pack(floatX* packed, const DecodeLayers& layers, const Execution& exec);
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec);
size_t decode_layers_scratch(int C, int NH);

// ---- halves of many texts side by side ----

// Whether the layers of B texts, with an MLP of width F, run as two halves side by side. Fewer and more texts than these lose by it (on
// an H200). Products by other kernels than decode_matmul share scratch memory.
inline bool decode_halves(int B, int C, int F) {
    int n = ceil_div(B, 2);
    return B > 32 && B <= 64 && decode_matmul_runs(true, n, C, F) && decode_matmul_runs(false, n, F, C);
}

// Two streams for the halves of some work that is launched as part of a stream's, also where that is captured as a graph.
struct SideStreams {
    cudaStream_t streams[2];
    cudaEvent_t begun, ended[2];
};
inline void side_streams_create(SideStreams* s) {
    cudaCheck(cudaEventCreateWithFlags(&s->begun, cudaEventDisableTiming));
    for (cudaStream_t& stream : s->streams) { cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    for (cudaEvent_t& event : s->ended) { cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
}
inline void side_streams_free(SideStreams* s) {
    if (!s->begun) { return; }
    cudaCheck(cudaEventDestroy(s->begun));
    for (cudaEvent_t event : s->ended) { cudaCheck(cudaEventDestroy(event)); }
    for (cudaStream_t stream : s->streams) { cudaCheck(cudaStreamDestroy(stream)); }
    *s = {};
}
// Calls launch(half, exec) for halves 0 and 1, which run at the same time. What is launched on exec's stream later waits for both.
template <class Launch> void launch_halves(const SideStreams* s, const Execution& exec, const Launch& launch) {
    cudaCheck(cudaEventRecord(s->begun, exec.stream));
    for (int half = 0; half < 2; half++) {
        cudaCheck(cudaStreamWaitEvent(s->streams[half], s->begun));
        Execution side = exec;
        side.stream = s->streams[half];
        launch(half, side);
        cudaCheck(cudaEventRecord(s->ended[half], s->streams[half]));
    }
    for (cudaEvent_t event : s->ended) { cudaCheck(cudaStreamWaitEvent(exec.stream, event)); }
}
