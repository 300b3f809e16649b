/*
The passes of train_gpt2.cu with --fp8, which includes this file after its own: gpt2_forward_fp8 and so on do what gpt2_forward
and so on do, with some operands in fp8. fp8_training.cuh says which.
*/
#pragma once

#if defined(ENABLE_FP32) // --fp8 is refused

static void gpt2_forward_fp8(GPT2*, int, int, bool) {}
static void gpt2_loss_fp8(GPT2*, int, int, float, bool) {}
static void gpt2_backward_fp8(GPT2*, int, int, bool) {}

#else

// The outputs and the parameters of one layernorm.
struct Norm {
    floatX* out;                 // (B, T, C)
    float *mean, *rstd;          // (B, T)
    const floatX *weight, *bias; // (C)
};

// The first layernorm of layer l; for l = L, the one after the last layer.
static Norm norm_before_layer(const GPT2* model, const Activations* acts, int B, int T, int l) {
    const GPT2Config* config = &model->config;
    if (l == config->num_layers) {
        return {acts->lnf, acts->lnf_mean, acts->lnf_rstd, model->params.lnfw, model->params.lnfb};
    }
    Parameters<floatX> w = layer_parameters(model->params, config, l);
    Activations a = layer_activations(*acts, config, B, T, l);
    return {a.ln1, a.ln1_mean, a.ln1_rstd, w.ln1w, w.ln1b};
}

// `to` = weight (OC,C), also as columns if the backward pass uses them. dX sums over the rows of a weight as they come.
static void quantize_weight(const GPT2* model, const Fp8Copies<E4M3>& to, const floatX* weight, int OC, int C) {
    quantize(model->fp8.stage >= FP8_DX ? to.to_both(true) : to.to_rows(), weight, OC, C, model->stream);
}

// The layernorm at the beginning of layer l, of residual = inp + inp2, or of inp if both are NULL.
static void layernorm_fp8(const GPT2* model, const Fp8Copies<E4M3>& to, const Norm& norm, floatX* residual,
                          const floatX* inp, const floatX* inp2, int BT) {
    bool dw = model->fp8.stage == FP8_DW;
    layernorm_quantize(dw && model->fp8.keep_norm ? to.to_both() : to.to_rows(), dw ? NULL : norm.out, residual,
                       norm.mean, norm.rstd, inp, inp2, norm.weight, norm.bias, BT, model->config.channels,
                       model->stream);
}

// As gpt2_forward, for training. first: the weights are new since the last call.
static void gpt2_forward_fp8(GPT2* model, int B, int T, bool first) {
    const GPT2Config* config = &model->config;
    const Fp8Memory& m = model->fp8;
    Activations* acts = &model->acts;
    int L = config->num_layers, NH = config->num_heads, C = config->channels, BT = B * T;
    cudaStream_t stream = model->stream;

    await_weights(0, stream);
    await_weights(1, stream);
    encoder_forward(acts->encoded, acts->inputs, model->params.wte, model->params.wpe, B, T, C, stream);
    layernorm_fp8(model, fp8_layer(m, config, BT, 0).ln1, norm_before_layer(model, acts, B, T, 0), NULL, acts->encoded,
                  NULL, BT);
    for (int l = 0; l < L; l++) {
        Range range("layer %d", l);
        Parameters<floatX> w = layer_parameters(model->params, config, l);
        Activations a = layer_activations(*acts, config, B, T, l);
        Fp8Layer q = fp8_layer(m, config, BT, l);
        if (first) {
            quantize_weight(model, q.qkvw, w.qkvw, 3 * C, C);
            quantize_weight(model, q.fcw, w.fcw, 4 * C, C);
            quantize_weight(model, q.fcprojw, w.fcprojw, C, 4 * C);
        }
        // attention
        matmul_fp8_forward(a.qkv, q.ln1.as_rows(), q.qkvw.as_rows(), w.qkvb, BT, C, 3 * C, stream);
        attention_forward(a.atty, a.lse, a.qkv, B, T, C, NH, stream);
        matmul_forward(a.residual2, NULL, a.atty, w.attprojw, w.attprojb, a.residual, BT, C, C, stream);
        Norm norm = {a.ln2, a.ln2_mean, a.ln2_rstd, w.ln2w, w.ln2b};
        layernorm_fp8(model, q.ln2, norm, NULL, a.residual2, NULL, BT);
        // MLP
        if (a.fch.is_slope) {
            matmul_fp8_gelu(q.gelu.to_both(), a.fch.tensor, q.ln2.as_rows(), q.fcw.as_rows(), w.fcb, BT, C, 4 * C,
                            stream);
        } else {
            bool dw = m.stage == FP8_DW;
            matmul_fp8_forward(a.fch.tensor, q.ln2.as_rows(), q.fcw.as_rows(), w.fcb, BT, C, 4 * C, stream);
            quantize_gelu(dw && m.keep_gelu ? q.gelu.to_both() : q.gelu.to_rows(), dw ? NULL : a.fch_gelu, a.fch.tensor,
                          BT, 4 * C, stream);
        }
        matmul_fp8_forward(a.projected, q.gelu.as_rows(), q.fcprojw.as_rows(), w.fcprojb, BT, 4 * C, C, stream);
        await_weights(l + 2, stream); // of the next layer
        norm = norm_before_layer(model, acts, B, T, l + 1);
        if (l + 1 < L) {
            layernorm_fp8(model, fp8_layer(m, config, BT, l + 1).ln1, norm, a.residual3, a.residual2, a.projected, BT);
        } else {
            fused_residual_layernorm_forward(a.residual3, norm.out, norm.mean, norm.rstd, a.residual2, a.projected,
                                             norm.weight, norm.bias, BT, C, stream);
        }
    }
}

