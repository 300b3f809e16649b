// The model of train_gpt2.c in every configuration that transformers' GPT-2 has, against transformers in float64 (variants.h).
#define TESTING
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../../train_gpt2.c"
#include "../test.h"
#include "../variants.h"

static int num_variants, num_families;
static double worst_logits, worst_gradient, worst_step;

static void check_difference(double difference, double limit, double* worst, const char* name, const char* what) {
    check_msg(difference <= limit, "%s: %s is off by %g of its norm", name, what, difference);
    *worst = difference > *worst ? difference : *worst;
}

static void check_greedy(const GPT2* model, const JsonValue* line, const int* inputs, const char* name) {
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    int made[VARIANT_NEW];
    int n = generate(model, &greedy, inputs, VARIANT_PROMPT, VARIANT_NEW, -1, made, NULL, NULL);
    check_msg(n == VARIANT_NEW, "%s: %d new tokens", name, n);
    for (int i = 0; i < n; i++) {
        int want = (int)json_get(line, "greedy")->items[i].integer;
        check_msg(made[i] == want, "%s: new token %d is %d, want %d (margin %g)", name, i, made[i], want,
                  json_get(line, "margin")->items[i].number);
    }
}

static void check_variant(const JsonValue* line, const GPT2Config* config, const char* name) {
    GPT2 model;
    int inputs[VARIANT_B * VARIANT_T], targets[VARIANT_B * VARIANT_T], BT = VARIANT_B * VARIANT_T;
    size_t V = (size_t)config->vocab_size, Vp = (size_t)config->padded_vocab_size;
    gpt2_allocate(&model, config);
    gpt2_allocate_training(&model);
    gpt2_allocate_batch(&model, VARIANT_B, VARIANT_T);
    variant_fill(model.params_memory, config);
    variant_tokens(inputs, targets, config->vocab_size);
    gpt2_forward(&model, &model.acts, inputs, VARIANT_B, VARIANT_T);
    gpt2_head(&model, model.acts.logits, model.acts.lnf, BT);
    check_difference(variant_difference(json_get(line, "logits"), model.acts.logits, (size_t)BT, V, Vp), 2e-5,
                     &worst_logits, name, "logits");
    check_greedy(&model, line, inputs, name);
    double loss = gpt2_loss(&model, targets, 1.0f / (float)BT, VARIANT_B, VARIANT_T);
    check_near(loss, json_get(line, "loss")->number, 1e-5 * loss);
    gpt2_backward(&model, inputs, VARIANT_B, VARIANT_T, true);
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(config, p) == 0) { continue; }
        check_difference(variant_tensor_difference(json_get(line, "grads"), model.grads_memory, config, p), 1e-4,
                         &worst_gradient, name, gpt2_params[p].name);
    }
    double norm = gpt2_gradient_norm(&model);
    check_near(norm, json_get(line, "grad_norm")->number, 1e-4 * norm);
    AdamW optimizer = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, norm > 1.0 ? (float)(1.0 / norm) : 1.0f};
    gpt2_update(&model, &optimizer, NULL);
    for (int l = 0; l < config->num_layers; l++) { // see variants.h
        memset(model.params.qkvb + (3 * l + 1) * config->channels, 0, (size_t)config->channels * sizeof(float));
    }
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(config, p) == 0) { continue; }
        check_difference(variant_tensor_difference(json_get(line, "after"), model.params_memory, config, p), 1e-4,
                         &worst_step, name, gpt2_params[p].name);
    }
    for (size_t i = V * (size_t)config->channels; i < Vp * (size_t)config->channels; i++) {
        check(model.params.wte[i] == 0.0f && model.params.lmhead[i] == 0.0f); // the padding
    }
    gpt2_free(&model);
    num_variants++;
    num_families += strncmp(name, "family_", 7) == 0;
}

static void test_against_transformers(void) {
    for_each_variant(check_variant);
    check_msg(num_variants >= 76 && num_families >= 14, "%d configurations", num_variants);
    printf("     %d configurations; largest differences: logits %.2g, gradients %.2g, a step %.2g\n", num_variants,
           worst_logits, worst_gradient, worst_step);
}

int main(int argc, char** argv) {
#ifdef _OPENMP
    omp_set_num_threads(1); // the models are tiny
#endif
    static const Test tests[] = {
        {"against_transformers", "logits, loss, gradients, a step, greedy text", test_against_transformers},
    };
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
