/*
Part of bench.h: tests of what one launch and a tolerance do not show: whether draws have the right probabilities, and whether
random bits differ between elements, launches and seeds. All bounds are six standard deviations, so a right kernel passes with
any seed, and a test with n draws finds a probability that is wrong by about 3 / sqrt(n).
*/
#pragma once

#include <math.h>
#include <string.h>

#include <functional>
#include <string>
#include <vector>

#include "../../llmc/cuda_common.cuh"

// The n elements at dev, as floats.
template <class T> inline std::vector<float> bench_download(const T* dev, size_t n) {
    std::vector<T> values(n);
    cudaCheck(cudaMemcpy(values.data(), dev, n * sizeof(T), cudaMemcpyDeviceToHost));
    return std::vector<float>(values.begin(), values.end());
}

// A sum of independent terms beside its expected value and variance.
struct BenchSum {
    double sum = 0, expected = 0, variance = 0;
    void add(bool bit, double p) { // a bit that is 1 with probability p
        sum += bit, expected += p, variance += p * (1 - p);
    }
    bool plausible() const { return fabs(sum - expected) <= 6 * sqrt(variance) + 1; }
    std::string text(const char* what) const {
        char line[192];
        snprintf(line, sizeof(line), "%s: %.0f, want %.0f +- %.0f (six standard deviations)", what, sum, expected,
                 6 * sqrt(variance) + 1);
        return plausible() ? "" : line;
    }
};

// Bits that are 1 with probability p each.
struct BenchBits {
    std::vector<float> p;
    std::vector<uint8_t> bit;
};
// The right number of ones, among the bits of similar p: a bias that cancels over all p would still be one.
inline std::string bench_unbiased(const BenchBits& x) {
    BenchSum bins[8];
    for (size_t i = 0; i < x.p.size(); i++) { bins[std::min(7, (int)(x.p[i] * 8))].add(x.bit[i], x.p[i]); }
    for (const BenchSum& bin : bins) {
        std::string text = bin.text("values rounded up, among those of similar probability");
        if (!text.empty()) { return text; }
    }
    return "";
}
// Returns the bits of piece i. begins: where each piece begins.
inline BenchBits bench_piece(const BenchBits& all, const std::vector<size_t>& begins, size_t i) {
    long begin = (long)begins[i], end = (long)(i + 1 < begins.size() ? begins[i + 1] : all.p.size());
    return {{all.p.begin() + begin, all.p.begin() + end}, {all.bit.begin() + begin, all.bit.begin() + end}};
}
// Bits i of a and i + shift of b are drawn independently of each other: they are equal as often as they should be.
inline std::string bench_independent(const BenchBits& a, const BenchBits& b, size_t shift, const std::string& what) {
    BenchSum equal;
    for (size_t i = 0; i < a.p.size() && i + shift < b.p.size(); i++) {
        double p = a.p[i], q = b.p[i + shift];
        equal.add(a.bit[i] == b.bit[i + shift], p * q + (1 - p) * (1 - q));
    }
    return equal.text(("equal directions of rounding " + what).c_str());
}

