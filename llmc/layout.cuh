/*
Where the parameters of a model are in GPU memory, and how several GPUs share them.

    embeddings | layer 0 | layer 1 | ... | last layernorm      one array of model_size() values: weights, or gradients
    bucket 0   | 1       | 2       | ... | L + 1               several GPUs exchange one at a time
    0          | 1   2   | 3   4   | ... | 2L + 1              pieces: of a layer the matrices, then the vectors

With ZeRO-1 each bucket is divided into equal shares, one for each rank. With Muon only bucket 0 is. The other buckets are
dealt to the ranks as wholes: bucket 1 to rank 0, bucket 2 to rank 1 and so on.

At the end, the tensors by name: Parameters, and for generation KeyValueCache.
*/
#pragma once

#include "cuda_common.cuh"
#include "decode.cuh"
#include "distributed.cuh"
#include "gpt2.h"
#include "utils.h"
#include <algorithm>

// Ends the program if the kernels do not support this model, with a message that names the reason.
inline void check_config(const GPT2Config* config) {
    int C = config->channels, HS = C / config->num_heads;
    int most = sizeof(floatX) == sizeof(float) ? 6144 : 8192;
    if (C % 8 != 0 || C > most) { die("%d channels: train_gpt2cu wants a multiple of 8 up to %d", C, most); }
    if (config->mlp_channels % 8 != 0 || config->mlp_channels > 4 * most) {
        die("%d channels in the MLP: train_gpt2cu wants a multiple of 8 up to %d", config->mlp_channels, 4 * most);
    }
    if (config->vocab_size > 262144) {
        die("%d tokens in the vocabulary: train_gpt2cu wants 262144 at most", config->vocab_size);
    }
    if (HS % 8 != 0 || HS > 256) {
        die("%d channels in %d heads: a head size of %d, train_gpt2cu wants a multiple of 8 up to 256", C,
            config->num_heads, HS);
    }
}

// A range of values in this array.
struct Span {
    size_t place, n;
};
inline int num_buckets(const GPT2Config* config) { return config->num_layers + 2; }

// The kind of the bucket that tensor p is in: 0 the embeddings, 1 a layer, 2 the last layernorm.
inline int bucket_kind(int p) {
    return gpt2_params[p].place == PLACE_EMBEDDINGS ? 0 : gpt2_params[p].place == PLACE_LAST_NORM ? 2 : 1;
}

// Bucket 0 is wte and wpe, bucket 1 + l is layer l, the last one is the last layernorm. n includes padding at the end, with
// which each of several GPUs has an equal share that consists of whole 16-byte vectors.
inline Span bucket(const GPT2Config* config, int b) {
    size_t sizes[3] = {0, 0, 0}; // of each kind
    size_t unit = (size_t)8 * ranks().env.num_ranks;
    for (int p = 0; p < NUM_PARAMS; p++) { sizes[bucket_kind(p)] += param_layer_size(config, p); }
    for (size_t& n : sizes) { n = ceil_div(n, unit) * unit; }
    return {b == 0 ? 0 : sizes[0] + (b - 1) * sizes[1], sizes[b == 0 ? 0 : b <= config->num_layers ? 1 : 2]};
}

inline size_t model_size(const GPT2Config* config) { // number of parameters with padding
    Span last = bucket(config, num_buckets(config) - 1);
    return last.place + last.n;
}

// Offset of tensor p of layer l in this array, in values; l is 0 for tensors that are not per layer. In a bucket, tensors are in the
// order of their places, and those of the same place are in the order of gpt2_params.
inline size_t param_place(const GPT2Config* config, int p, int l) {
    int kind = bucket_kind(p);
    size_t place = bucket(config, kind == 0 ? 0 : kind == 1 ? 1 + l : num_buckets(config) - 1).place;
    for (int q = 0; q < NUM_PARAMS; q++) {
        ParamPlace of_p = gpt2_params[p].place, of_q = gpt2_params[q].place;
        bool before = of_q < of_p || (of_q == of_p && q < p);
        if (bucket_kind(q) == kind && before) { place += param_layer_size(config, q); }
    }
    return place;
}

// A piece is the tensors of the same place and layer, which follow one another. Piece 0 is wte and wpe, pieces 1 + 2l and 2 + 2l are
// the matrices and the vectors of layer l, and piece 2L + 1 is the last layernorm.
inline int num_pieces(const GPT2Config* config) { return 2 * config->num_layers + 2; }
inline ParamPlace piece_kind(const GPT2Config* config, int i) {
    if (i == 0) { return PLACE_EMBEDDINGS; }
    return i == num_pieces(config) - 1 ? PLACE_LAST_NORM : i % 2 == 1 ? PLACE_LAYER_MATRICES : PLACE_LAYER_VECTORS;
}

