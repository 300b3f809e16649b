// The activations that the hidden layer of a GPT-2's MLPs may have, and their names.
#ifndef LLMC_ACTIVATION_H
#define LLMC_ACTIVATION_H

#include "utils.h"

// Activations: GELU in its tanh form, GELU, ReLU, its square, SiLU x * sigmoid(x), tanh.
typedef enum { ACT_GELU_TANH, ACT_GELU, ACT_RELU, ACT_RELU_SQUARED, ACT_SILU, ACT_TANH } Activation;

// The names that transformers has for them. A model is saved with an activation's first name.
static const struct {
    const char* name;
    Activation activation;
} gpt2_activations[] = {
    {"gelu_new", ACT_GELU_TANH},
    {"gelu_fast", ACT_GELU_TANH},
    {"gelu_accurate", ACT_GELU_TANH},
    {"gelu_python_tanh", ACT_GELU_TANH},
    {"gelu_pytorch_tanh", ACT_GELU_TANH},
    {"gelu", ACT_GELU},
    {"gelu_python", ACT_GELU},
    {"relu", ACT_RELU},
    {"relu2", ACT_RELU_SQUARED},
    {"silu", ACT_SILU},
    {"swish", ACT_SILU},
    {"tanh", ACT_TANH},
};
enum { NUM_ACTIVATION_NAMES = sizeof(gpt2_activations) / sizeof(gpt2_activations[0]) };

static inline const char* activation_name(int activation) {
    int i = 0;
    while (gpt2_activations[i].activation != (Activation)activation) { i++; }
    return gpt2_activations[i].name;
}

// Returns the activation with this name, or -1.
static inline int activation_of_name(const char* name) {
    for (int i = 0; i < NUM_ACTIVATION_NAMES; i++) {
        if (strcmp(name, gpt2_activations[i].name) == 0) { return (int)gpt2_activations[i].activation; }
    }
    return -1;
}

// Writes all names, "gelu_new, gelu_fast, ...", to text.
static inline const char* activation_names(char* text, size_t size) {
    for (size_t i = 0, n = 0; i < NUM_ACTIVATION_NAMES && n < size; i++) {
        n += (size_t)snprintf(text + n, size - n, "%s%s", i ? ", " : "", gpt2_activations[i].name);
    }
    return text;
}

#endif
