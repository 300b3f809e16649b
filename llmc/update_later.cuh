// The part of train_gpt2.cu that has AdamW update layers while the next forward pass runs (adamw_state.cuh). Included there,
// before the forward pass. In a step:
//
//     gpt2_update(later)  updates the embeddings, the first layer and the last layernorm, and leaves the other layers open
//     launch_micro_step   the first one of a step lets its forward pass take the update along
//     await_bucket        in the forward pass, before a layer: ends the update of that layer
//
// Whatever else reads the weights or the optimizer's state calls finish_update() first: a sample, validation, a checkpoint.
#pragma once

// Whether this run does so, which changes no bit.
static bool updates_later(const GPT2* model) {
    return is_alone() && strcmp(args->overlap, "off") != 0 && !model->options.muon && !model->options.fp8 &&
           !args->profile && sizeof(floatX) == 2 && has_sm90a() && model->config.channels % 8 == 0;
}

// The update of all layers but the first.
static AdamWLater updated_later(const GPT2* model) {
    const GPT2Config* config = &model->config;
    Piece matrices = parameter_piece(config, 1), vectors = parameter_piece(config, 2);
    size_t at = matrices.place;
    AdamWLater w = {};
    w.params = model->params_memory + at, w.grads = model->own_grads + at;
    w.m = model->m_memory + at, w.v = model->v_memory + at;
    if (model->master_memory) {
        w.master = model->master_memory + at;
        if (model->options.stochastic_rounding) { w.seed = (uint32_t)splitmix64(model->options.seed) | 1; }
    }
    w.state = model->state, w.matrices = (int)matrices.n, w.vectors = (int)vectors.n;
    w.num_workers = adamw_num_workers(), w.done = model->update_done;
    w.first = w.chunks_of_layer(), w.last = config->num_layers * w.chunks_of_layer();
    return w;
}

// Begins it. adamw_prepare has been called.
static void begin_update(GPT2* model) {
    model->update_is_open = true;
    cudaCheck(cudaMemsetAsync(model->update_done, 0, adamw_num_workers() * sizeof(int), model->stream));
}

// Lets the forward pass that is launched next take it along. The launch may be captured in a graph, so this does not depend on
// whether an update has begun: the kernels see that in state->is_later.
static void take_update_along(GPT2* model) {
    adamw_later() = updated_later(model);
    model->update_is_open = false;
}

// Ends it without a forward pass.
static void finish_update(GPT2* model) {
    if (!model->update_is_open) { return; }
    take_update_along(model);
    adamw_finish(model->config.num_layers, model->stream);
}

// The weights of bucket b, for b > 0 those of layer b - 1, may be read by what follows on the stream.
static void await_bucket(const GPT2* model, int b) {
    await_weights(b, model->stream);
    adamw_finish(b, model->stream);
}