inline Span parameter_piece(const GPT2Config* config, int i) {
    int l = (i - 1) / 2;
    Span piece = {SIZE_MAX, 0};
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (gpt2_params[p].place != piece_kind(config, i)) { continue; }
        piece.place = std::min(piece.place, param_place(config, p, param_per_layer(p) ? l : 0));
        piece.n += param_layer_size(config, p);
    }
    return piece;
}

// Tensors that follow one another in a piece and have the same weight decay; in GPT-2, all tensors of the piece.
struct DecayRange {
    size_t place, n;
    bool decay;
};
// Returns the range of piece i that has the value at `place`.
inline DecayRange decay_range(const GPT2Config* config, int i, size_t place) {
    DecayRange range = {parameter_piece(config, i).place, 0, false};
    for (int p = 0; p < NUM_PARAMS; p++) {
        const ParamInfo* info = &gpt2_params[p];
        if (info->place != piece_kind(config, i)) { continue; }
        if (range.n == 0 || info->decay != range.decay) {
            if (place < range.place + range.n) { break; }
            range = {range.place + range.n, 0, info->decay};
        }
        range.n += param_layer_size(config, p);
    }
    return range;
}

// With Muon: how many of the first l layers belong to the rank. Without ZeRO-1 it is all of them.
inline size_t layers_of_rank(int l, int rank) {
    int shares = ranks().num_shares;
    return (l - rank % shares + shares - 1) / shares;
}

// With ZeRO-1 (-z 1) a rank keeps moments and master weights only of its share of each bucket, and updates only these
// weights. Its shares follow one another in memory: the share of bucket b begins at own_place there. Without ZeRO-1 a share is
// the whole bucket, and own_place equals place. n is 0 if the bucket belongs to another rank.
struct Share {
    size_t place, n, own_place;
};
inline Share share_of(const GPT2Config* config, int b, int rank) {
    Span whole = bucket(config, b);
    int shares = ranks().num_shares, owner = bucket_owner(b);
    size_t n = whole.n / shares;
    if (owner < 0) { return {whole.place + (shares > 1 ? rank * n : 0), n, whole.place / shares}; }
    size_t own_place = bucket(config, 0).n / shares + layers_of_rank(b - 1, rank) * bucket(config, 1).n;
    return {whole.place, rank == owner ? whole.n : 0, own_place};
}

// This rank's share of bucket b. In a run with Muon, AdamW's second moment leaves out the matrices of the layers: for such an
// array, `matrices` is false.
inline Share own_share(const GPT2Config* config, int b, bool matrices = true) {
    int L = config->num_layers;
    Share share = share_of(config, b, ranks().env.rank);
    if (matrices || b == 0) { return share; }
    size_t n = parameter_piece(config, 1).n;
    share.own_place -= layers_of_rank(b - 1, ranks().env.rank) * n;
    if (b <= L && share.n > 0) { share.place += n, share.n -= n; }
    return share;
}
inline size_t share_size(const GPT2Config* config, bool matrices = true) { // values of all shares of this rank
    Share last = own_share(config, num_buckets(config) - 1, matrices);
    return last.own_place + last.n;
}

// Calls use(i, place, own_place, n, decay) for what the share of `rank` has of piece i, for each piece in bucket b: once for each range
// of the same weight decay. own_place is a place in the memory of that rank.
template <class Use> void for_each_piece(const GPT2Config* config, int b, int rank, Use use) {
    Share share = share_of(config, b, rank);
    int first = b == 0 ? 0 : 2 * b - 1, last = b == 0 ? 0 : std::min(2 * b, num_pieces(config) - 1);
    for (int i = first; i <= last; i++) {
        Span piece = parameter_piece(config, i);
        size_t place = std::max(piece.place, share.place), end = std::min(piece.place + piece.n, share.place + share.n);
        while (place < end) {
            DecayRange range = decay_range(config, i, place);
            size_t n = std::min(range.place + range.n, end) - place;
            use(i, place, share.own_place + (place - share.place), n, range.decay);
            place += n;
        }
    }
}

// own (share_size) = this rank's shares of whole (model_size).
inline void keep_shares(const GPT2Config* config, float* own, const float* whole, bool matrices,
                        const Execution& exec) {
    for (int b = 0; b < num_buckets(config); b++) {
        Share share = own_share(config, b, matrices);
        cudaCheck(cudaMemcpyAsync(own + share.own_place, whole + share.place, share.n * sizeof(float),
                                  cudaMemcpyDeviceToDevice, exec.stream));
    }
}

