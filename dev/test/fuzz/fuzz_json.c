/* Fuzz target: the JSON reader, strict and lenient, and the reader of texts (llmc/text_input.h). What the former accepts must be
   consistent: every value is read, every key is found again. The latter must find the same values whether the text comes
   whole or in pieces.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_json.c -lm -o fuzz_json && ./fuzz_json */
#include "../../../llmc/text_input.h"

static uint64_t touch(const JsonValue* v, bool strict) {
    uint64_t sum = v->type + (uint64_t)v->is_int;
    require(v->type != JSON_NUMBER || (!strict && isnan(v->number)) ||
            (v->number - v->number == 0 && (!v->is_int || v->number == (double)v->integer)));
    if (v->type == JSON_STRING) {
        require(v->string[v->length] == '\0');
        for (uint32_t i = 0; i < v->length; i++) { sum += (uint8_t)v->string[i]; }
    }
    for (uint32_t i = 0; i < v->count; i++) {
        const JsonValue* item = &v->items[i];
        require((v->type == JSON_OBJECT) == (item->key != NULL));
        if (item->key) { require(json_get_n(v, item->key, item->key_length) == item); }
        sum += touch(item, strict);
    }
    return sum;
}

// Returns the number of values of a text that comes in pieces of at least `step` bytes, or SIZE_MAX on an error.
static size_t count_values(const char* text, size_t size, TextFormat format, size_t step) {
    JsonItems items = json_items(NULL, 0, format);
    size_t begin = 0, count = 0, length;
    Error err;
    const char* s;
    err.text[0] = '\0';
    for (size_t end = 0; end < size && !err.text[0]; begin += items.lines.at) {
        end = size - end < step ? size : end + step;
        items.lines.text = text + begin;
        items.lines.n = end - begin;
        items.lines.at = 0;
        items.more = end < size;
        while (json_items_next(&items, &s, &length, "fuzz", &err)) {
            require(s >= items.lines.text && s + length <= items.lines.text + items.lines.at);
            count++;
        }
    }
    return err.text[0] ? SIZE_MAX : count;
}

static void read_text_input(const uint8_t* data, size_t size) {
    const char* text = (const char*)data;
    char names[64];
    size_t mark, half = size / 2;
    Error err;
    bool ok = text_check(data, size, "fuzz", "", &mark, &err);
    require(ok ? mark <= size : !strchr(err.text, '\n'));
    TextFormat format = text_format(text, size, true, "a", names, sizeof(names)),
               begun = text_format(text, half, false, "a", names, sizeof(names));
    require(format != TEXT_UNDECIDED && (begun == TEXT_UNDECIDED || begun == format));
    require(text_section(text, size) <= size);
    if (format == TEXT_PLAIN) { format = json_form(text, size); }
    if (size < 4096) { require(count_values(text, size, format, 3) == count_values(text, size, format, size)); }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    JsonDoc doc;
    Error err;
    err.text[0] = '\0';
    if (json_parse(&doc, (const char*)data, size, "fuzz.json", &err)) {
        (void)touch(doc.root, true);
        (void)json_get(doc.root, "a");
        json_free(&doc);
    } else {
        require(strncmp(err.text, "fuzz.json: ", 11) == 0 && !strchr(err.text, '\n') && !doc.root);
    }
    JsonOdd odd = {0, 0, 0};
    if (json_parse_lenient(&doc, (const char*)data, size, "fuzz.json", &odd, &err)) {
        (void)touch(doc.root, false);
        json_free(&doc);
    }
    read_text_input(data, size);
    char line[40];
    json_printable(line, sizeof(line), (const char*)data, size);
    for (size_t i = 0; line[i]; i++) { require((uint8_t)line[i] >= 0x20 && line[i] != 0x7F); }
    return 0;
}
