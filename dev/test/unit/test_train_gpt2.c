// The model of train_gpt2.c compared with PyTorch's values, finite differences, its own naive loops, and itself.
#define TESTING
#include "../../../train_gpt2.c"
#include "../golden.h"
#include "../test.h"

#if defined(__has_feature)
#define SANITIZED_BY_CLANG __has_feature(address_sanitizer)
#endif
// Sanitizers check accesses, which are the same for every sample, and make each sample thirty times slower.
static int samples(int n) {
#if defined(__SANITIZE_ADDRESS__) || SANITIZED_BY_CLANG
    if (!getenv("LLMC_TEST_FULL")) { return (n + 7) / 8; }
#endif
    return n;
}

static void load_weights(GPT2* model, const char* path) {
    Error err;
    ModelFile file;
    if (!model_open(&file, path, &err)) { die("%s", err.text); }
    gpt2_allocate(model, &file.config);
    if (!model_read(&file, model->params_memory, &err)) { die("%s", err.text); }
    model_close(&file);
}

// loads the fixture, ready to train on its 4 x 64 tokens
static void load_fixture(GPT2* model, const char* path) {
    load_weights(model, path);
    gpt2_allocate_training(model);
    gpt2_allocate_batch(model, 4, 64);
}

static void compare_hidden(const GPT2* model) {
    const float* ours[3] = {model->acts.encoded, model->acts.residual3, model->acts.lnf};
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof(name), "hidden.%d", i);
        float* want = golden_floats(name);
        double worst = largest_difference(ours[i], want, elements(golden_tensor(name)));
        check_msg(worst <= 2e-5, "%s is off by %g", name, worst);
        free(want);
    }
}

static void compare_logits(GPT2* model) {
    const GPT2Config* c = &model->config;
    float* want = golden_floats("logits");
    gpt2_head(model, model->acts.logits, model->acts.lnf, 4 * 64);
    double worst = 0.0;
    for (size_t n = 0; n < 4 * 64; n++) {
        double d =
            largest_difference(model->acts.logits + n * c->padded_vocab_size, want + n * c->vocab_size, c->vocab_size);
        if (!(d <= worst)) { worst = d; }
    }
    check_msg(worst <= 2e-5, "logits are off by %g", worst);
    printf("     largest difference of logits: %.2g\n", worst);
    free(want);
}

static void compare_gradients(const GPT2* model) {
    const GPT2Config* c = &model->config;
    double worst = 0.0;
    int compared = 0;
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int l = 0; l < param_copies(c, p); l++) {
            char hf[96], name[112];
            param_hf_name(hf, sizeof(hf), p, l);
            snprintf(name, sizeof(name), "grad.%s", hf);
            float* want = golden_floats(name);
            size_t n = elements(golden_tensor(name)), cols = param_cols(c, p), rows = n / cols;
            const float* ours = model->grads_memory + param_offset(c, p) + (size_t)l * param_layer_size(c, p);
            float* ordered = (float*)malloc_check(n * sizeof(float));
            for (size_t i = 0; i < n; i++) {
                ordered[i] = gpt2_params[p].conv1d ? ours[i % rows * cols + i / rows] : ours[i];
            }
            double error = relative_error(ordered, want, n);
            check_msg(error <= 1e-4, "%s is off by %g of its norm", name, error);
            if (!(error <= worst)) { worst = error; }
            compared++;
            free(ordered);
            free(want);
        }
    }
    check(compared == 4 + 12 * 2);
    printf("     largest relative error of a gradient: %.2g\n", worst);
}

// compares all results of one forward and backward pass
static void compare_pass(GPT2* model) {
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    float *loss = golden_floats("loss"), *norm = golden_floats("grad_norm");
    gpt2_forward(model, &model->acts, inputs, 4, 64);
    compare_hidden(model);
    compare_logits(model);
    double got = gpt2_loss(model, targets, 1.0f / (4 * 64), 4, 64);
    check_near(got, loss[0], 1e-5);
    gpt2_backward(model, inputs, 4, 64, true);
    compare_gradients(model);
    check_near(gpt2_gradient_norm(model), norm[0], 1e-4 * norm[0]);
    free(inputs), free(targets), free(loss), free(norm);
}

static void test_golden(void) {
    GPT2 model;
    load_fixture(&model, FIXTURES "tiny_gpt2");
    compare_pass(&model);
    gpt2_free(&model);
}

static void test_golden_naive(void) {
    settings.naive = 1;
    test_golden();
    settings.naive = 0;
}

