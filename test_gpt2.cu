/*
Tests of train_gpt2.cu on a GPU. They compare it with PyTorch in float64, compare it with itself, and run the program as
its users do. Without a GPU every test is skipped, by name.

    ./test_gpt2cu [--list | NAME ...]

Tolerances, relative to the norm of a tensor. In fp32, sums of a few hundred terms differ in the last bits: 1e-4, as in
the test of the CPU program. In 16 bits, every stored activation is rounded with a relative error of at most u = half an
ulp (u / sqrt(3) on average): u is 2^-9 for bf16 and 2^-12 for fp16.

The residual stream of the 2-layer fixture is rounded about 5 times, and each branch added to it about 6 times. So the
error of a hidden state is about sqrt(11) u. Logits are rounded once more. Gradients pass through the network twice, so
their error is about sqrt(30) u. FORWARD and BACKWARD below are twice these errors.
*/
#ifdef GPU_PROGRAM // in the emulation, where one binary, which takes a minute to compile, is both programs, by its name
#define main train_gpt2_main
#else
#define TESTING
#endif
#include "dev/cuda/reference.h"
#include "dev/test/golden.h"
#include "dev/test/test.h"
#include "dev/test/variants.h"
#include "train_gpt2.cu"
#undef main

#if defined(ENABLE_FP32)
static const double UNIT = 0x1p-24, FORWARD = 2e-5, BACKWARD = 1e-4, LOSS = 1e-5;
#elif defined(ENABLE_FP16)
static const double UNIT = 0x1p-12, FORWARD = 8 * UNIT, BACKWARD = 12 * UNIT, LOSS = 8 * UNIT;
#else
static const double UNIT = 0x1p-9, FORWARD = 8 * UNIT, BACKWARD = 12 * UNIT, LOSS = 8 * UNIT;
#endif
static const bool IS_FP32 = sizeof(floatX) == sizeof(float);
// In fp16, gradients of a mean over thousands of tokens would underflow, so the loss is scaled up. gradients() and
// gradient_norm() divide by the scale again.
static const double LOSS_SCALE = IS_FP16 ? 1024.0 : 1.0;

static bool has_fp8() { return strcmp(PRECISION_NAME, "bf16") == 0 && has_sm90a(); }

// Returns the size, or the smaller size in the emulation, where a step takes seconds, unless LLMC_TEST_FULL is set.
static int emulated_size(int size, int smaller) {
#ifdef GPU_PROGRAM
    return getenv("LLMC_TEST_FULL") ? size : smaller;
#else
    (void)smaller;
    return size;
#endif
}

static bool have_gpu() {
    int n = 0;
    if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0) { return true; }
    test_skip("needs a GPU");
    return false;
}

// ---- a model to test --------------------------------------------------------------------------------

// GPT-2 with maxT positions and so on.
static GPT2Config config_of(int maxT, int V, int L, int NH, int C) {
    GPT2Config config = {maxT, V, padded_vocab(V), L, NH, C, 0, 0.0f, 0, 0, 0, 0};
    gpt2_defaults(&config);
    return config;
}

static Execution test_exec;                                   // as main() of the program makes it
static GPT2Options test_options = {0, true, true, false, 42}; // options of the next model to be opened
static Batch test_batch;                                      // batch of the model opened last

// Opens a model of this shape with room for B x T tokens and uploads the given weights.
static void open_model(GPT2* model, const GPT2Config* config, const float* weights, int B, int T) {
    Plan parameters, activations;
    test_batch = {B, T, (int64_t)B * T, 1};
    gpt2_open(model, config, &test_options, test_exec);
    plan_training(&parameters, &activations, model, config, B, T, &test_options);
    allocate_training(model, &parameters, &activations);
    // makes reads of unwritten memory visible: bytes of 0xFF are NaN in every float type
    cudaCheck(cudaMemset(model->arenas[1], 0xFF, activations.total));
    cudaCheck(cudaMemset(model->grads_memory, 0xFF, num_parameters(config) * sizeof(float)));
    gpt2_upload(model, weights, 0);
}

static float* read_weights(const char* path, GPT2Config* config) {
    Error err;
    ModelFile file;
    if (!model_open(&file, path, &err)) { die("%s", err.text); }
    *config = file.config;
    float* weights = (float*)malloc_check(num_parameters(config) * sizeof(float));
    if (!model_read(&file, weights, &err)) { die("%s", err.text); }
    model_close(&file);
    return weights;
}

static void open_fixture(GPT2* model, int B) {
    GPT2Config config;
    float* weights = read_weights(FIXTURES "tiny_gpt2", &config);
    open_model(model, &config, weights, B, 64);
    free(weights);
}

// Opens a model with random weights (initial values plus noise), and draws random tokens (B * T + 1).
static void open_random(GPT2* model, const GPT2Config* config, int B, int T, std::vector<int>* tokens, int seed = 0) {
    size_t n = num_parameters(config);
    std::vector<float> weights(n), noise(n);
    Mt19937 mt;
    uint64_t rng = 3 + 7 * seed;
    gpt2_init_params(weights.data(), config, 42);
    mt19937_seed(&mt, 5 + seed);
    normal_fill(noise.data(), n, 0.0f, 0.05f, &mt);
    for (size_t i = 0; i < n; i++) { weights[i] += noise[i]; }
    open_model(model, config, weights.data(), B, T);
    tokens->resize((size_t)B * T + 1);
    for (int& token : *tokens) { token = (int)random_below(&rng, (uint32_t)config->vocab_size); }
}

static void set_tokens(GPT2* model, const int* inputs, const int* targets, size_t n) {
    cudaCheck(cudaMemcpy(model->acts.inputs, inputs, n * sizeof(int), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(model->acts.targets, targets, n * sizeof(int), cudaMemcpyHostToDevice));
}

static void set_scalar(GPT2* model, float* where, float value) {
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(where, &value, sizeof(value), cudaMemcpyHostToDevice));
}

static float get_scalar(GPT2* model, const float* where) {
    float value;
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(&value, where, sizeof(value), cudaMemcpyDeviceToHost));
    return value;
}

template <class T> static std::vector<float> to_host(const GPT2* model, const T* dev, size_t n) {
    std::vector<T> values(n);
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(values.data(), dev, n * sizeof(T), cudaMemcpyDeviceToHost));
    return std::vector<float>(values.begin(), values.end());
}

static std::vector<float> gradients(const GPT2* model) {
    std::vector<float> values = to_host(model, model->grads_memory, num_parameters(&model->config));
    for (float& x : values) { x /= (float)LOSS_SCALE; }
    return values;
}

static double gradient_norm(GPT2* model) { return get_scalar(model, &model->state->scaled_norm) / LOSS_SCALE; }

// One forward and backward pass over acts->inputs and targets: computes gradients and their norm, returns the loss.
static double run_pass(GPT2* model, int B, int T, bool first = true) {
    if (first) {
        set_scalar(model, &model->state->loss, 0.0f);
        set_scalar(model, &model->state->loss_scale, (float)LOSS_SCALE);
        set_scalar(model, &model->state->dloss, (float)(LOSS_SCALE / (double)test_batch.total));
    }
    Batch batch = {B, T, test_batch.total, 1};
    launch_micro_step(model, &batch, first, true);
    gpt2_gradient_norm(model);
    return get_scalar(model, &model->state->loss);
}

// ---- against PyTorch ----------------------------------------------------------------------------------

static void compare_golden(const GPT2* model, const char* name, const floatX* dev, size_t rows, size_t cols,
                           size_t stride, double tolerance, double* worst) {
    float* want = golden_floats(name);
    std::vector<float> padded = to_host(model, dev, rows * stride), got(rows * cols);
    for (size_t i = 0; i < rows * cols; i++) { got[i] = padded[i / cols * stride + i % cols]; }
    double error = relative_error(got.data(), want, rows * cols);
    check_msg(error <= tolerance, "%s is off by %g of its norm, want at most %g", name, error, tolerance);
    if (!(error <= *worst)) { *worst = error; }
    free(want);
}

static void compare_golden_gradients(const GPT2* model, double tolerance) {
    const GPT2Config* c = &model->config;
    std::vector<float> grads = gradients(model);
    double worst = 0.0;
    int compared = 0;
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int l = 0; l < param_copies(c, p); l++) {
            char hf[96], name[112];
            param_hf_name(hf, sizeof(hf), p, l);
            snprintf(name, sizeof(name), "grad.%s", hf);
            float* want = golden_floats(name);
            size_t n = elements(golden_tensor(name)), cols = param_cols(c, p), rows = n / cols;
            const float* ours = grads.data() + param_place(c, p, l);
            std::vector<float> ordered(n);
            for (size_t i = 0; i < n; i++) {
                ordered[i] = gpt2_params[p].conv1d ? ours[i % rows * cols + i / rows] : ours[i];
            }
            double error = relative_error(ordered.data(), want, n);
            check_msg(error <= tolerance, "%s is off by %g of its norm, want at most %g", name, error, tolerance);
            if (!(error <= worst)) { worst = error; }
            compared++;
            free(want);
        }
    }
    check(compared == 4 + 12 * 2);
    printf("     largest relative error of a gradient: %.2g, allowed %.2g\n", worst, tolerance);
}

static void test_golden(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    float *loss = golden_floats("loss"), *norm = golden_floats("grad_norm");
    open_fixture(&model, 4);
    const Activations* acts = &model.acts;
    size_t C = model.config.channels, V = model.config.vocab_size, Vp = model.config.padded_vocab_size;
    set_tokens(&model, inputs, targets, 256);
    double worst = 0.0;
    for (bool training : {false, true}) {
        gpt2_forward(&model, &model.acts, 4, 64, training ? TRAIN_FIRST : EVALUATE, NULL, model.exec);
        matmul_forward(acts->logits, NULL, acts->lnf, model.params.wte, NULL, NULL, 256, (int)C, (int)Vp, model.exec);
        compare_golden(&model, "hidden.0", acts->encoded, 256, C, C, FORWARD, &worst);
        compare_golden(&model, "hidden.1", acts->residual3, 256, C, C, FORWARD, &worst);
        compare_golden(&model, "hidden.2", acts->lnf, 256, C, C, FORWARD, &worst);
        compare_golden(&model, "logits", acts->logits, 256, V, Vp, FORWARD, &worst);
    }
    double got = run_pass(&model, 4, 64);
    printf("     largest relative error of hidden states and logits: %.2g, allowed %.2g; loss %.6f, want %.6f\n", worst,
           FORWARD, got, loss[0]);
    check_near(got, loss[0], LOSS);
    compare_golden_gradients(&model, BACKWARD);
    check_near(gradient_norm(&model), norm[0], BACKWARD * norm[0]);
    gpt2_free(&model);
    free(inputs), free(targets), free(loss), free(norm);
}

static void test_ten_steps(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    float *want = golden_floats("train.losses"), *want_norms = golden_floats("train.grad_norms");
    double worst = 0.0;
    open_fixture(&model, 4);
    set_tokens(&model, inputs, targets, 256);
    for (int i = 0; i < 10; i++) {
        double loss = run_pass(&model, 4, 64), norm = gradient_norm(&model);
        AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        gpt2_update(&model, &o, false);
        worst = fmax(worst, fabs(loss - want[i]));
        check_near(loss, want[i], IS_FP32 ? 1e-4 : 2 * LOSS);
        check_near(norm, want_norms[i], (IS_FP32 ? 1e-3 : 2 * BACKWARD) * want_norms[i]);
    }
    printf("     largest difference of a loss: %.2g\n", worst);
    size_t n = elements(golden_tensor("train.wte_after"));
    float* wte = golden_floats("train.wte_after");
    std::vector<float> weights(num_parameters(&model.config));
    gpt2_download(&model, weights.data());
    double error = relative_error(weights.data(), wte, n);
    check_msg(error <= BACKWARD, "wte after 10 steps is off by %g of its norm", error);
    free(inputs), free(targets), free(want), free(want_norms), free(wte);
    gpt2_free(&model);
}

// ---- every configuration of transformers' GPT-2 (variants.h) ---------------------------------------------

static struct {
    int seen, run;
    double logits, gradient, step; // largest differences
} variants;

static void check_variant_tensors(const JsonValue* lists, const GPT2Config* config, const std::vector<float>& values,
                                  double limit, double* worst, const char* name, const char* what) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(config, p) == 0) { continue; }
        double difference = variant_tensor_difference(lists, values.data(), config, p);
        check_msg(difference <= limit, "%s: %s of %s is off by %g of its norm", name, what, gpt2_params[p].name,
                  difference);
        *worst = fmax(*worst, difference);
    }
}

// Greedy text equals the reference up to the first choice that is as close as rounding.
static void check_variant_text(GPT2* model, const JsonValue* line, const int* inputs, double margin, const char* name) {
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    int n = VARIANT_PROMPT, count, got[VARIANT_NEW];
    check(generate(model, &greedy, inputs, &n, 1, n, VARIANT_NEW, -1, got, &count, NULL) && count == VARIANT_NEW);
    for (int i = 0; i < count; i++) {
        if (got[i] == json_get(line, "greedy")->items[i].integer) { continue; }
        double lead = json_get(line, "margin")->items[i].number;
        check_msg(lead <= margin, "%s: new token %d is %d, and the right one leads by %g", name, i, got[i], lead);
        break;
    }
}

