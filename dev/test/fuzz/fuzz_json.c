/* Fuzz target: the JSON reader. What it accepts must be consistent: every value is read, every key is found again.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_json.c -lm -o fuzz_json && ./fuzz_json */
#include "../../../llmc/json.h"

static uint64_t touch(const JsonValue* v) {
    uint64_t sum = v->type + (uint64_t)v->is_int;
    require(v->type != JSON_NUMBER || (v->number - v->number == 0 && (!v->is_int || v->number == (double)v->integer)));
    if (v->type == JSON_STRING) {
        require(v->string[v->length] == '\0');
        for (uint32_t i = 0; i < v->length; i++) { sum += (uint8_t)v->string[i]; }
    }
    for (uint32_t i = 0; i < v->count; i++) {
        const JsonValue* item = &v->items[i];
        require((v->type == JSON_OBJECT) == (item->key != NULL));
        if (item->key) { require(json_get_n(v, item->key, item->key_length) == item); }
        sum += touch(item);
    }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    JsonDoc doc;
    Error err;
    err.text[0] = '\0';
    if (json_parse(&doc, (const char*)data, size, "fuzz.json", &err)) {
        (void)touch(doc.root);
        (void)json_get(doc.root, "a");
        json_free(&doc);
    } else {
        require(strncmp(err.text, "fuzz.json: ", 11) == 0 && !strchr(err.text, '\n') && !doc.root);
    }
    char line[40];
    json_printable(line, sizeof(line), (const char*)data, size);
    for (size_t i = 0; line[i]; i++) { require((uint8_t)line[i] >= 0x20 && line[i] != 0x7F); }
    return 0;
}
