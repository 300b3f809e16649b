// llmc/dataloader.h: writing and rejecting shards, the order of the data, exact positions, and the loader's thread.
#include "../test.h"
#include "../../../llmc/dataloader.h"

enum { VOCAB = 50257 };

static const char* path_of(const char* name) { // valid for the next three calls
    static char paths[4][256];
    static int turn = 0;
    char* path = paths[turn++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", test_dir(), name);
    return path;
}

static void write_shard(const char* path, const uint16_t* tokens, size_t n) {
    ShardWriter w;
    Error err;
    if (!shard_writer_open(&w, path, &err)) { die("%s", err.text); }
    shard_writer_put(&w, tokens, n);
    if (!shard_writer_close(&w, &err)) { die("%s", err.text); }
}

// writes tokens first, first + 1, ..., so that a token shows where it comes from
static void write_count(const char* path, int first, size_t n) {
    uint16_t* tokens = (uint16_t*)malloc_check(n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) { tokens[i] = (uint16_t)(first + (int)i); }
    write_shard(path, tokens, n);
    free(tokens);
}

static void write_bytes(const char* path, const void* data, size_t n) {
    FileWriter w;
    Error err;
    if (!writer_open(&w, path, &err)) { die("%s", err.text); }
    writer_put(&w, data, n);
    if (!writer_close(&w, &err)) { die("%s", err.text); }
}

// An open loader must not move in memory, so each slot has a static one.
static DataLoader* loader(int slot, const char* pattern, int B, int T, int rank, int num_ranks, bool shuffle,
                          uint64_t seed) {
    static DataLoader loaders[8];
    Error err;
    DataLoader* d = &loaders[slot];
    if (!dataloader_open(d, pattern, B, T, rank, num_ranks, VOCAB, shuffle, seed, &err)) { die("%s", err.text); }
    return d;
}

static void next(DataLoader* d, int* inputs, int* targets) {
    Error err;
    err.text[0] = '\0';
    bool ok = dataloader_next(d, inputs, targets, &err);
    check_msg(ok, "next: %s", err.text);
}

// ---- shards -----------------------------------------------------------------------

static void test_writer(void) {
    const char *path = path_of("w.bin"), *tmp = path_of("w.bin.tmp");
    ShardWriter w;
    Error err;
    check(shard_writer_open(&w, path, &err));
    uint16_t tokens[1000];
    for (int i = 0; i < 1000; i++) { tokens[i] = (uint16_t)(i * 65); }
    shard_writer_put(&w, tokens, 0);
    shard_writer_put(&w, tokens, 7);
    shard_writer_put(&w, tokens + 7, 993);
    check(!file_exists(path) && file_exists(tmp));
    check(shard_writer_close(&w, &err));
    check(file_exists(path) && !file_exists(tmp));
    MappedFile file;
    check(map_file(&file, path, &err));
    const int32_t* header = (const int32_t*)(const void*)file.data;
    check(file.size == 1024 + 2000 && header[0] == 20240520 && header[1] == 1 && header[2] == 1000);
    for (int i = 3; i < 256; i++) { check(header[i] == 0); }
    check(memcmp(file.data + 1024, tokens, 2000) == 0);
    unmap_file(&file);

    check(shard_writer_open(&w, path, &err)); // an old file stays until the new one is complete
    shard_writer_put(&w, tokens, 10);
    shard_writer_abort(&w);
    check(file_exists(path) && !file_exists(tmp));

    check(shard_writer_open(&w, path, &err));
    w.num_tokens = INT32_MAX; // as if that many tokens had been written
    shard_writer_put(&w, tokens, 1);
    check(!shard_writer_close(&w, &err));
    check_msg(strstr(err.text, "more than 2147483647 tokens"), "%s", err.text);
    check(file_exists(path) && !file_exists(tmp));

    check(!shard_writer_open(&w, path_of("nowhere/w.bin"), &err));
    check(!shard_writer_open(&w, test_dir(), &err));
    check_msg(strstr(err.text, "is a directory"), "%s", err.text);
}

static void test_parse(void) {
    uint8_t good[1024 + 8] = {0};
    int32_t header[3] = {20240520, 1, 4};
    uint16_t tokens[4] = {0, 50256, 17, 3};
    memcpy(good, header, sizeof(header));
    memcpy(good + 1024, tokens, sizeof(tokens));
    size_t n = 0;
    Error err;
    check(shard_parse(good, sizeof(good), "s", VOCAB, &n, &err) && n == 4);
    check(shard_parse(good, sizeof(good), "s", 0, &n, &err) && n == 4);
    check(!shard_parse(good, sizeof(good), "s", 50256, &n, &err) && n == 0);
    check_str(err.text,
              "s: token 1 is id 50256, but the model's vocabulary ends at 50255: was it made for another tokenizer?");
    for (size_t size = 0; size < sizeof(good); size++) {
        uint8_t* copy = (uint8_t*)malloc_check(size); // exact size, so that a sanitizer detects a read past the end
        memcpy(copy, good, size);
        check_msg(!shard_parse(copy, size, "s", VOCAB, &n, &err), "%zu bytes are enough", size);
        free(copy);
        char want[100];
        const char* cut = "s: is a token shard cut short: %zu bytes, the header alone has 1024; make it again";
        snprintf(want, sizeof(want), cut, size);
        if (size > 0 && size < 1024) { check_str(err.text, want); }
    }
    struct {
        int32_t magic, version, count;
        const char* want;
    } bad[] = {
        {20240801, 7, 4, "is a Llama-3 shard"},
        {20240326, 3, 4, "is a model file of llm.c, not a token shard: make shards"},
        {20240328, 2, 4, "tokenizer"},
        {20240522, 1, 4, "multiple-choice"},
        {-7, 1, 4, "begins with -7, want 20240520"},
        {20240520, 2, 4, "version 2"},
        {20240520, 1, 3, "says 3 tokens, that is 1030 bytes, but the file has 1032: overwritten in part?"},
        {20240520, 1, 5, "says 5 tokens, that is 1034 bytes, but the file has 1032: cut short?"},
        {20240520, 1, -1, "says -1 tokens"},
        {20240520, 1, INT32_MAX, "cut short?"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int32_t h[3] = {bad[i].magic, bad[i].version, bad[i].count};
        memcpy(good, h, sizeof(h));
        check(!shard_parse(good, sizeof(good), "s", VOCAB, &n, &err));
        check_msg(strncmp(err.text, "s: ", 3) == 0 && strstr(err.text, bad[i].want), "%s", err.text);
    }
    const char* texts[] = {"hi", "First Citizen: before we proceed\r\n\tany further", "{\"text\": \"\xc3\xa9\"}"};
    for (int i = 0; i < 3; i++) {
        check(!shard_parse((const uint8_t*)texts[i], strlen(texts[i]), "s", VOCAB, &n, &err));
        check_str(err.text, "s: looks like text: make shards of it with dev/data/tokenize");
    }
    check(!shard_parse((const uint8_t*)"\x88\xD8\x34\x02\0", 5, "s", VOCAB, &n, &err)); // all but the magic's last byte
    check_str(err.text, "s: is not a token shard: begins with 37017736, want 20240520");
    const char* lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:00";
    check(!shard_parse((const uint8_t*)lfs, strlen(lfs), "s", VOCAB, &n, &err));
    check_msg(strstr(err.text, "git-LFS pointer"), "%s", err.text);
    check(!shard_parse((const uint8_t*)"", 0, "s", VOCAB, &n, &err));
    check_msg(strstr(err.text, "is empty"), "%s", err.text);
}

static void test_open_errors(void) {
    DataLoader d;
    Error err;
    write_count(path_of("e1.bin"), 0, 100);
    write_count(path_of("e2.bin"), 0, 32);
    write_bytes(path_of("text.txt"), "To be", 5);
    struct {
        const char* name;
        int B, T, rank, num_ranks, vocab;
        const char* want;
    } cases[] = {
        {"none*.bin", 2, 8, 0, 1, VOCAB, "no file matches"},
        {"none*.bin", 2, 8, 0, 1, VOCAB, "none*.bin"},
        {"e2.bin", 2, 8, 0, 2, VOCAB,
         "e2.bin: has 32 tokens, one batch needs 2 x 2 ranks x 8 + 1 = 33: use smaller -b or -t"},
        {"e2.bin", 1, 32, 0, 1, VOCAB, "e2.bin: has 32 tokens, one batch needs 1 x 32 + 1 = 33: use a smaller -t"},
        {"e2.bin", 8, 32, 0, 1, VOCAB, ": use a smaller -t"},
        {"e2.bin", 32, 4, 0, 1, VOCAB, ": use a smaller -b"},
        {"e2.bin", 32, 32, 0, 1, VOCAB, ": use smaller -b and -t"},
        {"e2.bin", 1, 1, 0, 32, VOCAB, ": make longer shards"},
        {"e?.bin", 0, 8, 0, 1, VOCAB, "batches of 0 x 8"},
        {"e?.bin", 2, -1, 0, 1, VOCAB, "batches of 2 x -1"},
        {"e?.bin", 2, 8, 2, 2, VOCAB, "rank 2 of 2"},
        {"e?.bin", 2, 8, 0, 1, 0, "vocabulary 0"},
        {"e?.bin", INT32_MAX, INT32_MAX, 0, INT32_MAX, VOCAB, "more than a shard can hold"},
        {"e?.bin", 65536, 32768, 0, 1, VOCAB, "more than a shard can hold"},
        {"*", 1, 8, 0, 1, VOCAB, "looks like text"},
        {"*", 1, 8, 0, 1, VOCAB, " files, and must match shards only"},
        {".", 1, 8, 0, 1, VOCAB, "is a directory"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool ok = dataloader_open(&d, path_of(cases[i].name), cases[i].B, cases[i].T, cases[i].rank, cases[i].num_ranks,
                                  cases[i].vocab, i % 2, 1, &err);
        check_msg(!ok, "case %zu opens", i);
        check_msg(ok || strstr(err.text, cases[i].want), "%s", err.text);
        check(!strchr(err.text, '\n'));
        dataloader_close(&d); // closing a loader that did not open is allowed
    }
}

// ---- the order of the data -----------------------------------------------------------

// n batches need one token more than they have inputs. Batches here are of 16, 32 or 48 tokens: 49 tokens are 48 + 1,
// 192 lack that one token, and 101 leave a remainder.
static const size_t order_sizes[3] = {101, 49, 192};

static void write_three(void) { // tokens 0.., 1000.., 2000..
    write_count(path_of("o_0.bin"), 0, order_sizes[0]);
    write_count(path_of("o_1.bin"), 1000, order_sizes[1]);
    write_count(path_of("o_2.bin"), 2000, order_sizes[2]);
}

static void test_order(void) {
    write_three();
    for (int num_ranks = 1; num_ranks <= 3; num_ranks++) {
        for (int rank = 0; rank < num_ranks; rank++) {
            enum { B = 2, T = 8 };
            DataLoader* d = loader(0, path_of("o_?.bin"), B, T, rank, num_ranks, false, 0);
            check(d->num_shards == 3 && d->num_tokens == 342);
            int64_t batches = 0;
            for (int pass = 0; pass < 3; pass++) {
                for (size_t shard = 0; shard < 3; shard++) {
                    for (size_t s = 0; (s + 1) * (size_t)num_ranks * B * T < order_sizes[shard]; s++) {
                        DataLoaderState at;
                        dataloader_state(d, &at);
                        check(at.epoch == pass && at.shard == (int64_t)shard);
                        check(at.position == (int64_t)s * num_ranks * B * T);
                        int inputs[B * T], targets[B * T];
                        next(d, inputs, targets);
                        int first = (int)shard * 1000 + ((int)s * num_ranks + rank) * B * T;
                        for (int i = 0; i < B * T; i++) {
                            check(inputs[i] == first + i && targets[i] == first + i + 1);
                        }
                        batches += pass == 0;
                    }
                }
            }
            check_msg(d->batches_per_epoch == batches, "%lld batches, counted %lld", (long long)d->batches_per_epoch,
                      (long long)batches);
            dataloader_reset(d);
            int inputs[B * T], targets[B * T];
            next(d, inputs, targets);
            check(inputs[0] == rank * B * T);
            dataloader_close(d);
            dataloader_close(d);
        }
    }
}

// each row comes once per epoch, over all ranks; the order depends on the epoch and the seed, and on nothing else
static void test_shuffle(void) {
    enum { T = 4, B = 3, R = 2, EPOCHS = 3 };
    write_count(path_of("s_0.bin"), 0, 24 * 5 + 1);
    write_count(path_of("s_1.bin"), 1000, 24 * 2 + 1);
    write_count(path_of("s_2.bin"), 2000, 24 * 7 + 4);
    enum { STEPS = 14, ROWS = STEPS * B * R };
    static int order[2][EPOCHS][ROWS];
    for (int seed = 0; seed < 2; seed++) {
        DataLoader* ranks[R];
        for (int r = 0; r < R; r++) { ranks[r] = loader(r, path_of("s_?.bin"), B, T, r, R, true, (uint64_t)seed); }
        check(ranks[0]->batches_per_epoch == STEPS);
        for (int epoch = 0; epoch < EPOCHS; epoch++) {
            static bool seen[3000];
            memset(seen, 0, sizeof(seen));
            for (int step = 0; step < STEPS; step++) {
                int shard_of_step = -1;
                for (int r = 0; r < R; r++) {
                    int inputs[B * T], targets[B * T];
                    next(ranks[r], inputs, targets);
                    for (int b = 0; b < B; b++) {
                        int first = inputs[b * T];
                        check(first % 1000 % T == 0 && !seen[first]);
                        seen[first] = true;
                        order[seed][epoch][(step * R + r) * B + b] = first;
                        if (shard_of_step < 0) { shard_of_step = first / 1000; }
                        check(first / 1000 == shard_of_step);
                        for (int t = 0; t < T; t++) {
                            check(inputs[b * T + t] == first + t && targets[b * T + t] == first + t + 1);
                        }
                    }
                }
            }
        }
        DataLoaderState at;
        dataloader_state(ranks[1], &at);
        check(at.epoch == EPOCHS && at.shard == 0 && at.position == 0);
        for (int r = 0; r < R; r++) { dataloader_close(ranks[r]); }
    }
    int ascending = 0, as_before = 0, as_other_seed = 0;
    for (int i = 1; i < ROWS; i++) {
        ascending += order[0][0][i] == order[0][0][i - 1] + T;
        as_before += order[0][0][i] == order[0][1][i];
        as_other_seed += order[0][0][i] == order[1][0][i];
    }
    check_msg(ascending < 12 && as_before < 30 && as_other_seed < 30, "%d %d %d", ascending, as_before, as_other_seed);
    bool first_shard_differs = false;
    for (int e = 1; e < EPOCHS; e++) { first_shard_differs |= order[1][e][0] / 1000 != order[1][0][0] / 1000; }
    check(first_shard_differs);
}

// ---- positions --------------------------------------------------------------------

static void test_restore(void) {
    enum { B = 2, T = 8, N = 60, MORE = 25 };
    write_three();
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        static int want[N + MORE][B * T];
        static DataLoaderState states[N + MORE];
        int targets[B * T], got[B * T];
        Error err;
        DataLoader* a = loader(0, path_of("o_?.bin"), B, T, 1, 2, shuffle, 5);
        for (int i = 0; i < N + MORE; i++) {
            dataloader_state(a, &states[i]);
            next(a, want[i], targets);
        }
        DataLoader* b = loader(1, path_of("o_?.bin"), B, T, 1, 2, shuffle, 5);
        for (int i = 0; i < N; i++) {
            DataLoader* d = i % 2 ? b : a; // one is in its first epoch, one in a later epoch
            if (!dataloader_restore(d, &states[i], &err)) { test_fail(__FILE__, __LINE__, "%s", err.text); }
            for (int j = i; j < i + MORE; j++) {
                DataLoaderState at;
                dataloader_state(d, &at);
                check(memcmp(&at, &states[j], sizeof(at)) == 0);
                next(d, got, targets);
                check_msg(memcmp(got, want[j], sizeof(got)) == 0, "restored at %d, batch %d differs", i, j);
            }
        }
        dataloader_close(a);
        dataloader_close(b);
    }
}

// a run with 2 ranks of B = 2 is resumed with other ranks and other B: the sequence of rows is the same
static void test_restore_other_ranks(void) {
    enum { T = 8, ROWS = 64 };
    write_count(path_of("r_0.bin"), 0, 8 * ROWS + 1);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        int stream[ROWS], inputs[4 * T], targets[4 * T];
        DataLoader* whole = loader(0, path_of("r_?.bin"), 1, T, 0, 1, shuffle, 11);
        for (int i = 0; i < ROWS; i++) {
            next(whole, inputs, targets);
            stream[i] = inputs[0];
        }
        dataloader_close(whole);
        DataLoader* first = loader(0, path_of("r_?.bin"), 2, T, 1, 2, shuffle, 11);
        DataLoaderState at;
        Error err;
        for (int i = 0; i < 7; i++) { next(first, inputs, targets); } // 28 rows
        check(inputs[0] == stream[26] && inputs[T] == stream[27]);
        dataloader_state(first, &at);
        dataloader_close(first);
        int layouts[][2] = {{1, 1}, {1, 4}, {1, 3}, {4, 2}}; // B, ranks
        for (int k = 0; k < 4; k++) {
            int B = layouts[k][0], R = layouts[k][1];
            DataLoader* ranks[4];
            for (int r = 0; r < R; r++) {
                ranks[r] = loader(r, path_of("r_?.bin"), B, T, r, R, shuffle, 11);
                check_msg(dataloader_restore(ranks[r], &at, &err), "%s", err.text);
            }
            for (int row = 28; row + B * R <= ROWS; row += B * R) {
                for (int r = 0; r < R; r++) {
                    next(ranks[r], inputs, targets);
                    for (int b = 0; b < B; b++) { check(inputs[b * T] == stream[row + r * B + b]); }
                }
            }
            dataloader_state(ranks[0], &at);
            check(at.epoch == 1 && at.position == 0);
            at.epoch = 0;
            at.position = 28 * T;
            for (int r = 0; r < R; r++) { dataloader_close(ranks[r]); }
        }
        DataLoader* large = loader(0, path_of("r_?.bin"), 4, T, 0, 4, shuffle, 11); // 16 rows per step
        at.position = 60 * T;                                                       // only 4 rows are left in the epoch
        check(dataloader_restore(large, &at, &err));
        dataloader_state(large, &at);
        check(at.epoch == 1 && at.shard == 0 && at.position == 0);
        dataloader_close(large);
    }
}

// A run whose batches are too large for one of the shards is resumed with smaller ones, and the reverse: it is the same data, and
// what is left goes on in the same order.
static void test_restore_short_shard(void) {
    enum { T = 8 };
    write_count(path_of("s_0.bin"), 0, 8 * 32 + 1);
    write_count(path_of("s_1.bin"), 1000, 8 * 3 + 1);
    write_count(path_of("s_2.bin"), 2000, 8 * 32 + 1);
    write_count(path_of("s_3.bin"), 3000, 0);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        int inputs[4 * T], targets[4 * T];
        Error err;
        for (int first = 1; first <= 4; first += 3) { // rows of a batch before
            DataLoader* a = loader(0, path_of("s_?.bin"), first, T, 0, 1, shuffle, 3);
            DataLoader* b = loader(1, path_of("s_?.bin"), 5 - first, T, 0, 1, shuffle, 3);
            int rows[64 + 3], n = 0, skipped = 0, seen = 0;
            check(a->batches_per_epoch == (first == 1 ? 67 : 16) && a->num_tokens == 2 * 257 + 25);
            for (; n < 16; n += first) {
                next(a, inputs, targets);
                for (int i = 0; i < first; i++) { rows[n + i] = inputs[i * T]; }
            }
            DataLoaderState at;
            dataloader_state(a, &at);
            check_msg(dataloader_restore(b, &at, &err), "%s", err.text);
            for (dataloader_state(b, &at); at.epoch == 0; dataloader_state(b, &at)) {
                next(b, inputs, targets);
                for (int i = 0; i < 5 - first && n < 67; i++) { rows[n++] = inputs[i * T]; }
            }
            for (int i = 0; i < n; i++) {
                seen += rows[i] >= 1000 && rows[i] < 2000;
                for (int j = 0; j < i; j++) { skipped += rows[i] == rows[j]; }
            }
            check_msg(skipped == 0, "%d rows twice", skipped);
            // The short shard is read by the run with smaller batches, unless its turn was before. Batches of 4 leave out up to
            // 3 rows of a shard in which smaller ones were read first.
            int want = 64 + seen - (first == 1 ? (64 + seen) % 4 : 0);
            check_msg(n == want && (seen == 0 || seen == 3), "%d rows, %d of them from the short shard", n, seen);
            check(shuffle || seen == (first == 4 ? 3 : 0));
            dataloader_close(a);
            dataloader_close(b);
        }
    }
}

