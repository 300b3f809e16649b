// llmc/matmul.h against loops in double: odd sizes, strides, accumulation, every instruction set, any number of threads.
#include "../../../llmc/matmul.h"
#include "../test.h"
#include <sys/wait.h>

enum { NT, NN, TN, NUM_KINDS };

static float* random_floats(size_t n, uint32_t seed) {
    float* p = (float*)malloc_check(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        p[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return p;
}

// one product; rows have `pad` extra floats, which must stay unchanged. Fills out (M, N + pad).
static void multiply(float* out, int kind, const float* a, const float* b, const float* bias, size_t M, size_t N,
                     size_t K, size_t pad, bool accumulate) {
    if (kind == NT) { matmul_nt(out, N + pad, a, K + pad, b, K + pad, bias, M, N, K, accumulate); }
    if (kind == NN) { matmul_nn(out, N + pad, a, K + pad, b, N + pad, M, N, K, accumulate); }
    if (kind == TN) { matmul_tn(out, N + pad, a, M + pad, b, N + pad, M, N, K, accumulate); }
}

static void compare(int kind, size_t M, size_t N, size_t K, size_t pad, bool accumulate) {
    size_t size = (M + N + pad) * (K + pad) + (K + 1) * (M + N + 2 * pad); // enough for any orientation of a and b
    float *a = random_floats(size, 1), *b = random_floats(size, 2), *bias = random_floats(N, 3);
    float *out = random_floats(M * (N + pad), 4), *before = random_floats(M * (N + pad), 4);
    for (size_t i = 0; !accumulate && i < M * (N + pad); i++) {
        if (i % (N + pad) < N) { out[i] = NAN; } // exposes elements that are not written
    }
    multiply(out, kind, a, b, bias, M, N, K, pad, accumulate);
    size_t wrong = 0;
    for (size_t m = 0; m < M; m++) {
        for (size_t n = 0; n < N + pad; n++) {
            double want = accumulate || n >= N ? before[m * (N + pad) + n] : 0.0;
            if (kind == NT && n < N) { want += bias[n]; }
            double magnitude = fabs(want) + 1.0; // + 1, because the bias and the old value may cancel
            for (size_t k = 0; n < N && k < K; k++) {
                double x = kind == TN ? a[k * (M + pad) + m] : a[m * (K + pad) + k];
                double term = x * (kind == NT ? b[n * (K + pad) + k] : b[k * (N + pad) + n]);
                want += term;
                magnitude += fabs(term);
            }
            // K + 2 roundings, each of a value of at most `magnitude` (Higham 2002, eq. 3.5); u = 2^-24
            double bound = n < N ? (double)(K + 2) * 0x1p-24 * magnitude : 0.0;
            if (!(fabs(out[m * (N + pad) + n] - want) <= bound)) { wrong++; }
        }
    }
    check_msg(wrong == 0, "%s: kind %d, M %zu N %zu K %zu pad %zu add %d: %zu wrong", matmul_isa_names[matmul_isa()],
              kind, M, N, K, pad, accumulate, wrong);
    free(a), free(b), free(bias), free(out), free(before);
}

static void compare_all(void) {
    static const size_t sizes[] = {1, 2, 7, 8, 17, 48, 65, 100};
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        for (size_t i = 0; i < 8; i++) {
            for (size_t j = 0; j < 8; j++) {
                for (size_t k = 0; k < 8; k++) {
                    compare(kind, sizes[i], sizes[j], sizes[k], (i + k) % 3, (i + j) % 2);
                }
            }
        }
        // several blocks of K and of N; threads with different columns; b used in place (M <= 512), and packed
        compare(kind, 70, 800, 300, 0, false);
        compare(kind, 33, 416, 1700, 16, true);
        compare(kind, 33, 401, 1700, 1, false);
        compare(kind, 530, 400, 600, 0, true);
    }
}

// in a child process, because a process chooses its instruction set only once
static void on_isa(const char* isa) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("LLMC_CPU", isa, 1);
        compare_all();
        fflush(stdout);
        _exit(test_failures > 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    check_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: the child ended with status %d", isa, status);
}

static void test_portable(void) { on_isa("portable"); }

static void test_avx2(void) {
#ifdef MATMUL_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        on_isa("avx2");
        return;
    }
#endif
    test_skip("needs a CPU with AVX2 and FMA");
}

#if defined(MATMUL_X86) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COMPARES_SPEED 1
// the least time of a product with one thread, in a child process
static double seconds_on(const char* isa) {
    int ends[2];
    double best = 1e9;
    check(pipe(ends) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        enum { SIZE = 384 };
        setenv("LLMC_CPU", isa, 1);
#ifdef _OPENMP
        omp_set_num_threads(1);
#endif
        float *a = random_floats(SIZE * SIZE, 1), *b = random_floats(SIZE * SIZE, 2),
              *out = random_floats(SIZE * SIZE, 3);
        for (int i = 0; i < 25; i++) {
            struct timespec begin, end;
            clock_gettime(CLOCK_MONOTONIC, &begin);
            multiply(out, NN, a, b, NULL, SIZE, SIZE, SIZE, 0, false);
            clock_gettime(CLOCK_MONOTONIC, &end);
            double s = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
            if (s < best) { best = s; }
        }
        _exit(write(ends[1], &best, sizeof(best)) != sizeof(best));
    }
    close(ends[1]); // or read() would wait for a child that has crashed
    check(read(ends[0], &best, sizeof(best)) == sizeof(best));
    waitpid(pid, NULL, 0);
    close(ends[0]);
    return best;
}
#endif

// An AVX2 tile whose accumulators the compiler kept on the stack was slower than portable code; it should take 0.4 times as long.
static void test_avx2_is_fast(void) {
#ifdef COMPARES_SPEED
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        double avx2 = seconds_on("avx2"), portable = seconds_on("portable");
        check_msg(avx2 < 0.8 * portable, "a product takes %.2f ms with AVX2 and %.2f without", 1e3 * avx2,
                  1e3 * portable);
        return;
    }
#endif
    test_skip("needs a CPU with AVX2 and FMA, and optimised code");
}

static void test_avx512(void) {
#ifdef MATMUL_X86
    if (__builtin_cpu_supports("avx512f")) {
        on_isa("avx512");
        return;
    }
#endif
    test_skip("needs a CPU with AVX-512");
}

// must be the last test, because it starts threads in this process
static void test_any_threads(void) {
#ifdef _OPENMP
    enum { M = 70, N = 800, K = 1700 };
    float *a = random_floats(M * K, 1), *b = random_floats((size_t)N * K, 2), *out[2];
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        for (int i = 0; i < 2; i++) {
            omp_set_num_threads(i == 0 ? 1 : 3);
            out[i] = random_floats(M * N, 4);
            multiply(out[i], kind, a, b, NULL, M, N, K, 0, true);
        }
        check_msg(memcmp(out[0], out[1], M * N * sizeof(float)) == 0, "kind %d: one thread and three differ", kind);
        free(out[0]), free(out[1]);
    }
    free(a), free(b);
#else
    test_skip("built without OpenMP");
#endif
}

static const Test tests[] = {
    {"portable", "against plain loops, plain vector code", test_portable},
    {"avx2", "against plain loops, AVX2", test_avx2},
    {"avx2_is_fast", "faster than portable code", test_avx2_is_fast},
    {"avx512", "against plain loops, AVX-512", test_avx512},
    {"any_threads", "the same bits for one thread and three", test_any_threads},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
