/* Fuzz target: the reader of the rendezvous' messages, and what rank 0 makes of a hello. What is read lies within the input
   and its bounds, a prefix of it is never refused for another reason than the whole, and every reason is one printable line.

   If the first byte is odd, the rest is a list of edits (offset, new byte) of a valid hello; else it is the message.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_rendezvous.c -lm -o fuzz_rendezvous && ./fuzz_rendezvous */
#include "../../../llmc/rendezvous.h"

static void check_inside(RdzvText text, const uint8_t* data, size_t n, size_t max) {
    require(text.length <= max);
    if (text.length == 0) { return; }
    require((const uint8_t*)text.data >= data && (const uint8_t*)text.data + text.length <= data + n);
}

static void check_line(const char* text) {
    for (const uint8_t* p = (const uint8_t*)text; *p; p++) { require(*p >= 0x20 && *p != 0x7F); }
}

// Lets a rank 0 of three judge the message.
static void judge(const RdzvMessage* m, bool protocol) {
    RankEnv env;
    Rendezvous how;
    RdzvServer server;
    RdzvPeer peer;
    RdzvArrival arrivals[3];
    Error line;
    char reason[1024];
    memset(&env, 0, sizeof(env));
    memset(&how, 0, sizeof(how));
    memset(&server, 0, sizeof(server));
    memset(&peer, 0, sizeof(peer));
    memset(arrivals, 0, sizeof(arrivals));
    env.num_ranks = 3;
    how.ranks = &env;
    how.version = "1.0";
    how.flags = "batch=4\nlr=0.1\n";
    server.how = &how;
    server.arrivals = arrivals;
    strcpy(arrivals[2].host, "here");
    bool ends_all = rdzv_judge(&server, m, &peer, protocol, reason, sizeof(reason));
    require(!ends_all || reason[0]);
    if (!reason[0]) { require(m->rank == 1 && m->num_ranks == 3 && m->token == 0 && protocol); }
    error_set(&line, "%s", reason);
    check_line(line.text);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static uint8_t message[RENDEZVOUS_MAX_MESSAGE];
    RdzvMessage m, shorter;
    Error err, ignored;
    if (size == 0) { return 0; }
    bool edits = data[0] & 1;
    size_t n = rdzv_min(size - 1, sizeof(message));
    if (n > 0) { memcpy(message, data + 1, n); }
    if (edits) {
        RankEnv env;
        Rendezvous how;
        memset(&env, 0, sizeof(env));
        memset(&how, 0, sizeof(how));
        env.rank = 1;
        env.num_ranks = 3;
        how.ranks = &env;
        how.version = "1.0";
        how.flags = "batch=4\nlr=0.1\n";
        n = rdzv_write_hello(message, &how);
        for (size_t i = 1; i + 2 <= size; i += 2) { message[data[i] % n] = data[i + 1]; }
    }
    uint8_t* exact = (uint8_t*)malloc_check(n); // the sanitizer sees a read behind it
    if (n > 0) { memcpy(exact, message, n); }
    err.text[0] = '\0';
    int used = rdzv_parse(&m, exact, n, &err);
    require(used >= RDZV_BAD && (used <= 0 || (used >= RENDEZVOUS_HEADER && (size_t)used <= n)));
    require((used == RDZV_BAD) == (err.text[0] != '\0'));
    check_line(err.text);
    for (size_t k = 0; k < n; k += k < 64 ? 1 : 97) { // what a segment more or less must not change
        int before = rdzv_parse(&shorter, exact, k, &ignored);
        require(before == RDZV_INCOMPLETE || before == used);
    }
    if (used > 0) {
        check_inside(m.body, exact, n, RENDEZVOUS_MAX_HELLO);
        check_inside(m.version, exact, n, RENDEZVOUS_MAX_NAME);
        check_inside(m.host, exact, n, RENDEZVOUS_MAX_NAME);
        check_inside(m.flags, exact, n, RENDEZVOUS_MAX_FLAGS);
        require(m.kind >= RDZV_HELLO && m.kind <= RDZV_REFUSED);
    }
    if (used == RDZV_OTHER_PROTOCOL || (used > 0 && m.kind == RDZV_HELLO)) { judge(&m, used > 0); }
    free(exact);
    return 0;
}