static void check_variant(const JsonValue* line, const GPT2Config* config, const char* name) {
    int C = config->channels, B = VARIANT_B, T = VARIANT_T, BT = B * T;
    if (C % 8 != 0 || C / config->num_heads % 8 != 0 || config->mlp_channels % 8 != 0) { return; } // for the CPU alone
    if (variants.seen++ % emulated_size(1, 8) != 0) { return; }
    GPT2 model;
    int inputs[VARIANT_B * VARIANT_T], targets[VARIANT_B * VARIANT_T];
    std::vector<float> weights(num_parameters(config)), values(weights.size());
    size_t V = config->vocab_size, Vp = config->padded_vocab_size;
    variant_fill(weights.data(), config);
    variant_tokens(inputs, targets, config->vocab_size);
    open_model(&model, config, weights.data(), B, T);
    set_tokens(&model, inputs, targets, BT);
    gpt2_forward(&model, &model.acts, B, T, EVALUATE, NULL, model.exec);
    matmul_forward(model.acts.logits, NULL, model.acts.lnf, model.params.lmhead, NULL, NULL, BT, C, (int)Vp,
                   model.exec);
    std::vector<float> logits = to_host(&model, model.acts.logits, BT * Vp);
    const JsonValue* want = json_get(line, "logits");
    // The program rounds the weights to 16 bits, and the fixture does not. Rounding seven matrices adds about sqrt(7) u to
    // the error of the logits. As in FORWARD, the limit is twice the error.
    double difference = variant_difference(want, logits.data(), BT, V, Vp);
    double limit = IS_FP32 ? 2e-5 : hypot(FORWARD, 2 * sqrt(7.0) * UNIT);
    check_msg(difference <= limit, "%s: logits are off by %g of their norm", name, difference);
    variants.logits = fmax(variants.logits, difference);
    check_variant_text(&model, line, inputs,
                       IS_FP32 ? 1e-4 : 4 * FORWARD * want->items[0].number / sqrt((double)BT * V), name);
    double loss = run_pass(&model, B, T), norm = gradient_norm(&model);
    check_near(loss, json_get(line, "loss")->number, (IS_FP32 ? 1e-5 : LOSS) * loss);
    std::vector<float> grads = gradients(&model);
    for_each_tensor(config, [&](size_t place, size_t offset, size_t n) {
        std::copy(grads.begin() + place, grads.begin() + place + n, values.begin() + offset);
    });
    // In 16 bits PyTorch's error in bf16 is allowed, too. It is larger in wide heads, in deep models, and at ReLU's bend, where rounding
    // changes the slope from 0 to 1. 8 sums tell a difference with a standard deviation of a quarter, and the largest of 1200 such
    // estimates is 1.8 times too large.
    double torch = 1.8 * json_get(line, "bf16")->number * sqrt(UNIT * 512);
    limit = IS_FP32 ? 1e-4 : fmax(BACKWARD, torch);
    check_near(norm, json_get(line, "grad_norm")->number, limit * norm);
    check_variant_tensors(json_get(line, "grads"), config, values, limit, &variants.gradient, name, "the gradient");
    AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    gpt2_update(&model, &o, false);
    gpt2_download(&model, values.data());
    for (int l = 0; l < config->num_layers; l++) { // see variants.h
        float* keys = &values[param_offset(config, 5) + (size_t)(3 * l + 1) * C];
        std::fill(keys, keys + C, 0.0f);
    }
    // A first step is the rate times the gradient's sign. Of 64 values, rounding to 16 bits turns the sign of one or two.
    check_variant_tensors(json_get(line, "after"), config, values, IS_FP32 ? 1e-4 : 12 * 0x1p-9, &variants.step, name,
                          "a step");
    gpt2_free(&model);
    variants.run++;
}

static void test_variants(void) {
    if (!have_gpu()) { return; }
    for_each_variant(check_variant);
    check(variants.run >= emulated_size(56, 7));
    printf("     %d configurations; largest differences: logits %.2g, gradients %.2g, a step %.2g\n", variants.run,
           variants.logits, variants.gradient, variants.step);
}

// Tolerances of 20 steps of a 124M model on real text, relative to PyTorch's losses and norms in fp32 on a GPU. In 16
// bits they are the largest errors of PyTorch's own autocast to bf16 on the same steps, measured on an H200: ours must
// not be larger.
static const double D12_LOSS = IS_FP32 ? 1e-3 : 1.82e-3, D12_NORM = IS_FP32 ? 1e-3 : 9.42e-2;

static void test_d12_tinyshakespeare(void) {
    if (!have_gpu()) { return; }
    const char* data = getenv("LLMC_DATA") ? getenv("LLMC_DATA") : "../shared/data";
    char path[512];
    Error err;
    snprintf(path, sizeof(path), "%s/tinyshakespeare.txt", data);
    if (!file_exists(path)) {
        test_skip("needs %s", path);
        return;
    }
    MappedFile text, json;
    Tokenizer tokenizer;
    TokenBuffer tokens = {0};
    JsonDoc doc;
    const JsonValue *losses, *norms;
    const char* reference = FIXTURES "d12_tinyshakespeare.json";
    if (!map_file(&json, reference, &err) || !json_parse(&doc, (const char*)json.data, json.size, reference, &err) ||
        !json_want(doc.root, "losses", JSON_ARRAY, &losses, reference, &err) ||
        !json_want(doc.root, "grad_norms", JSON_ARRAY, &norms, reference, &err) || !map_file(&text, path, &err)) {
        die("%s", err.text);
    }
    snprintf(path, sizeof(path), "%s/gpt2_tokenizer", data);
    if (!tokenizer_load(&tokenizer, path, &err)) { die("%s", err.text); }
    tokenizer_encode(&tokenizer, (const char*)text.data, text.size, &tokens);
    check(tokens.count == 338025 && losses->count == 20 && norms->count == 20);

    GPT2 model;
    GPT2Config config;
    check(config_from_descriptor(&config, "d12", &err));
    std::vector<float> weights(num_parameters(&config));
    std::vector<int> ids(20 * 4096 + 1);
    gpt2_init_params(weights.data(), &config, 42);
    for (size_t i = 0; i < ids.size(); i++) { ids[i] = (int)tokens.ids[i]; }
    open_model(&model, &config, weights.data(), 4, 1024);
    double worst_loss = 0.0, worst_norm = 0.0;
    for (int step = 0; step < 20; step++) {
        set_tokens(&model, &ids[step * 4096], &ids[step * 4096 + 1], 4096);
        double loss = run_pass(&model, 4, 1024) / losses->items[step].number - 1.0;
        double norm = gradient_norm(&model) / norms->items[step].number - 1.0;
        AdamW o = {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        gpt2_update(&model, &o, false);
        if (!(fabs(loss) <= worst_loss)) { worst_loss = fabs(loss); }
        if (!(fabs(norm) <= worst_norm)) { worst_norm = fabs(norm); }
    }
    printf("     largest relative difference in 20 steps: loss %.2e (allowed %.0e), norm %.2e (%.0e)\n", worst_loss,
           D12_LOSS, worst_norm, D12_NORM);
    check(worst_loss <= D12_LOSS);
    check(worst_norm <= D12_NORM);
    token_buffer_free(&tokens);
    tokenizer_free(&tokenizer);
    unmap_file(&text);
    json_free(&doc);
    unmap_file(&json);
    gpt2_free(&model);
}

// ---- against itself -------------------------------------------------------------------------------------

// The relative error of each tensor of gradients, squared.
static std::vector<double> squared_errors(const GPT2* model, const std::vector<float>& a, const std::vector<float>& b) {
    std::vector<double> squares;
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int l = 0; l < param_copies(&model->config, p); l++) {
            size_t at = param_place(&model->config, p, l);
            double error = relative_error(a.data() + at, b.data() + at, param_layer_size(&model->config, p));
            squares.push_back(error * error);
        }
    }
    return squares;
}

static void check_errors(const GPT2Config* config, const std::vector<double>& squares, double tolerance) {
    size_t i = 0;
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int l = 0; l < param_copies(config, p); l++) {
            double error = sqrt(squares[i++]);
            check_msg(error <= tolerance, "d%s of layer %d is off by %g of its norm", gpt2_params[p].name, l, error);
        }
    }
}

static void compare_all_gradients(const GPT2* model, const std::vector<float>& a, const std::vector<float>& b,
                                  double tolerance) {
    check_errors(&model->config, squared_errors(model, a, b), tolerance);
}

static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Pieces follow one another, each has the tensors of its place, and for_each_piece cuts one only where weight decay changes. decays (n):
// whether the value has weight decay.
static void check_pieces(const GPT2Config* config, const std::vector<int>& decays) {
    size_t end = 0;
    for (int i = 0; i < num_pieces(config); i++) {
        Span piece = parameter_piece(config, i);
        check_msg(piece.place == end, "piece %d begins at %zu, want %zu", i, piece.place, end);
        end += piece.n;
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (int l = 0; l < param_copies(config, p); l++) {
                size_t place = param_place(config, p, l);
                if (place < piece.place || place >= end) { continue; }
                check(place + param_layer_size(config, p) <= end);
                check_msg(gpt2_params[p].place == piece_kind(config, i), "%s is in piece %d", gpt2_params[p].name, i);
            }
        }
    }
    check(end == decays.size());
    int last = -1, last_decay = 0;
    end = 0;
    for (int b = 0; b < num_buckets(config); b++) {
        for_each_piece(config, b, 0, [&](int i, size_t place, size_t own_place, size_t n, bool decay) {
            check(place == end && own_place == end);
            check_msg(i == last + 1 || (i == last && decay != last_decay), "piece %d at %zu", i, place);
            for (size_t j = 0; j < n; j++) { check(decays[place + j] == decay); }
            last = i, last_decay = decay, end += n;
        });
    }
    check(end == decays.size() && last == num_pieces(config) - 1);
}

// The model's arrays hold every tensor of every layer exactly once, without gaps; each layer is contiguous; a download
// returns what was uploaded.
static void test_layout(void) {
    GPT2Config config = config_of(16, 100, 3, 2, 64);
    size_t n = num_parameters(&config), layer = 0;
    std::vector<int> places(n, 0), offsets(n, 0), decays(n, -1);
    for_each_tensor(&config, [&](size_t place, size_t offset, size_t size) {
        for (size_t i = 0; i < size; i++) { places[place + i]++, offsets[offset + i]++; }
    });
    check(std::count(places.begin(), places.end(), 1) == (ptrdiff_t)n);
    check(std::count(offsets.begin(), offsets.end(), 1) == (ptrdiff_t)n);
    for (int p = 0; p < NUM_PARAMS; p++) { layer += param_per_layer(p) ? param_layer_size(&config, p) : 0; }
    size_t first = param_place(&config, 4, 0); // qkvw, a layer's first matrix
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int l = 0; l < param_copies(&config, p); l++) {
            size_t at = param_place(&config, p, l);
            bool inside = at >= first + l * layer && at + param_layer_size(&config, p) <= first + (l + 1) * layer;
            check_msg(inside == param_per_layer(p), "%s of layer %d", gpt2_params[p].name, l);
            check(at % 8 == 0); // aligned to 16 bytes
            for (size_t i = 0; i < param_layer_size(&config, p); i++) { decays[at + i] = gpt2_params[p].decay; }
        }
    }
    check_pieces(&config, decays);
    if (!have_gpu()) { return; }
    GPT2 model;
    std::vector<float> weights(n), back(n);
    for (size_t i = 0; i < n; i++) { weights[i] = (float)(i % 251); } // exact in every precision
    for (bool master : {true, false}) {
        test_options.master_weights = master;
        open_model(&model, &config, weights.data(), 1, 16);
        gpt2_download(&model, back.data());
        check(same_bits(weights, back));
        upload_floats(&model, model.m_memory, weights.data());
        for_each_tensor(&config, [&](size_t place, size_t offset, size_t n) {
            download_values(&model, back.data() + offset, model.m_memory, place, n);
        });
        cudaCheck(cudaStreamSynchronize(model.exec.stream));
        check(same_bits(weights, back));
        float value = get_scalar(&model, model.m_memory + param_place(&config, 10, 2) + 5); // fcw of layer 2
        check(value == weights[param_offset(&config, 10) + 2 * param_layer_size(&config, 10) + 5]);
        gpt2_free(&model);
    }
    test_options.master_weights = true;
}

static void test_gradient_accumulation(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    double loss[2];
    std::vector<float> grads[2];
    for (int i = 0; i < 2; i++) {
        open_fixture(&model, i == 0 ? 4 : 1);
        test_batch.total = 256;
        for (int b = 0; b < (i == 0 ? 1 : 4); b++) {
            set_tokens(&model, inputs + b * 64, targets + b * 64, i == 0 ? 256 : 64);
            loss[i] = run_pass(&model, test_batch.B, 64, b == 0);
        }
        grads[i] = gradients(&model);
        if (i == 1) { compare_all_gradients(&model, grads[1], grads[0], IS_FP32 ? 1e-5 : 4 * UNIT); }
        gpt2_free(&model);
    }
    check_near(loss[0], loss[1], IS_FP32 ? 1e-6 : UNIT);
    free(inputs), free(targets);
}

static void test_recompute(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    GPT2Config config = config_of(200, 300, 3, 2, 128);
    config.mlp_channels = 3 * config.channels;
    std::vector<float> grads[3];
    std::vector<int> tokens;
    test_options.saves_slope = false; // saved_slope compares that
    for (int recompute = 0; recompute <= 2; recompute++) {
        test_options.recompute = recompute;
        open_random(&model, &config, 2, 200, &tokens);
        set_tokens(&model, tokens.data(), tokens.data() + 1, 400);
        run_pass(&model, 2, 200);
        grads[recompute] = gradients(&model);
        double tolerance = IS_FP32 ? 1e-6 : 2 * UNIT; // the library's GELU and the recomputed one round differently
        if (recompute > 0) { compare_all_gradients(&model, grads[recompute], grads[0], tolerance); }
        gpt2_free(&model);
    }
    test_options.recompute = 0, test_options.saves_slope = true;
}