static void test_restore_refused(void) {
    enum { T = 8 };
    write_three();
    int inputs[T], targets[T], expect[T];
    Error err;
    DataLoader* d = loader(0, path_of("o_?.bin"), 1, T, 0, 1, true, 5);
    DataLoader* plain = loader(1, path_of("o_?.bin"), 1, T, 0, 1, false, 0);
    next(d, inputs, targets);
    DataLoaderState good;
    dataloader_state(d, &good);
    struct {
        int64_t epoch, shard, position;
        uint64_t seed;
        int64_t shuffle, T, num_shards, num_tokens;
        const char* want;
    } bad[] = {
        {0, 0, 8, 5, 1, 8, 2, 342, "342 tokens in 2 shards, now there are 342 in 3"},
        {0, 0, 8, 5, 1, 8, 3, 343, "343 tokens in 3 shards"},
        {0, 0, 8, 6, 1, 8, 3, 342, "seed 6 and T = 8, now seed 5 and T = 8"},
        {0, 0, 8, 5, 1, 4, 3, 342, "seed 5 and T = 4"},
        {0, 0, 8, 5, 0, 8, 3, 342, "in order, but this run does not"},
        {0, 0, 9, 5, 1, 8, 3, 342, "position 9 is not in it"},
        {0, 0, -8, 5, 1, 8, 3, 342, "position -8 is not in it"},
        {0, 0, 800, 5, 1, 8, 3, 342, "position 800 is not in it"},
        {0, 0, INT64_MAX / 8 * 8, 5, 1, 8, 3, 342, "is not in it"},
        {0, 3, 8, 5, 1, 8, 3, 342, "shard 3"},
        {0, -1, 8, 5, 1, 8, 3, 342, "shard -1"},
        {-1, 0, 8, 5, 1, 8, 3, 342, "epoch -1"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        DataLoaderState s = {bad[i].epoch,      bad[i].shard,      bad[i].position,
                             bad[i].seed,       bad[i].shuffle,    bad[i].T,
                             bad[i].num_shards, bad[i].num_tokens, 0};
        check_msg(!dataloader_restore(d, &s, &err), "case %zu", i);
        check_msg(strstr(err.text, bad[i].want), "%s", err.text);
    }
    check(!dataloader_restore(plain, &good, &err));
    check_msg(strstr(err.text, "shuffled, but this run does not"), "%s", err.text);
    next(d, inputs, targets); // the rejected positions do not disturb the loader
    check(dataloader_restore(d, &good, &err));
    next(d, expect, targets);
    check(memcmp(inputs, expect, sizeof(expect)) == 0);
    dataloader_close(d);
    dataloader_close(plain);
}

// The same number of tokens, but one of the blocks that the fingerprint covers differs; and the same tokens under another
// name. A position without a fingerprint is accepted.
static void test_other_tokens(void) {
    char path[300], other[300];
    snprintf(path, sizeof(path), "%s/same.bin", test_dir());
    snprintf(other, sizeof(other), "%s/renamed.bin", test_dir());
    for (int what = 0; what < 4; what++) { // 0: as saved; 1: first, 2: last token differs; 3: renamed
        static DataLoader d;
        static DataLoaderState saved;
        ShardWriter w;
        Error err;
        check(shard_writer_open(&w, what == 3 ? other : path, &err));
        for (int i = 0; i < 5000; i++) {
            uint16_t token = (uint16_t)((i * 7 + (what == 1 && i == 0) + (what == 2 && i == 4999)) % 100);
            shard_writer_put(&w, &token, 1);
        }
        check(shard_writer_close(&w, &err));
        check(dataloader_open(&d, what == 3 ? other : path, 2, 10, 0, 1, 200, true, 5, &err));
        if (what == 0) { dataloader_state(&d, &saved); }
        bool taken = dataloader_restore(&d, &saved, &err);
        check_msg(taken == (what == 0 || what == 3), "case %d", what);
        check(taken || strstr(err.text, "as many tokens as when it was saved, but other ones"));
        DataLoaderState old = saved;
        old.fingerprint = 0; // from a checkpoint of an earlier version
        check(dataloader_restore(&d, &old, &err));
        dataloader_close(&d);
    }
}

// ---- errors while reading --------------------------------------------------------------

static void test_bad_token(void) {
    enum { B = 1, T = 10 };
    uint16_t tokens[101];
    for (int i = 0; i < 101; i++) { tokens[i] = (uint16_t)i; }
    tokens[57] = 50257;
    write_shard(path_of("t_0.bin"), tokens, 101);
    int inputs[B * T], targets[B * T];
    Error err;
    DataLoader* d = loader(0, path_of("t_?.bin"), B, T, 0, 1, false, 0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 5; i++) { next(d, inputs, targets); }
        for (int again = 0; again < 2; again++) {
            check(!dataloader_next(d, inputs, targets, &err));
            check_msg(strstr(err.text, "t_0.bin: token 57 is id 50257, but the model's vocabulary ends at 50256"), "%s",
                      err.text);
        }
        DataLoaderState at;
        dataloader_state(d, &at);
        check(at.position == 50);
        dataloader_reset(d);
    }
    dataloader_close(d);
    tokens[57] = 0;
    tokens[50] = 60000; // in the batch before, it is only a target
    write_shard(path_of("t_0.bin"), tokens, 101);
    d = loader(0, path_of("t_?.bin"), B, T, 0, 1, false, 0);
    for (int i = 0; i < 4; i++) { next(d, inputs, targets); }
    check(!dataloader_next(d, inputs, targets, &err));
    check_msg(strstr(err.text, "token 50 is id 60000"), "%s", err.text);
    dataloader_close(d);
}