static void test_golden_llmc_bin(void) {
    GPT2 model;
    Error err;
    char path[256];
    snprintf(path, sizeof(path), "%s/tiny.bin", test_dir());
    load_weights(&model, FIXTURES "tiny_gpt2");
    if (!model_save_llmc(path, &model.config, model.params_memory, 3, &err)) { die("%s", err.text); }
    gpt2_free(&model);
    load_fixture(&model, path);
    compare_pass(&model);
    gpt2_free(&model);
}

// ---- training ------------------------------------------------------------------------------------

// does n steps of the run from which the reference values come; muon_rate: 0 for AdamW alone
static void fixture_steps(GPT2* model, int n, float muon_rate, double* losses, double* norms) {
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    for (int step = 0; step < n; step++) {
        gpt2_forward(model, &model->acts, inputs, 4, 64);
        losses[step] = gpt2_loss(model, targets, 1.0f / (4 * 64), 4, 64);
        gpt2_backward(model, inputs, 4, 64, true);
        norms[step] = gpt2_gradient_norm(model);
        AdamW o = {
            1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, (float)(1.0 - pow(0.9, step + 1)), (float)(1.0 - pow(0.95, step + 1)),
            1.0f};
        if (norms[step] > 1.0) { o.gradient_scale = (float)(1.0 / norms[step]); }
        Muon muon = {muon_rate, 0.95f, 0.1f, o.gradient_scale};
        gpt2_update(model, &o, muon_rate > 0 ? &muon : NULL);
    }
    free(inputs), free(targets);
}

static void test_ten_steps(void) {
    GPT2 model;
    double losses[10], norms[10];
    int n = samples(10);
    load_fixture(&model, FIXTURES "tiny_gpt2");
    fixture_steps(&model, n, 0.0f, losses, norms);
    float *want_losses = golden_floats("train.losses"), *want_norms = golden_floats("train.grad_norms");
    for (int i = 0; i < n; i++) {
        check_near(losses[i], want_losses[i], 1e-4);
        check_near(norms[i], want_norms[i], 1e-3 * want_norms[i]);
    }
    float* wte = golden_floats("train.wte_after");
    double error = relative_error(model.params.wte, wte, elements(golden_tensor("train.wte_after")));
    check_msg(n < 10 || error <= 1e-4, "wte after 10 steps is off by %g of its norm", error);
    free(want_losses), free(want_norms), free(wte);
    gpt2_free(&model);
}

// Checks the change of a tensor in the ten steps. The reference has every 16th row.
static void compare_change(const char* name, const float* before, const float* after, size_t cols) {
    const SafeTensor* tensor = golden_muon_tensor(name);
    size_t rows = elements(tensor) / cols;
    float *got = tensor_floats(tensor), *want = tensor_floats(tensor);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            size_t at = r * cols + c, whole = 16 * r * cols + c;
            got[at] = after[whole] - before[whole];
            want[at] -= before[whole];
        }
    }
    double error = relative_error(got, want, rows * cols);
    check_msg(error <= 1e-4, "the change of %s is off by %g of its norm", name, error);
    printf("     %s: its change is off by %.2g\n", name, error);
    free(got), free(want);
}

static void test_muon_ten_steps(void) {
    static const int tensors[] = {0, 4, 6, 10, 12}; // wte, qkvw, attprojw, fcw, fcprojw
    GPT2 before, model;
    double losses[10], norms[10];
    int n = samples(10);
    load_weights(&before, FIXTURES "tiny_gpt2");
    load_fixture(&model, FIXTURES "tiny_gpt2");
    fixture_steps(&model, n, 2e-3f, losses, norms);
    float* want_losses = tensor_floats(golden_muon_tensor("losses"));
    float* want_norms = tensor_floats(golden_muon_tensor("grad_norms"));
    for (int i = 0; i < n; i++) {
        check_near(losses[i], want_losses[i], 2e-5);
        check_near(norms[i], want_norms[i], 1e-4 * want_norms[i]);
    }
    for (int i = 0; i < 5; i++) {
        const GPT2Config* c = &model.config;
        int p = tensors[i];
        for (int l = 0; l < param_copies(c, p); l++) {
            char name[96];
            size_t at = param_offset(c, p) + (size_t)l * param_layer_size(c, p);
            param_hf_name(name, sizeof(name), p, l);
            if (n == 10) {
                compare_change(name, before.params_memory + at, model.params_memory + at, param_cols(c, p));
            }
            for (size_t j = 0; p > 0 && j < param_layer_size(c, p); j++) { check(model.v_memory[at + j] == 0.0f); }
        }
    }
    free(want_losses), free(want_norms);
    gpt2_free(&before);
    gpt2_free(&model);
}

