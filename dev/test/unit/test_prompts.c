// llmc/text_output.h and prompts.h: where a text ends, what is printed when, in which order, from which random state.
#include "../test.h"
#include "../../../llmc/prompts.h"

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

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"stops", "--stop: within a token, over tokens, several; nothing of it is printed early", test_stops},
        {"order", "texts that end in any order are printed in the order of the prompts", test_order},
        {"streams", "a random state for each text", test_streams},
    };
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
