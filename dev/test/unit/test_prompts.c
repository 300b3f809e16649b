// llmc/text_output.h, prompts.h and text_queue.h: where a text ends, what is printed when, in which order, from which random state,
// and which texts are side by side.
#include "../test.h"
#include "../../../llmc/text_queue.h"

// A vocabulary of these tokens.
static const char* const words[] = {"a", "ab", "b", "\n", "\n\nU", "ser", ":", "\xC3", "\xA9", "c", "User"};
enum { A, AB, B, NEWLINE, USER_1, USER_2, COLON, E_1, E_2, C, USER, NUM_WORDS };

static Tokenizer vocabulary(void) {
    static uint8_t bytes[64];
    static uint32_t offsets[NUM_WORDS + 1];
    Tokenizer t;
    memset(&t, 0, sizeof(t));
    t.vocab_size = NUM_WORDS;
    t.bytes = bytes;
    t.offsets = offsets;
    for (int i = 0; i < NUM_WORDS; i++) {
        offsets[i + 1] = offsets[i] + (uint32_t)strlen(words[i]);
        require(offsets[i + 1] <= sizeof(bytes));
        memcpy(bytes + offsets[i], words[i], strlen(words[i]));
    }
    return t;
}

// What a file has, from `from` on.
static const char* read_from(FILE* f, long from) {
    static char text[1 << 14];
    fflush(f);
    fseek(f, from, SEEK_SET);
    size_t n = fread(text, 1, sizeof(text) - 1, f);
    fseek(f, 0, SEEK_END);
    text[n] = '\0';
    return text;
}

// ---- stop strings -------------------------------------------------------------------------

// A text of these tokens (up to -1) is printed as `shown` after each of them; `stops` are separated by |. It ends at the
// last token, by a stop string or, if `whole`, without one.
static void check_stops(int line, const char* stops, const int* tokens, const char* const* shown, bool whole) {
    char copy[64];
    const char* list[8];
    int num_stops = 0;
    Tokenizer t = vocabulary();
    FILE* f = tmpfile();
    if (!f) { die("tmpfile: %s", strerror(errno)); }
    snprintf(copy, sizeof(copy), "%s", stops);
    for (char* s = strtok(copy, "|"); s; s = strtok(NULL, "|")) { list[num_stops++] = s; }
    TextOutput out = text_begin(&t, f);
    out.stops = list, out.num_stops = num_stops;
    int i = 0;
    for (; tokens[i] >= 0; i++) {
        bool stop = text_token(&out, tokens[i]), last = tokens[i + 1] < 0;
        const char* got = read_from(f, 0);
        if (strcmp(got, shown[i]) != 0) { test_fail(__FILE__, line, "token %d: '%s', want '%s'", i, got, shown[i]); }
        if (stop != (last && !whole)) { test_fail(__FILE__, line, "token %d: stop is %d", i, stop); }
    }
    text_end(&out);
    const char* got = read_from(f, 0);
    if (strcmp(got, shown[i]) != 0) { test_fail(__FILE__, line, "at the end: '%s', want '%s'", got, shown[i]); }
    check(out.length == strlen(shown[i]) && memcmp(out.text, shown[i], out.length) == 0); // what the log gets
    free(out.text);
    fclose(f);
}
#define TOKENS(...)                                                                                                    \
    (const int[]) { __VA_ARGS__, -1 }
#define SHOWN(...)                                                                                                     \
    (const char* const[]) { __VA_ARGS__ }