// The backward pass gets the same gradients from GELU's saved slope as from its saved argument. Either is rounded to 16 bits,
// so the two may differ by as much as each may differ from the golden gradients, divided by two. Batches that are too small for
// the kernel that saves the slope, as validation may have them, give the same hidden states.
static void test_saved_slope(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    GPT2Config config = config_of(1024, 300, 2, 12, 768);
    std::vector<float> grads[2];
    std::vector<int> tokens;
    std::vector<float> small[2];
    double loss[2];
    for (int saves_slope = 0; saves_slope <= 1; saves_slope++) {
        test_options.saves_slope = saves_slope;
        open_random(&model, &config, 4, 1024, &tokens);
        set_tokens(&model, tokens.data(), tokens.data() + 1, 4096);
        bool saved = model.acts.fch.is_slope;
        loss[saves_slope] = run_pass(&model, 4, 1024);
        grads[saves_slope] = gradients(&model);
        if (saved) { compare_all_gradients(&model, grads[1], grads[0], BACKWARD / 2); }
        gpt2_forward(&model, &model.acts, 2, 32, EVALUATE, NULL, model.exec);
        small[saves_slope] = to_host(&model, model.acts.lnf, 64 * 768);
        gpt2_free(&model);
        test_options.saves_slope = true;
        if (saves_slope && !saved) { test_skip("needs code for sm_90a, and 16 bits"); }
    }
    check(small[0] == small[1]);
    check(loss[0] == loss[1]); // gelu_and_slope() computes what gelu() computes
}

// The gradient of a bias is the sum of a tensor's columns. Those of the first layer's fc and qkv, which the backward pass reaches
// last, are still in memory. Its sums wait for the end of the layer, so nothing may write over their terms before; the second shape
// has products that need scratch of their own on a Hopper.
static void test_bias_sums(void) {
    if (!have_gpu()) { return; }
    for (int large = 0; large <= (num_multiprocessors() >= 64); large++) { // the emulation's card has four
        int B = large ? 16 : 2, T = large ? 1024 : 160, C = large ? 768 : 128, NH = C / 64, N = B * T;
        GPT2 model;
        GPT2Config config = config_of(1024, 300, 2, NH, C);
        std::vector<int> tokens;
        open_random(&model, &config, B, T, &tokens);
        set_tokens(&model, tokens.data(), tokens.data() + 1, N);
        run_pass(&model, B, T);
        Parameters<float> grads = layer_parameters(model.grads, &config, 0);
        auto check_sums = [&](const char* name, const float* bias, const floatX* tensor, int columns) {
            std::vector<float> got = to_host(&model, bias, columns),
                               terms = to_host(&model, tensor, (size_t)N * columns);
            double error = 0, norm = 0;
            for (int i = 0; i < columns; i++) {
                double sum = 0;
                for (int row = 0; row < N; row++) { sum += terms[(size_t)row * columns + i]; }
                error += (got[i] - sum) * (got[i] - sum), norm += sum * sum;
            }
            error = sqrt(error / norm);
            check_msg(error <= BACKWARD, "%d tokens, the gradient of %s is off by %g of its norm, want at most %g", N,
                      name, error, BACKWARD);
        };
        check_sums("fcb", grads.fcb, model.acts.dfch, config.mlp_channels);
        check_sums("qkvb", grads.qkvb, model.acts.dqkv, 3 * C);
        gpt2_free(&model);
    }
}

// Each stage of --fp8 gives bf16's loss and gradients, up to the rounding of e4m3 (3 bits of mantissa, a relative error of 1/16 at
// most) and of e5m2 (2 bits, 1/8). The error of one small model is luck (with 2 bits 0.12 to 0.20 of the norm of a gradient over
// 16 of them), so that of a tensor is the root of the mean square over several. What the backward pass computes again is what the
// forward pass had.
static void test_fp8(void) {
    if (!have_gpu()) { return; }
    if (!has_fp8()) { return test_skip("needs bf16 and code for sm_90a"); }
    enum { MODELS = 8 };
    GPT2 model;
    GPT2Config config = config_of(128, 300, 2, 2, 64);
    config.mlp_channels = 3 * config.channels;
    std::vector<float> want[MODELS], same[MODELS];
    std::vector<int> tokens;
    double want_loss[MODELS];
    for (int stage = FP8_OFF; stage <= FP8_DW; stage++) {
        for (int recompute = 0; recompute <= 2; recompute++) {
            test_options.fp8 = stage, test_options.recompute = recompute;
            std::vector<double> mean;
            for (int i = 0; i < MODELS; i++) {
                open_random(&model, &config, 2, 56, &tokens, i);
                set_tokens(&model, tokens.data(), tokens.data() + 1, 112);
                double loss = run_pass(&model, 2, 56);
                // with fp8, until scales are known
                for (int k = 0; stage > FP8_OFF && k < 3; k++) { loss = run_pass(&model, 2, 56); }
                std::vector<float> grads = gradients(&model);
                if (stage == FP8_OFF && recompute == 0) { want[i] = grads, want_loss[i] = loss; }
                check_msg(fabs(loss - want_loss[i]) <= 5e-3 * want_loss[i], "stage %d: loss %g, want %g", stage, loss,
                          want_loss[i]);
                std::vector<double> squares = squared_errors(&model, grads, want[i]);
                mean.resize(squares.size());
                for (size_t k = 0; k < squares.size(); k++) { mean[k] += squares[k] / MODELS; }
                check(get_scalar(&model, &model.state->saturated) == 0.0f);
                if (recompute == 1) { same[i] = grads; }
                if (recompute == 2) { check(same_bits(grads, same[i])); }
                // tenfold values: the first pass saturates and says so, the next one has new scales
                std::vector<float> larger(num_parameters(&config));
                gpt2_download(&model, larger.data());
                for (float& x : larger) { x *= 10.0f; }
                gpt2_upload(&model, larger.data(), 0);
                run_pass(&model, 2, 56);
                bool saturates = get_scalar(&model, &model.state->saturated) > 0.0f;
                check_msg(saturates == (stage > FP8_OFF), "stage %d", stage);
                run_pass(&model, 2, 56), run_pass(&model, 2, 56);
                check(get_scalar(&model, &model.state->saturated) == 0.0f);
                gpt2_free(&model);
            }
            check_errors(&config, mean, stage < FP8_DX ? 0.09 : 0.18);
        }
    }
    test_options.fp8 = FP8_OFF, test_options.recompute = 0;
}

// With --fp8, NaN and overflow anywhere reach the loss or the norm, and stop the update. The scales recover: four passes
// later the gradients have the same bits as before.
static void test_fp8_recovers(void) {
    if (!have_gpu()) { return; }
    if (!has_fp8()) { return test_skip("needs bf16 and code for sm_90a"); }
    GPT2 model;
    GPT2Config config = config_of(128, 300, 2, 2, 64);
    std::vector<int> tokens;
    test_options.fp8 = FP8_DW;
    open_random(&model, &config, 2, 56, &tokens);
    set_tokens(&model, tokens.data(), tokens.data() + 1, 112);
    for (int i = 0; i < 4; i++) { run_pass(&model, 2, 56); }
    std::vector<float> want = gradients(&model), weights(num_parameters(&config)), broken;
    gpt2_download(&model, weights.data());
    AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    for (float value : {NAN, 1e30f}) {
        for (int p : {0, 2, 4, 10, 12}) { // wte, ln1w, qkvw, fcw, fcprojw
            broken = weights;
            broken[param_offset(&config, p) + 3] = value;
            gpt2_upload(&model, broken.data(), 0);
            run_pass(&model, 2, 56);
            gpt2_update(&model, &o, false);
            int applied = to_host(&model, &model.state->applied, 1)[0] != 0.0f;
            check_msg(!applied || value == 1e30f, "%s", gpt2_params[p].name);
            gpt2_upload(&model, weights.data(), 0);
            for (int i = 0; i < 4; i++) { run_pass(&model, 2, 56); } // an outlier is forgotten in four
            check_msg(same_bits(gradients(&model), want), "%s", gpt2_params[p].name);
        }
    }
    gpt2_free(&model);
    test_options.fp8 = FP8_OFF;
}

// The deferred update gives the same bits as an update after the step. The products are large enough for gemm, whose idle warps update.
static void test_deferred_update(void) {
    if (!have_gpu()) { return; }
#ifdef CUDA_EMULATION // of 4 multiprocessors
    GPT2Config config = config_of(emulated_size(48, 16), 300, 4, 2, 128);
#else
    GPT2Config config = config_of(1024, 5000, 4, 4, 256);
#endif
    enum { AT_ONCE, DEFERRED, WITHOUT_FORWARD, SKIPPED, NUM_WAYS };
    std::vector<float> weights[NUM_WAYS], m[NUM_WAYS], v[NUM_WAYS];
    std::vector<int> tokens;
    int T = config.max_seq_len;
    test_options.defers_updates = true;
    for (int way = 0; way < NUM_WAYS; way++) {
        GPT2 model;
        open_random(&model, &config, 8, T, &tokens);
        set_tokens(&model, tokens.data(), tokens.data() + 1, 8 * T);
        if (!deferred_update_on(&model)) {
            gpt2_free(&model);
            test_options.defers_updates = false;
            return test_skip("needs 16 bits, code for sm_90a, and weight decay of the matrices alone");
        }
        weights[way].resize(num_parameters(&config));
        for (int step = 0; step < 3; step++) {
            run_pass(&model, 8, T);
            AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
            bool skip = way == SKIPPED && step == 1;
            gpt2_update(&model, &o, skip, NULL, way != AT_ONCE);
            check(model.update_is_deferred == (way != AT_ONCE));
            if (way == WITHOUT_FORWARD) { gpt2_download(&model, weights[way].data()); }
            if (skip) { // a later step has the bits of one without the skipped step
                run_pass(&model, 8, T);
                gpt2_update(&model, &o, false, NULL, true);
            }
        }
        gpt2_download(&model, weights[way].data());
        check(!model.update_is_deferred);
        m[way] = to_host(&model, model.m_memory, num_parameters(&config));
        v[way] = to_host(&model, model.v_memory, num_parameters(&config));
        gpt2_free(&model);
        check_msg(same_bits(weights[way], weights[0]) && same_bits(m[way], m[0]) && same_bits(v[way], v[0]), "way %d",
                  way);
    }
    test_options.defers_updates = false;
}

static void test_same_bits_again(void) {
    if (!have_gpu()) { return; }
    GPT2Config config = config_of(1024, 5000, 2, 3, 192);
    std::vector<float> grads[2], weights[2];
    std::vector<int> tokens;
    float loss[2];
    for (int i = 0; i < 2; i++) {
        GPT2 model;
        open_random(&model, &config, 3, 1000, &tokens);
        set_tokens(&model, tokens.data(), tokens.data() + 1, 3000);
        for (int step = 0; step < 3; step++) {
            loss[i] = (float)run_pass(&model, 3, 1000);
            AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
            gpt2_update(&model, &o, false);
        }
        grads[i] = gradients(&model);
        weights[i].resize(num_parameters(&config));
        gpt2_download(&model, weights[i].data());
        gpt2_free(&model);
    }
    check(loss[0] == loss[1]);
    check(isfinite(loss[0]));
    check(same_bits(grads[0], grads[1]));
    check(same_bits(weights[0], weights[1]));
}

// Two models are trained alternately in one process, each with its own stream and its own CublasLt. The host never waits for them.
// Each gets the bits that it gets alone. One defers updates where it can; the other recomputes, and trains in fp8 where that exists.
static void test_two_models(void) {
    if (!have_gpu()) { return; }
    GPT2Config configs[2] = {config_of(64, 300, 3, 2, 128), config_of(64, 200, 2, 2, 64)};
    GPT2Options options[2] = {test_options, test_options};
    options[0].defers_updates = true;
    options[1].recompute = 2, options[1].fp8 = has_fp8() ? FP8_DW : FP8_OFF;
    std::vector<float> weights[2][2]; // [together][model]
    GPT2 models[2];
    CublasLt libraries[2];
    std::vector<int> tokens;
    auto open = [&](int i) {
        GPT2Options before = std::exchange(test_options, options[i]);
        CublasLt* library = std::exchange(test_exec.library, &libraries[i]);
        cublaslt_open(libraries[i]);
        open_random(&models[i], &configs[i], 2, 64, &tokens, i);
        test_options = before, test_exec.library = library;
        set_tokens(&models[i], tokens.data(), tokens.data() + 1, 128);
        StepState state = {};
        state.loss_scale = (float)LOSS_SCALE, state.dloss = (float)(LOSS_SCALE / 128);
        cudaCheck(cudaMemcpy(models[i].state, &state, sizeof(state), cudaMemcpyHostToDevice));
    };
    auto pass = [&](int i) {
        Batch batch = {2, 64, 128, 1};
        launch_micro_step(&models[i], &batch, true, true);
    };
    auto update = [&](int i) {
        AdamW o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        gpt2_gradient_norm(&models[i]);
        gpt2_update(&models[i], &o, false, NULL, deferred_update_on(&models[i]));
    };
    auto close = [&](int i, std::vector<float>* w) {
        w->resize(num_parameters(&configs[i]));
        gpt2_download(&models[i], w->data());
        gpt2_free(&models[i]);
        cublaslt_close(libraries[i]);
    };
    for (int i = 0; i < 2; i++) {
        open(i);
        for (int step = 0; step < 3; step++) { pass(i), update(i); }
        close(i, &weights[0][i]);
    }
    open(0), open(1);
    for (int step = 0; step < 3; step++) { pass(0), pass(1), update(0), update(1); }
    close(1, &weights[1][1]), close(0, &weights[1][0]);
    for (int i = 0; i < 2; i++) {
        check(std::all_of(weights[0][i].begin(), weights[0][i].end(), [](float w) { return isfinite(w); }));
        check_msg(same_bits(weights[0][i], weights[1][i]), "model %d", i);
    }
}

