// The deferred update: AdamW updates layers while the next forward pass runs (adamw_state.cuh). A part of train_gpt2.cu, which
// includes it before its forward pass. In a step:
//
//     gpt2_update        updates the embeddings, the first layer and the last layernorm, and defers the other layers: defer_update
//     launch_micro_step  the first of a step attaches the deferred update to its forward pass: attach_deferred_update
//     await_bucket       in the forward pass, before each layer: finishes the update of that layer
//
// Other readers of the weights or of the optimizer's state, such as samples, validation and checkpoints, call
// finish_deferred_update(model) first.
#pragma once

// Whether this run defers updates. Results are bitwise identical with and without.
static bool deferred_update_on(const GPT2* model) {
    return is_alone() && strcmp(args->overlap, "off") != 0 && !model->options.muon && !model->options.fp8 &&
           !args->profile && sizeof(floatX) == 2 && has_sm90a() && model->config.channels % 8 == 0;
}

// Returns the update of all layers except the first.
static DeferredUpdate make_deferred_update(const GPT2* model) {
    const GPT2Config* config = &model->config;
    Piece matrices = parameter_piece(config, 1), vectors = parameter_piece(config, 2);
    size_t at = matrices.place;
    DeferredUpdate w = {};
    w.params = model->params_memory + at, w.grads = model->own_grads + at;
    w.m = model->m_memory + at, w.v = model->v_memory + at;
    if (model->master_memory) {
        w.master = model->master_memory + at;
        if (model->options.stochastic_rounding) { w.seed = (uint32_t)splitmix64(model->options.seed) | 1; }
    }
    w.state = model->state, w.matrices = (int)matrices.n, w.vectors = (int)vectors.n;
    w.num_workers = deferred_update_workers(), w.done = model->deferred_done;
    w.first = w.chunks_of_layer(), w.last = config->num_layers * w.chunks_of_layer();
    return w;
}

// Defers the update of these layers. Call after adamw_prepare.
static void defer_update(GPT2* model) {
    model->update_is_deferred = true;
    cudaCheck(cudaMemsetAsync(model->deferred_done, 0, deferred_update_workers() * sizeof(int), model->stream));
}

// Attaches the deferred update to the forward pass that is launched next. The launch may be captured in a graph, so this does not
// depend on whether an update has been deferred: the kernels read that in state->is_deferred.
static void attach_deferred_update(GPT2* model) {
    deferred_update() = make_deferred_update(model);
    model->update_is_deferred = false;
}

// Finishes the deferred update of all layers, if there is one, without a forward pass.
static void finish_deferred_update(GPT2* model) {
    if (!model->update_is_deferred) { return; }
    attach_deferred_update(model);
    finish_deferred_update(model->config.num_layers, model->stream);
}

// Makes the stream wait until the weights of bucket b (for b > 0: of layer b - 1) are gathered and updated.
static void await_bucket(const GPT2* model, int b) {
    await_weights(b, model->stream);
    finish_deferred_update(b, model->stream);
}
