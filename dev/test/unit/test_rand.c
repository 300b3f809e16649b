// llmc/rand.h and gpt2_init_params (gpt2.h) against values from PyTorch and from the papers, and by statistical tests.
#include "../test.h"
#include "../../../llmc/gpt2.h"
#include "../../../llmc/rand.h"

// ---- a scanner for the fixture -----------------------------------------------------

// Reads up to max numbers after "key": in text. Returns their number.
static int json_numbers(const char* text, const char* key, double* out, int max) {
    char quoted[64];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char* p = text ? strstr(text, quoted) : NULL;
    if (!p) { return 0; }
    p += strlen(quoted);
    int n = 0;
    while (n < max) {
        p += strspn(p, " \n\t[,");
        char* end;
        double value = strtod(p, &end);
        if (end == p) { break; }
        out[n++] = value;
        p = end;
    }
    return n;
}

static char* read_fixture(void) {
    MappedFile file;
    Error err;
    if (!map_file(&file, "dev/test/fixtures/d12_tinyshakespeare.json", &err)) { die("%s", err.text); }
    char* text = (char*)calloc_check(file.size + 1, 1);
    memcpy(text, file.data, file.size);
    unmap_file(&file);
    return text;
}

// ---- mt19937 and normals ----------------------------------------------------------------

static void test_mt19937(void) {
    Mt19937 mt;
    mt19937_seed(&mt, 5489); // seed and value of the C++ standard, [rand.predef]
    uint32_t last = 0;
    for (int i = 0; i < 10000; i++) { last = mt19937_u32(&mt); }
    check_msg(last == 4123659995u, "the 10000th word is %u", last);
}

static void test_uniform_blocks(void) {
    static float filled[5000];
    Mt19937 a, b;
    mt19937_seed(&a, 7);
    mt19937_seed(&b, 7);
    size_t pieces[] = {1, 622, 1, 1, 623, 624, 625, 1300, 17, 0, 1186}, at = 0;
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        mt19937_fill_uniform(&a, filled + at, pieces[i]);
        at += pieces[i];
    }
    check(at == 5000);
    for (size_t i = 0; i < at; i++) {
        float one = mt19937_uniform(&b);
        check_msg(filled[i] == one, "uniform %zu: %.9g in a block, %.9g alone", i, filled[i], one);
        check(one >= 0.0f && one < 1.0f);
    }
}

static void test_normal_sizes(void) {
    char* text = read_fixture();
    const char* section = strstr(text, "\"normal_seed42_std0.02\"");
    int sizes[] = {1, 5, 15, 16, 17, 40};
    for (int s = 0; s < 6; s++) {
        int n = sizes[s];
        char key[16];
        double want[64];
        float got[64];
        snprintf(key, sizeof(key), "%d", n);
        check_msg(json_numbers(section, key, want, 64) == n, "fixture for n = %d", n);
        Mt19937 mt;
        mt19937_seed(&mt, 42);
        normal_fill(got, (size_t)n, 0.0, 0.02, &mt);
        for (int i = 0; i < n; i++) {
            check_msg(got[i] == (float)want[i], "n = %d, value %d is %.9g, want %.9g", n, i, got[i], want[i]);
        }
    }
    free(text);
}

static void test_normal_cached(void) {
    float whole[15], parts[15];
    Mt19937 mt;
    mt19937_seed(&mt, 42);
    normal_fill(whole, 15, 0.0, 1.0, &mt);
    mt19937_seed(&mt, 42);
    normal_fill(parts, 5, 0.0, 1.0, &mt); // three pairs, so one value is left for the next call
    normal_fill(parts + 5, 10, 0.0, 1.0, &mt);
    check(memcmp(whole, parts, sizeof(whole)) == 0);
    check(mt.has_cached);
    mt19937_seed(&mt, 42);
    check(!mt.has_cached);
}