static void test_stops(void) {
    check_stops(__LINE__, "", TOKENS(A, B, C), SHOWN("a", "ab", "abc", "abc\n"), true);
    // it ends within a token, at a token's end, and over three tokens, of which none is printed early
    check_stops(__LINE__, "b", TOKENS(A, AB), SHOWN("a", "aa", "aa\n"), false);
    check_stops(__LINE__, "ab", TOKENS(C, AB), SHOWN("c", "c", "c\n"), false);
    check_stops(__LINE__, "\nUser:", TOKENS(C, NEWLINE, USER, COLON), SHOWN("c", "c", "c", "c", "c\n"), false);
    check_stops(__LINE__, "\nUser:", TOKENS(C, USER_1, USER_2, COLON), SHOWN("c", "c\n", "c\n", "c\n", "c\n\n"), false);
    // what was held back is printed as soon as it cannot be the string any more, or when the text ends
    check_stops(__LINE__, "\nUser:", TOKENS(NEWLINE, USER, A), SHOWN("", "", "\nUsera", "\nUsera\n"), true);
    check_stops(__LINE__, "\nUser:", TOKENS(NEWLINE, USER, NEWLINE, USER, COLON),
                SHOWN("", "", "\nUser", "\nUser", "\nUser", "\nUser\n"), false);
    check_stops(__LINE__, "\nUser:", TOKENS(C, NEWLINE, USER), SHOWN("c", "c", "c", "c\nUser\n"), true);
    // a string that begins within another beginning of it
    check_stops(__LINE__, "aab", TOKENS(A, A, A, B), SHOWN("", "", "a", "a", "a\n"), false);
    // several: the one that is complete first ends the text; of two in one token, the one that begins first
    check_stops(__LINE__, "abcc|bc", TOKENS(A, B, C), SHOWN("", "", "a", "a\n"), false);
    check_stops(__LINE__, "b|a", TOKENS(C, AB), SHOWN("c", "c", "c\n"), false);
    check_stops(__LINE__, "b|ab", TOKENS(C, AB), SHOWN("c", "c", "c\n"), false);
    // bytes, not characters, are compared; half a character is neither printed nor lost
    check_stops(__LINE__, "\xC3\xA9", TOKENS(A, E_1, E_2), SHOWN("a", "a", "a", "a\n"), false);
    check_stops(__LINE__, "\xA9", TOKENS(A, E_1, E_2), SHOWN("a", "a", "a", "a\xEF\xBF\xBD\n"), false);
    check_stops(__LINE__, "b", TOKENS(E_1, E_2, E_1), SHOWN("", "\xC3\xA9", "\xC3\xA9", "\xC3\xA9\xEF\xBF\xBD\n"),
                true);
}

// ---- the order of the texts -----------------------------------------------------------------

static void test_order(void) {
    char* texts[4];
    size_t bytes[4];
    int lengths[4] = {1, 1, 1, 1};
    Prompts p;
    memset(&p, 0, sizeof(p));
    p.B = 4, p.T = 1, p.texts = texts, p.bytes = bytes, p.lengths = lengths;
    for (int b = 0; b < 4; b++) {
        static char names[4][3] = {"p0", "p1", "p2", "p3"};
        texts[b] = names[b], bytes[b] = 2;
    }
    Tokenizer t = vocabulary();
    FILE* f = tmpfile();
    if (!f) { die("tmpfile: %s", strerror(errno)); }
    settings.stops.items[0] = "c", settings.stops.n = 1;
    Continuations c = continuations_begin(&p, &t, f);
    check_str(read_from(f, 0), "---- 1 of 4 ----\np0");
    check(!text_token(&c.texts[1], AB) && !text_token(&c.texts[2], B));
    check_str(read_from(f, 0), "---- 1 of 4 ----\np0"); // nothing of the others yet
    check(!text_token(&c.texts[0], A));
    check_str(read_from(f, 0), "---- 1 of 4 ----\np0a"); // the first one at once
    check(text_token(&c.texts[2], C));                   // each text has the stop strings
    c.counts[2] = 2;
    continuations_end(&c, 2);
    check_str(read_from(f, 0), "---- 1 of 4 ----\np0a");
    long at = (long)strlen(read_from(f, 0));
    continuations_end(&c, 0); // what the second has so far is printed, and the rest as it comes
    check_str(read_from(f, at), "\n---- 2 of 4 ----\np1ab");
    check(!text_token(&c.texts[1], A));
    check_str(read_from(f, at), "\n---- 2 of 4 ----\np1aba");
    at += (long)strlen(read_from(f, at));
    c.counts[1] = 2;
    continuations_end(&c, 1); // the third is complete: the fourth follows
    check_str(read_from(f, at), "\n---- 3 of 4 ----\np2b\n---- 4 of 4 ----\np3");
    check(c.num_complete == 3 && c.num_tokens == 4);
    at += (long)strlen(read_from(f, at));
    continuations_end(&c, 3);
    check_str(read_from(f, at), "\n");
    continuations_free(&c);
    fclose(f);
    settings.stops.n = 0;
}