// As gpt2_loss, for training. From +head on, it also does what gpt2_backward does for the head, a quarter of the tokens at a
// time: dbtc becomes the gradient of lnf, and the gradient of wte is written, or added to unless `first`.
static void gpt2_loss_fp8(GPT2* model, int B, int T, float scale, bool first) {
    const GPT2Config* config = &model->config;
    const Fp8Memory& m = model->fp8;
    Activations* acts = &model->acts;
    int V = config->vocab_size, Vp = config->padded_vocab_size, C = config->channels, BT = B * T;
    int most = fp8_head_tokens(BT), number = m.scales.num - FP8_OF_HEAD;
    const float* dloss = &model->state->dloss;
    cudaStream_t stream = model->stream;
    if (m.stage < FP8_HEAD) { return gpt2_loss(model, acts, B, T, true, scale); }

    E5M2* memory = (E5M2*)(acts->logits + (size_t)most * Vp);
    auto wte = fp8_copies(m, number + FP8_WTE, m.wte, m.wte + (size_t)Vp * C);
    auto lnf = fp8_copies(m, number + FP8_LNF, m.gelu_rows, m.gelu_rows + (size_t)most * C);
    auto dlogits = fp8_copies(m, number + FP8_DLOGITS, memory, memory + (size_t)most * Vp);
    if (first) { quantize_weight(model, wte, model->params.wte, Vp, C); }
    for (int begin = 0; begin < BT; begin += most) {
        int n = std::min(most, BT - begin);
        bool add = !first || begin > 0;
        const floatX* inp = acts->lnf + (size_t)begin * C;
        float* losses = acts->losses + begin;
        const int* targets = acts->targets + begin;
        quantize(m.stage == FP8_DW ? lnf.to_both() : lnf.to_rows(), inp, n, C, stream);
        matmul_fp8_forward(acts->logits, lnf.as_rows(), wte.as_rows(), NULL, n, C, Vp, stream);
        if (m.stage == FP8_DW) {
            fused_classifier(acts->logits, losses, targets, NULL, n, V, Vp, stream);
            quantize_dlogits(dlogits.to_both(), acts->logits, losses, targets, dloss, n, V, Vp, stream);
            matmul_fp8_backward_weight(model->grads.wte, dlogits.as_columns(), lnf.as_columns(), n, C, Vp, add, stream);
        } else {
            fused_classifier(acts->logits, losses, targets, dloss, n, V, Vp, stream);
            quantize(dlogits.to_rows(), acts->logits, n, Vp, stream);
            matmul_backward_weight(model->grads.wte, acts->scratch, acts->logits, inp, n, C, Vp, add, stream);
        }
        matmul_fp8_backward_input(acts->dbtc + (size_t)begin * C, dlogits.as_rows(), wte.as_columns(), n, C, Vp,
                                  stream);
    }
    mean_loss(&model->state->loss, acts->losses, BT, scale, stream);
}