// The iteration in double and without any trick: x (rows,cols), wide or tall, is copied so that it is wide.
static void newton_schulz_double(double* x, int rows, int cols) {
    bool tall = rows > cols;
    int n = tall ? cols : rows, k = tall ? rows : cols;
    double *w = (double*)malloc_check(2 * sizeof(double) * (size_t)n * k), *next = w + (size_t)n * k, norm = 0.0;
    double *a = (double*)malloc_check(2 * sizeof(double) * (size_t)n * n), *b = a + (size_t)n * n;
    for (int i = 0; i < n * k; i++) { norm += x[i] * x[i]; }
    for (int i = 0; i < n * k; i++) { w[i] = x[tall ? i % k * n + i / k : i] / (sqrt(norm) + 1e-7); }
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < n * n; i++) {
            a[i] = 0.0;
            for (int j = 0; j < k; j++) { a[i] += w[i / n * k + j] * w[i % n * k + j]; }
        }
        for (int i = 0; i < n * n; i++) {
            b[i] = -4.7750 * a[i];
            for (int j = 0; j < n; j++) { b[i] += 2.0315 * a[i / n * n + j] * a[j * n + i % n]; }
        }
        for (int i = 0; i < n * k; i++) {
            next[i] = 3.4445 * w[i];
            for (int j = 0; j < n; j++) { next[i] += b[i / k * n + j] * w[j * k + i % k]; }
        }
        memcpy(w, next, sizeof(double) * (size_t)n * k);
    }
    for (int i = 0; i < n * k; i++) { x[tall ? i % k * n + i / k : i] = w[i]; }
    free(w), free(a);
}

static void test_newton_schulz(void) {
    static const int shapes[][2] = {{48, 48}, {192, 48}, {48, 192}, {1, 33}, {33, 1}, {7, 5}};
    Mt19937 mt;
    mt19937_seed(&mt, 9);
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        int rows = shapes[s][0], cols = shapes[s][1];
        size_t size = (size_t)rows * cols, n = rows < cols ? rows : cols;
        float *x = (float*)malloc_check((3 * size + 2 * n * n) * sizeof(float)), *want = x + size,
              *scratch = want + size;
        double* reference = (double*)malloc_check(size * sizeof(double));
        normal_fill(x, size, 0.0f, 1e-3f, &mt);
        for (size_t i = 0; i < size; i++) { reference[i] = x[i]; }
        newton_schulz_double(reference, rows, cols);
        for (size_t i = 0; i < size; i++) { want[i] = (float)reference[i]; }
        newton_schulz(x, scratch, rows, cols);
        double error = relative_error(x, want, size);
        check_msg(error <= 2e-5, "(%d,%d) is off by %g of its norm", rows, cols, error);
        // a matrix of zeros, such as the gradient of a dead layer, has an update of zero
        memset(x, 0, size * sizeof(float));
        newton_schulz(x, scratch, rows, cols);
        for (size_t i = 0; i < size; i++) { check(x[i] == 0.0f); }
        free(x), free(reference);
    }
}

#ifdef _OPENMP
static void compare_one_thread_with_three(float muon_rate) {
    int threads = omp_get_max_threads();
    double losses[2][3] = {{0}}, norms[2][3] = {{0}};
    float* weights[2];
    GPT2 model[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i == 0 ? 1 : 3);
        load_fixture(&model[i], FIXTURES "tiny_gpt2");
        fixture_steps(&model[i], samples(3), muon_rate, losses[i], norms[i]);
        weights[i] = model[i].params_memory;
    }
    omp_set_num_threads(threads);
    check(memcmp(losses[0], losses[1], sizeof(losses[0])) == 0);
    check(memcmp(norms[0], norms[1], sizeof(norms[0])) == 0);
    check(memcmp(weights[0], weights[1], num_parameters(&model[0].config) * sizeof(float)) == 0);
    gpt2_free(&model[0]);
    gpt2_free(&model[1]);
}
#endif

static void test_same_bits_for_any_threads(void) {
#ifdef _OPENMP
    compare_one_thread_with_three(0.0f);
    compare_one_thread_with_three(2e-3f); // Muon
#else
    test_skip("built without OpenMP");
#endif
}

