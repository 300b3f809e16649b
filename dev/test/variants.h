/*
Reads dev/test/fixtures/gpt2_variants.jsonl: for many configurations of GPT-2, what transformers computes in float64 from weights that
a formula gives. For tests that run from the top folder. A line has

    name, config      config is what transformers' config.json says
    logits            of inputs (2,12), and loss: their mean cross-entropy with targets (2,12)
    grads, grad_norm  of the loss, a tensor of all layers each
    after             the parameters after one step of AdamW: rate 1e-3, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on matrices, clip 1;
                      the keys' biases as 0, because their gradient is 0 but for rounding, and AdamW makes steps of any size alike
    bf16              the largest relative difference of a gradient's tensor that PyTorch's model in bf16 has on the CPU
    greedy, margin    20 tokens after the first 4 inputs; the largest logit's lead at each

A tensor is a list: its Euclidean norm, then sums of its values with signs that a hash gives. The difference of two tensors has about
the root mean square of the differences of their sums as its norm, so the lists stand for the tensors.
*/
#ifndef DEV_TEST_VARIANTS_H
#define DEV_TEST_VARIANTS_H

#include "../../llmc/checkpoint.h"
#include "../../llmc/json.h"
#include "../../llmc/rand.h"
#include "golden.h"

enum { VARIANT_B = 2, VARIANT_T = 12, VARIANT_PROMPT = 4, VARIANT_NEW = 20 };

// Weight i of tensor p in layer l.
static inline float variant_weight(int p, int l, uint64_t i) {
    uint64_t bits = splitmix64(((uint64_t)p << 56) + ((uint64_t)l << 40) + i);
    float u = (float)(bits >> 40) * 0x1p-24f - 0.5f;
    const ParamInfo* info = &gpt2_params[p];
    if (info->init == INIT_ONE) { return 1.0f + 0.5f * u; }
    return (info->rows == DIM_1 ? 0.25f : info->rows == DIM_VP ? 1.0f : 0.5f) * u;
}

// Fills params (num_parameters), matrices as (out, in), padding rows 0.
static inline void variant_fill(float* params, const GPT2Config* config) {
    memset(params, 0, num_parameters(config) * sizeof(float));
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t n = param_used_rows(config, p) * param_cols(config, p);
        for (int l = 0; l < param_copies(config, p); l++) {
            float* tensor = params + param_offset(config, p) + (size_t)l * param_layer_size(config, p);
            for (size_t i = 0; i < n; i++) { tensor[i] = variant_weight(p, l, i); }
        }
    }
}

static inline void variant_tokens(int* inputs, int* targets, int vocab_size) {
    for (int i = 0; i < VARIANT_B * VARIANT_T; i++) {
        inputs[i] = (int)(splitmix64(1000 + (uint64_t)i) % (uint64_t)vocab_size);
        targets[i] = (int)(splitmix64(2000 + (uint64_t)i) % (uint64_t)vocab_size);
    }
}

// Returns about the norm of x - y over the norm of y, where x (rows,cols) has rows that are `stride` floats apart and `list` stands
// for y.
static inline double variant_difference(const JsonValue* list, const float* x, size_t rows, size_t cols,
                                        size_t stride) {
    double sums[32] = {0}, squares = 0.0;
    size_t K = list->count - 1;
    require(list->count > 1 && K <= 32);
    for (size_t i = 0; i < rows * cols; i++) {
        uint64_t bits = splitmix64(((uint64_t)77 << 56) + i);
        double value = x[i / cols * stride + i % cols];
        for (size_t k = 0; k < K; k++) { sums[k] += bits >> k & 1 ? -value : value; }
    }
    for (size_t k = 0; k < K; k++) {
        double d = sums[k] - list->items[1 + k].number;
        squares += d * d;
    }
    return sqrt(squares / (double)K) / list->items[0].number;
}

// The same for tensor p of all layers, which `memory`, in the order of gpt2_params, has at its place. lists: member "grads" or "after".
static inline double variant_tensor_difference(const JsonValue* lists, const float* memory, const GPT2Config* config,
                                               int p) {
    const JsonValue* list = json_get(lists, gpt2_params[p].name);
    size_t n = param_used_rows(config, p) * param_cols(config, p) * (size_t)param_copies(config, p);
    require(list);
    return variant_difference(list, memory + param_offset(config, p), 1, n, n);
}

// Calls use(line, config, name) for each configuration.
static inline void for_each_variant(void (*use)(const JsonValue* line, const GPT2Config* config, const char* name)) {
    Error err;
    MappedFile file;
    const char* path = FIXTURES "gpt2_variants.jsonl";
    if (!map_file(&file, path, &err)) { die("%s", err.text); }
    const char *at = (const char*)file.data, *end = at + file.size;
    while (at < end) {
        const char* newline = (const char*)memchr(at, '\n', (size_t)(end - at));
        JsonDoc doc;
        GPT2Config config;
        int bos, eot;
        require(newline);
        memset(&config, 0, sizeof(config));
        if (!json_parse(&doc, at, (size_t)(newline - at), path, &err)) { die("%s", err.text); }
        const char* name = json_get(doc.root, "name")->string;
        if (!hf_config_read(&config, &bos, &eot, json_get(doc.root, "config"), name, &err)) { die("%s", err.text); }
        use(doc.root, &config, name);
        json_free(&doc);
        at = newline + 1;
    }
    unmap_file(&file);
}

#endif