// Edge cases of the shape: one token, odd lengths, other head sizes, wide models. The loss of a token does not depend
// on later tokens, so a pass over the first half must give the same losses as the full pass.
static void test_shapes(void) {
    if (!have_gpu()) { return; }
    static const int shapes[][5] = {
        // B, T, L, NH, C
        {1, 1, 2, 6, 384},  {1, 17, 1, 12, 768}, {3, 127, 1, 4, 128}, {2, 129, 1, 16, 1024}, {1, 200, 1, 25, 1600},
        {2, 64, 1, 4, 384}, {1, 100, 1, 3, 384}, {1, 33, 1, 3, 120},  {64, 8, 1, 12, 768},   {1, 8192, 1, 2, 128}};
    for (const int* s : shapes) {
        GPT2 model;
        GPT2Config config = config_of(s[1], 300, s[2], s[3], s[4]);
        std::vector<int> tokens;
        open_random(&model, &config, s[0], s[1], &tokens);
        size_t n = (size_t)s[0] * s[1];
        set_tokens(&model, tokens.data(), tokens.data() + 1, n);
        double loss = run_pass(&model, s[0], s[1]);
        std::vector<float> grads = gradients(&model), losses = to_host(&model, model.acts.losses, n);
        bool finite = isfinite(loss) && isfinite(gradient_norm(&model));
        for (float g : grads) { finite &= (bool)isfinite(g); }
        check_msg(finite, "B %d T %d NH %d C %d: not finite", s[0], s[1], s[3], s[4]);
        int half = s[1] / 2 + 1;
        gpt2_forward(&model, &model.acts, 1, half, EVALUATE, NULL, model.exec);
        gpt2_loss(&model, &model.acts, 1, half, EVALUATE, 0.0f, model.exec);
        std::vector<float> first = to_host(&model, model.acts.losses, half);
        losses.resize(half);
        double error = relative_error(first.data(), losses.data(), half);
        check_msg(error <= (IS_FP32 ? 1e-5 : 8 * UNIT), "B %d T %d NH %d C %d: a shorter pass differs by %g", s[0],
                  s[1], s[3], s[4], error);
        gpt2_free(&model);
    }
}

// The same for the embedding of a token that does not occur, with GPT-2's vocabulary: in bf16 on Hopper its head is another kernel.
static void check_nan_in_head(void) {
    GPT2 model;
    GPT2Config config = config_of(64, 50257, 1, 1, 64);
    std::vector<int> tokens;
    open_random(&model, &config, 4, 64, &tokens);
    set_tokens(&model, tokens.data(), tokens.data() + 1, 256);
    check(isfinite(run_pass(&model, 4, 64)) && isfinite(gradient_norm(&model)));
    int absent = 0;
    while (std::find(tokens.begin(), tokens.end(), absent) != tokens.end()) { absent++; }
    floatX nan = (floatX)NAN;
    cudaCheck(cudaMemcpy(model.params.wte + (size_t)absent * 64, &nan, sizeof(nan), cudaMemcpyHostToDevice));
    check(isnan(run_pass(&model, 4, 64)) && isnan(gradient_norm(&model)));
    gpt2_free(&model);
}

// a NaN in any weight tensor makes loss and norm not finite, and the update then changes no weight
static void test_nan_is_seen(void) {
    if (!have_gpu()) { return; }
    check_nan_in_head();
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    open_fixture(&model, 4);
    set_tokens(&model, inputs, targets, 256);
    size_t n = num_parameters(&model.config);
    floatX nan = (floatX)NAN;
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(&model.config, p) == 0) { continue; }
        floatX saved, *weight = model.params_memory + param_place(&model.config, p, 0);
        if (p == 0) { weight += (size_t)inputs[3] * model.config.channels; }
        cudaCheck(cudaMemcpy(&saved, weight, sizeof(saved), cudaMemcpyDeviceToHost));
        cudaCheck(cudaMemcpy(weight, &nan, sizeof(nan), cudaMemcpyHostToDevice));
        std::vector<float> before = to_host(&model, model.params_memory, n), m = to_host(&model, model.m_memory, n);
        double loss = run_pass(&model, 4, 64);
        check_msg(!isfinite(loss), "%s: loss is %g", gpt2_params[p].name, loss);
        check_msg(!isfinite(gradient_norm(&model)), "%s: the norm is finite", gpt2_params[p].name);
        AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        gpt2_update(&model, &o, false);
        check(same_bits(before, to_host(&model, model.params_memory, n)));
        check(same_bits(m, to_host(&model, model.m_memory, n)));
        cudaCheck(cudaMemcpy(weight, &saved, sizeof(saved), cudaMemcpyHostToDevice));
    }
    check(isfinite(run_pass(&model, 4, 64)));
    free(inputs), free(targets);
    gpt2_free(&model);
}

// Applies a step of Muon, in double, to the matrices in weights and momentum (num_params, in a checkpoint's order).
// grads (num_params) are in the model's order.
static void muon_cpu(const GPT2Config* config, float* weights, float* momentum, const float* grads, double grad_scale,
                     const Muon& o) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        int num = param_muon_matrices(p);
        size_t n = param_layer_size(config, p), rows = param_rows(config, p) / std::max(num, 1),
               cols = param_cols(config, p);
        for (int l = 0; num > 0 && l < config->num_layers; l++) {
            std::vector<float> x(n), direction(n);
            float *w = weights + param_offset(config, p) + l * n, *m = momentum + param_offset(config, p) + l * n;
            muon_prepare_cpu(x.data(), m, m, grads + param_place(config, p, l), num, rows, cols, grad_scale,
                             o.momentum);
            newton_schulz_cpu(direction.data(), x.data(), num, (int)std::min(rows, cols), (int)std::max(rows, cols));
            muon_apply_cpu(w, w, direction.data(), num, rows, cols, o.learning_rate, o.weight_decay);
        }
    }
}

// Updates the tensors of all layers that Muon leaves to AdamW; arrays as in muon_cpu. step: from 1.
static void adamw_of_muon_cpu(const GPT2Config* config, float* weights, std::vector<double>& m, std::vector<double>& v,
                              const float* grads, double grad_scale, const AdamW& o, int step) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_muon_matrices(p) > 0) { continue; }
        size_t n = param_layer_size(config, p);
        for (int l = 0; l < param_copies(config, p); l++) {
            for (size_t i = 0; i < n; i++) {
                size_t at = param_offset(config, p) + l * n + i;
                double g = grads[param_place(config, p, l) + i] * grad_scale,
                       decay = gpt2_params[p].decay ? o.weight_decay : 0;
                m[at] = o.beta1 * m[at] + (1 - o.beta1) * g, v[at] = o.beta2 * v[at] + (1 - o.beta2) * g * g;
                double mean = m[at] / (1 - pow(o.beta1, step)), square = v[at] / (1 - pow(o.beta2, step));
                weights[at] -= (float)(o.learning_rate * (mean / (sqrt(square) + o.eps) + decay * weights[at]));
            }
        }
    }
}

// AdamW's second moment of a run with Muon, as a checkpoint has it: 0 for the matrices. It comes back from there.
static void second_moment_has_no_matrices(GPT2* model) {
    const GPT2Config* config = &model->config;
    size_t n = num_parameters(config), own = share_size(config, false);
    std::vector<float> v(n), before = to_host(model, model->v_memory, own);
    check(own == n - config->num_layers * parameter_piece(config, 1).n);
    const float* whole = collect_shares(model, model->v_memory);
    for_each_tensor(config, [&](size_t place, size_t offset, size_t n) {
        download_values(model, v.data() + offset, whole, place, n);
    });
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t zeros = 0, size = param_size(config, p);
        for (size_t i = 0; i < size; i++) { zeros += v[param_offset(config, p) + i] == 0.0f; }
        check_msg(param_muon_matrices(p) > 0 ? zeros == size : zeros <= size / 2, "%s: %zu zeros", gpt2_params[p].name,
                  zeros);
    }
    cudaCheck(cudaMemset(model->v_memory, 0xFF, own * sizeof(float)));
    upload_shares(model, model->v_memory, v.data());
    check(same_bits(before, to_host(model, model->v_memory, own)));
}

// Two steps of Muon and of its AdamW against their arithmetic in double, from random gradients, whose singular
// values are of one order: in the directions of small ones, rounding to 16 bits is all that newton_schulz sees. With the
// matrices of both layers together and with one layer after the other, the bits are the same.
static void test_muon() {
    if (!have_gpu()) { return; }
    GPT2Config config = config_of(64, 300, 2, 3, 192);
    config.mlp_channels = 96; // less than the channels: the other of the two matrices is the wide one
    const Muon muon = {0.01f, 0.95f, 0.1f};
    size_t n = num_parameters(&config);
    std::vector<float> weights[2], before(n), want(n), momentum(n), grads(n);
    std::vector<double> m(n), v(n);
    std::vector<int> tokens;
    Mt19937 mt;
    test_options.muon = true;
    for (int run = 0; run < 2; run++) {
        GPT2 model;
        open_random(&model, &config, 64, 64, &tokens);
        check(model.muon_layers == 2);
        model.muon_layers = 2 - run;
        weights[run].resize(n);
        std::fill(momentum.begin(), momentum.end(), 0.0f);
        std::fill(m.begin(), m.end(), 0.0), std::fill(v.begin(), v.end(), 0.0);
        mt19937_seed(&mt, 17);
        for (int step = 0; step < 2; step++) {
            normal_fill(grads.data(), n, 0.0f, 1.0f, &mt);
            cudaCheck(cudaMemcpy(model.grads_memory, grads.data(), n * sizeof(float), cudaMemcpyHostToDevice));
            set_scalar(&model, &model.state->loss, 1.0f);
            set_scalar(&model, &model.state->loss_scale, 1.0f);
            gpt2_gradient_norm(&model);
            double norm = get_scalar(&model, &model.state->scaled_norm);
            AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, (float)(0.5 * norm)}; // clips to a half
            gpt2_download(&model, before.data());
            want = before;
            muon_cpu(&config, want.data(), momentum.data(), grads.data(), 0.5, muon);
            adamw_of_muon_cpu(&config, want.data(), m, v, grads.data(), 0.5, o, step + 1);
            gpt2_update(&model, &o, false, &muon);
            gpt2_download(&model, weights[run].data());
            for (int p = 0; p < NUM_PARAMS; p++) {
                size_t at = param_offset(&config, p), size = param_size(&config, p);
                std::vector<float> change(size), wanted(size);
                for (size_t i = 0; i < size; i++) {
                    change[i] = weights[run][at + i] - before[at + i], wanted[i] = want[at + i] - before[at + i];
                }
                double error = relative_error(change.data(), wanted.data(), size);
                bool is_exact = IS_FP32 || param_muon_matrices(p) == 0; // Newton-Schulz is in 16 bits
                check_msg(error <= (is_exact ? 1e-4 : 12 * UNIT), "step %d: the change of %s is off by %g of its norm",
                          step + 1, gpt2_params[p].name, error);
            }
        }
        second_moment_has_no_matrices(&model);
        gpt2_free(&model);
    }
    test_options.muon = false;
    check(same_bits(weights[0], weights[1]));
}

