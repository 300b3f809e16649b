// llmc/sampler.h: cases computed by hand, frequencies compared with probabilities, and hostile logits.
#include "../test.h"
#include "../../../llmc/sampler.h"

static int sample(Sampler* s, const float* logits, int vocab_size) {
    void* scratch = malloc_check(sampler_scratch_bytes(vocab_size));
    int token = sample_token(s, logits, vocab_size, scratch);
    free(scratch);
    return token;
}

// Draws many tokens and compares their frequencies with the probabilities want (vocab_size). A token of probability 0
// must never be drawn.
static void check_frequencies(Sampler s, const float* logits, const double* want, int vocab_size, const char* what) {
    enum { DRAWS = 200000 };
    int* counts = (int*)calloc_check((size_t)vocab_size, sizeof(int));
    void* scratch = malloc_check(sampler_scratch_bytes(vocab_size));
    for (int i = 0; i < DRAWS; i++) {
        int token = sample_token(&s, logits, vocab_size, scratch);
        require(token >= 0 && token < vocab_size);
        counts[token]++;
    }
    double chi2 = 0.0, total = 0.0;
    int freedom = -1;
    for (int i = 0; i < vocab_size; i++) {
        check_msg(want[i] > 0.0 || counts[i] == 0, "%s: token %d was drawn", what, i);
        total += want[i];
        if (want[i] <= 0.0) { continue; }
        double expected = want[i] * DRAWS;
        chi2 += (counts[i] - expected) * (counts[i] - expected) / expected;
        freedom++;
    }
    require(fabs(total - 1.0) < 1e-6);
    // exceeded by chance far less than 1 in 1000 times, at any number of degrees of freedom
    double limit = freedom + 4.0 * sqrt(2.0 * freedom) + 8.0;
    check_msg(chi2 <= limit, "%s: chi-square %.1f with %d degrees of freedom", what, chi2, freedom);
    free(counts);
    free(scratch);
}

// softmax of logit / temperature over the tokens in keep; 0 for the others
static void softmax_of(const float* logits, const bool* keep, int vocab_size, double temperature, double* out) {
    double sum = 0.0;
    for (int i = 0; i < vocab_size; i++) { sum += out[i] = keep[i] ? exp(logits[i] / temperature) : 0.0; }
    for (int i = 0; i < vocab_size; i++) { out[i] /= sum; }
}

static void test_check(void) {
    Error err;
    struct {
        float temperature;
        int top_k;
        float top_p;
        const char* want; // the error; NULL: valid
        float min_p, penalty;
    } cases[] = {
        {0.0f, 0, 1.0f, NULL, 0.0f, 1.0f},
        {0.8f, 40, 0.9f, NULL, 0.1f, 1.3f},
        {-0.1f, 0, 1.0f, "temperature -0.1", 0.0f, 1.0f},
        {NAN, 0, 1.0f, "temperature", 0.0f, 1.0f},
        {INFINITY, 0, 1.0f, "temper", 0.0f, 1.0f},
        {1.0f, -1, 1.0f, "top-k -1", 0.0f, 1.0f},
        {1.0f, 0, 0.0f, "top-p 0", 0.0f, 1.0f},
        {1.0f, 0, 1.01f, "top-p 1.01", 0.0f, 1.0f},
        {1.0f, 0, NAN, "top-p", 0.0f, 1.0f},
        {1.0f, 1000000, 1e-9f, NULL, 1.0f, 0.5f},
        {1.0f, 0, 1.0f, "min-p -0.1", -0.1f, 1.0f},
        {1.0f, 0, 1.0f, "min-p 1.01", 1.01f, 1.0f},
        {1.0f, 0, 1.0f, "min-p", NAN, 1.0f},
        {1.0f, 0, 1.0f, "repetition penalty 0", 0.0f, 0.0f},
        {1.0f, 0, 1.0f, "repetition penalty", 0.0f, NAN},
        {1.0f, 0, 1.0f, "repetition penalty", 0.0f, INFINITY},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Sampler s = {cases[i].temperature, cases[i].top_k, cases[i].top_p, cases[i].min_p, cases[i].penalty, 1};
        bool ok = sampler_check(&s, &err);
        check_msg(ok == !cases[i].want, "case %zu", i);
        if (!ok) { check_msg(strstr(err.text, cases[i].want), "%s", err.text); }
    }
}