static void test_normal_moments(void) {
    size_t n = 1000003;
    float* x = (float*)malloc_check(n * sizeof(float));
    Mt19937 mt;
    mt19937_seed(&mt, 1);
    normal_fill(x, n, 1.5, 2.0, &mt);
    double m[5] = {0};
    for (size_t i = 0; i < n; i++) {
        double z = (x[i] - 1.5) / 2.0;
        for (int k = 1; k <= 4; k++) { m[k] += pow(z, k) / (double)n; }
    }
    check_near(m[1], 0.0, 0.005);
    check_near(m[2], 1.0, 0.01);
    check_near(m[3], 0.0, 0.02);
    check_near(m[4], 3.0, 0.05);
    free(x);
}

// the code for this machine and the portable code give the same bits, for 2^20 uniforms and the extreme ones
static void test_box_muller_paths(void) {
    enum { N = 1 << 20 };
    float* a = (float*)malloc_check(N * sizeof(float));
    float* b = (float*)malloc_check(N * sizeof(float));
    for (uint32_t i = 0; i < N; i++) { a[i] = b[i] = mt19937_to_float(i * 2654435761u); }
    for (int j = 0; j < 16; j++) { a[j] = b[j] = j % 2 ? 16777215.0f / 16777216.0f : 0.0f; }
    box_muller(a, N / 16, 0.25f, 0.02f);
    box_muller_portable(b, N / 16, 0.25f, 0.02f);
    check(memcmp(a, b, N * sizeof(float)) == 0);
    double worst = 0.0; // compares with libm too, whose last bits may differ
    for (uint32_t block = 0; block < N; block += 16) {
        for (uint32_t j = block; j < block + 8; j++) {
            bool first = block == 0;
            double u = first ? (j % 2 ? 16777215.0 / 16777216.0 : 0.0) : mt19937_to_float(j * 2654435761u);
            double v = first ? (j % 2 ? 16777215.0 / 16777216.0 : 0.0) : mt19937_to_float((j + 8) * 2654435761u);
            double r = sqrt(-2.0 * log(1.0 - u)), theta = 2.0 * 3.14159265358979323846 * v;
            worst = fmax(worst, fabs(a[j] - (r * cos(theta) * 0.02 + 0.25)));
            worst = fmax(worst, fabs(a[j + 8] - (r * sin(theta) * 0.02 + 0.25)));
        }
    }
    check_msg(worst < 1e-7, "differs from libm by %g", worst);
    free(a);
    free(b);
}

// ---- the initial weights of a model -------------------------------------------------

static void check_tensor(const char* text, const char* name, const float* x, size_t n) {
    char quoted[64];
    snprintf(quoted, sizeof(quoted), "\"%s\": {", name);
    const char* entry = strstr(text, quoted);
    double count = 0, first[8], last[8], want_sum = 0, want_sumsq = 0;
    bool found = json_numbers(entry, "n", &count, 1) == 1 && json_numbers(entry, "first8", first, 8) == 8 &&
                 json_numbers(entry, "last8", last, 8) == 8 && json_numbers(entry, "sum_f64", &want_sum, 1) == 1 &&
                 json_numbers(entry, "sumsq_f64", &want_sumsq, 1) == 1;
    check_msg(found, "the fixture has no %s", name);
    if (!found) { return; }
    check_msg(count == (double)n, "%s has %zu values, want %.0f", name, n, count);
    for (int i = 0; i < 8; i++) {
        check_msg(x[i] == (float)first[i], "%s[%d] is %.9g, want %.9g", name, i, x[i], first[i]);
        float end = x[n - 8 + (size_t)i];
        check_msg(end == (float)last[i], "%s[n - %d] is %.9g, want %.9g", name, 8 - i, end, last[i]);
    }
    double sum = 0.0, sumsq = 0.0, sum_low = 0.0; // compensated sum: half an ulp of one weight is about 1e-9
    for (size_t i = 0; i < n; i++) {
        double s = sum + x[i];
        sum_low += fabs(sum) >= fabsf(x[i]) ? (sum - s) + x[i] : (x[i] - s) + sum;
        sum = s;
        sumsq += (double)x[i] * x[i];
    }
    check_msg(fabs(sum + sum_low - want_sum) <= 1e-10, "%s: sum %.17g, want %.17g", name, sum + sum_low, want_sum);
    check_msg(fabs(sumsq - want_sumsq) <= 1e-10 * want_sumsq, "%s: squares %.17g, want %.17g", name, sumsq, want_sumsq);
}