static void test_shard_vanishes(void) {
    enum { T = 64 };
    int inputs[T], targets[T];
    Error err;
    for (int how = 0; how < 3; how++) {
        write_count(path_of("v_0.bin"), 0, 20000);
        write_count(path_of("v_1.bin"), 0, 10000);
        DataLoader* d = loader(0, path_of("v_?.bin"), 1, T, 0, 1, false, 0);
        for (int i = 0; i < 10; i++) { next(d, inputs, targets); }
        if (how == 0) { check(truncate(path_of("v_0.bin"), 2048) == 0); }
        if (how == 1) { check(unlink(path_of("v_1.bin")) == 0); }
        if (how == 2) { write_count(path_of("v_1.bin"), 0, 9000); }
        bool ok = true;
        int handed_out = 10;
        while (ok && handed_out < 400) { handed_out += ok = dataloader_next(d, inputs, targets, &err); }
        check(!ok);
        const char* want[] = {"v_0.bin: has become shorter", "v_1.bin: No such file", "v_1.bin: has changed its size"};
        check_msg(strstr(err.text, want[how]), "%s", err.text);
        check_msg(how == 0 ? handed_out <= 12 : handed_out == 19999 / T, "%d batches", handed_out);
        dataloader_close(d);
    }
}

// a shard of more than 2 GiB, as a sparse file
static void test_large(void) {
    enum { B = 2, T = 1024 };
    const char* path = path_of("large.bin");
    const int64_t n = 1200000000, at = n - 1 - 3 * B * T;
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
    int32_t header[3] = {20240520, 1, (int32_t)n};
    uint16_t tail[3 * B * T + 1];
    for (int i = 0; i < 3 * B * T + 1; i++) { tail[i] = (uint16_t)(i + 1); }
    bool written = fd >= 0 && ftruncate(fd, 1024 + 2 * n) == 0 && pwrite(fd, header, 12, 0) == 12 &&
                   pwrite(fd, tail, sizeof(tail), 1024 + 2 * at) == (ssize_t)sizeof(tail);
    if (fd >= 0) { close(fd); }
    if (!written) {
        test_skip("no room for a sparse file of 2.4 GB in %s", test_dir());
        unlink(path);
        return;
    }
    static int inputs[B * T], targets[B * T];
    Error err;
    DataLoader* d = loader(0, path, B, T, 0, 1, false, 0);
    check(d->num_tokens == n && d->batches_per_epoch == (n - 1) / (B * T));
    DataLoaderState state;
    dataloader_state(d, &state);
    state.position = at;
    check(dataloader_restore(d, &state, &err));
    for (int s = 0; s < 3; s++) {
        next(d, inputs, targets);
        for (int i = 0; i < B * T; i++) { check(inputs[i] == s * B * T + i + 1 && targets[i] == inputs[i] + 1); }
    }
    dataloader_state(d, &state);
    check(state.epoch == 1 && state.position == 0);
    dataloader_close(d);
    d = loader(0, path, B, T, 0, 1, true, 3); // shuffles 1.2 million rows
    for (int s = 0; s < 50; s++) { next(d, inputs, targets); }
    dataloader_close(d);
    unlink(path);
}

