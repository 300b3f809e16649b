/*
The shape of a GPT-2 model: its configuration, the model descriptors, and the table of parameters. The CPU program and
the GPU program derive sizes, pointers, initialisation, weight decay, checkpoint names and test names from this table.
*/
#ifndef LLMC_GPT2_H
#define LLMC_GPT2_H

#include "activation.h"
#include "rand.h"
#include "utils.h"
#include <math.h>

typedef struct {
    int max_seq_len;       // maxT, number of position embeddings
    int vocab_size;        // V
    int padded_vocab_size; // Vp, a multiple of 128; rows V..Vp of wte are zero and never sampled
    int num_layers;        // L
    int num_heads;         // NH
    int channels;          // C
    int mlp_channels;      // F, width of the MLP's hidden layer; GPT-2: 4*C
    float norm_epsilon;    // added to the variance in every layernorm; GPT-2: 1e-5
    // GPT-2: 0
    int activation;         // Activation of the MLP's hidden layer
    int unscaled_attention; // 1: attention's scores are not divided by sqrt(HS)
    int scale_by_layer;     // 1: the scores of layer l = 0, 1, ... are also divided by l + 1
    int untied_head;        // 1: the head has weights of its own, lmhead; 0: it uses wte
} GPT2Config;

// What attention's scores q k^T are multiplied by in a layer, l = 0, 1, ...
static inline float attention_scale(const GPT2Config* config, int l) {
    float scale = config->unscaled_attention ? 1.0f : 1.0f / sqrtf((float)(config->channels / config->num_heads));
    return config->scale_by_layer ? scale / (float)(l + 1) : scale;
}

// ---- parameters -----------------------------------------------------------------

typedef enum { INIT_NORMAL, INIT_NORMAL_RESIDUAL, INIT_ONE, INIT_ZERO } InitKind;

enum { DIM_1, DIM_C, DIM_3C, DIM_F, DIM_VP, DIM_MAXT }; // names: param_dim() has their sizes

// What a tensor belongs to. A checkpoint stores those of a layer as (L, rows, cols). In GPU memory, tensors of the same place
// follow one another, and several GPUs exchange the gradients of a place's tensors together: "parameters in memory" in train_gpt2.cu.
typedef enum { PLACE_EMBEDDINGS, PLACE_LAYER_MATRICES, PLACE_LAYER_VECTORS, PLACE_LAST_NORM, PLACE_HEAD } ParamPlace;

typedef struct {
    const char* name;    // our name, which is also llm.c's
    const char* hf_name; // Hugging Face's name without "transformer.", which lmhead's has not; %d is the layer
    ParamPlace place;
    int rows, cols; // DIM_*; rows is DIM_1 for vectors
    bool conv1d;    // Hugging Face stores it transposed, as (in, out); here it is (out, in)
    InitKind init;  // matrices: normal with std 0.02, or 0.02 / sqrt(2 L) if they write to the residual stream
    bool decay;     // AdamW and Muon apply weight decay; GPT-2: to tensors of two or more dimensions
} ParamInfo;

enum { NUM_PARAMS = 17 };