static void test_init_d12(void) {
    GPT2Config config;
    Error err;
    if (!config_from_descriptor(&config, "d12", &err)) { die("%s", err.text); }
    char* text = read_fixture();
    size_t total = num_parameters(&config);
    float* params = (float*)malloc_check(total * sizeof(float));
    for (size_t i = 0; i < total; i++) { params[i] = NAN; }
    gpt2_init_params(params, &config, 42);
    int num_random = 0;
    size_t V = (size_t)config.vocab_size, C = (size_t)config.channels;
    for (int p = 0; p < NUM_PARAMS; p++) {
        const ParamInfo* info = &gpt2_params[p];
        const float* tensor = params + param_offset(&config, p);
        size_t n = param_layer_size(&config, p);
        if (info->init == INIT_ONE || info->init == INIT_ZERO) {
            float want = info->init == INIT_ONE ? 1.0f : 0.0f;
            for (size_t i = 0; i < param_size(&config, p); i++) {
                check_msg(tensor[i] == want, "%s[%zu] is %g, want %g", info->name, i, tensor[i], want);
            }
            continue;
        }
        for (int layer = 0; layer < param_copies(&config, p); layer++, num_random++) {
            char name[32];
            snprintf(name, sizeof(name), "%s", info->name);
            if (param_per_layer(p)) { snprintf(name, sizeof(name), "h%d.%s", layer, info->name); }
            check_tensor(text, name, tensor + (size_t)layer * n, info->rows == DIM_VP ? V * C : n);
        }
    }
    check_msg(num_random == 50, "%d random tensors", num_random);
    for (size_t i = V * C; i < (size_t)config.padded_vocab_size * C; i++) { check(params[i] == 0.0f); }
    free(params);
    free(text);
}

// the order of the draws, with tensors of fewer than 16 values and of no multiple of 16
static void check_init_order(int untied_head) {
    GPT2Config config = {3, 5, 128, 2, 1, 3, 12, 1e-5f, 0, 0, 0, untied_head};
    size_t total = num_parameters(&config), C = 3;
    float* params = (float*)malloc_check(total * sizeof(float));
    gpt2_init_params(params, &config, 1234);
    const char* order[] = {"wte",     "wpe",  "lmhead",   "qkvw", "attprojw", "fcw",
                           "fcprojw", "qkvw", "attprojw", "fcw",  "fcprojw"};
    Mt19937 mt;
    mt19937_seed(&mt, 1234);
    for (int i = 0; i < 11; i++) {
        int p = 0;
        if (i == 2 && !untied_head) { continue; } // nothing is drawn for it
        while (strcmp(gpt2_params[p].name, order[i]) != 0) { p++; }
        size_t n = i == 0 || i == 2 ? 5 * C : param_layer_size(&config, p);
        float want[64];
        double std = strstr(order[i], "proj") ? 0.02 / sqrt(2.0 * 2) : 0.02;
        require(n <= 64);
        normal_fill(want, n, 0.0, std, &mt);
        const float* got = params + param_offset(&config, p) + (i >= 7 ? n : 0);
        check_msg(memcmp(got, want, n * sizeof(float)) == 0, "draw %d, %s", i, order[i]);
    }
    for (size_t i = 5 * C; untied_head && i < 128 * C; i++) { // padding
        check(params[param_offset(&config, NUM_PARAMS - 1) + i] == 0.0f);
    }
    free(params);
}

static void test_init_order(void) {
    check_init_order(0);
    check_init_order(1);
}