// 4 sequences at once, and one at a time with accumulated gradients
static void test_gradient_accumulation(void) {
    GPT2 a, b;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    load_fixture(&a, FIXTURES "tiny_gpt2");
    load_fixture(&b, FIXTURES "tiny_gpt2");
    gpt2_forward(&a, &a.acts, inputs, 4, 64);
    double loss = gpt2_loss(&a, targets, 1.0f / 256, 4, 64), sum = 0.0;
    gpt2_backward(&a, inputs, 4, 64, true);
    for (int i = 0; i < 4; i++) {
        gpt2_forward(&b, &b.acts, inputs + i * 64, 1, 64);
        sum += gpt2_loss(&b, targets + i * 64, 1.0f / 256, 1, 64) / 4;
        gpt2_backward(&b, inputs + i * 64, 1, 64, i == 0);
    }
    check_near(sum, loss, 1e-6);
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t at = param_offset(&a.config, p);
        double error = relative_error(b.grads_memory + at, a.grads_memory + at, param_size(&a.config, p));
        check_msg(error <= 1e-5, "d%s is off by %g of its norm", gpt2_params[p].name, error);
    }
    free(inputs), free(targets);
    gpt2_free(&a);
    gpt2_free(&b);
}

// ---- finite differences ------------------------------------------------------------------------------

// An odd shape: 48 channels, 3 heads of 16, 17 positions, 61 tokens, 3 sequences, two micro-batches.
static GPT2Config odd_config(int mlp_channels, float norm_epsilon) {
    GPT2Config config = {17, 61, padded_vocab(61), 2, 3, 48, mlp_channels, norm_epsilon, 0, 0, 0, 0};
    return config;
}

static void random_odd_model(GPT2* model, GPT2Config config, int* inputs, int* targets, int n) {
    Mt19937 mt;
    uint64_t rng = 7;
    gpt2_allocate(model, &config);
    gpt2_allocate_training(model);
    gpt2_allocate_batch(model, 3, 17);
    gpt2_init_params(model->params_memory, &config, 42);
    // other values than at initialisation: biases and layernorm weights matter, and nothing is tiny
    mt19937_seed(&mt, 5);
    float* noise = (float*)malloc_check(num_parameters(&config) * sizeof(float));
    normal_fill(noise, num_parameters(&config), 0.0f, 0.15f, &mt);
    for (size_t i = 0; i < num_parameters(&config); i++) { model->params_memory[i] += noise[i]; }
    free(noise);
    for (int i = 0; i < n; i++) {
        inputs[i] = (int)random_below(&rng, 61);
        targets[i] = (int)random_below(&rng, 61);
    }
}

// Checks several entries of each tensor with (loss(x + h) - loss(x - h)) / 2h. The loss is computed in fp32, with an
// error of about 3e-7 of its terms, so at h = 1e-2 rounding adds an error of about 3e-5 and curvature one of order h^2;
// Richardson extrapolation removes the latter.
static void check_finite_differences(GPT2Config config) {
    enum { N = 3 * 17 };
    GPT2 model;
    int inputs[N], targets[N];
    random_odd_model(&model, config, inputs, targets, N);
    gpt2_forward(&model, &model.acts, inputs, 3, 17);
    gpt2_loss(&model, targets, 1.0f / N, 3, 17);
    gpt2_backward(&model, inputs, 3, 17, true);
    uint64_t rng = 11;
    double worst = 0.0;
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t at = param_offset(&model.config, p), n = param_size(&model.config, p);
        if (n == 0) { continue; }                                                 // the head, if it is tied
        n = param_used_rows(&model.config, p) * n / param_rows(&model.config, p); // the padding has no gradient
        double scale = 0.0;
        for (size_t i = 0; i < n; i++) { // fmax() here makes gcc 12 for aarch64 crash at -O3
            double size = fabs(model.grads_memory[at + i]);
            scale = size > scale ? size : scale;
        }
        for (int k = 0; k < samples(24); k++) {
            size_t i = at + random_below(&rng, (uint32_t)n);
            float saved = model.params_memory[i];
            double slope[2];
            for (int s = 0; s < 2; s++) {
                float h = s == 0 ? 1e-2f : 2e-2f;
                double loss[2];
                for (int sign = 0; sign < 2; sign++) {
                    model.params_memory[i] = sign ? saved - h : saved + h;
                    gpt2_forward(&model, &model.acts, inputs, 3, 17);
                    loss[sign] = gpt2_loss(&model, targets, 0.0f, 3, 17);
                }
                slope[s] = (loss[0] - loss[1]) / (2.0 * h);
            }
            model.params_memory[i] = saved;
            double want = (4.0 * slope[0] - slope[1]) / 3.0, got = model.grads_memory[i];
            double error = fabs(got - want) / (scale + 1e-3);
            if (!(error <= worst)) { worst = error; }
            check_msg(error <= 5e-3, "d%s[%zu] is %g, finite differences give %g (largest entry %g)",
                      gpt2_params[p].name, i - at, got, want, scale);
        }
    }
    printf("     largest difference, of the largest entry of its tensor: %.2g\n", worst);
    for (size_t i = (size_t)model.config.vocab_size * 48; i < (size_t)model.config.padded_vocab_size * 48; i++) {
        check(model.grads.wte[i] == 0.0f && model.grads.lmhead[i] == 0.0f);
    }
    gpt2_free(&model);
}