// In llm.c's order, which is also the order in checkpoints and in the CPU program's memory. Only models with an untied head have
// lmhead.
static const ParamInfo gpt2_params[NUM_PARAMS] = {
    {"wte", "wte.weight", PLACE_EMBEDDINGS, DIM_VP, DIM_C, false, INIT_NORMAL, true},
    {"wpe", "wpe.weight", PLACE_EMBEDDINGS, DIM_MAXT, DIM_C, false, INIT_NORMAL, true},
    {"ln1w", "h.%d.ln_1.weight", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ONE, false},
    {"ln1b", "h.%d.ln_1.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ZERO, false},
    {"qkvw", "h.%d.attn.c_attn.weight", PLACE_LAYER_MATRICES, DIM_3C, DIM_C, true, INIT_NORMAL, true},
    {"qkvb", "h.%d.attn.c_attn.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_3C, false, INIT_ZERO, false},
    {"attprojw", "h.%d.attn.c_proj.weight", PLACE_LAYER_MATRICES, DIM_C, DIM_C, true, INIT_NORMAL_RESIDUAL, true},
    {"attprojb", "h.%d.attn.c_proj.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ZERO, false},
    {"ln2w", "h.%d.ln_2.weight", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ONE, false},
    {"ln2b", "h.%d.ln_2.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ZERO, false},
    {"fcw", "h.%d.mlp.c_fc.weight", PLACE_LAYER_MATRICES, DIM_F, DIM_C, true, INIT_NORMAL, true},
    {"fcb", "h.%d.mlp.c_fc.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_F, false, INIT_ZERO, false},
    {"fcprojw", "h.%d.mlp.c_proj.weight", PLACE_LAYER_MATRICES, DIM_C, DIM_F, true, INIT_NORMAL_RESIDUAL, true},
    {"fcprojb", "h.%d.mlp.c_proj.bias", PLACE_LAYER_VECTORS, DIM_1, DIM_C, false, INIT_ZERO, false},
    {"lnfw", "ln_f.weight", PLACE_LAST_NORM, DIM_1, DIM_C, false, INIT_ONE, false},
    {"lnfb", "ln_f.bias", PLACE_LAST_NORM, DIM_1, DIM_C, false, INIT_ZERO, false},
    {"lmhead", "lm_head.weight", PLACE_HEAD, DIM_VP, DIM_C, false, INIT_NORMAL, true},
};

static inline size_t param_dim(const GPT2Config* config, int dim) {
    size_t C = (size_t)config->channels;
    switch (dim) {
    case DIM_1:
        return 1;
    case DIM_C:
        return C;
    case DIM_3C:
        return 3 * C;
    case DIM_F:
        return (size_t)config->mlp_channels;
    case DIM_VP:
        return (size_t)config->padded_vocab_size;
    default:
        return (size_t)config->max_seq_len;
    }
}

static inline size_t param_rows(const GPT2Config* config, int p) { return param_dim(config, gpt2_params[p].rows); }
static inline size_t param_cols(const GPT2Config* config, int p) { return param_dim(config, gpt2_params[p].cols); }

// Whether each layer has a tensor p.
static inline bool param_per_layer(int p) {
    return gpt2_params[p].place == PLACE_LAYER_MATRICES || gpt2_params[p].place == PLACE_LAYER_VECTORS;
}
// How many tensors p the model has.
static inline int param_copies(const GPT2Config* config, int p) {
    return param_per_layer(p) ? config->num_layers : gpt2_params[p].place != PLACE_HEAD || config->untied_head;
}

// Tensor p of a layer as the matrices that Muon updates, one by one: 0 for vectors and embeddings, which AdamW updates.
// qkvw is three, (C,C) each: q, k and v are different maps of the same input, and orthogonalised as one, a large one
// would shrink the updates of the others.
static inline int param_muon_matrices(int p) {
    const ParamInfo* info = &gpt2_params[p];
    return !param_per_layer(p) || info->rows == DIM_1 ? 0 : info->rows == DIM_3C ? 3 : 1;
}

// The rows of tensor p without padding.
static inline size_t param_used_rows(const GPT2Config* config, int p) {
    return gpt2_params[p].rows == DIM_VP ? (size_t)config->vocab_size : param_rows(config, p);
}

// number of elements of tensor p in a layer (of the whole tensor if it is not per layer)
static inline size_t param_layer_size(const GPT2Config* config, int p) {
    return param_rows(config, p) * param_cols(config, p);
}

// number of elements of tensor p in all layers
static inline size_t param_size(const GPT2Config* config, int p) {
    return param_layer_size(config, p) * (size_t)param_copies(config, p);
}

// Offset of tensor p in the array that holds all tensors. p = NUM_PARAMS gives the size of this array.
static inline size_t param_offset(const GPT2Config* config, int p) {
    size_t offset = 0;
    for (int i = 0; i < p; i++) { offset += param_size(config, i); }
    return offset;
}

static inline size_t num_parameters(const GPT2Config* config) { return param_offset(config, NUM_PARAMS); }

// Writes Hugging Face's name of a tensor, with the prefix "transformer." if it has it, to name (size bytes).
static inline void param_hf_name(char* name, size_t size, int p, int layer) {
    int n = snprintf(name, size, "%s", gpt2_params[p].place == PLACE_HEAD ? "" : "transformer.");
    if (param_per_layer(p)) {
        // replace the %d of the table's name by the layer
        const char* hf = gpt2_params[p].hf_name;
        const char* hole = strstr(hf, "%d");
        snprintf(name + n, size - (size_t)n, "%.*s%d%s", (int)(hole - hf), hf, layer, hole + 2);
    } else {
        snprintf(name + n, size - (size_t)n, "%s", gpt2_params[p].hf_name);
    }
}

// Fills params (num_parameters(config)), in the order of gpt2_params, with the initial weights that llm.c and PyTorch
// have for this seed (42 in both). The embeddings and an untied head are drawn first, then layer after layer. The padding rows
// V..Vp of wte and lmhead are 0 and no numbers are drawn for them.
static inline void gpt2_init_params(float* params, const GPT2Config* config, uint32_t seed) {
    Mt19937 mt;
    mt19937_seed(&mt, seed);
    for (int p = 0; p < NUM_PARAMS; p++) {
        float* tensor = params + param_offset(config, p);
        size_t n = param_size(config, p);
        float value = gpt2_params[p].init == INIT_ONE ? 1.0f : 0.0f;
        for (size_t i = 0; i < n; i++) { tensor[i] = value; }
    }
    for (int layer = -1; layer < config->num_layers; layer++) { // -1: the tensors that are not per layer
        for (int p = 0; p < NUM_PARAMS; p++) {
            InitKind init = gpt2_params[p].init;
            if (init != INIT_NORMAL && init != INIT_NORMAL_RESIDUAL) { continue; }
            if (param_per_layer(p) != (layer >= 0) || param_copies(config, p) == 0) { continue; }
            size_t n = param_layer_size(config, p);
            float* tensor = params + param_offset(config, p) + (layer >= 0 ? (size_t)layer * n : 0);
            n = param_used_rows(config, p) * param_cols(config, p);
            double std = init == INIT_NORMAL ? 0.02 : 0.02 / sqrt(2.0 * config->num_layers);
            normal_fill(tensor, n, 0.0, std, &mt);
        }
    }
}

// ---- configurations ---------------------------------------------------------------

static inline int padded_vocab(int vocab_size) { return (vocab_size + 127) / 128 * 128; }

// Sets all but the sizes that a descriptor names to GPT-2's values. config->channels must be set; if 4*C overflows, config_check()
// refuses the channels.
static inline void gpt2_defaults(GPT2Config* config) {
    config->activation = ACT_GELU_TANH;
    config->unscaled_attention = config->scale_by_layer = config->untied_head = 0;
    config->mlp_channels = (int)(4 * (int64_t)config->channels);
    config->norm_epsilon = 1e-5f;
}

// Whether the model computes as GPT-2 does, whatever its sizes and its head.
static inline bool is_plain_gpt2(const GPT2Config* c) {
    return c->activation == ACT_GELU_TANH && !c->unscaled_attention && !c->scale_by_layer;
}

// Fails if a number is out of range or the numbers do not fit together. `where` is the file or flag that they come
// from, for the message.
static inline bool config_check(const GPT2Config* c, const char* where, Error* err) {
    struct {
        const char* name;
        int value, max;
    } fields[] = {
        {"the number of positions", c->max_seq_len, 1 << 24}, {"the vocabulary size", c->vocab_size, 1 << 24},
        {"the number of layers", c->num_layers, 4096},        {"the number of heads", c->num_heads, 4096},
        {"the number of channels", c->channels, 1 << 20},     {"the number of MLP channels", c->mlp_channels, 1 << 22},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (fields[i].value < 1 || fields[i].value > fields[i].max) {
            return error_set(err, "%s: %s is %d, want 1 to %d", where, fields[i].name, fields[i].value, fields[i].max);
        }
    }
    if (!(c->norm_epsilon > 0.0f && c->norm_epsilon <= 1.0f)) { // written so that NaN fails
        return error_set(err, "%s: the epsilon of the layernorms is %g, want more than 0 and at most 1", where,
                         (double)c->norm_epsilon);
    }
    if (c->activation < 0 || c->activation > ACT_TANH ||
        (c->unscaled_attention | c->scale_by_layer | c->untied_head) >> 1) {
        return error_set(err, "%s: an activation, a scale of attention or a head that this program does not know",
                         where);
    }
    if (c->channels % c->num_heads != 0) {
        return error_set(err, "%s: %d channels do not divide into %d heads", where, c->channels, c->num_heads);
    }
    if (c->padded_vocab_size < c->vocab_size) {
        return error_set(err, "%s: padded vocabulary %d is smaller than the vocabulary %d", where, c->padded_vocab_size,
                         c->vocab_size);
    }
    return true;
}

// Descriptors: "d12" or "gpt2:d12" is the GPT-2 of depth 12 with 1024 positions; "gpt3:c768" is the GPT-3 with 768
// channels and 2048 positions. All have GPT-2's vocabulary of 50,257. Sources: Radford et al. 2019 (GPT-2); Brown et
// al. 2020, arXiv:2005.14165, table 2.1 (GPT-3); llm.c for depths above 48.
static inline bool is_descriptor(const char* s) {
    if (strncmp(s, "gpt2:", 5) == 0 || strncmp(s, "gpt3:", 5) == 0) { return true; }
    return s[0] == 'd' && s[1] != '\0' && strspn(s + 1, "0123456789") == strlen(s + 1);
}

static inline bool config_from_descriptor(GPT2Config* config, const char* descriptor, Error* err) {
    static const int gpt2_sizes[][3] = {// depth, channels, heads
                                        {6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {36, 1280, 20},
                                        {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
    static const int gpt3_sizes[][3] = {// channels, depth, head size
                                        {384, 6, 64},    {768, 12, 64},   {1024, 24, 64},
                                        {1536, 24, 96},  {2048, 24, 128}, {2560, 32, 80},
                                        {4096, 32, 128}, {5140, 40, 128}, {12288, 96, 128}};
    bool gpt3 = strncmp(descriptor, "gpt3:", 5) == 0;
    const char* number = strchr(descriptor, ':') ? strchr(descriptor, ':') + 1 : descriptor;
    char kind = gpt3 ? 'c' : 'd', *end = NULL;
    long n = number[0] == kind && number[1] >= '0' && number[1] <= '9' ? strtol(number + 1, &end, 10) : 0;
    bool found = false;
    memset(config, 0, sizeof(*config));
    config->vocab_size = 50257;
    config->padded_vocab_size = padded_vocab(50257);
    config->max_seq_len = gpt3 ? 2048 : 1024;
    for (size_t i = 0; !gpt3 && i < sizeof(gpt2_sizes) / sizeof(gpt2_sizes[0]); i++) {
        if (end && *end == '\0' && n == gpt2_sizes[i][0]) {
            config->num_layers = gpt2_sizes[i][0];
            config->channels = gpt2_sizes[i][1];
            config->num_heads = gpt2_sizes[i][2];
            found = true;
        }
    }
    for (size_t i = 0; gpt3 && i < sizeof(gpt3_sizes) / sizeof(gpt3_sizes[0]); i++) {
        if (end && *end == '\0' && n == gpt3_sizes[i][0]) {
            config->channels = gpt3_sizes[i][0];
            config->num_layers = gpt3_sizes[i][1];
            if (config->channels % gpt3_sizes[i][2] != 0) {
                return error_set(err, "model '%s': %d channels do not divide into heads of %d", descriptor,
                                 config->channels, gpt3_sizes[i][2]);
            }
            config->num_heads = config->channels / gpt3_sizes[i][2];
            found = true;
        }
    }
    if (!found) {
        return error_set(err,
                         "model '%s' is not known; one of d6 d12 d24 d36 d48 d60 d72 d84 (also gpt2:dN) or "
                         "gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096 c12288",
                         descriptor);
    }
    gpt2_defaults(config);
    return config_check(config, descriptor, err);
}

#endif
