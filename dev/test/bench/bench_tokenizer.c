/* Speed of tokenizer.h on one and on several threads: MB/s (1e6 bytes) of encoding, from text to ids in memory.

   dev/test/bench/bench_tokenizer [FILE ...]     default: tinyshakespeare and this repository's sources

   Each text is repeated to 100 MB. Cold: the cache of pieces is emptied before each run; warm: it has seen the text.
   Prints best and median of 5. Takes GPT-2's vocabulary from $LLMC_DATA or ../shared/data; if it is not there, the
   byte-level one. Hostile: 1 MiB of one character, and of random bytes. */
#include "../../../llmc/tokenizer.h"
#include <glob.h>
#include <sched.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { BENCH_BYTES = 100000000, BENCH_RUNS = 5 };

static Tokenizer tokenizer;
static TokenBuffer buffer;

static int by_value(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Pins the calling thread to its CPU, so that it keeps its caches. Returns the old mask, for restoring it.
static cpu_set_t pin_to_current(void) {
    cpu_set_t old, one;
    sched_getaffinity(0, sizeof(old), &old);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);
    return old;
}

static void bench_one_thread(const char* name, const char* text, size_t n) {
    double ms[2][BENCH_RUNS];
    cpu_set_t old = pin_to_current();
    tokenizer_encode(&tokenizer, text, n, &buffer); // touches the pages of ids
    for (int run = 0; run < BENCH_RUNS; run++) {
        for (int warm = 0; warm < 2; warm++) {
            // makes the next call empty the cache
            if (!warm) { memset(buffer.cache_owner, 0xFF, sizeof(buffer.cache_owner)); }
            buffer.count = 0;
            double start = time_ms();
            tokenizer_encode(&tokenizer, text, n, &buffer);
            ms[warm][run] = time_ms() - start;
        }
    }
    sched_setaffinity(0, sizeof(old), &old);
    for (int warm = 0; warm < 2; warm++) {
        qsort(ms[warm], BENCH_RUNS, sizeof(double), by_value);
        printf("%-24s %6.1f MB  1 thread   %-4s  best %6.1f  median %6.1f MB/s  %.2f bytes/token\n", name,
               (double)n / 1e6, warm ? "warm" : "cold", (double)n / 1e3 / ms[warm][0],
               (double)n / 1e3 / ms[warm][BENCH_RUNS / 2], (double)n / (double)buffer.count);
    }
}

// Each thread encodes its share of 1 MB chunks.
static void bench_threads(const char* name, const char* text, size_t n) {
#ifdef _OPENMP
    size_t chunk = 1 << 20;
    for (int threads = 2; threads <= omp_get_num_procs(); threads *= 2) {
        double best = 1e30;
        for (int run = 0; run < 3; run++) {
            double start = time_ms();
#pragma omp parallel num_threads(threads)
            {
                TokenBuffer b;
                memset(&b, 0, sizeof(b));
#pragma omp for schedule(dynamic)
                for (size_t at = 0; at < n; at += chunk) {
                    b.count = 0;
                    tokenizer_encode(&tokenizer, text + at, n - at < chunk ? n - at : chunk, &b);
                }
                token_buffer_free(&b);
            }
            double ms = time_ms() - start;
            if (ms < best) { best = ms; }
        }
        printf("%-24s %6.1f MB  %d threads  cold  best %6.1f MB/s\n", name, (double)n / 1e6, threads,
               (double)n / 1e3 / best);
    }
#else
    (void)name, (void)text, (void)n;
#endif
}

// Repeats text (size bytes) to BENCH_BYTES and measures.
static void bench_text(const char* name, const char* text, size_t size) {
    if (size == 0) { return; }
    char* all = (char*)malloc_check(BENCH_BYTES);
    for (size_t n = 0; n < BENCH_BYTES; n += size) {
        memcpy(all + n, text, size < BENCH_BYTES - n ? size : BENCH_BYTES - n);
    }
    bench_one_thread(name, all, BENCH_BYTES);
    bench_threads(name, all, BENCH_BYTES);
    free(all);
}

// Measures the concatenation of the files.
static void bench_files(const char* name, char** paths, size_t count) {
    char* text = NULL;
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        MappedFile file;
        Error err;
        if (!map_file(&file, paths[i], &err)) { die("%s", err.text); }
        text = (char*)realloc_check(text, n + file.size);
        memcpy(text + n, file.data, file.size);
        n += file.size;
        unmap_file(&file);
    }
    bench_text(name, text, n);
    free(text);
}

static void bench_hostile(void) {
    static const char* const units[] = {"a", " ", "0", ".", "\xFF", NULL};
    static const char* const names[] = {"'a' x 1 MiB", "' ' x 1 MiB",  "'0' x 1 MiB",
                                        "'.' x 1 MiB", "0xFF x 1 MiB", "1 MiB of random bytes"};
    size_t n = 1 << 20;
    char* text = (char*)malloc_check(n);
    for (int k = 0; k < 6; k++) {
        double best = 1e30;
        uint64_t state = 42;
        for (size_t i = 0; i < n; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text[i] = units[k] ? units[k][0] : (char)(state >> 56);
        }
        for (int run = 0; run < 3; run++) {
            buffer.count = 0;
            double start = time_ms();
            tokenizer_encode(&tokenizer, text, n, &buffer);
            double ms = time_ms() - start;
            if (ms < best) { best = ms; }
        }
        printf("%-24s %6.1f ms  %zu tokens\n", names[k], best, buffer.count);
    }
    free(text);
}

int main(int argc, char** argv) {
    const char* data = getenv("LLMC_DATA") ? getenv("LLMC_DATA") : "../shared/data";
    char path[4096];
    Error err;
    snprintf(path, sizeof(path), "%s/gpt2_tokenizer", data);
    double start = time_ms();
    if (tokenizer_load(&tokenizer, path, &err)) {
        printf("tokenizer: %d tokens, read in %.0f ms\n", tokenizer.vocab_size, time_ms() - start);
    } else {
        tokenizer_init_bytes(&tokenizer);
        printf("tokenizer: byte-level, no merges (%s)\n", err.text);
    }
    if (argc > 1) {
        for (int i = 1; i < argc; i++) { bench_files(argv[i], argv + i, 1); }
    } else {
        glob_t sources;
        char* shakespeare = path;
        snprintf(path, sizeof(path), "%s/tinyshakespeare.txt", data);
        if (file_exists(path)) { bench_files("tinyshakespeare", &shakespeare, 1); }
        if (glob("llmc/*.h", 0, NULL, &sources) == 0) {
            bench_files("llmc/*.h", sources.gl_pathv, sources.gl_pathc);
            globfree(&sources);
        }
    }
    bench_hostile();
    token_buffer_free(&buffer);
    tokenizer_free(&tokenizer);
    return 0;
}