// The weights (num_params) of a random model before and after a step with random gradients and this weight decay.
static void step_with_decay(float weight_decay, std::vector<float>* before, std::vector<float>* after) {
    const float rate = 0.01f;
    GPT2 model;
    GPT2Config config = config_of(16, 100, 2, 2, 64);
    size_t n = num_parameters(&config);
    std::vector<int> tokens;
    std::vector<float> grads(n);
    Mt19937 mt;
    open_random(&model, &config, 64, 16, &tokens);
    before->resize(n), after->resize(n);
    gpt2_download(&model, before->data());
    mt19937_seed(&mt, 17);
    normal_fill(grads.data(), n, 0.0f, 1.0f, &mt);
    cudaCheck(cudaMemcpy(model.grads_memory, grads.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    set_scalar(&model, &model.state->loss, 1.0f);
    set_scalar(&model, &model.state->loss_scale, 1.0f);
    gpt2_gradient_norm(&model);
    AdamW o = {rate, 0.9f, 0.95f, 1e-8f, weight_decay, 1.0f};
    Muon muon = {rate, 0.95f, weight_decay};
    gpt2_update(&model, &o, false, test_options.muon ? &muon : NULL);
    gpt2_download(&model, after->data());
    gpt2_free(&model);
}

// Weight decay subtracts learning_rate * weight_decay * weight from the tensors that have it in gpt2_params, and changes no bit of others.
static void test_weight_decay(void) {
    if (!have_gpu()) { return; }
    GPT2Config config = config_of(16, 100, 2, 2, 64);
    for (bool muon : {false, true}) {
        std::vector<float> before, without, with;
        test_options.muon = muon;
        step_with_decay(0.0f, &before, &without);
        step_with_decay(0.5f, &before, &with);
        for (int p = 0; p < NUM_PARAMS; p++) {
            for (size_t i = param_offset(&config, p); i < param_offset(&config, p + 1); i++) {
                double want = gpt2_params[p].decay ? -0.01 * 0.5 * before[i] : 0.0;
                double error = (double)with[i] - without[i] - want; // each of the two is rounded to fp32
                bool good = want == 0.0 ? error == 0.0 : fabs(error) <= 5e-7 * (fabs(before[i]) + fabs(without[i]));
                check_msg(good, "%s: decay changes %g by %g, want %g", gpt2_params[p].name, before[i], error + want,
                          want);
            }
        }
    }
    test_options.muon = false;
}

static StepState verdict_on(GPT2* model, StepState state, bool skip) {
    AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
    cudaCheck(cudaMemcpy(model->state, &state, sizeof(state), cudaMemcpyHostToDevice));
    adamw_prepare(model->state, o, skip, false, model->exec);
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(&state, model->state, sizeof(state), cudaMemcpyDeviceToHost));
    return state;
}

// adamw_prepare: verdict on a step, clipping, fp16 loss scale: halved by an overflow, doubled after 2000 finite steps
static void test_verdict(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    StepState good = {};
    good.loss = 2.0f, good.scaled_norm = 4096.0f, good.loss_scale = 1024.0f, good.dloss = 4.0f, good.num_updates = 7;
    StepState s = verdict_on(&model, good, false);
    check(s.applied == 1 && s.num_updates == 8 && s.norm == 4.0f && s.loss_scale == 1024.0f && s.dloss == 4.0f);
    check_near(s.grad_scale, 0.25 / 1024, 1e-10); // clipped from 4 to 1
    check(s.good_steps == (IS_FP16 ? 1 : 0));
    s = verdict_on(&model, good, true);
    check(s.applied == 0 && s.num_updates == 7);
    for (float bad : {(float)NAN, (float)INFINITY, -(float)INFINITY}) {
        StepState spoiled = good;
        spoiled.good_steps = 5, spoiled.loss = bad; // the loss itself is not finite: the scale stays
        s = verdict_on(&model, spoiled, false);
        check(s.applied == 0 && s.num_updates == 7 && s.loss_scale == 1024.0f && s.good_steps == 5);
        spoiled.loss = good.loss, spoiled.scaled_norm = bad;
        s = verdict_on(&model, spoiled, false);
        check(s.applied == 0 && s.num_updates == 7 && s.loss_scale == (IS_FP16 ? 512.0f : 1024.0f));
        check(s.dloss == (IS_FP16 ? 2.0f : 4.0f) && s.good_steps == (IS_FP16 ? 0 : 5));
        spoiled.loss_scale = 1.0f;
        check(verdict_on(&model, spoiled, false).loss_scale == 1.0f);
    }
    good.good_steps = 1998;
    check(verdict_on(&model, good, false).loss_scale == 1024.0f);
    good.good_steps = 1999;
    s = verdict_on(&model, good, false);
    check(s.loss_scale == (IS_FP16 ? 2048.0f : 1024.0f) && s.dloss == (IS_FP16 ? 8.0f : 4.0f));
    check(s.applied == 1 && s.norm == 4.0f); // the new scale is for the next step
    good.loss_scale = 65536.0f;
    check(verdict_on(&model, good, false).loss_scale == 65536.0f);
    gpt2_free(&model);
}

// stochastic rounding gives the same params in an update and when they are recomputed from the fp32 master weights
static void stochastic_rounding_is_repeatable(const Muon* muon) {
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    test_options.stochastic_rounding = true;
    test_options.muon = muon != NULL;
    open_fixture(&model, 4);
    set_tokens(&model, inputs, targets, 256);
    size_t n = num_parameters(&model.config);
    for (int i = 0; i < 2; i++) {
        run_pass(&model, 4, 64);
        AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f};
        gpt2_update(&model, &o, false, muon);
    }
    std::vector<float> params = to_host(&model, model.params_memory, n), master(n);
    gpt2_download(&model, master.data());
    gpt2_upload(&model, master.data(), 2);
    check(same_bits(params, to_host(&model, model.params_memory, n)));
    if (!IS_FP32) {
        gpt2_upload(&model, master.data(), 1);
#if defined(ENABLE_BF16)
        check(!same_bits(params, to_host(&model, model.params_memory, n)));
#endif
    }
    test_options.stochastic_rounding = test_options.muon = false;
    free(inputs), free(targets);
    gpt2_free(&model);
}
static void test_stochastic_rounding_is_repeatable(void) {
    const Muon muon = {0.01f, 0.95f, 0.1f};
    if (!have_gpu()) { return; }
    stochastic_rounding_is_repeatable(NULL);
    stochastic_rounding_is_repeatable(&muon);
}

// ---- generation -----------------------------------------------------------------------------------------

static void test_greedy(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    int *prompt = golden_ints("generate.prompt"), *want = golden_ints("generate.greedy");
    int n = (int)elements(golden_tensor("generate.prompt")), total = (int)elements(golden_tensor("generate.greedy"));
    int got[64], count;
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    check(generate(&model, &greedy, prompt, &n, 1, n, total, -1, got, &count, NULL));
    check(count == total);
    int same = 0;
    while (same < total && got[same] == want[same]) { same++; }
    printf("     %d of %d tokens as PyTorch's in float64\n", same, total);
    // in 16 bits two tokens of almost equal probability may swap
    check_msg(same == total || (!IS_FP32 && same >= 4), "token %d is %d, want %d", same, got[same], want[same]);
    free(prompt), free(want);
    gpt2_free(&model);
}

// The logits at each position of a text must be the same with the key-value cache (prefill of some tokens, then one
// token at a time) and in one pass without the cache.
struct CacheCheck {
    int B, prefill; // texts, which decides the kernels that run; tokens in the longest prompt
};
// tokens (4, 64): text b has those of row b % 4.
static void check_cache(GPT2* model, const int* tokens, const std::vector<CacheCheck>& checks) {
    int C = model->config.channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    int F = model->config.mlp_channels, NH = model->config.num_heads;
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    set_tokens(model, tokens, tokens, 256);
    gpt2_forward(model, &model->acts, 4, 64, EVALUATE, NULL, model->exec);
    matmul_forward(model->acts.logits, NULL, model->acts.lnf, model->params.wte, NULL, NULL, 256, C, Vp, model->exec);
    std::vector<float> want = to_host(model, model->acts.logits, (size_t)256 * Vp);
    for (const CacheCheck& c : checks) {
        Generator g;
        int B = c.B, prefill = c.prefill;
        std::vector<int> prompts((size_t)B * prefill, 0), at(B), next(B),
            lengths(B); // at: position of the newest token
        for (int b = 0; b < B; b++) {
            lengths[b] = prefill - b * 5 % prefill, at[b] = lengths[b] - 1;
            memcpy(&prompts[(size_t)b * prefill], tokens + b % 4 * 64, lengths[b] * sizeof(int));
        }
        TextQueue q = text_queue_of(prompts.data(), lengths.data(), B, prefill, 64, -1, 64, NULL, NULL, next.data());
        text_queue_open(&q, B);
        generator_allocate(&g, model, B, text_queue_pass_tokens(&q, B), text_queue_capacity(&q));
        // or nothing tests the one launch
        check((g.packed != NULL) == decode_layers_runs(B, C, F, NH, g.cache.capacity));
        // generator_matmul has a product of C columns in the memory of the logits, which attention's follows
        check((char*)g.attention_scratch - (char*)g.logits >= (ptrdiff_t)(sizeof(float) * B * C));
        generator_fill(&g, model, &greedy, &q);
        text_queue_close(&q);
        for (int t = prefill - 1;; t++) {
            std::vector<float> got = to_host(model, g.logits, (size_t)B * Vp);
            for (int b = 0; b < B; b++) {
                double error = relative_error(&got[(size_t)b * Vp], &want[((size_t)b % 4 * 64 + at[b]) * Vp], V);
                check_msg(error <= (IS_FP32 ? 1e-5 : 2 * FORWARD),
                          "%d texts, prefill %d, text %d, position %d: off by %g", B, prefill, b, at[b], error);
            }
            if (t == 63) { break; }
            // continue with the given text, not with the tokens that the model chose
            for (int b = 0; b < B; b++) { next[b] = tokens[b % 4 * 64 + ++at[b]]; }
            cudaCheck(cudaMemcpy(g.tokens, next.data(), B * sizeof(int), cudaMemcpyHostToDevice));
            generator_step(&g, model, &greedy);
        }
        generator_free(&g);
    }
}

static void test_cache(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    int* tokens = golden_ints("input_ids");
    open_fixture(&model, 4);
    check_cache(&model, tokens, {{1, 1}, {1, 41}, {2, 21}, {4, 1}, {8, 41}, {16, 21}, {33, 48}, {64, 41}});
    free(tokens);
    gpt2_free(&model);
    // more channels than tokens in the vocabulary, and so many texts that products go through scratch memory
    GPT2Config config = config_of(64, 60, 2, 4, 256);
    std::vector<int> few;
    open_random(&model, &config, 4, 64, &few);
    check_cache(&model, few.data(), {{9, 21}, {70, 21}});
    gpt2_free(&model);
}

// Texts whose layers run in one launch. The first size keeps all weights of a layer in shared memory, the second one does not.
static void test_one_launch(void) {
    if (!have_gpu()) { return; }
    for (GPT2Config config : {config_of(64, 301, 2, 2, 128), config_of(64, 301, 2, 5, 320)}) {
        int C = config.channels, F = config.mlp_channels, NH = config.num_heads;
        if (!decode_layers_runs(1, C, F, NH, 64)) { return test_skip("needs 16 bits and an H100 or H200"); }
        check(!decode_layers_runs(1, C, F - 64, NH, 64)); // its kernels are for 4*C
        GPT2 model;
        std::vector<int> tokens;
        open_random(&model, &config, 4, 64, &tokens);
        check_cache(&model, tokens.data(), {{1, MAX_PROMPT_STEPS + 1}});
        if (decode_layers_runs(8, C, F, NH, 64)) { // and a prompt without a pass over it
            check_cache(&model, tokens.data(), {{1, MAX_PROMPT_STEPS - 1}, {2, 50}, {8, 58}, {13, 61}});
        }
        Generator g;
        generator_allocate(&g, &model, 1, 1, 64);
        check(g.packed);
        cudaCheck(cudaMemsetAsync(g.positions, 0xFF, sizeof(int), model.exec.stream)); // -1: nothing is computed
        decode_layers(generator_layers(&g, &model), 1, g.packed, g.layers_scratch, model.exec);
        cudaCheck(cudaStreamSynchronize(model.exec.stream));
        generator_free(&g);
        gpt2_free(&model);
    }
}

// The fixture's model with its matrices in 8 bits. *arena is their memory.
static void open_weights8(GPT2* model, void** arena, WeightFormat format) {
    Plan plan = {};
    Error err;
    open_fixture(model, 4);
    model->weights8.format = format;
    weights8_plan(&plan, &model->weights8, &model->config);
    *arena = plan_allocate(&plan, "weights in 8 bits", &err);
    require(*arena);
    weights8_quantize(&model->weights8, &model->config, model->params_memory, model->exec);
}

// Every matrix is rounded to 8 bits as the CPU rounds it, and nothing else is.
static void check_rounded(const GPT2* model, const std::vector<float>& before, bool is_int8) {
    const GPT2Config* config = &model->config;
    size_t n = model_size(config);
    std::vector<float> want = before, values(n), scales(n), after = to_host(model, model->params_memory, n);
    for (int p : {0, 4, 6, 10, 12}) { // wte, qkvw, attprojw, fcw, fcprojw
        int rows = (int)param_rows(config, p), K = (int)param_cols(config, p);
        for (int l = 0; l < param_copies(config, p); l++) {
            size_t place = param_place(config, p, l);
            quantize_weights_cpu(&values[place], scales.data(), &want[place], &before[place], is_int8, rows, K);
        }
    }
    for (size_t i = 0; i < n; i++) {
        float rounded = (float)(floatX)want[i];
        if (after[i] != rounded) {
            check_msg(false, "weight %zu: %g became %g, want %g", i, before[i], after[i], rounded);
            return;
        }
    }
}

// The greedy continuation of a prompt, one forward pass per token, is the one with the cache and weights in 8 bits.
static void check_greedy(GPT2* model) {
    enum { NEW = 12 };
    int* tokens = golden_ints("input_ids");
    int C = model->config.channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    int n = 20, got[NEW], count, same = 0;
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    check(generate(model, &greedy, tokens, &n, 1, n, NEW, -1, got, &count, NULL) && count == NEW);
    for (int i = 0; i < NEW; i++) {
        set_tokens(model, tokens, tokens, n + i);
        gpt2_forward(model, &model->acts, 1, n + i, EVALUATE, NULL, model->exec);
        matmul_forward(model->acts.logits, NULL, model->acts.lnf, model->params.wte, NULL, NULL, n + i, C, Vp,
                       model->exec);
        std::vector<float> logits = to_host(model, model->acts.logits + (size_t)(n + i - 1) * Vp, V);
        tokens[n + i] = sampler_argmax(logits.data(), V);
        same += same == i && tokens[n + i] == got[i];
    }
    // in 16 bits two tokens of almost equal probability may swap
    check_msg(same == NEW || (!IS_FP32 && same >= 4), "token %d is %d, want %d", same, got[same], tokens[n + same]);
    free(tokens);
}

// A NaN among the weights of one row makes the logits NaN.
static void check_nan_row(GPT2* model) {
    int* tokens = golden_ints("input_ids");
    int n = 4, got[4], count;
    floatX nan = (floatX)NAN;
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    floatX* fcw = layer_parameters(model->params, &model->config, 1).fcw;
    cudaCheck(cudaMemcpy(fcw + model->config.channels + 3, &nan, sizeof(nan), cudaMemcpyHostToDevice));
    weights8_quantize(&model->weights8, &model->config, model->params_memory, model->exec);
    check(!generate(model, &greedy, tokens, &n, 1, n, 4, -1, got, &count, NULL));
    free(tokens);
}