// dweight (OC,C) from fp8 columns with +dw, else from dout16 (BT,OC) and inp16 (BT,C)
static void weight_gradient_fp8(const GPT2* model, float* dweight, float* scratch, const Fp8Copies<E5M2>& dout,
                                const Fp8Copies<E4M3>& inp, const floatX* dout16, const floatX* inp16, int BT, int C,
                                int OC, bool add) {
    if (model->fp8.stage == FP8_DW) {
        matmul_fp8_backward_weight(dweight, dout.as_columns(), inp.as_columns(), BT, C, OC, add, model->stream);
    } else {
        matmul_backward_weight(dweight, scratch, dout16, inp16, BT, C, OC, add, model->stream);
    }
}

// As gpt2_backward. Without +dw the backward pass has the tensors that gpt2_backward has, too.
static void gpt2_backward_fp8(GPT2* model, int B, int T, bool first) {
    const GPT2Config* config = &model->config;
    const Fp8Memory& m = model->fp8;
    const Parameters<floatX>* p = &model->params;
    const Parameters<float>* g = &model->grads;
    Activations* acts = &model->acts;
    int L = config->num_layers, NH = config->num_heads, C = config->channels, BT = B * T;
    floatX *dresidual = acts->dresidual, *dbtc = acts->dbtc; // (B,T,C)
    float* scratch = acts->scratch + attention_backward_bias_terms(B, T, C, NH);
    bool add = !first, dw = m.stage == FP8_DW;
    cudaStream_t stream = model->stream;
    if (m.stage < FP8_DX) { return gpt2_backward(model, B, T, first); }
    auto to = [&](const Fp8Copies<E5M2>& copies) { return dw ? copies.to_both() : copies.to_rows(); };
    if (first) { zero_gradients(model); }

    if (m.stage < FP8_HEAD) {
        linear_cross_entropy_backward(dbtc, g->wte, acts->scratch, acts->logits, acts->losses, acts->lnf, p->wte,
                                      &model->state->dloss, BT, C, config->padded_vocab_size, add, stream);
    }
    const floatX* residual = layer_activations(*acts, config, B, T, L).residual;
    layernorm_backward(dresidual, layer_parameters(*g, config, L - 1).fcprojb, g->lnfw, g->lnfb, acts->scratch, dbtc,
                       NULL, residual, p->lnfw, acts->lnf_mean, acts->lnf_rstd, BT, C, stream);
    gradients_ready(L + 1, stream);
    for (int l = L - 1; l >= 0; l--) {
        Range range("layer %d", l);
        Parameters<floatX> w = layer_parameters(*p, config, l);
        Parameters<float> d = layer_parameters(*g, config, l);
        Activations a = layer_activations(*acts, config, B, T, l);
        Fp8Layer q = fp8_layer(m, config, BT, l);
        // what the forward pass has not kept; the rows are not used
        if (dw && !m.keep_gelu) { quantize_gelu(fp8_again(m, q.gelu), NULL, a.fch.tensor, BT, 4 * C, stream); }
        if (dw && !m.keep_norm) {
            layernorm_quantize(fp8_again(m, q.ln1), NULL, NULL, a.ln1_mean, a.ln1_rstd, a.residual, NULL, w.ln1w,
                               w.ln1b, BT, C, stream);
            layernorm_quantize(fp8_again(m, q.ln2), NULL, NULL, a.ln2_mean, a.ln2_rstd, a.residual2, NULL, w.ln2w,
                               w.ln2b, BT, C, stream);
        }
        if (!dw && !a.keep_gelu) { gelu_forward(a.fch_gelu, a.fch.tensor, (size_t)BT * 4 * C, stream); }
        if (!dw && !a.keep_norm) {
            layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, a.residual, w.ln1w, w.ln1b, BT, C, stream);
            layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, BT, C, stream);
        }
        column_sums_wait();
        // MLP; dresidual's sums, the gradient of fcprojb, were added by the layernorm after this layer
        quantize(to(q.dfcproj), dresidual, BT, C, stream);
        weight_gradient_fp8(model, d.fcprojw, scratch, q.dfcproj, q.gelu, dresidual, a.fch_gelu, BT, 4 * C, C, add);
        if (a.fch.is_slope) {
            matmul_fp8_gelu_backward(to(q.dfch), d.fcb, acts->gelu_terms, q.dfcproj.as_rows(), q.fcprojw.as_columns(),
                                     a.fch.tensor, BT, 4 * C, C, stream);
        } else {
            matmul_fp8_backward_input(a.dfch, q.dfcproj.as_rows(), q.fcprojw.as_columns(), BT, 4 * C, C, stream);
            quantize_gelu_backward(to(q.dfch), a.dfch, a.dfch, a.fch.tensor, BT, 4 * C, stream);
            matmul_backward_bias(d.fcb, acts->gelu_terms, a.dfch, BT, 4 * C, stream);
        }
        weight_gradient_fp8(model, d.fcw, scratch, q.dfch, q.ln2, a.dfch, a.ln2, BT, C, 4 * C, add);
        matmul_fp8_backward_input(dbtc, q.dfch.as_rows(), q.fcw.as_columns(), BT, C, 4 * C, stream);
        layernorm_backward(dresidual, d.attprojb, d.ln2w, d.ln2b, acts->norm2_terms, dbtc, dresidual, a.residual2,
                           w.ln2w, a.ln2_mean, a.ln2_rstd, BT, C, stream);
        // attention
        matmul_backward(dbtc, d.attprojw, scratch, dresidual, a.atty, w.attprojw, BT, C, C, add, stream);
        attention_backward(a.dqkv, d.qkvb, acts->scratch, dbtc, a.qkv, a.atty, a.lse, B, T, C, NH, stream);
        quantize(to(q.dqkv), a.dqkv, BT, 3 * C, stream);
        weight_gradient_fp8(model, d.qkvw, scratch, q.dqkv, q.ln1, a.dqkv, a.ln1, BT, C, 3 * C, add);
        matmul_fp8_backward_input(dbtc, q.dqkv.as_rows(), q.qkvw.as_columns(), BT, C, 3 * C, stream);
        float* earlier_bias = l > 0 ? layer_parameters(*g, config, l - 1).fcprojb : NULL;
        layernorm_backward(dresidual, earlier_bias, d.ln1w, d.ln1b, acts->norm1_terms, dbtc, dresidual, a.residual,
                           w.ln1w, a.ln1_mean, a.ln1_rstd, BT, C, stream);
        column_sums_end(stream);
        gradients_ready(1 + l, stream);
    }
    encoder_backward(g->wte, g->wpe, (int*)acts->scratch, dresidual, acts->inputs, B, T, C, config->vocab_size, stream);
    gradients_ready(0, stream);
}
#endif