static void test_greedy(void) {
    Sampler s = sampler_make(0.0f, 0, 1.0f, 1);
    float logits[5] = {-1.0f, 3.0f, 2.0f, 3.0f, -5.0f};
    check(sample(&s, logits, 5) == 1); // of equal logits the lower id
    logits[3] = 3.5f;
    check(sample(&s, logits, 5) == 3);
    check(s.rng == 1);
    Sampler one = sampler_make(0.7f, 1, 1.0f, 1); // top-k 1: only the best token, whatever the temperature
    Sampler little = sampler_make(5.0f, 0, 1e-6f, 1);
    for (int i = 0; i < 100; i++) {
        check(sample(&one, logits, 5) == 3);
        check(sample(&little, logits, 5) == 3);
    }
    logits[1] = 3.5f;
    for (int i = 0; i < 100; i++) { check(sample(&one, logits, 5) == 1); }
}

static void test_frequencies(void) {
    const float logits[6] = {1.0f, -0.5f, 2.0f, 0.25f, -3.0f, 1.5f};
    const bool all[6] = {true, true, true, true, true, true};
    double want[6];
    float temperatures[3] = {0.5f, 1.0f, 3.0f};
    for (int t = 0; t < 3; t++) {
        Sampler s = sampler_make(temperatures[t], 0, 1.0f, 42);
        softmax_of(logits, all, 6, temperatures[t], want);
        check_frequencies(s, logits, want, 6, "temperature");
    }
    float shifted[6]; // softmax does not change if all logits are shifted
    for (int i = 0; i < 6; i++) { shifted[i] = logits[i] + 1000.0f; }
    Sampler s = sampler_make(1.0f, 0, 1.0f, 7);
    softmax_of(logits, all, 6, 1.0, want);
    check_frequencies(s, shifted, want, 6, "shifted");
}

static void test_top_k(void) {
    const float logits[6] = {1.0f, -0.5f, 2.0f, 0.25f, -3.0f, 1.5f};
    const bool keep[6] = {true, false, true, false, false, true};
    double want[6];
    Sampler s = sampler_make(2.0f, 3, 1.0f, 42);
    softmax_of(logits, keep, 6, 2.0, want);
    check_frequencies(s, logits, want, 6, "k = 3");
    const float ties[6] = {1.0f, 0.0f, 0.0f, 0.0f, 1.0f, -1.0f};
    const double two[6] = {0.5, 0.0, 0.0, 0.0, 0.5, 0.0};
    s.top_k = 2;
    check_frequencies(s, ties, two, 6, "k = 2, two equal");
    // three equal logits for two places: the lower ids win
    const bool lowest[6] = {true, true, true, false, true, false};
    s.top_k = 4;
    softmax_of(ties, lowest, 6, 2.0, want);
    check_frequencies(s, ties, want, 6, "k = 4, a tie at the edge");
}