// A launch of a kernel that rounds stochastically to bf16: the exact results, and what has become of them.
struct BenchRounded {
    std::vector<float> exact, rounded;
};
inline uint32_t bench_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
// p: of rounding away from 0. Returns what is wrong if a result is neither of its two neighbours.
inline std::string bench_rounding_bits(const BenchRounded& x, BenchBits* out) {
    for (size_t i = 0; i < x.exact.size(); i++) {
        uint32_t exact = bench_float_bits(x.exact[i]), up = bench_float_bits(x.rounded[i]) - (exact & 0xFFFF0000u);
        if (up != 0 && up != 0x10000u) {
            char text[160];
            snprintf(text, sizeof(text), "element %zu is %.9g, which is not a neighbour of %.9g", i,
                     (double)x.rounded[i], (double)x.exact[i]);
            return text;
        }
        out->p.push_back((float)(exact & 0xFFFFu) / 65536);
        out->bit.push_back(up != 0);
    }
    return "";
}
// One update of a million weights. update(params, master, zeros) sets both; master (n) has the start values, zeros is (3 * n).
inline BenchRounded bench_round_weights(const std::function<void(floatX*, float*, float*, size_t)>& update) {
    size_t n = (size_t)1 << 20;
    std::vector<float> weights(n);
    for (size_t i = 0; i < n; i++) { weights[i] = (float)(hash_bits((uint32_t)i, 1) % 4096 + 1) / 1024; }
    float* memory = (float*)device_malloc_check(5 * n * sizeof(float), "stochastic rounding");
    floatX* params = (floatX*)(memory + 4 * n);
    cudaCheck(cudaMemset(memory, 0, 5 * n * sizeof(float)));
    cudaCheck(cudaMemcpy(memory, weights.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    update(params, memory, memory + n, n);
    BenchRounded result = {bench_download(memory, n), bench_download(params, n)};
    cudaCheck(cudaFree(memory));
    return result;
}
// Stochastic rounding is unbiased, and each element, update and seed has bits of its own. run(seed, update) is one launch from
// the same start values. Ranks have different seeds. pieces: where those of the results begin, such as matrices and vectors.
inline std::string bench_stochastic_rounding(const std::function<BenchRounded(uint32_t, int)>& run,
                                             const std::vector<size_t>& pieces = {}) {
    BenchBits bits[3];
    std::string wrong;
    const int launches[3][2] = {{1337, 5}, {1337, 6}, {1338, 5}}; // seed, update
    for (int i = 0; i < 3 && wrong.empty(); i++) {
        wrong = bench_rounding_bits(run((uint32_t)launches[i][0], launches[i][1]), &bits[i]);
    }
    if (wrong.empty()) { wrong = bench_unbiased(bits[0]); }
    if (wrong.empty()) { wrong = bench_independent(bits[0], bits[1], 0, "in two updates"); }
    if (wrong.empty()) { wrong = bench_independent(bits[0], bits[2], 0, "with two seeds"); }
    for (size_t shift = 1; shift < bits[0].p.size() && wrong.empty(); shift *= 2) { // also from matrix to matrix
        wrong = bench_independent(bits[0], bits[0], shift, "in elements " + std::to_string(shift) + " apart");
    }
    for (size_t i = 0; i < pieces.size(); i++) {
        for (size_t j = i + 1; j < pieces.size() && wrong.empty(); j++) {
            std::string what = "in the pieces at " + std::to_string(pieces[i]) + " and " + std::to_string(pieces[j]);
            wrong = bench_independent(bench_piece(bits[0], pieces, i), bench_piece(bits[0], pieces, j), 0, what);
        }
    }
    return wrong;
}

// Pearson's chi-square test: draws (any number) of values with the probabilities p. Values too rare for it are joined.
inline std::string bench_frequencies(const std::vector<int>& draws, const std::vector<double>& p) {
    std::vector<double> counts(p.size());
    for (int x : draws) {
        if (x < 0 || x >= (int)p.size() || p[(size_t)x] == 0) {
            return "a draw of " + std::to_string(x) + ", which has no probability";
        }
        counts[(size_t)x]++;
    }
    double n = (double)draws.size(), sum = 0, rare = 0, rare_count = 0;
    int freedom = -1;
    auto add = [&](double count, double expected) {
        sum += (count - expected) * (count - expected) / expected;
        freedom++;
    };
    for (size_t i = 0; i < p.size(); i++) {
        if (n * p[i] >= 5) {
            add(counts[i], n * p[i]);
        } else {
            rare += n * p[i], rare_count += counts[i];
        }
    }
    if (rare > 1) { add(rare_count, rare); }
    double most = freedom + 6 * sqrt(2.0 * freedom) + 6;
    char text[160];
    snprintf(text, sizeof(text),
             "frequencies of %.0f draws: chi-square %.1f, want at most %.1f with %d degrees of freedom", n, sum, most,
             freedom);
    return sum <= most ? "" : text;
}
// Draws from p that must not depend on each other agree as often as chance lets them.
inline std::string bench_independent_draws(const std::vector<int>& a, const std::vector<int>& b,
                                           const std::vector<double>& p, const char* what) {
    BenchSum equal;
    double chance = 0;
    for (double x : p) { chance += x * x; }
    for (size_t i = 0; i < a.size(); i++) { equal.add(a[i] == b[i], chance); }
    return equal.text(what);
}