static void test_finite_differences(void) { check_finite_differences(odd_config(4 * 48, 1e-5f)); }

static void test_finite_differences_variant(void) {
    GPT2Config config = odd_config(3 * 48, 1e-6f);
    config.activation = ACT_SILU;
    config.unscaled_attention = config.scale_by_layer = config.untied_head = 1;
    check_finite_differences(config);
}

// compares the fast path with the plain loops; called for the odd shape and for one that crosses tiles of queries
static void compare_with_naive(GPT2* model, const int* inputs, const int* targets, int B, int T) {
    size_t n = num_parameters(&model->config);
    float* fast = (float*)malloc_check(n * sizeof(float));
    double loss[2];
    for (int naive = 0; naive < 2; naive++) {
        settings.naive = naive;
        gpt2_forward(model, &model->acts, inputs, B, T);
        loss[naive] = gpt2_loss(model, targets, 1.0f / (float)(B * T), B, T);
        gpt2_backward(model, inputs, B, T, true);
        if (!naive) { memcpy(fast, model->grads_memory, n * sizeof(float)); }
    }
    settings.naive = 0;
    check_near(loss[0], loss[1], 1e-5);
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t at = param_offset(&model->config, p);
        double error = relative_error(fast + at, model->grads_memory + at, param_size(&model->config, p));
        check_msg(error <= 2e-5, "d%s differs by %g of its norm", gpt2_params[p].name, error);
    }
    free(fast);
}

static void test_naive_and_fast(void) {
    GPT2 model;
    int inputs[3 * 17], targets[3 * 17];
    for (int F = 4 * 48; F >= 2; F -= 95) { // of four times, about two times and a fraction of the 48 channels
        GPT2Config config = odd_config(F, 1e-5f);
        if (F < 4 * 48) { // other settings than GPT-2's as well
            config.activation = F % 4 == 1 ? ACT_GELU : ACT_TANH;
            config.unscaled_attention = config.scale_by_layer = config.untied_head = 1;
        }
        random_odd_model(&model, config, inputs, targets, 3 * 17);
        compare_with_naive(&model, inputs, targets, 3, 17);
        compare_with_naive(&model, inputs, targets, 2, 1);
        gpt2_free(&model);
    }

    GPT2Config config = {200, 300, padded_vocab(300), 1, 2, 64, 256, 1e-5f, 0, 0, 0, 0};
    int long_inputs[2 * 200], long_targets[2 * 200];
    uint64_t rng = 3;
    for (int i = 0; i < 400; i++) {
        long_inputs[i] = (int)random_below(&rng, 300);
        long_targets[i] = (int)random_below(&rng, 300);
    }
    gpt2_allocate(&model, &config);
    gpt2_allocate_training(&model);
    gpt2_allocate_batch(&model, 2, 200);
    gpt2_init_params(model.params_memory, &config, 1);
    for (size_t i = 0; i < num_parameters(&config); i++) { model.params_memory[i] *= 5.0f; } // makes attention sharper
    compare_with_naive(&model, long_inputs, long_targets, 2, 200);
    gpt2_free(&model);
}