// whole (model_size) = own (share_size) of all ranks, and 0 for matrices that are not there. All ranks must call it.
inline void join_shares(const GPT2Config* config, float* whole, const float* own, bool matrices,
                        const Execution& exec) {
    if (!matrices) { cudaCheck(cudaMemsetAsync(whole, 0, model_size(config) * sizeof(float), exec.stream)); }
    for (int b = 0; b < num_buckets(config); b++) {
        Span span = bucket(config, b);
        bool skips = !matrices && b >= 1 && b <= config->num_layers;
        size_t skipped = skips ? parameter_piece(config, 2 * b - 1).n : 0;
        float* to = whole + span.place + skipped;
        const float* from = own + own_share(config, b, matrices).own_place;
        if (ranks().num_shares > 1) {
            gather_shares(b, to, from, span.n - skipped, exec);
        } else {
            cudaCheck(
                cudaMemcpyAsync(to, from, (span.n - skipped) * sizeof(float), cudaMemcpyDeviceToDevice, exec.stream));
        }
    }
}

// Calls copy(place, offset, n) for each tensor of each layer. Its n values begin at `place` in the model's arrays, which are
// ordered by layer, and at `offset` in the arrays of a checkpoint, which are ordered by tensor.
template <class Copy> void for_each_tensor(const GPT2Config* config, Copy copy) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t n = param_layer_size(config, p);
        for (int l = 0; l < param_copies(config, p); l++) {
            copy(param_place(config, p, l), param_offset(config, p) + l * n, n);
        }
    }
}

// The tensors of gpt2_params (llmc/gpt2.h) by name, in its order: weights of T = floatX, gradients of T = float.
template <class T> struct Parameters {
    T* wte;      // (Vp, C)
    T* wpe;      // (maxT, C)
    T* ln1w;     // (L, C)
    T* ln1b;     // (L, C)
    T* qkvw;     // (L, 3*C, C)
    T* qkvb;     // (L, 3*C)
    T* attprojw; // (L, C, C)
    T* attprojb; // (L, C)
    T* ln2w;     // (L, C)
    T* ln2b;     // (L, C)
    T* fcw;      // (L, F, C)
    T* fcb;      // (L, F)
    T* fcprojw;  // (L, C, F)
    T* fcprojb;  // (L, C)
    T* lnfw;     // (C)
    T* lnfb;     // (C)
};

// Parameters is read as an array of pointers in the order of the table.
template <class T> T** parameter_array(Parameters<T>* p) {
    static_assert(sizeof(Parameters<T>) == NUM_PARAMS * sizeof(T*), "one pointer for each entry of gpt2_params");
    return (T**)p;
}

template <class T> void point_parameters(Parameters<T>* p, T* memory, const GPT2Config* config) {
    for (int i = 0; i < NUM_PARAMS; i++) { parameter_array(p)[i] = memory + param_place(config, i, 0); }
}

// View of layer l: the pointers of per-layer tensors are moved to this layer's tensor.
template <class T> Parameters<T> layer_parameters(Parameters<T> p, const GPT2Config* config, int l) {
    size_t offset = l * bucket(config, 1).n;
    for (int i = 0; i < NUM_PARAMS; i++) { parameter_array(&p)[i] += param_per_layer(i) ? offset : 0; }
    return p;
}

// For generation: the keys and values of all earlier positions.
struct KeyValueCache {
    int B, capacity; // texts, and the most positions per text
    floatX* keys;    // (L, B, capacity, C)
    floatX* values;  // (L, B, capacity, C)
};

inline KeyValueCache layer_cache(KeyValueCache cache, const GPT2Config* config, int l) {
    size_t offset = (size_t)l * cache.B * cache.capacity * config->channels;
    cache.keys += offset, cache.values += offset;
    return cache;
}

// All layers as decode_layers() takes them, for texts with the residual stream x and these positions.
inline DecodeLayers decode_layers_of(const GPT2Config* config, const Parameters<floatX>& params,
                                     const KeyValueCache& cache, floatX* x, const int* positions) {
    int C = config->channels;
    Parameters<floatX> w = layer_parameters(params, config, 0);
    DecodeLayer first = {x, cache.keys,        cache.values,   positions,
                         C, config->num_heads, cache.capacity, config->norm_epsilon};
    first.ln1w = w.ln1w, first.ln1b = w.ln1b, first.qkvw = w.qkvw, first.qkvb = w.qkvb;
    first.attprojw = w.attprojw, first.attprojb = w.attprojb, first.ln2w = w.ln2w, first.ln2b = w.ln2b;
    first.fcw = w.fcw, first.fcb = w.fcb, first.fcprojw = w.fcprojw, first.fcprojb = w.fcprojb;
    return {first, config->num_layers, bucket(config, 1).n, (size_t)cache.B * cache.capacity * C};
}