static void test_top_p(void) {
    // probabilities 0.4, 0.3, 0.2, 0.1
    const float logits[4] = {logf(0.2f), logf(0.4f), logf(0.1f), logf(0.3f)};
    struct {
        float p;
        double want[4];
    } cases[] = {
        {0.39f, {0.0, 1.0, 0.0, 0.0}},         {0.41f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}},
        {0.69f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}}, {0.71f, {2.0 / 9, 4.0 / 9, 0.0, 3.0 / 9}},
        {0.91f, {0.2, 0.4, 0.1, 0.3}},         {0.9999999f, {0.2, 0.4, 0.1, 0.3}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Sampler s = sampler_make(1.0f, 0, cases[i].p, 9);
        check_frequencies(s, logits, cases[i].want, 4, "top-p");
    }
    // top-k 2 leaves probabilities 4/7 and 3/7: top-p 0.58 needs both tokens, 0.56 only one
    Sampler s = sampler_make(1.0f, 2, 0.56f, 9);
    const double one[4] = {0.0, 1.0, 0.0, 0.0}, both[4] = {0.0, 4.0 / 7, 0.0, 3.0 / 7};
    check_frequencies(s, logits, one, 4, "top-k then top-p 0.56");
    s.top_p = 0.58f;
    check_frequencies(s, logits, both, 4, "top-k then top-p 0.58");
    // the temperature is applied first: at 0.5 the probabilities are 16/30, 9/30, 4/30, 1/30
    Sampler cold = sampler_make(0.5f, 0, 0.8f, 9);
    const double sharp[4] = {0.0, 16.0 / 25, 0.0, 9.0 / 25};
    check_frequencies(cold, logits, sharp, 4, "temperature then top-p");
    const float equal[5] = {2.0f, 2.0f, 2.0f, 2.0f, 2.0f};
    const double lowest[5] = {1.0 / 3, 1.0 / 3, 1.0 / 3, 0.0, 0.0};
    Sampler fair = sampler_make(1.0f, 0, 0.5f, 9); // 2.5 of 5 equal tokens: three are kept, the lower ids
    check_frequencies(fair, equal, lowest, 5, "top-p of equals");
}

static void test_min_p(void) {
    // probabilities 0.4, 0.3, 0.2, 0.1; relative to the largest 1, 0.75, 0.5, 0.25
    const float logits[4] = {logf(0.2f), logf(0.4f), logf(0.1f), logf(0.3f)};
    struct {
        float min_p;
        double want[4];
    } cases[] = {
        {0.0f, {0.2, 0.4, 0.1, 0.3}},          {0.24f, {0.2, 0.4, 0.1, 0.3}}, {0.26f, {2.0 / 9, 4.0 / 9, 0.0, 3.0 / 9}},
        {0.51f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}}, {0.76f, {0.0, 1.0, 0.0, 0.0}}, {1.0f, {0.0, 1.0, 0.0, 0.0}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Sampler s = sampler_make(1.0f, 0, 1.0f, 9);
        s.min_p = cases[i].min_p;
        check_frequencies(s, logits, cases[i].want, 4, "min-p");
    }
    // the temperature is applied first: at 0.5 the ratios to the largest are 1, 0.5625, 0.25, 0.0625
    Sampler cold = {0.5f, 0, 1.0f, 0.3f, 1.0f, 9};
    const double sharp[4] = {0.0, 16.0 / 25, 0.0, 9.0 / 25};
    check_frequencies(cold, logits, sharp, 4, "temperature then min-p");
    // top-p adds up the probabilities before min-p removes any: 0.71 of all takes three tokens, 0.71 of the largest two one
    Sampler both = {1.0f, 0, 0.69f, 0.2f, 1.0f, 9};
    const double two[4] = {0.0, 4.0 / 7, 0.0, 3.0 / 7};
    check_frequencies(both, logits, two, 4, "top-p 0.69 and min-p 0.2");
    Sampler first = {1.0f, 0, 0.71f, 0.7f, 1.0f, 9};
    check_frequencies(first, logits, two, 4, "top-p 0.71, then min-p 0.7");
    Sampler third = {1.0f, 3, 1.0f, 0.3f, 1.0f, 9};
    const double three[4] = {2.0 / 9, 4.0 / 9, 0.0, 3.0 / 9};
    check_frequencies(third, logits, three, 4, "top-k 3 and min-p 0.3");
    const float ties[3] = {1.0f, 0.0f, 1.0f}; // min-p 1 keeps all of the most likely ones
    const double equal[3] = {0.5, 0.0, 0.5};
    Sampler one = {0.7f, 0, 1.0f, 1.0f, 1.0f, 9};
    check_frequencies(one, ties, equal, 3, "min-p 1 of equals");
}