// Makes the scales from what is known of the tensors. update: this step's values are added to that; all ranks must then call it.
static void update_fp8_scales(GPT2* model, bool update) {
    fp8_set_scales(model->fp8.scales, update, &model->state->saturated, &model->state->dloss, model->stream);
}

// Call with the first micro-batch of each step on the GPU; pass() makes a forward and a backward pass over it. Before the
// first step, and unless a resumed run knows them (known), it measures the values of all tensors in three passes. One is not
// enough: a gradient that is too small for fp8 hides those before it.
template <class Pass> static void begin_fp8(GPT2* model, bool known, Pass pass) {
    if (model->options.fp8 == FP8_OFF || model->fp8.begun) { return; }
    model->fp8.begun = true;
    update_fp8_scales(model, false); // also forgets what trials of the exchange have measured
    for (int i = 0; i < 3 && !known; i++) {
        pass();
        update_fp8_scales(model, true);
    }
    cudaCheck(cudaMemsetAsync(&model->state->loss, 0, sizeof(float), model->stream));
}

// Copies what is known of the tensors, for a checkpoint. Returns how many there are, 0 without --fp8.
static int download_fp8(const GPT2* model, float* largest) {
    const Fp8Scales& s = model->fp8.scales;
    if (model->options.fp8 == FP8_OFF) { return 0; }
    cudaCheck(cudaStreamSynchronize(model->stream));
    cudaCheck(cudaMemcpy(largest, s.largest, s.num * sizeof(float), cudaMemcpyDeviceToHost));
    return s.num;
}
static void upload_fp8(GPT2* model, const float* largest, int num) {
    const Fp8Scales& s = model->fp8.scales;
    if (model->options.fp8 == FP8_OFF) { return; }
    if (num != s.num) { die("the checkpoint has the scales of %d fp8 tensors, this model has %d", num, s.num); }
    cudaCheck(cudaMemcpy(s.largest, largest, num * sizeof(float), cudaMemcpyHostToDevice));
}