// ---- the small generator --------------------------------------------------------------

static void test_known_words(void) {
    uint64_t state = 1;
    check(random_u64(&state) == 0x47e4ce4b896cdd1dull);
    check(random_u64(&state) == 0xabcfa6a8e079651dull);
    check(random_u64(&state) == 0xb9d10d8feb731f57ull);
    check(splitmix64(0) == 0xe220a8397b1dcdafull);
    check(splitmix64(1234567) == 0x599ed017fb08fc85ull);
    uint64_t zero = 0;
    uint32_t a = random_u32(&zero), b = random_u32(&zero);
    check(a != 0 && b != 0 && a != b);
    for (int i = 0; i < 100000; i++) {
        float f = random_f32(&state);
        double d = random_f64(&state);
        check(f >= 0.0f && f < 1.0f && d >= 0.0 && d < 1.0);
    }
}

static void test_random_below(void) {
    uint64_t state = 99;
    uint32_t n = 3u << 30; // without rejection sampling every third value would come twice as often as the two after it
    int counts[3] = {0};
    for (int i = 0; i < 300000; i++) {
        uint32_t x = random_below(&state, n);
        check(x < n);
        counts[x % 3]++;
    }
    for (int i = 0; i < 3; i++) { check_near(counts[i], 100000, 1300); } // 5 sigma
    for (int i = 0; i < 10; i++) { check(random_below(&state, 1) == 0); }
}

static void test_permutation(void) {
    enum { N = 5000 };
    static uint32_t p[N], q[N];
    static bool seen[N];
    random_permutation(p, N, 3);
    random_permutation(q, N, 3);
    check(memcmp(p, q, sizeof(p)) == 0);
    for (int i = 0; i < N; i++) {
        check(p[i] < N && !seen[p[i]]);
        seen[p[i]] = true;
    }
    random_permutation(q, N, 4);
    int same = 0;
    for (int i = 0; i < N; i++) { same += p[i] == q[i]; }
    check_msg(same < 12, "two seeds agree in %d of %d places", same, N);
    random_permutation(p, 0, 1);
    random_permutation(p, 1, 1);
    check(p[0] == 0);
    int counts[256] = {0}; // how often each of the 24 permutations of 4 comes
    for (uint64_t seed = 0; seed < 24000; seed++) {
        random_permutation(p, 4, seed);
        counts[p[0] * 64 + p[1] * 16 + p[2] * 4 + p[3]]++;
    }
    double chi2 = 0.0;
    int orders = 0;
    for (int i = 0; i < 256; i++) {
        if (counts[i] == 0) { continue; }
        chi2 += (counts[i] - 1000.0) * (counts[i] - 1000.0) / 1000.0;
        orders++;
    }
    check(orders == 24);
    check_msg(chi2 < 49.7, "chi-square %.1f", chi2); // exceeded by chance 1 in 1000 times, at 23 degrees of freedom
}

static const Test tests[] = {
    {"mt19937", "the 10000th word of the standard's generator", test_mt19937},
    {"uniform_blocks", "blocks of uniforms are the uniforms one by one", test_uniform_blocks},
    {"normal_sizes", "torch's normal_ for n = 1, 5, 15, 16, 17, 40, bit for bit", test_normal_sizes},
    {"normal_cached", "the second of a pair waits for the next call", test_normal_cached},
    {"normal_moments", "mean, variance, skew and kurtosis", test_normal_moments},
    {"box_muller_paths", "the fast and the portable path agree bit for bit", test_box_muller_paths},
    {"init_d12", "GPT-2 124M from seed 42: all 50 random tensors as torch has them", test_init_d12},
    {"init_order", "order of the draws, tensors of odd sizes", test_init_order},
    {"known_words", "xorshift64* and splitmix64", test_known_words},
    {"random_below", "bounded draws are unbiased", test_random_below},
    {"permutation", "each order is as likely as the others", test_permutation},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