// Losses of a run of three steps from the same seed, and the head (V, C) after the first one.
static void short_run(GPT2Config config, bool use_muon, double* losses, float* head) {
    enum { N = 3 * 17 };
    GPT2 model;
    int inputs[N], targets[N];
    random_odd_model(&model, config, inputs, targets, N);
    for (int step = 0; step < 3; step++) {
        gpt2_forward(&model, &model.acts, inputs, 3, 17);
        losses[step] = gpt2_loss(&model, targets, 1.0f / N, 3, 17);
        gpt2_backward(&model, inputs, 3, 17, true);
        AdamW o = {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1.0f, 1.0f};
        o.bias1 = (float)(1.0 - pow(0.9, step + 1)), o.bias2 = (float)(1.0 - pow(0.95, step + 1));
        Muon muon = {1e-3f, 0.95f, 0.1f, 1.0f};
        gpt2_update(&model, &o, use_muon ? &muon : NULL);
        if (step == 0 && head) { memcpy(head, model.params.lmhead, 61 * 48 * sizeof(float)); }
    }
    gpt2_free(&model);
}

// both settings reach the loss, and a model with other values than GPT-2's learns, with AdamW and with Muon
static void test_mlp_and_epsilon(void) {
    for (int muon = 0; muon < 2; muon++) {
        double standard[3], narrow[3], epsilon[3], both[3];
        short_run(odd_config(4 * 48, 1e-5f), muon, standard, NULL);
        short_run(odd_config(3 * 48, 1e-5f), muon, narrow, NULL);
        short_run(odd_config(4 * 48, 1e-6f), muon, epsilon, NULL);
        short_run(odd_config(3 * 48, 1e-6f), muon, both, NULL);
        check(standard[0] != narrow[0] && standard[0] != epsilon[0] && narrow[0] != both[0]);
        check(fabs(standard[0] - epsilon[0]) < 1e-2); // a small change of the variance
        check_msg(both[1] < both[0] && both[2] < both[1], "losses %g, %g, %g", both[0], both[1], both[2]);
    }
}

// an untied head learns, and AdamW updates it also beside Muon
static void test_untied_head_learns(void) {
    static float heads[2][61 * 48];
    GPT2Config config = odd_config(4 * 48, 1e-5f);
    config.untied_head = 1;
    for (int muon = 0; muon < 2; muon++) {
        double losses[3];
        short_run(config, muon, losses, heads[muon]);
        check_msg(losses[1] < losses[0] && losses[2] < losses[1], "losses %g, %g, %g", losses[0], losses[1], losses[2]);
    }
    check(memcmp(heads[0], heads[1], sizeof(heads[0])) == 0);
    check(param_muon_matrices(NUM_PARAMS - 1) == 0 && gpt2_params[NUM_PARAMS - 1].decay);
}

// ---- generation ------------------------------------------------------------------------------------------

static void test_greedy(void) {
    GPT2 model;
    load_weights(&model, FIXTURES "tiny_gpt2");
    int *prompt = golden_ints("generate.prompt"), *want = golden_ints("generate.greedy");
    int n = (int)elements(golden_tensor("generate.prompt")), total = (int)elements(golden_tensor("generate.greedy"));
    int got[64];
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    check(generate(&model, &greedy, prompt, n, total, -1, got, NULL, NULL) == total);
    for (int i = 0; i < total; i++) { check_msg(got[i] == want[i], "token %d is %d, want %d", i, got[i], want[i]); }
    free(prompt), free(want);
    gpt2_free(&model);
}

// the logits of every position are the same token by token through the cache, after a prefill, and in one pass
static void check_cache(GPT2* model, const int* tokens, int T) {
    int Vp = model->config.padded_vocab_size, V = model->config.vocab_size;
    gpt2_forward(model, &model->acts, tokens, 1, T);
    gpt2_head(model, model->acts.logits, model->acts.lnf, T);
    for (int prefill = 0; prefill < T; prefill += T / 3) {
        Generator g;
        generator_allocate(&g, &model->config, T);
        if (prefill) { generator_prefill(&g, model, tokens, prefill); }
        for (int t = prefill ? prefill - 1 : 0; t < T; t++) {
            if (t >= prefill) { generator_step(&g, model, tokens[t]); }
            double worst = largest_difference(g.logits, model->acts.logits + (size_t)t * Vp, (size_t)V);
            check_msg(worst <= 2e-5, "prefill %d, position %d: logits differ by %g", prefill, t, worst);
        }
        generator_free(&g, &model->config);
    }
}

static void test_cache(void) {
    GPT2 model;
    load_fixture(&model, FIXTURES "tiny_gpt2");
    int* tokens = golden_ints("input_ids");
    check_cache(&model, tokens, 64);
    free(tokens);
    gpt2_free(&model);
    int inputs[3 * 17], targets[3 * 17];
    random_odd_model(&model, odd_config(3 * 48, 1e-2f), inputs, targets, 3 * 17); // an epsilon that the logits show
    check_cache(&model, inputs, 17);
    gpt2_free(&model);
}

