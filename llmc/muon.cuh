/*
Muon on the GPU: which matrices are updated together, and in which memory. The arithmetic is explained in train_gpt2.c;
the operations are declared here, and their kernels come from dev/cuda/muon.cu and dev/cuda/newton_schulz.cu.

One matrix is too small for a GPU, so newton_schulz takes matrices of the same shape (n,k), n <= k, of as many layers as
the workspace has room for. There are two shapes, and a layer has these matrices of them:

    (C,C)       q, k, v, attproj
    (C,F)       fc, which is (F,C) and transposed on its way to newton_schulz and back, and fcproj; (F,C) where F < C

The workspace is the memory of the logits, which an update does not need. How many layers fit does not change a result.
With ZeRO-1 a rank updates the layers that belong to it (bucket_owner); the results are the same as without.
*/
#pragma once

#include "cuda_common.cuh"
#include "distributed.cuh"
#include "gpt2.h"
#include "layout.cuh"
#include <algorithm>

struct StepState;

// Hyperparameters of one update, set by the host.
struct Muon {
    float learning_rate, momentum, weight_decay;
};

// ---- operations -----------------------------------------------------------------------------

// For num matrices (rows,cols): m = momentum * m + g, and x (num,n,k) = g + momentum * m, divided by its norm, with
// g = grads * state->grad_scale. Writes nothing unless state->applied. scratch in floats
void muon_prepare(floatX* x, float* m, float* scratch, const float* grads, const StepState* state, int num, int rows,
                  int cols, float momentum, const Execution& exec);
size_t muon_prepare_scratch(int num);
// out (num,n,k): with inp (num,n,k) = U S V^T, about U V^T. inp may be the beginning of scratch, which is in values of
// floatX.
void newton_schulz(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec);
size_t newton_schulz_scratch(int num, int n, int k);
// params (num,rows,cols), and master unless it is NULL, -= learning_rate * (0.2 sqrt(max(rows,cols)) o + weight_decay *
// params), if state->applied. o (num,n,k). seed: as in adamw, for a range of parameters that begins `first` values
// before params.
void muon_apply(floatX* params, float* master, const floatX* o, const StepState* state, int num, int rows, int cols,
                float learning_rate, float weight_decay, uint32_t seed, size_t first, const Execution& exec);

// ---- an update ------------------------------------------------------------------------------

// A layer's matrices of one shape, which are orthogonalised together: num of them, (n,k) or (k,n), n <= k.
struct MuonShape {
    int num, n, k;
};
// Returns the shape of the two matrices of the MLP, (F,C) and (C,F), or without mlp of q, k, v and attproj, (C,C).
inline MuonShape muon_shape(const GPT2Config* config, bool mlp) {
    int C = config->channels, F = config->mlp_channels;
    return mlp ? MuonShape{2, std::min(C, F), std::max(C, F)} : MuonShape{4, C, C};
}
inline bool is_muon_mlp(int p) { return gpt2_params[p].rows == DIM_F || gpt2_params[p].cols == DIM_F; }

// Values of the workspace for the matrices of one shape in `layers` layers: the results, and newton_schulz's scratch.
inline size_t muon_workspace(const GPT2Config* config, int layers, bool mlp) {
    MuonShape s = muon_shape(config, mlp);
    return (size_t)layers * s.num * s.n * s.k + newton_schulz_scratch(layers * s.num, s.n, s.k);
}
// The same for both shapes, one after the other.
inline size_t muon_workspace(const GPT2Config* config, int layers) {
    return std::max(muon_workspace(config, layers, false), muon_workspace(config, layers, true));
}

// What an update works on: arrays in the order of layout.cuh.
struct MuonArrays {
    floatX* params;     // (model_size)
    float *master, *m;  // (share_size); master: NULL without master weights
    const float* grads; // (share_size)
    const StepState* state;
    floatX* workspace; // (muon_workspace(config, layers))
    int layers;        // that are updated at once
    float* scratch;    // (muon_prepare_scratch(3))
};

// Calls use(l, place, own_place, index, num, rows, cols) for the tensors of one shape in this rank's layers number begin to
// end - 1, which are layers l of the model. The `num` matrices at `place` in params, and at `own_place` in the other arrays, are
// matrices index, index + 1, ... of the workspace.
template <class Use> void for_each_muon_tensor(const GPT2Config* config, int begin, int end, bool mlp, Use use) {
    int index = 0, shares = ranks().num_shares;
    for (int i = begin; i < end; i++) {
        int l = i * shares + ranks().env.rank % shares;
        Share share = own_share(config, 1 + l);
        for (int p = 0; p < NUM_PARAMS; p++) {
            int num = param_muon_matrices(p);
            if (num == 0 || is_muon_mlp(p) != mlp) { continue; }
            int rows = (int)param_rows(config, p) / num, cols = (int)param_cols(config, p);
            size_t place = param_place(config, p, l);
            use(l, place, share.own_place + (place - share.place), index, num, rows, cols);
            index += num;
        }
    }
}

// One step of Muon on the matrices of all layers of this rank. seed(l, place): for the rounding of the matrices of layer l in the range
// of the same weight decay that begins at `place` (decay_range).
template <class Seed> void muon_update(const MuonArrays& a, const GPT2Config* config, const Muon& optimizer, Seed seed,
                                       const Execution& exec) {
    int L = (int)layers_of_rank(config->num_layers, ranks().env.rank);
    for (int round = 0; round < 2 * ceil_div(L, a.layers); round++) {
        bool mlp = round % 2;
        MuonShape s = muon_shape(config, mlp);
        int begin = round / 2 * a.layers, end = std::min(begin + a.layers, L), num = (end - begin) * s.num;
        size_t size = (size_t)s.n * s.k; // of a matrix
        floatX *out = a.workspace, *x = out + num * size;
        auto prepare = [&](int, size_t, size_t own_place, int index, int n, int rows, int cols) {
            muon_prepare(x + index * size, a.m + own_place, a.scratch, a.grads + own_place, a.state, n, rows, cols,
                         optimizer.momentum, exec);
        };
        auto apply = [&](int l, size_t place, size_t own_place, int index, int n, int rows, int cols) {
            DecayRange range = decay_range(config, 1 + 2 * l, place);
            float decay = range.decay ? optimizer.weight_decay : 0.0f;
            muon_apply(a.params + place, a.master ? a.master + own_place : NULL, out + index * size, a.state, n, rows,
                       cols, optimizer.learning_rate, decay, seed(l, range.place), place - range.place, exec);
        };
        for_each_muon_tensor(config, begin, end, mlp, prepare);
        newton_schulz(out, x, x, num, s.n, s.k, exec);
        for_each_muon_tensor(config, begin, end, mlp, apply);
    }
}