static void test_weights8(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    void* arena;
    int* tokens = golden_ints("input_ids");
    open_fixture(&model, 1);
    std::vector<float> before = to_host(&model, model.params_memory, model_size(&model.config));
    gpt2_free(&model);
    for (WeightFormat format : {WEIGHTS_INT8, WEIGHTS_FP8}) {
        int device = device_attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                     device_attribute(cudaDevAttrComputeCapabilityMinor);
        // as in weights8_format(), which ends the program there
        if (format == WEIGHTS_FP8 && std::min(device, compiled_arch(ptx_sm90a_kernel<0>)) < 89) { continue; }
        open_weights8(&model, &arena, format);
        check_rounded(&model, before, format == WEIGHTS_INT8);
        std::vector<CacheCheck> checks = {{1, 61}, {2, 62}, {8, 62}, {16, 62}, {64, 63}};
        // --check of decode_matmul covers the kernels for more than 8 sequences
        checks.resize(emulated_size((int)checks.size(), 3));
        check_cache(&model, tokens, checks);
        check_greedy(&model);
        check_nan_row(&model);
        cudaCheck(cudaFree(arena));
        gpt2_free(&model);
    }
    free(tokens);
}

enum {
    QUEUE_TEXTS = 60,
    QUEUE_LONGEST = 40,
    QUEUE_POSITIONS = 100,
    QUEUE_NEW = 70,
    QUEUE_SLOTS = 64,
    QUEUE_STOP = 5,
    QUEUE_VOCAB = 97
};
// Returns new token i of a text, where it ends or not.
static int queue_token(int text, int i) { return (text * 31 + i * 17) % QUEUE_VOCAB; }

// A stand-in for the GPU: for each slot the text, its newest token, the number of that, and its position.
struct QueueDevice {
    int text[QUEUE_SLOTS], token[QUEUE_SLOTS], i[QUEUE_SLOTS], position[QUEUE_SLOTS];
};

static void run_queue_passes(TextQueue* q, QueueDevice* d, int* passes) {
    Sampler sampler = sampler_make(1.0f, 0, 1.0f, 9);
    PromptPass p;
    for (int first = q->next; text_queue_pass(q, &sampler, QUEUE_VOCAB, &p); first = q->next) {
        check(p.n >= 1 && p.slot + p.n <= q->B && p.n * p.T <= text_queue_pass_tokens(q, q->B));
        check(p.T <= text_queue_capacity(q) && (first == 0 || p.T % 64 == 0 || p.T == text_queue_capacity(q)));
        for (int i = 0; i < p.n; i++) {
            int text = first + i, b = p.slot + i, length = q->lengths[text];
            check(q->slot[b] == text && d->position[b] == -1); // nobody is in this slot
            check(length <= p.T && p.last[i] == length - 1 && p.rng[i] == prompts_rng(&sampler, text));
            for (int t = 0; t < p.T; t++) {
                check(p.inputs[i * p.T + t] == (t < length ? (text + t) % QUEUE_VOCAB : 0));
            }
            check(p.newest[i] == (text + length - 1) % QUEUE_VOCAB);
            uint32_t seen[4] = {0};
            for (int t = 0; t < length; t++) { seen_add(seen, (text + t) % QUEUE_VOCAB); }
            check(memcmp(seen, p.seen + (size_t)i * 4, sizeof(seen)) == 0);
            d->text[b] = text, d->i[b] = 0, d->token[b] = queue_token(text, 0), d->position[b] = length;
        }
        ++*passes;
        prompt_pass_free(&p);
    }
}

// Continues the texts as generate() does: a step is in flight while the tokens of the one before are taken.
static void check_queue(int B, int num_tokens, int stop) {
    static int prompts[QUEUE_TEXTS * QUEUE_LONGEST], lengths[QUEUE_TEXTS], counts[QUEUE_TEXTS],
        made[QUEUE_TEXTS * QUEUE_NEW];
    int passes = 0, steps = 0;
    for (int text = 0; text < QUEUE_TEXTS; text++) {
        lengths[text] = text == 3 ? QUEUE_LONGEST : 1 + text * 7 % QUEUE_LONGEST;
        for (int t = 0; t < lengths[text]; t++) { prompts[text * QUEUE_LONGEST + t] = (text + t) % QUEUE_VOCAB; }
    }
    QueueDevice d;
    for (int b = 0; b < QUEUE_SLOTS; b++) { d.position[b] = d.text[b] = -1; }
    TextQueue q = text_queue_of(prompts, lengths, QUEUE_TEXTS, QUEUE_LONGEST, num_tokens, stop, QUEUE_POSITIONS, NULL,
                                made, counts);
    text_queue_open(&q, B);
    run_queue_passes(&q, &d, &passes);
    while (q.active > 0 && steps++ < 100000) {
        int read[QUEUE_SLOTS];
        memcpy(read, d.token, sizeof(read));
        check(q.active == (QUEUE_TEXTS - (q.next - q.active) < B ? QUEUE_TEXTS - (q.next - q.active)
                                                                 : B)); // no slot is free while one waits
        for (int b = 0; b < B; b++) {
            if (text_queue_is_last(&q, b)) { d.position[b] = -1; }
        }
        for (int b = 0; text_queue_goes_on(&q) && b < B; b++) {
            if (d.position[b] < 0) { continue; }
            check_msg(d.position[b] < text_queue_capacity(&q), "text %d is past the cache", d.text[b]);
            d.token[b] = queue_token(d.text[b], ++d.i[b]), d.position[b]++;
        }
        for (int b = 0; b < B; b++) {
            if (text_queue_take(&q, b, read[b])) { d.position[b] = -1; }
        }
        run_queue_passes(&q, &d, &passes);
    }
    check(q.next == QUEUE_TEXTS && q.active == 0 && !q.failed);
    text_queue_close(&q);
    for (int text = 0; text < QUEUE_TEXTS; text++) {
        int room = QUEUE_POSITIONS - lengths[text] + 1, want = num_tokens < room ? num_tokens : room, n = 0;
        while (n < want && queue_token(text, n) != stop) {
            check(made[text * num_tokens + n] == queue_token(text, n));
            n++;
        }
        check_msg(counts[text] == n, "%d slots: text %d has %d tokens, want %d", B, text, counts[text], n);
    }
    check(passes >= (QUEUE_TEXTS + B - 1) / B && (stop >= 0 || B == 1 || passes < QUEUE_TEXTS));
}

static void test_text_queue(void) {
    const int slots[] = {1, 2, 7, 60, 64};
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        check_queue(slots[i], QUEUE_NEW, -1);
        check_queue(slots[i], QUEUE_NEW, QUEUE_STOP);
        check_queue(slots[i], 5, QUEUE_STOP);
        check_queue(slots[i], 1, -1);
    }
}

static void test_text_queue_failure(void) {
    int prompts[2] = {1, 2}, lengths[2] = {1, 1}, counts[2];
    Sampler sampler = sampler_make(0.0f, 0, 1.0f, 1);
    PromptPass p;
    TextQueue q = text_queue_of(prompts, lengths, 2, 1, 9, -1, 100, NULL, NULL, counts);
    text_queue_open(&q, 2);
    check(text_queue_pass(&q, &sampler, QUEUE_VOCAB, &p) && p.n == 2 && p.T == 1);
    prompt_pass_free(&p);
    check(!text_queue_take(&q, 0, 4) && !q.failed);
    check(text_queue_take(&q, 1, -1) && q.failed && q.active == 1); // the other text goes on
    check(!text_queue_take(&q, 0, 4) && counts[0] == 2 && counts[1] == 0);
    text_queue_close(&q);
}

// a batch of prompts of different lengths gives the same continuations as each prompt alone
static void test_batch_of_prompts(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 4);
    int* tokens = golden_ints("input_ids");
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    int lengths[5] = {1, 20, 7, 30, 13}, counts[5], alone[16], count;
    std::vector<int> prompts(5 * 30, 0), together(5 * 16);
    for (int b = 0; b < 5; b++) { memcpy(&prompts[b * 30], tokens + b % 4 * 64 + b, lengths[b] * sizeof(int)); }
    check(generate(&model, &greedy, prompts.data(), lengths, 5, 30, 16, -1, together.data(), counts, NULL));
    for (int b = 0; b < 5; b++) {
        check(generate(&model, &greedy, &prompts[b * 30], &lengths[b], 1, lengths[b], 16, -1, alone, &count, NULL));
        check(counts[b] == 16 && count == 16);
        int same = 0;
        while (same < 16 && alone[same] == together[b * 16 + same]) { same++; }
        check_msg(same == 16 || !IS_FP32, "text %d differs from token %d on", b, same);
        check(same > 0);
    }
    // the others go on as before when a text ends: here all end at the token that text 1 has fourth
    std::vector<int> ended(5 * 16);
    int stop = together[1 * 16 + 3];
    check(generate(&model, &greedy, prompts.data(), lengths, 5, 30, 16, stop, ended.data(), counts, NULL));
    check(counts[1] <= 3 || !IS_FP32);
    for (int b = 0; b < 5; b++) {
        int want = 0, same = 0;
        while (want < 16 && together[b * 16 + want] != stop) { want++; }
        while (same < std::min(want, counts[b]) && ended[b * 16 + same] == together[b * 16 + same]) { same++; }
        check_msg((same == want && counts[b] == want) || (!IS_FP32 && (same > 0 || want == 0)),
                  "text %d: %d of %d tokens before the stop, want %d", b, same, counts[b], want);
    }
    free(tokens);
    gpt2_free(&model);
}

// The logits that follow a text of n tokens, in one pass without a cache, with the penalty of the sampler.
static std::vector<float> next_logits(GPT2* model, const Sampler* sampler, const std::vector<int>& text) {
    int n = (int)text.size(), C = model->config.channels, V = model->config.vocab_size;
    int Vp = model->config.padded_vocab_size;
    set_tokens(model, text.data(), text.data(), n);
    gpt2_forward(model, &model->acts, 1, n, EVALUATE, NULL, model->exec);
    matmul_forward(model->acts.logits, NULL, model->acts.lnf, model->params.wte, NULL, NULL, n, C, Vp, model->exec);
    std::vector<float> logits = to_host(model, model->acts.logits + (size_t)(n - 1) * Vp, V);
    std::vector<uint32_t> seen(seen_words(V), 0);
    for (int token : text) { seen_add(seen.data(), token); }
    sampler_penalize(logits.data(), seen.data(), V, sampler->repetition_penalty);
    return logits;
}

// The difference of the logits of tokens a and b after a text, in root mean squares of all logits.
static double logit_gap(GPT2* model, const Sampler* sampler, const std::vector<int>& text, int a, int b) {
    std::vector<float> logits = next_logits(model, sampler, text);
    double squares = 0.0;
    for (float x : logits) { squares += (double)x * x; }
    return fabs(logits[a] - logits[b]) / sqrt(squares / (double)logits.size());
}

// Texts of 1 to 40 random tokens.
struct RandomTexts {
    enum { T = 40, NEW = 30 }; // NEW: tokens to generate; the longest prompts have no room for all of them
    int N;
    std::vector<int> prompts, lengths; // (N,T), (N)
};
static RandomTexts random_texts(const GPT2* model, int N, int seed = 0) {
    RandomTexts x = {N, std::vector<int>((size_t)N * x.T, 0), std::vector<int>(N)};
    uint64_t rng = 11 + 100 * seed;
    for (int i = 0; i < N; i++) {
        x.lengths[i] = 1 + (int)random_below(&rng, x.T);
        for (int t = 0; t < x.lengths[i]; t++) {
            x.prompts[i * x.T + t] = (int)random_below(&rng, (uint32_t)model->config.vocab_size);
        }
    }
    return x;
}

// The continuation of each text alone, with its own random state.
static std::vector<std::vector<int>> continue_alone(GPT2* model, const Sampler* sampler, const RandomTexts& x,
                                                    int stop) {
    std::vector<std::vector<int>> texts(x.N);
    for (int i = 0; i < x.N; i++) {
        Sampler own = *sampler;
        int got[x.NEW], count;
        own.rng = prompts_rng(sampler, i);
        check(generate(model, &own, &x.prompts[i * x.T], &x.lengths[i], 1, x.lengths[i], x.NEW, stop, got, &count));
        texts[i].assign(got, got + count);
    }
    return texts;
}