// several loaders are opened and closed at arbitrary moments
static void test_close_anytime(void) {
    enum { B = 2, T = 8 };
    write_three();
    int inputs[B * T], targets[B * T];
    uint64_t rng = 1;
    for (int i = 0; i < 300; i++) {
        DataLoader* a = loader(0, path_of("o_?.bin"), B, T, 0, 2, i % 2, 1);
        DataLoader* b = loader(1, path_of("o_?.bin"), B, T, 1, 2, i % 2, 1);
        for (uint32_t k = random_below(&rng, 6); k > 0; k--) {
            next(a, inputs, targets);
            if (random_below(&rng, 3) == 0) { dataloader_reset(b); }
            next(b, inputs, targets);
        }
        if (random_below(&rng, 2)) { dataloader_reset(a); }
        dataloader_close(i % 3 ? a : b);
        dataloader_close(i % 3 ? b : a);
    }
}

static const Test tests[] = {
    {"writer", "a shard appears whole or not at all", test_writer},
    {"parse", "each rule of the header, every truncation, mistaken files", test_parse},
    {"open_errors", "one clear line for each bad pattern, shard and size", test_open_errors},
    {"order", "without shuffle: llm.c's order, 1 to 3 ranks, 3 epochs", test_order},
    {"shuffle", "every row once an epoch over all ranks", test_shuffle},
    {"restore", "from every position, the same batches follow", test_restore},
    {"restore_other_ranks", "another number of ranks goes on in the same stream", test_restore_other_ranks},
    {"restore_short_shard", "batches for which a shard is too short, and then others", test_restore_short_shard},
    {"restore_refused", "other data, seeds, row lengths, impossible positions", test_restore_refused},
    {"other_tokens", "data that was changed in place is noticed", test_other_tokens},
    {"bad_token", "an id past the vocabulary names shard and position", test_bad_token},
    {"shard_vanishes", "shards cut, removed, replaced during a run", test_shard_vanishes},
    {"large", "a shard of more than 2 GiB", test_large},
    {"close_anytime", "300 loaders opened and closed at odd moments", test_close_anytime},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