static void test_generate_limits(void) {
    GPT2 model;
    load_weights(&model, FIXTURES "tiny_gpt2");
    int* prompt = golden_ints("input_ids");
    int got[100];
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 1);
    // the tokens that positions 63 and 64 predict
    check(generate(&model, &greedy, prompt, 63, 100, -1, got, NULL, NULL) == 2);
    check(generate(&model, &greedy, prompt, 64, 100, -1, got, NULL, NULL) == 1);
    check(generate(&model, &greedy, prompt, 8, 1, -1, got, NULL, NULL) == 1);
    int first = got[0];
    check(generate(&model, &greedy, prompt, 8, 10, first, got, NULL, NULL) ==
          0); // stops before the stop token is returned
    model.params.lnfb[0] = NAN;
    check(generate(&model, &greedy, prompt, 8, 10, -1, got, NULL, NULL) == -1);
    free(prompt);
    gpt2_free(&model);
}

// ---- numbers ------------------------------------------------------------------------------------------------

static void test_fast_exp(void) {
    double worst = 0.0;
    for (int i = -860000; i <= 880000; i++) {
        float x = (float)i * 1e-4f;
        double error = fabs(fast_exp(x) / exp((double)x) - 1.0);
        if (!(error <= worst)) { worst = error; }
    }
    check_msg(worst <= 2.5e-7, "relative error %g", worst); // 2 ulp
    check(fast_exp(-INFINITY) == 0.0f && fast_exp(-100.0f) == 0.0f);
    check(isnan(fast_exp(NAN)));
    check(isfinite(fast_exp(1e30f)) && fast_exp(1e30f) > 1e38f);
}

// a NaN in a weight makes loss and gradient norm NaN, so that the step can be skipped
static void test_nan_is_seen(void) {
    GPT2 model;
    int *inputs = golden_ints("input_ids"), *targets = golden_ints("targets");
    load_fixture(&model, FIXTURES "tiny_gpt2");
    // one of the four sequences is enough: its first token has position 0, and it contains inputs[3]
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(&model.config, p) == 0) { continue; }
        float* weight = model.params_memory + param_offset(&model.config, p);
        if (p == 0) { weight += (size_t)inputs[3] * model.config.channels; }
        float saved = *weight;
        *weight = NAN;
        gpt2_forward(&model, &model.acts, inputs, 1, 64);
        double loss = gpt2_loss(&model, targets, 1.0f / 64, 1, 64);
        gpt2_backward(&model, inputs, 1, 64, true);
        check_msg(!isfinite(loss), "%s: loss is %g", gpt2_params[p].name, loss);
        check_msg(!isfinite(gpt2_gradient_norm(&model)), "%s: the norm is finite", gpt2_params[p].name);
        *weight = saved;
    }
    free(inputs), free(targets);
    gpt2_free(&model);
}

// the first two steps of a 124M run on real text; takes minutes, so it runs only with LLMC_TEST_FULL
static void test_d12_two_losses(void) {
    const char* data = getenv("LLMC_DATA") ? getenv("LLMC_DATA") : "../shared/data";
    char path[512];
    Error err;
    if (!getenv("LLMC_TEST_FULL")) {
        test_skip("takes a minute and 4 GB: make test-full");
        return;
    }
    snprintf(path, sizeof(path), "%s/tinyshakespeare.txt", data);
    if (!file_exists(path)) {
        test_skip("needs %s", path);
        return;
    }
    MappedFile text;
    Tokenizer tokenizer;
    TokenBuffer tokens = {0};
    check(map_file(&text, path, &err));
    snprintf(path, sizeof(path), "%s/gpt2_tokenizer", data);
    if (!tokenizer_load(&tokenizer, path, &err)) { die("%s", err.text); }
    tokenizer_encode(&tokenizer, text.data, text.size, &tokens);
    check(tokens.count == 338025);

    static const double want[2] = {10.963157653808594, 9.577528953552246},
                        want_norms[2] = {30.890413284301758, 10.142605781555176};
    GPT2 model;
    GPT2Config config;
    check(config_from_descriptor(&config, "d12", &err));
    gpt2_allocate(&model, &config);
    gpt2_init_params(model.params_memory, &config, 42);
    gpt2_allocate_training(&model);
    gpt2_allocate_batch(&model, 4, 1024);
    int* ids = (int*)malloc_check((2 * 4096 + 1) * sizeof(int));
    for (int i = 0; i < 2 * 4096 + 1; i++) { ids[i] = (int)tokens.ids[i]; }
    for (int step = 0; step < 2; step++) {
        const int* inputs = ids + step * 4096;
        gpt2_forward(&model, &model.acts, inputs, 4, 1024);
        double loss = gpt2_loss(&model, inputs + 1, 1.0f / 4096, 4, 1024);
        gpt2_backward(&model, inputs, 4, 1024, true);
        double norm = gpt2_gradient_norm(&model);
        AdamW o = {3e-4f,
                   0.9f,
                   0.95f,
                   1e-8f,
                   0.1f,
                   (float)(1.0 - pow(0.9, step + 1)),
                   (float)(1.0 - pow(0.95, step + 1)),
                   (float)(1.0 / norm)};
        gpt2_update(&model, &o, NULL);
        printf("     step %d: loss %.6f, reference %.6f; norm %.5f, reference %.5f\n", step + 1, loss, want[step], norm,
               want_norms[step]);
        check_near(loss, want[step], 1e-4);
        check_near(norm, want_norms[step], 1e-3 * want_norms[step]);
    }
    free(ids);
    token_buffer_free(&tokens);
    tokenizer_free(&tokenizer);
    unmap_file(&text);
    gpt2_free(&model);
}

