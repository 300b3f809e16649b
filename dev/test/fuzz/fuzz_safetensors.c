/* Fuzz target: the safetensors reader. Every byte of every tensor that it returns is read.

   An input is used three times: as a file; as a header, with its size before it and, after it, data up to the largest
   end offset in it; and as a list of edits (two bytes of offset, one new byte) of a valid header.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_safetensors.c -lm -o fuzz_safetensors */
#include "../../../llmc/safetensors.h"

static volatile uint64_t fuzz_sum; // so that the reads are not optimised away

static void parse(const uint8_t* data, size_t size) {
    SafeTensors st;
    Error err;
    err.text[0] = '\0';
    if (!safetensors_parse(&st, data, size, "fuzz", &err)) {
        require(strncmp(err.text, "fuzz: ", 6) == 0 && !strchr(err.text, '\n'));
        return;
    }
    size_t total = 0;
    for (size_t i = 0; i < st.num_tensors; i++) {
        const SafeTensor* t = &st.tensors[i];
        require(safetensors_find(&st, t->name) == t);
        for (size_t k = 0; k < t->bytes; k++) { fuzz_sum += t->data[k]; }
        for (size_t k = 0; safe_is_float(t->dtype) && k < t->elements; k++) {
            float f;
            safetensors_to_float(&f, t, k, 1);
            fuzz_sum += safe_bits_from_float(f) + safe_bf16_from_float(f);
        }
        total += t->bytes;
    }
    require(total == size - 8 - (size_t)safe_header_bytes(data, size)); // every byte belongs to a tensor
    safetensors_close(&st);
}

static void parse_header(const uint8_t* data, size_t size) {
    JsonDoc doc;
    if (!json_parse(&doc, (const char*)data, size, "header", NULL)) { return; }
    int64_t body = 0;
    for (uint32_t i = 0; i < doc.root->count; i++) {
        const JsonValue* offsets = json_get(&doc.root->items[i], "data_offsets");
        for (uint32_t k = 0; offsets && k < offsets->count; k++) {
            int64_t end = offsets->items[k].integer;
            if (end > body && end < 4096) { body = end; }
        }
    }
    json_free(&doc);
    size_t whole = 8 + size + (size_t)body;
    uint8_t* file = (uint8_t*)calloc_check(whole, 1);
    for (int i = 0; i < 8; i++) { file[i] = (uint8_t)((uint64_t)size >> 8 * i); }
    memcpy(file + 8, data, size);
    parse(file, whole);
    free(file);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    uint8_t good[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[5],\"data_offsets\":[24,34]},"
        "\"c\":{\"dtype\":\"F4\",\"shape\":[4,1],\"data_offsets\":[34,36]}}";
    parse(data, size);
    parse_header(data, size);
    for (size_t i = 0; i + 3 <= size; i += 3) {
        good[(data[i] + (size_t)data[i + 1] * 256) % (sizeof(good) - 1)] = data[i + 2];
    }
    parse_header(good, sizeof(good) - 1);
    return 0;
}