// Continues the texts, at most at_once side by side, and returns how many differ from `alone`. Only rounding may make a
// difference: where the most likely token is taken, the two tokens that differ first must be nearly as likely. If draws is not
// NULL, adds to it the tokens up to the first difference, and that one.
static int count_different(GPT2* model, const Sampler* sampler, const RandomTexts& x, int stop, int at_once,
                           const std::vector<std::vector<int>>& alone, int* draws = NULL) {
    Sampler own = *sampler;
    std::vector<int> got((size_t)x.N * x.NEW, -7), counts(x.N);
    GenerationTimes times = {};
    double largest = 0.0;
    int different = 0;
    check(generate(model, &own, x.prompts.data(), x.lengths.data(), x.N, x.T, x.NEW, stop, got.data(), counts.data(),
                   NULL, &times, NULL, at_once));
    check(times.at_once == (x.N > at_once ? at_once : 0));
    for (int i = 0; i < x.N; i++) {
        const int *text = &got[(size_t)i * x.NEW], *want = alone[i].data();
        int n = (int)alone[i].size(), same = 0;
        while (same < n && same < counts[i] && text[same] == want[same]) { same++; }
        if (draws) { *draws += std::min(same + 1, n); }
        if (same == n && same == counts[i]) { continue; }
        different++;
        if (sampler->temperature > 0.0f) { continue; }
        std::vector<int> context(&x.prompts[i * x.T], &x.prompts[i * x.T] + x.lengths[i]);
        context.insert(context.end(), want, want + same);
        int a = same < n ? want[same] : stop,
            b = same < counts[i] ? text[same] : stop; // it ended there by the stop token
        bool ends = a >= 0 && b >= 0 && (int)context.size() <= model->config.max_seq_len;
        check_msg(ends, "text %d has %d tokens, alone %d", i, counts[i], n);
        double gap = ends ? logit_gap(model, sampler, context, a, b) : 0.0;
        check_msg(gap <= 4 * FORWARD, "text %d, token %d: %d, alone %d; their logits differ by %g", i, same, b, a, gap);
        largest = fmax(largest, gap);
    }
    printf("     %d texts, %d side by side: %d differ from those alone, largest gap %.2g, allowed %.2g\n", x.N, at_once,
           different, largest, 4 * FORWARD);
    return different;
}

// Greedy texts are the same alone, side by side, and in the slot of a text that has ended, but for near ties.
static void test_neighbours(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1), penalized = greedy;
    penalized.repetition_penalty = 1.5f;
    RandomTexts x = random_texts(&model, 64), many = random_texts(&model, 150);
    auto alone = continue_alone(&model, &greedy, x, -1);
    for (int at_once : {64, 9, 2}) { check(count_different(&model, &greedy, x, -1, at_once, alone) <= x.N / 4); }
    int stop = alone[5][3]; // so that texts end at different times
    alone = continue_alone(&model, &greedy, many, stop);
    int early = 0;
    for (int i = 0; i < many.N; i++) { early += (int)alone[i].size() < std::min<int>(many.NEW, 65 - many.lengths[i]); }
    check_msg(early > 3, "only %d texts end by the stop token", early);
    for (int at_once : {1, 7, 64, 100}) {
        check(count_different(&model, &greedy, many, stop, at_once, alone) <= many.N / 4);
    }
    // A penalty makes near ties more frequent: on an H200 27 to 40 of 150 texts differ, so several sets of texts are counted together.
    int different[2] = {}, texts = 0;
    for (int set = 0; set < 6; set++) {
        many = random_texts(&model, 150, set), texts += many.N;
        alone = continue_alone(&model, &penalized, many, -1);
        for (int i = 0; i < 2; i++) {
            different[i] += count_different(&model, &penalized, many, -1, i ? 64 : 7, alone);
        }
    }
    for (int n : different) { check_msg(n <= texts / 4, "%d of %d texts differ", n, texts); }
    gpt2_free(&model);
}

// Each text has its own random numbers, wherever and whenever it is continued. With other random numbers nearly every draw would
// differ. A draw next to the boundary of two tokens may fall on either side: on an H100, with 100 texts side by side, none of the
// 100 texts differed somewhere in fp32, 20 in fp16, and 77 in bf16.
static void test_streams(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    Sampler sampler = sampler_make(1.0f, 0, 1.0f, splitmix64(5)),
            filtered = sampler_make(0.9f, 20, 0.9f, splitmix64(6));
    filtered.min_p = 0.05f, filtered.repetition_penalty = 1.2f;
    RandomTexts x = random_texts(&model, 100);
    for (const Sampler* s : {&sampler, &filtered}) {
        auto alone = continue_alone(&model, s, x, -1);
        std::vector<int> first;
        for (auto& text : alone) { first.push_back(text[0]); }
        std::sort(first.begin(), first.end());
        check(std::unique(first.begin(), first.end()) - first.begin() > 20); // not one stream for all
        for (int at_once : {7, 64, 100}) {
            int draws = 0, different = count_different(&model, s, x, -1, at_once, alone, &draws);
            printf("     %d of %d draws differ\n", different, draws);
            check(IS_FP32 ? different <= x.N / 20 : different <= draws / 10);
        }
    }
    gpt2_free(&model);
}

// min-p 1 is greedy; a large penalty leaves no token twice
static void test_filters(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    int *prompt = golden_ints("input_ids"), n = 8, num = emulated_size(40, 10), count, greedy[40], got[40];
    Sampler s = sampler_make(0.0f, 0, 1.0f, 1);
    check(generate(&model, &s, prompt, &n, 1, n, num, -1, greedy, &count) && count == num);
    s = sampler_make(1.0f, 0, 1.0f, 1);
    s.min_p = 1.0f;
    check(generate(&model, &s, prompt, &n, 1, n, num, -1, got, &count) && memcmp(got, greedy, num * sizeof(int)) == 0);
    s = sampler_make(0.0f, 0, 1.0f, 1);
    s.repetition_penalty = 1e6f;
    check(generate(&model, &s, prompt, &n, 1, n, num, -1, got, &count) && count == num);
    std::vector<int> all(prompt, prompt + n);
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    all.insert(all.end(), got, got + num);
    std::sort(all.begin(), all.end());
    check(std::unique(all.begin(), all.end()) == all.end());
    free(prompt);
    gpt2_free(&model);
}

static void test_generate_limits(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    int *prompt = golden_ints("input_ids"), got[100], count, n;
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    n = 63;
    check(generate(&model, &greedy, prompt, &n, 1, n, 100, -1, got, &count, NULL) && count == 2);
    n = 64;
    check(generate(&model, &greedy, prompt, &n, 1, n, 100, -1, got, &count, NULL) && count == 1);
    n = 8;
    check(generate(&model, &greedy, prompt, &n, 1, n, 1, -1, got, &count, NULL) && count == 1);
    int first = got[0];
    check(generate(&model, &greedy, prompt, &n, 1, n, 10, first, got, &count, NULL) && count == 0);
    std::vector<float> weights(num_parameters(&model.config));
    gpt2_download(&model, weights.data());
    weights[param_offset(&model.config, 15)] = NAN; // lnfb
    gpt2_upload(&model, weights.data(), 0);
    check(!generate(&model, &greedy, prompt, &n, 1, n, 10, -1, got, &count, NULL) && count == 0);
    free(prompt);
    gpt2_free(&model);
}

// the same seed draws the same tokens, another seed draws others; top-k 1 is greedy
static void test_sampling(void) {
    if (!have_gpu()) { return; }
    GPT2 model;
    open_fixture(&model, 1);
    int *prompt = golden_ints("input_ids"), n = 8, count, got[5][40];
    Sampler samplers[5] = {sampler_make(1.0f, 0, 1.0f, 1), sampler_make(1.0f, 0, 1.0f, 1),
                           sampler_make(1.0f, 0, 1.0f, 2), sampler_make(0.0f, 0, 1.0f, 1),
                           sampler_make(1.0f, 1, 1.0f, 1)};
    for (int i = 0; i < 5; i++) {
        check(generate(&model, &samplers[i], prompt, &n, 1, n, 40, -1, got[i], &count, NULL) && count == 40);
    }
    check(memcmp(got[0], got[1], sizeof(got[0])) == 0);
    check(memcmp(got[0], got[2], sizeof(got[0])) != 0);
    check(memcmp(got[3], got[4], sizeof(got[0])) == 0);
    check(samplers[0].rng == samplers[1].rng && samplers[0].rng != 1);
    free(prompt);
    gpt2_free(&model);
}

// ---- the program ----------------------------------------------------------------------------------------