// Each text has a random stream of its own, which the seed and the text's number decide and nothing else; that of the first
// is the sampler's.
static void test_streams(void) {
    Sampler a = sampler_make(1.0f, 0, 1.0f, splitmix64(1)),
            b = sampler_make(1.0f, 0, 1.0f, splitmix64(2)); // seeds 1 and 2
    check(prompts_rng(&a, 0) == a.rng);
    enum { TEXTS = 2000 };
    static uint64_t states[2 * TEXTS];
    for (int i = 0; i < TEXTS; i++) { states[2 * i] = prompts_rng(&a, i), states[2 * i + 1] = prompts_rng(&b, i); }
    for (int i = 0; i < 2 * TEXTS; i++) {
        for (int j = 0; j < i; j++) { check_msg(states[i] != states[j], "%d is %d", i, j); }
    }
}

// ---- texts side by side ---------------------------------------------------------------------------

enum { N = 60, LONGEST = 40, POSITIONS = 100, NEW = 70, MAX_SLOTS = 64, STOP = 5, VOCAB = 97 };
static int token_of(int text, int i) {
    return (text * 31 + i * 17) % VOCAB;
} // new token i of a text, where it ends or not

// A stand-in for the GPU: for each slot the text, its newest token, the number of that, and its position.
typedef struct {
    int text[MAX_SLOTS], token[MAX_SLOTS], i[MAX_SLOTS], position[MAX_SLOTS];
} Device;

static void run_passes(TextQueue* q, Device* d, int* passes) {
    Sampler sampler = sampler_make(1.0f, 0, 1.0f, 9);
    PromptPass p;
    for (int first = q->next; text_queue_pass(q, &sampler, VOCAB, &p); first = q->next) {
        check(p.n >= 1 && p.slot + p.n <= q->B && p.n * p.T <= text_queue_pass_tokens(q, q->B));
        check(p.T <= text_queue_capacity(q) && (first == 0 || p.T % 64 == 0 || p.T == text_queue_capacity(q)));
        for (int i = 0; i < p.n; i++) {
            int text = first + i, b = p.slot + i, length = q->lengths[text];
            check(q->slot[b] == text && d->position[b] == -1); // nobody is in this slot
            check(length <= p.T && p.last[i] == length - 1 && p.rng[i] == prompts_rng(&sampler, text));
            for (int t = 0; t < p.T; t++) { check(p.inputs[i * p.T + t] == (t < length ? (text + t) % VOCAB : 0)); }
            check(p.newest[i] == (text + length - 1) % VOCAB);
            uint32_t seen[4] = {0};
            for (int t = 0; t < length; t++) { seen_add(seen, (text + t) % VOCAB); }
            check(memcmp(seen, p.seen + (size_t)i * 4, sizeof(seen)) == 0);
            d->text[b] = text, d->i[b] = 0, d->token[b] = token_of(text, 0), d->position[b] = length;
        }
        ++*passes;
        prompt_pass_free(&p);
    }
}