static void test_repetition_penalty(void) {
    enum { V = 70 };
    float logits[V], want[V];
    uint32_t seen[3] = {0, 0, 0};
    const int in_text[] = {0, 31, 32, 63, 64, 69, 5};
    check(seen_words(V) == 3 && seen_words(64) == 2 && seen_words(1) == 1);
    for (int i = 0; i < V; i++) { want[i] = logits[i] = i % 2 ? 3.0f : -2.0f; }
    logits[5] = 0.0f, logits[64] = -INFINITY;
    for (size_t i = 0; i < sizeof(in_text) / sizeof(in_text[0]); i++) {
        int token = in_text[i];
        seen_add(seen, token);
        want[token] = token % 2 ? 2.0f : -3.0f;
    }
    want[5] = 0.0f, want[64] = -INFINITY;
    seen_add(seen, 69); // twice is the same as once
    sampler_penalize(logits, seen, V, 1.5f);
    for (int i = 0; i < V; i++) { check_msg(logits[i] == want[i], "token %d: %g, want %g", i, logits[i], want[i]); }
    // the penalty turns the greedy choice to the next token that the text does not have
    float greedy[4] = {1.0f, 4.0f, 3.9f, 2.0f};
    uint32_t one = 1u << 1;
    sampler_penalize(greedy, &one, 4, 1.2f);
    Sampler s = sampler_make(0.0f, 0, 1.0f, 1);
    check(sample(&s, greedy, 4) == 2);
}

static void test_hostile(void) {
    Sampler modes[] = {
        sampler_make(0.0f, 0, 1.0f, 1),   sampler_make(1.0f, 0, 1.0f, 1),   sampler_make(0.7f, 2, 1.0f, 1),
        sampler_make(1.0f, 0, 0.9f, 1),   sampler_make(1.0f, 3, 0.5f, 1),   sampler_make(9.0f, 0, 1.0f, 1),
        sampler_make(1e-38f, 0, 1.0f, 1), sampler_make(1e30f, 5, 0.99f, 0), {1.0f, 0, 1.0f, 0.5f, 1.0f, 1}};
    for (size_t m = 0; m < sizeof(modes) / sizeof(modes[0]); m++) {
        Sampler* s = &modes[m];
        float nans[3] = {NAN, NAN, NAN}, none[3] = {-INFINITY, NAN, -INFINITY};
        check(sample(s, nans, 3) == -1);
        check(sample(s, none, 3) == -1);
        float one[4] = {NAN, -INFINITY, -1e30f, NAN};
        float infinite[4] = {1e30f, INFINITY, NAN, -INFINITY};
        float single[1] = {-3.0f};
        for (int i = 0; i < 50; i++) {
            check(sample(s, one, 4) == 2);
            check(sample(s, infinite, 4) == 1);
            check(sample(s, single, 1) == 0);
            float wide[5] = {-1e30f, 1e30f, NAN, 3.4e38f, -3.4e38f};
            int token = sample(s, wide, 5);
            check_msg(token == 3 || (m == 7 && token != 2), "mode %zu drew %d", m, token);
            float two[3] = {NAN, 1e30f, 1e30f};
            token = sample(s, two, 3);
            check(token == 1 || (token == 2 && s->temperature > 0.0f));
        }
        float infinities[4] = {INFINITY, 0.0f, NAN, INFINITY};
        int counts[4] = {0};
        for (int i = 0; i < 200; i++) { counts[sample(s, infinities, 4)]++; }
        bool alone = s->temperature == 0.0f || m == 4; // greedy, or top-p 0.5
        check_msg(alone ? counts[0] == 200 : counts[0] > 50 && counts[3] > 50 && counts[0] + counts[3] == 200,
                  "mode %zu: %d and %d", m, counts[0], counts[3]);
    }
}