// a tiny step takes one thread, a large one all of them; OMP_NUM_THREADS overrides that
static void test_threads(void) {
#ifdef _OPENMP
    char set[16] = "";
    int before = omp_get_max_threads();
    if (getenv("OMP_NUM_THREADS")) { snprintf(set, sizeof(set), "%s", getenv("OMP_NUM_THREADS")); }
    setenv("OMP_NUM_THREADS", "8", 1);
    omp_set_num_threads(8);
    limit_threads(1e6);
    check(omp_get_max_threads() == 8);
    unsetenv("OMP_NUM_THREADS");
    limit_threads(1e12);
    check(omp_get_max_threads() == 8);
    limit_threads(220e6);
    check(omp_get_max_threads() == 4);
    limit_threads(1e6);
    check(omp_get_max_threads() == 1);
    omp_set_num_threads(before);
    if (set[0]) { setenv("OMP_NUM_THREADS", set, 1); }
#endif
}

static const Test tests[] = {
    {"golden", "hidden states, logits, loss, every gradient against PyTorch in float64", test_golden},
    {"golden_naive", "the same with the plain loops", test_golden_naive},
    {"golden_llmc_bin", "the same after a round trip through llm.c's .bin", test_golden_llmc_bin},
    {"ten_steps", "ten steps of AdamW: losses, norms, weights", test_ten_steps},
    {"newton_schulz", "Muon's iteration against loops in double, for wide and tall matrices", test_newton_schulz},
    {"muon_ten_steps", "ten steps of Muon: losses, norms, changes of the weights", test_muon_ten_steps},
    {"same_bits_for_any_threads", "one thread and three give the same bits", test_same_bits_for_any_threads},
    {"gradient_accumulation", "four micro-batches of one are one of four", test_gradient_accumulation},
    {"finite_differences", "gradients of every tensor on an odd shape", test_finite_differences},
    {"finite_differences_variant", "the same with other settings than GPT-2's", test_finite_differences_variant},
    {"mlp_and_epsilon", "both change the loss, and the model learns", test_mlp_and_epsilon},
    {"untied_head_learns", "with AdamW, also beside Muon", test_untied_head_learns},
    {"naive_and_fast", "the two paths agree on odd shapes", test_naive_and_fast},
    {"greedy", "greedy continuation, token for token", test_greedy},
    {"cache", "logits with the cache, after a prefill, and without", test_cache},
    {"generate_limits", "positions run out, stop token, logits that are not numbers", test_generate_limits},
    {"threads", "no more threads than have work", test_threads},
    {"fast_exp", "relative error and special values", test_fast_exp},
    {"nan_is_seen", "a NaN in any weight tensor reaches loss and norm", test_nan_is_seen},
    {"d12_two_losses", "124M from seed 42 on tinyshakespeare, against PyTorch on a GPU", test_d12_two_losses},
};

int main(int argc, char** argv) {
    (void)train; // train() and the other tasks are tested through the program, by test_program.sh
    (void)sample;
    (void)evaluate;
    (void)bench;
    (void)plan;
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