// Continues the texts as generate() of train_gpt2.cu does: a step is in flight while the tokens of the one before are taken.
static void check_queue(int B, int num_tokens, int stop) {
    static int prompts[N * LONGEST], lengths[N], counts[N], made[N * NEW];
    int passes = 0, steps = 0;
    for (int text = 0; text < N; text++) {
        lengths[text] = text == 3 ? LONGEST : 1 + text * 7 % LONGEST;
        for (int t = 0; t < lengths[text]; t++) { prompts[text * LONGEST + t] = (text + t) % VOCAB; }
    }
    Device d;
    for (int b = 0; b < MAX_SLOTS; b++) { d.position[b] = d.text[b] = -1; }
    TextQueue q = text_queue_of(prompts, lengths, N, LONGEST, num_tokens, stop, POSITIONS, NULL, made, counts);
    text_queue_open(&q, B);
    run_passes(&q, &d, &passes);
    while (q.active > 0 && steps++ < 100000) {
        int read[MAX_SLOTS];
        memcpy(read, d.token, sizeof(read));
        check(q.active ==
              (N - (q.next - q.active) < B ? N - (q.next - q.active) : B)); // no slot is free while one waits
        for (int b = 0; b < B; b++) {
            if (text_queue_is_last(&q, b)) { d.position[b] = -1; }
        }
        for (int b = 0; text_queue_goes_on(&q) && b < B; b++) {
            if (d.position[b] < 0) { continue; }
            check_msg(d.position[b] < text_queue_capacity(&q), "text %d is past the cache", d.text[b]);
            d.token[b] = token_of(d.text[b], ++d.i[b]), d.position[b]++;
        }
        for (int b = 0; b < B; b++) {
            if (text_queue_take(&q, b, read[b])) { d.position[b] = -1; }
        }
        run_passes(&q, &d, &passes);
    }
    check(q.next == N && q.active == 0 && !q.failed);
    text_queue_close(&q);
    for (int text = 0; text < N; text++) {
        int room = POSITIONS - lengths[text] + 1, want = num_tokens < room ? num_tokens : room, n = 0;
        while (n < want && token_of(text, n) != stop) {
            check(made[text * num_tokens + n] == token_of(text, n));
            n++;
        }
        check_msg(counts[text] == n, "%d slots: text %d has %d tokens, want %d", B, text, counts[text], n);
    }
    check(passes >= (N + B - 1) / B && (stop >= 0 || B == 1 || passes < N));
}

static void test_queue(void) {
    const int slots[] = {1, 2, 7, 60, 64};
    for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
        check_queue(slots[i], NEW, -1);
        check_queue(slots[i], NEW, STOP);
        check_queue(slots[i], 5, STOP);
        check_queue(slots[i], 1, -1);
    }
}

static void test_queue_failure(void) {
    int prompts[2] = {1, 2}, lengths[2] = {1, 1}, counts[2];
    Sampler sampler = sampler_make(0.0f, 0, 1.0f, 1);
    PromptPass p;
    TextQueue q = text_queue_of(prompts, lengths, 2, 1, 9, -1, 100, NULL, NULL, counts);
    text_queue_open(&q, 2);
    check(text_queue_pass(&q, &sampler, VOCAB, &p) && p.n == 2 && p.T == 1);
    prompt_pass_free(&p);
    check(!text_queue_take(&q, 0, 4) && !q.failed);
    check(text_queue_take(&q, 1, -1) && q.failed && q.active == 1); // the other text goes on
    check(!text_queue_take(&q, 0, 4) && counts[0] == 2 && counts[1] == 0);
    text_queue_close(&q);
}

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"stops", "--stop: within a token, over tokens, several; nothing of it is printed early", test_stops},
        {"order", "texts that end in any order are printed in the order of the prompts", test_order},
        {"streams", "a random state for each text", test_streams},
        {"queue", "many texts in few slots: each gets its own tokens, ends where it must, and no slot waits",
         test_queue},
        {"queue_failure", "logits that are not numbers end their text", test_queue_failure},
    };
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
