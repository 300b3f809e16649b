/*
Speed of train_gpt2.c at the size of GPT-2 124M, random weights: a training step, generation, and loading a checkpoint.
It prints figures and checks nothing. `make bench` runs it; by itself:
make dev/test/bench/bench_train_gpt2 && dev/test/bench/bench_train_gpt2
*/
#define TESTING
#include "../../../train_gpt2.c"

static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static double median(double* values, int n) {
    qsort(values, (size_t)n, sizeof(double), compare_doubles);
    return values[n / 2];
}

// bytes/s of reading one large array with all threads, best of 5
static double measure_read_bandwidth(void) {
    size_t n = (size_t)128 << 20;
    float* x = allocate_floats(n);
    double best_ms = 1e30, keep = 0.0;
    for (int repeat = 0; repeat < 5; repeat++) {
        double start = time_ms(), sum = 0.0;
#pragma omp parallel for reduction(+ : sum)
        for (long i = 0; i < (long)n; i += CHUNK) { sum += sum_of_squares_chunk(x + i, CHUNK); }
        double ms = time_ms() - start;
        best_ms = ms < best_ms ? ms : best_ms;
        keep += sum;
    }
    if (keep != 0.0) { printf("the array is not zero\n"); }
    free(x);
    return (double)n * sizeof(float) / best_ms * 1e3;
}

static void bench_train(GPT2* model, int B, int T) {
    enum { WARM_UP = 2, STEPS = 9 };
    double ms[STEPS], parts[4][STEPS];
    int* tokens = (int*)malloc_check(((size_t)B * T + 1) * sizeof(int));
    uint64_t rng = 1;
    for (int i = 0; i <= B * T; i++) { tokens[i] = (int)random_below(&rng, (uint32_t)model->config.vocab_size); }
    gpt2_allocate_batch(model, B, T);
    for (int step = -WARM_UP; step < STEPS; step++) {
        double t[5] = {time_ms()};
        gpt2_forward(model, &model->acts, tokens, B, T);
        gpt2_loss(model, tokens + 1, 1.0f / (float)(B * T), B, T);
        t[1] = time_ms();
        gpt2_backward(model, tokens, B, T, true);
        t[2] = time_ms();
        double norm = gpt2_gradient_norm(model);
        t[3] = time_ms();
        AdamW o = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, (float)(1.0 / norm)};
        gpt2_update(model, &o, NULL);
        t[4] = time_ms();
        if (step < 0) { continue; }
        ms[step] = t[4] - t[0];
        for (int i = 0; i < 4; i++) { parts[i][step] = t[i + 1] - t[i]; }
    }
    const GPT2Config* c = &model->config;
    double flops = 6.0 * B * T * ((double)num_parameters(c) - (double)param_size(c, 1));
    double whole = median(ms, STEPS);
    printf("training step B=%d T=%d: %.0f ms (fastest %.0f), %.0f tok/s, %.0f GFLOP/s in matmuls | forward %.0f, "
           "backward %.0f, "
           "norm %.0f, AdamW %.0f ms\n",
           B, T, whole, ms[0], B * T / whole * 1e3, flops / whole / 1e6, median(parts[0], STEPS),
           median(parts[1], STEPS), median(parts[2], STEPS), median(parts[3], STEPS));
    free(tokens);
}

static void bench_generate(const GPT2* model) {
    enum { TOKENS = 64 };
    double bandwidth = measure_read_bandwidth(), ms[TOKENS];
    Generator g;
    generator_allocate(&g, &model->config, TOKENS);
    for (int i = 0; i < TOKENS; i++) {
        double start = time_ms();
        generator_step(&g, model, i);
        ms[i] = time_ms() - start;
    }
    double whole = median(ms, TOKENS);
    double bytes = ((double)num_parameters(&model->config) - (double)param_size(&model->config, 1)) * sizeof(float);
    printf(
        "generation, batch 1: %.1f ms a token, %.1f tok/s, %.1f GB/s = %.0f%% of the %.1f GB/s that a read loop gets\n",
        whole, 1e3 / whole, bytes / whole / 1e6, 100.0 * bytes / whole * 1e3 / bandwidth, bandwidth / 1e9);
    generator_free(&g, &model->config);
}

static void bench_load(const GPT2* model) {
    enum { TIMES = 5 };
    char dir[] = "/tmp/llmc_bench_XXXXXX", cmd[64];
    Error err;
    double save = time_ms(), ms[TIMES];
    if (!mkdtemp(dir)) { die("mkdtemp: %s", strerror(errno)); }
    if (!model_save_hf(dir, &model->config, model->params_memory, false, 50256, &err)) { die("%s", err.text); }
    save = time_ms() - save;
    for (int i = 0; i < TIMES; i++) {
        GPT2 loaded;
        ModelFile file;
        double start = time_ms();
        if (!model_open(&file, dir, &err)) { die("%s", err.text); }
        gpt2_allocate(&loaded, &file.config);
        if (!model_read(&file, loaded.params_memory, &err)) { die("%s", err.text); }
        ms[i] = time_ms() - start;
        model_close(&file);
        gpt2_free(&loaded);
    }
    printf("checkpoint of 498 MB: ready %.0f ms after the program asks for it, from page cache; saved in %.0f ms\n",
           median(ms, TIMES), save);
    snprintf(cmd, sizeof(cmd), "rm -rf %s", dir);
    if (system(cmd) != 0) { printf("cannot remove %s\n", dir); }
}

int main(void) {
    GPT2 model;
    GPT2Config config;
    Error err;
    if (!config_from_descriptor(&config, "d12", &err)) { die("%s", err.text); }
    int threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    printf("GPT-2 124M, fp32, %d threads, %s\n", threads, matmul_isa_names[matmul_isa()]);
    gpt2_allocate(&model, &config);
    double start = time_ms();
    gpt2_init_params(model.params_memory, &config, 42);
    printf("random weights: %.0f ms\n", time_ms() - start);
    gpt2_allocate_training(&model);
    bench_train(&model, 4, 64);
    bench_generate(&model);
    bench_load(&model);
    gpt2_free(&model);
    (void)train;
    (void)sample;
    (void)evaluate;
    (void)bench;
    (void)plan;
    return EXIT_SUCCESS;
}