static void test_repeatable(void) {
    float logits[100];
    uint64_t rng = 5;
    for (int i = 0; i < 100; i++) { logits[i] = 4.0f * random_f32(&rng); }
    Sampler a = sampler_make(0.9f, 50, 0.95f, 123), b = a, c = a;
    c.rng = 124;
    int differ = 0;
    for (int i = 0; i < 200; i++) {
        int token = sample(&a, logits, 100);
        check(token == sample(&b, logits, 100));
        differ += token != sample(&c, logits, 100);
    }
    check(a.rng == b.rng && differ > 100);
}

static int by_order(const void* a, const void* b) {
    Candidate x = *(const Candidate*)a, y = *(const Candidate*)b;
    return candidate_before(x, y) ? -1 : candidate_before(y, x);
}

// the partial selections compared with a full sort, for many sizes, with and without ties
static void test_selection(void) {
    enum { MAX = 3000 };
    static float logits[MAX];
    static Candidate sorted[MAX], chosen[MAX];
    uint64_t rng = 77;
    Candidate few[3] = {{1.0f, 0}, {3.0f, 1}, {2.0f, 2}};
    check(candidates_select_mass(few, 2, 0.0) == 1 && few[0].id == 1); // at least one is selected
    check(candidates_select_mass(few, 3, 0.0) == 1 && few[0].id == 1);
    for (int round = 0; round < 600; round++) {
        int n = 1 + (int)random_below(&rng, round % 3 ? MAX : 12), k = 1 + (int)random_below(&rng, (uint32_t)n);
        if (round % 5 == 0) { k = 1 + k / 20; }
        int ties = round % 4;
        double sum = 0.0;
        for (int i = 0; i < n; i++) {
            float x = random_f32(&rng);
            if (ties == 1) { x = floorf(8.0f * x); }
            if (ties == 2) { x = (float)i; }
            if (ties == 3) { x = (float)(n - i); }
            logits[i] = sorted[i].score = x;
            sorted[i].id = i;
            sum += x;
        }
        memcpy(chosen, sorted, sizeof(chosen));
        qsort(sorted, (size_t)n, sizeof(Candidate), by_order);
        double mass = sum * random_f64(&rng), so_far = 0.0;
        int want = 0;
        do { so_far += sorted[want++].score; } while (want < n && so_far < mass * (1.0 - 1e-12));
        int got = candidates_select_mass(chosen, n, mass * (1.0 - 1e-12));
        check_msg(got == want || ties == 0, "%d of %d hold the mass, want %d", got, n, want);
        check(abs(got - want) <= 1);
        qsort(chosen, (size_t)got, sizeof(Candidate), by_order);
        for (int i = 0; i < got; i++) { check(chosen[i].id == sorted[i].id); }

        check(sampler_top_k(chosen, logits, n, k) == k);
        qsort(chosen, (size_t)k, sizeof(Candidate), by_order);
        for (int i = 0; i < k; i++) { check(chosen[i].id == sorted[i].id); }
    }
}

static const Test tests[] = {
    {"check", "settings out of range are refused by name", test_check},
    {"greedy", "temperature 0, top-k 1 and a tiny top-p: the largest, lowest id of a tie", test_greedy},
    {"frequencies", "softmax at three temperatures", test_frequencies},
    {"top_k", "the k largest and no other, ties at the edge", test_top_k},
    {"top_p", "the fewest that reach p, after temperature and top-k", test_top_p},
    {"min_p", "tokens near the most likely one, after temperature, top-k and top-p", test_min_p},
    {"repetition_penalty", "positive logits of seen tokens are divided, negative ones multiplied",
     test_repetition_penalty},
    {"hostile", "NaN, infinities, +-1e30, extreme temperatures", test_hostile},
    {"repeatable", "the seed decides", test_repeatable},
    {"selection", "partial selections against a full sort", test_selection},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