// Runs a command. Stores its output, including stderr, and returns its exit code.
static int run_command(std::string* output, const char* fmt, ...) {
    char command[4096], part[4096];
    va_list list;
    va_start(list, fmt);
    vsnprintf(command, sizeof(command), fmt, list);
    va_end(list);
    strncat(command, " 2>&1", sizeof(command) - strlen(command) - 1);
    FILE* f = popen(command, "r");
    if (!f) { die("popen: %s", strerror(errno)); }
    output->clear();
    for (size_t n; (n = fread(part, 1, sizeof(part), f)) > 0;) { output->append(part, n); }
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static std::string program_path;
static const char* program() { return program_path.c_str(); }
// Sets program_path to $TRAIN_GPT2CU, or to train_gpt2cu next to this test, which has the same precision.
static void find_program(const char* test) {
    const char *given = getenv("TRAIN_GPT2CU"), *slash = strrchr(test, '/');
    program_path = given ? given : (slash ? std::string(test, slash + 1) : "./") + "train_gpt2cu";
}

// Writes a training and a validation shard for the program and returns their directory. The tokens are triples: two
// random ids below 40 and their sum.
static const char* make_shards() {
    static char dir[128];
    if (dir[0]) { return dir; }
    snprintf(dir, sizeof(dir), "%s/data", test_dir());
    Error err;
    check(make_directories(dir, &err));
    uint64_t rng = 9;
    for (int shard = 0; shard < 2; shard++) {
        char path[256];
        ShardWriter writer;
        std::vector<uint16_t> tokens(20000);
        for (size_t i = 0; i < tokens.size(); i++) {
            tokens[i] =
                i % 3 == 2 ? (uint16_t)((tokens[i - 1] + tokens[i - 2]) % 500) : (uint16_t)random_below(&rng, 40);
        }
        snprintf(path, sizeof(path), "%s/%s_0.bin", dir, shard ? "d_val" : "d_train");
        if (!shard_writer_open(&writer, path, &err)) { die("%s", err.text); }
        shard_writer_put(&writer, tokens.data(), tokens.size());
        if (!shard_writer_close(&writer, &err)) { die("%s", err.text); }
    }
    return dir;
}

static std::string slurp(const char* path) {
    Error err;
    MappedFile file;
    if (!map_file(&file, path, &err)) { return std::string("(missing) ") + err.text; }
    std::string text((const char*)file.data, file.size);
    unmap_file(&file);
    return text;
}

static bool have_program() {
    if (!have_gpu()) { return false; }
    if (file_exists(program())) { return true; }
    test_skip("needs %s: make train_gpt2cu", program());
    return false;
}

#define SMALL_RUN                                                                                                      \
    "%s --recipe llmc -e d6 --layers 2 --heads 2 --channels 128 --positions 64 -i '%s/d_train_*.bin' -j "              \
    "'%s/d_val_*.bin' "                                                                                                \
    "-b 4 -t 64 -s 0 -v 5 -m 2 "

// a run that resumes from another run's checkpoint of step 7 ends with the same bits as that run
static void test_resume(void) {
    if (!have_program()) { return; }
    const char *data = make_shards(), *dir = test_dir();
    std::string out, log[2], weights[2], moments[2];
    for (int chance = 0; chance < (has_fp8() ? 3 : 2); chance++) {
        const char* flags[] = {"", "--stochastic-rounding 1", "--fp8"};
        for (int i = 0; i < 2; i++) {
            char run[256], path[512];
            snprintf(run, sizeof(run), "%s/resume_%d_%d", dir, chance, i);
            if (i == 1) { // copy what the first run had written up to step 7
                int rc = run_command(&out, "mkdir %s && cp -r %s/resume_%d_0/step_00000007 %s/resume_%d_0/m* %s", run,
                                     dir, chance, dir, chance, run);
                check_msg(rc == 0, "%s", out.c_str());
            }
            int rc = run_command(&out, SMALL_RUN "-d 512 -x 12 -n 7 -y %d -o %s %s", program(), data, data, i, run,
                                 flags[chance]);
            check_msg(rc == 0, "exit %d: %s", rc, out.c_str());
            check((out.find("resumed at step 7") != std::string::npos) == (i == 1));
            snprintf(path, sizeof(path), "%s/main.log", run);
            log[i] = slurp(path);
            snprintf(path, sizeof(path), "%s/step_00000012/model.safetensors", run);
            weights[i] = slurp(path);
            snprintf(path, sizeof(path), "%s/step_00000012/optimizer.safetensors", run);
            moments[i] = slurp(path);
        }
        check(weights[0].size() > 100000);
        check(weights[0] == weights[1]);
        check(moments[0] == moments[1]);
        size_t at = log[0].find("s:12 trl:");
        check(at != std::string::npos);
        check(at != std::string::npos && log[1].find(log[0].substr(at)) != std::string::npos);
    }
}

// a run with micro-steps gives the same bits with the CUDA graph and without it
static void test_graph(void) {
    if (!have_program()) { return; }
    const char* data = make_shards();
    std::string out, logs[2];
    for (const char* flags : {"", "--fp8"}) {
        if (flags[0] && !has_fp8()) { break; }
        for (int graph = 0; graph < 2; graph++) {
            char run[256], path[512];
            snprintf(run, sizeof(run), "%s/graph%s_%d", test_dir(), flags, graph);
            int rc = run_command(&out, SMALL_RUN "-d 768 -x 6 -o %s --graph %d --tune 0 %s", program(), data, data, run,
                                 graph, flags);
            check_msg(rc == 0, "exit %d: %s", rc, out.c_str());
            snprintf(path, sizeof(path), "%s/step_00000006/model.safetensors", run);
            logs[graph] = slurp(path);
        }
        check(logs[0].size() > 100000 && logs[0] == logs[1]);
    }
}

// The HellaSwag score does not depend on the number of questions per batch. The right endings follow the rule of the
// training data, so a trained model finds them.
static void test_hellaswag(void) {
    if (!have_program()) { return; }
    const char* data = make_shards();
    char path[256];
    snprintf(path, sizeof(path), "%s/choices.bin", test_dir());
    std::vector<uint16_t> body;
    uint64_t rng = 4;
    size_t longest = 0;
    const int num_examples = 14;
    for (int i = 0; i < num_examples; i++) {
        size_t first = body.size();
        int label = (int)random_below(&rng, 4), a = (int)random_below(&rng, 40), b = (int)random_below(&rng, 40);
        int context[] = {a, b, a + b}; // the rule of make_shards(): a random pair, then its sum
        for (int word : {65535, 0, i, label, 4, 3}) { body.push_back((uint16_t)word); }
        for (int token : context) { body.push_back((uint16_t)token); }
        for (int e = 0; e < 4; e++) {
            int n = 3 + (int)random_below(&rng, 2) * 3;
            body.push_back((uint16_t)n);
            for (int t = 0; t < n; t += 3) {
                int c = (int)random_below(&rng, 40), d = (int)random_below(&rng, 40);
                int sum = e == label ? c + d : 200 + (int)random_below(&rng, 200);
                for (int token : {c, d, sum}) { body.push_back((uint16_t)token); }
            }
        }
        body[first + 1] = (uint16_t)((body.size() - first) * 2);
        longest = std::max<size_t>(longest, body[first + 1]);
    }
    int32_t header[256] = {20240522, 1, num_examples, (int32_t)longest};
    FILE* f = fopen(path, "wb");
    check(f && fwrite(header, sizeof(header), 1, f) == 1 && fwrite(body.data(), 2, body.size(), f) == body.size());
    if (f) { fclose(f); }
    std::string first_score, out;
    for (int B = 4; B <= 12; B += 4) {
        int rc = run_command(
            &out,
            "%s --recipe llmc -e d6 --layers 2 --heads 2 --channels 128 --positions 64 -i '%s/d_train_*.bin' -t 64 "
            "-b %d -s 0 -v 150 -l 3e-3 -u 10 -x %d --hellaswag %s",
            program(), data, B, B == 4 ? 150 : 0, path);
        check_msg(rc == 0, "exit %d: %s", rc, out.c_str());
        size_t at = out.find("HellaSwag: "), end = out.find(" (", at);
        check_msg(at != std::string::npos, "%s", out.c_str());
        if (at == std::string::npos) { return; }
        if (B == 4) {
            first_score = out.substr(at, end - at);
            size_t last = out.rfind("HellaSwag: ");
            int correct = atoi(out.c_str() + last + 11);
            printf("     %s before training, %d of %d after it\n", first_score.c_str(), correct, num_examples);
            check(correct >= 12);
        }
        check(out.substr(at, end - at) == first_score);
    }
}

// in fp32, three steps of a 124M model with random weights give the loss and norm of the CPU program
static void test_cpu_program(void) {
    if (!have_program()) { return; }
    if (!IS_FP32) {
        test_skip("compares fp32 builds: make test_gpt2cu PRECISION=FP32");
        return;
    }
    if (!file_exists("./train_gpt2")) {
        test_skip("needs ./train_gpt2: make train_gpt2");
        return;
    }
    const char* data = make_shards();
    std::string out, log[2];
    for (int gpu = 0; gpu < 2; gpu++) {
        char run[256], path[512];
        snprintf(run, sizeof(run), "%s/cpu_%d", test_dir(), gpu);
        int rc = run_command(
            &out, "%s --recipe llmc -e d12 -i '%s/d_train_*.bin' -j '%s/d_val_*.bin' -b 2 -t 64 -x 3 -s 0 -m 2 -o %s",
            gpu ? program() : "./train_gpt2", data, data, run);
        check_msg(rc == 0, "exit %d: %s", rc, out.c_str());
        snprintf(path, sizeof(path), "%s/log.jsonl", run);
        log[gpu] = slurp(path);
    }
    const char *a = log[0].c_str(), *b = log[1].c_str();
    for (int step = 0; step < 3; step++) {
        double values[2][2] = {{0, 1}, {2, 3}};
        for (int gpu = 0; gpu < 2; gpu++) {
            const char*& at = gpu ? b : a;
            at = strstr(at, "\"loss\":");
            if (at) { values[gpu][0] = strtod(at + 7, NULL), at = strstr(at, "\"grad_norm\":"); }
            if (at) { values[gpu][1] = strtod(at + 12, NULL); }
            if (!at) { break; }
        }
        printf("     step %d: loss %.6f and %.6f, norm %.5f and %.5f\n", step + 1, values[0][0], values[1][0],
               values[0][1], values[1][1]);
        check_near(values[1][0], values[0][0], 1e-4 * values[0][0]);
        check_near(values[1][1], values[0][1], 1e-3 * values[0][1]);
        if (!a || !b) { break; }
    }
}

// bad input ends the program with one line that says the reason, and with exit code 1 or 2
static void test_refusals(void) {
    if (!have_program()) { return; }
    const char* data = make_shards();
    struct {
        const char *flags, *says;
        int code;
    } cases[] = {
        {"-e d12 --channels 100 --heads 4 -i X -b 1", "multiple of 8", 1},
        {"-e d12 --channels 768 --heads 2 -i X -b 1", "head size", 1},
        {"-e d12 -i X -b 60000 -t 1024", "free", 1},
        {"-e d12 -i X -t 2048", "positions", 1},
        {"-e d12 -i X -b 4 -t 64 -d 100", "not a multiple", 1},
        {"-e d12 -i /nowhere/x_*.bin", "nowhere", 1},
        {"-e d12 -i X -r 3", "recompute", 2},
        {"-e d12 -i X --wrong", "wrong", 2},
        {"-e d12 -i X -b 4 -t 64 --hellaswag /nowhere", "nowhere", 1},
        {"-e d12 -i X -b 2 -t 64 --hellaswag /etc/passwd", "rows of a batch", 1},
        {"-e d12 -i X -b 4 -t 64 --hellaswag /etc/passwd", "evaluation file", 1},
        {"-e /nowhere --prompt x", "nowhere", 1},
        {"-e d12 --prompts /nowhere", "nowhere", 1},
        {"-e d12 --prompt x", "vocabulary", 1},
        {"-e d12", "no training data", 1},
    };
    for (auto& c : cases) {
        std::string out, flags = c.flags, shards = std::string("'") + data + "/d_train_*.bin'";
        size_t at = flags.find(" X");
        if (at != std::string::npos) { flags.replace(at + 1, 1, shards); }
        int rc = run_command(&out, "%s %s", program(), flags.c_str());
        size_t line = out.rfind("error: ");
        if (c.code == 2) { line = 0; }
        check_msg(rc == c.code, "%s: exit %d: %s", c.flags, rc, out.c_str());
        check_msg(line != std::string::npos && out.find(c.says, line) != std::string::npos, "%s: says %s", c.flags,
                  out.c_str());
    }
}

// Trains from weights of which one element is set to `spoiled`. Returns the exit code, stores the path of the run's
// output directory in run (256).
static int run_spoiled(const char* name, int tensor, float spoiled, char* run, std::string* out) {
    const char* data = make_shards();
    char dir[256];
    Error err;
    GPT2Config config;
    float* weights = read_weights(FIXTURES "tiny_gpt2", &config);
    weights[param_offset(&config, tensor)] = spoiled;
    snprintf(dir, sizeof(dir), "%s/%s", test_dir(), name);
    snprintf(run, 256, "%s/%s_run", test_dir(), name);
    if (!make_directories(dir, &err) || !model_save_hf(dir, &config, weights, false, -1, &err)) { die("%s", err.text); }
    free(weights);
    return run_command(out, "%s -e %s -i '%s/d_train_*.bin' -b 4 -t 64 -x 40 -s 0 --max-nonfinite 3 -o %s", program(),
                       dir, data, run);
}

// Weights that are not finite are refused. If no step is finite, the steps are skipped, the run ends with a message, and the
// weights are saved.
static void test_gives_up(void) {
    if (!have_program()) { return; }
    char run[256];
    Path checkpoint;
    Error err;
    std::string out;
    int rc = run_spoiled("nan", 10, NAN, run, &out); // fcw
    check_msg(rc == 1, "exit %d: %s", rc, out.c_str());
    check_msg(out.find(" is not finite: nan at [0, 0]: take other weights") != std::string::npos, "%s", out.c_str());
    check(!run_has_checkpoints(run));
    // finite weights that overflow in the forward pass are saved; every step that was launched counts as skipped
    rc = run_spoiled("huge", 14, 3e38f, run, &out); // lnfw
    check_msg(rc == 1, "exit %d: %s", rc, out.c_str());
    check_msg(out.find("3 steps in a row: stopped, the weights of the last good step are saved") != std::string::npos,
              "%s", out.c_str());
    RunState state;
    check_msg(run_find_newest(run, &checkpoint, false, &err) && run_load_state(checkpoint.text, &state, &err), "%s",
              err.text);
    check_msg(state.step >= 3 && state.skipped_steps == state.step, "%lld steps, %lld skipped", (long long)state.step,
              (long long)state.skipped_steps);
}

#ifdef CUDA_EMULATION
// What the emulation has found in the kernels of the tests that ran before this one.
static void test_findings(void) {
    int count;
    const char* text = emulation_findings(&count);
    check_msg(count == 0, "%d findings: %s", count, text);
}
#endif

static const Test tests[] = {
    {"golden", "hidden states, logits, loss, every gradient against PyTorch in float64", test_golden},
    {"ten_steps", "ten steps of AdamW: losses, norms, weights", test_ten_steps},
    {"variants", "every configuration of transformers' GPT-2: logits, gradients, a step, greedy text", test_variants},
    {"d12_tinyshakespeare", "20 steps of 124M on real text against PyTorch", test_d12_tinyshakespeare},
    {"layout", "parameters layer by layer: every one in its place", test_layout},
    {"gradient_accumulation", "four micro-batches of one are one of four", test_gradient_accumulation},
    {"recompute", "the three recompute levels agree", test_recompute},
    {"bias_sums", "gradients of biases are the sums of the tensors that they belong to", test_bias_sums},
    {"saved_slope", "GELU's saved slope gives the gradients that its argument gives", test_saved_slope},
    {"fp8", "the stages of --fp8 against bf16; values that grow saturate once", test_fp8},
    {"fp8_recovers", "NaN and overflow with --fp8 stop the update, and scales recover", test_fp8_recovers},
    {"deferred_update", "AdamW during the next forward pass has the same bits", test_deferred_update},
    {"same_bits_again", "two runs give the same bits", test_same_bits_again},
    {"two_models", "two models trained in turn, without waiting: each has the bits that it has alone", test_two_models},
    {"shapes", "T from 1 to 8192, B to 64, C to 1600, head sizes 32 to 128", test_shapes},
    {"nan_is_seen", "a NaN in any weight tensor stops the update", test_nan_is_seen},
    {"muon", "two steps of Muon against its arithmetic in double", test_muon},
    {"weight_decay", "the tensors that decay, and no others", test_weight_decay},
    {"verdict", "the device judges a step: applied, clipped, loss scale", test_verdict},
    {"stochastic_rounding", "stochastic rounding is repeated exactly on resume",
     test_stochastic_rounding_is_repeatable},
    {"greedy", "greedy continuation against PyTorch", test_greedy},
    {"cache", "logits with the cache, after prefills, and without", test_cache},
    {"one_launch", "logits with the cache where all layers of a token are one launch", test_one_launch},
    {"weights8", "int8 and fp8: rounded as on the CPU, logits and greedy text as without the cache", test_weights8},
    {"text_queue", "many texts in few slots: each gets its own tokens, ends where it must, and no slot waits",
     test_text_queue},
    {"text_queue_failure", "logits that are not numbers end their text", test_text_queue_failure},
    {"batch_of_prompts", "prompts of different lengths side by side", test_batch_of_prompts},
    {"neighbours", "greedy texts alone and side by side, in new and in used slots: equal but for near ties",
     test_neighbours},
    {"streams", "each text has its own random numbers, whatever its neighbours", test_streams},
    {"filters", "min-p 1 is greedy, a large repetition penalty leaves no token twice", test_filters},
    {"generate_limits", "positions run out, stop token, logits that are not numbers", test_generate_limits},
    {"sampling", "seeds repeat, top-k 1 is greedy", test_sampling},
    {"resume", "a stopped and resumed run ends with the same bits", test_resume},
    {"graph", "with and without CUDA graph the same bits", test_graph},
    {"hellaswag", "scores do not depend on the batch; a trained model finds the endings", test_hellaswag},
    {"cpu_program", "124M in fp32 against train_gpt2", test_cpu_program},
    {"refusals", "bad input: one line, exit 1 or 2", test_refusals},
    {"gives_up", "steps that are not finite never reach the weights", test_gives_up},
#ifdef CUDA_EMULATION
    {"findings", "no race, no access out of bounds, no read of what was not written in the tests before",
     test_findings},
#endif
};

int main(int argc, char** argv) {
#ifdef GPU_PROGRAM
    const char* slash = strrchr(argv[0], '/');
    if (strncmp(slash ? slash + 1 : argv[0], "train_gpt2", strlen("train_gpt2")) == 0) {
        return train_gpt2_main(argc, argv);
    }
#endif
    (void)train, (void)sample, (void)evaluate, (void)bench, (void)plan,
        (void)profile_run; // not called here: the tests run the program itself
    find_program(argv[0]);
    setenv("XDG_CACHE_HOME", test_dir(), 1); // what the program keeps for later runs
    settings.tune = 0;                       // no autotuning, so that every test uses the same algorithms
    int n = 0;
    bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    CublasLt library;
    TunedState tuned = {};
    test_exec.library = &library, test_exec.tuned = &tuned;
    if (!list && cudaGetDeviceCount(&n) == cudaSuccess && n > 0) { open_device(&test_exec); }
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
