// Token shards from hostile bytes: clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_shard.c -o fuzz_shard -lm -lpthread
//
// Random bytes hardly ever have a header that fits their size, so every input is tried as a file, and once more as the
// body of a file whose header is valid, except that the first two bytes may change one of its words.
#include "../../../llmc/dataloader.h"

static void parse(const uint8_t* data, size_t size, int vocab_size) {
    Error err;
    err.text[0] = '\0';
    size_t num_tokens = 0;
    bool ok = shard_parse(data, size, "input", vocab_size, &num_tokens, &err);
    if (!ok) {
        require(num_tokens == 0 && err.text[0] != '\0' && !strchr(err.text, '\n'));
        return;
    }
    require(size == SHARD_HEADER_BYTES + 2 * num_tokens);
    int* tokens = (int*)malloc_check(num_tokens * sizeof(int));
    int limit = vocab_size > 0 ? vocab_size : 65536;
    require(shard_read(data, 0, num_tokens, tokens, "input", limit, &err)); // shard_parse() has checked them
    for (size_t i = 0; i < num_tokens; i++) { require(tokens[i] >= 0 && tokens[i] < limit); }
    bool small = shard_read(data, 0, num_tokens, tokens, "input", 256, &err);
    for (size_t i = 0; small && i < num_tokens; i++) { require(tokens[i] < 256); }
    free(tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    parse(data, size, 50257);
    parse(data, size, 0);
    if (size < 2) { return 0; }
    // byte 0, if below 64, chooses a header word, to which byte 1 is added; byte 1 also chooses the vocabulary
    int32_t header[3] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)((size - 2) / 2)};
    if (data[0] < 64) { header[data[0] % 3] += (int8_t)data[1]; }
    size_t total = SHARD_HEADER_BYTES + size - 2;
    uint8_t* shard = (uint8_t*)calloc_check(total, 1); // exact size, so that a read past the end is detected
    memcpy(shard, header, sizeof(header));
    memcpy(shard + SHARD_HEADER_BYTES, data + 2, size - 2);
    parse(shard, total, data[1] % 2 ? 50257 : 0);
    free(shard);
    return 0;
}
