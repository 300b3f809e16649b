/* The safetensors reader, with one test per rule that it enforces and tests of files that people pass by mistake, and
   the writer.

   gcc -O3 -std=gnu11 -fopenmp dev/test/unit/test_safetensors.c -lm -lpthread -o dev/test/unit/test_safetensors */
#include "../../../llmc/safetensors.h"
#include "../test.h"

// A file in memory, in a heap block of exactly its size, so that a sanitizer detects a read past the end.
typedef struct {
    uint8_t* data;
    size_t size;
} Bytes;

static Bytes bytes_new(const void* data, size_t size) {
    Bytes b = {(uint8_t*)malloc_check(size), size};
    if (size > 0) { memcpy(b.data, data, size); }
    return b;
}

// Makes a file: u64 n, the header, then body_size bytes 0, 1, 2, ...
static Bytes make_file(uint64_t n, const char* header, size_t body_size) {
    size_t length = strlen(header);
    Bytes b = {(uint8_t*)malloc_check(8 + length + body_size), 8 + length + body_size};
    for (int i = 0; i < 8; i++) { b.data[i] = (uint8_t)(n >> 8 * i); }
    memcpy(b.data + 8, header, length);
    for (size_t i = 0; i < body_size; i++) { b.data[8 + length + i] = (uint8_t)i; }
    return b;
}

static bool parse(SafeTensors* st, Bytes b, Error* err) {
    err->text[0] = '\0';
    bool ok = safetensors_parse(st, b.data, b.size, "m.safetensors", err);
    check_msg(ok || (strncmp(err->text, "m.safetensors: ", 15) == 0 && !strchr(err->text, '\n')), "message '%s'",
              err->text);
    return ok;
}

// reason: must be in the error message; NULL: the file is valid. Frees b.
static void check_bytes(Bytes b, const char* what, const char* reason) {
    SafeTensors st;
    Error err;
    bool ok = parse(&st, b, &err);
    check_msg(ok == !reason, "%s: %s", what, ok ? "taken" : err.text);
    if (!ok && reason) { check_msg(strstr(err.text, reason) != NULL, "'%s' lacks '%s'", err.text, reason); }
    if (ok) { safetensors_close(&st); }
    free(b.data);
}

static void check_header(const char* header, size_t body_size, const char* reason) {
    check_bytes(make_file(strlen(header), header, body_size), header, reason);
}

// a tensor's entry in the header
#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

// ---- the rules ---------------------------------------------------------------------

static void test_reads(void) {
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "U8", "[3]", 24, 27) "," T("a", "F32", "[2,3]", 0, 24) "}";
    Bytes b = make_file(sizeof(header) - 1, header, 27);
    SafeTensors st;
    Error err;
    if (!parse(&st, b, &err)) {
        check_msg(false, "%s", err.text);
        return;
    }
    const SafeTensor *a = safetensors_find(&st, "a"), *last = safetensors_find(&st, "b");
    check(st.num_tensors == 2 && a == &st.tensors[0] && last == &st.tensors[1]);
    check(a->dtype == SAFE_F32 && a->num_dims == 2 && a->shape[0] == 2 && a->shape[1] == 3);
    check(a->elements == 6 && a->bytes == 24 && a->data == b.data + 8 + sizeof(header) - 1);
    check(last->bytes == 3 && last->data[0] == 24 && last->data[2] == 26);
    check(safetensors_find(&st, "c") == NULL && safetensors_find(&st, "") == NULL);
    check_str(json_get(st.metadata, "format")->string, "pt");
    safetensors_close(&st);
    free(b.data);
}

static void test_find_among_many(void) {
    enum { N = 300 };
    char *header = (char*)malloc_check(N * 80), *at = header + sprintf(header, "{"), name[16];
    for (int i = 0; i < N; i++) {
        int key = (i * 7 + 3) % N;
        at += sprintf(at, "%s\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i ? "," : "", key, i,
                      i + 1);
    }
    strcpy(at, "}");
    Bytes b = make_file(strlen(header), header, N);
    SafeTensors st;
    Error err;
    check(parse(&st, b, &err));
    for (int i = 0; i < N; i++) {
        sprintf(name, "t%d", (i * 7 + 3) % N);
        const SafeTensor* t = safetensors_find(&st, name);
        check(t && strcmp(t->name, name) == 0 && t->data[0] == (uint8_t)i);
    }
    check(safetensors_find(&st, "t300") == NULL && safetensors_find(&st, "t") == NULL);
    safetensors_close(&st);
    free(header);
    free(b.data);
}

static void test_header_size_limit(void) {
    for (uint64_t over = 0; over < 2; over++) { // "{}" and spaces
        uint64_t n = 100000000 + over;
        Bytes b = {(uint8_t*)malloc_check(8 + n), 8 + n};
        memset(b.data, ' ', b.size);
        for (int i = 0; i < 8; i++) { b.data[i] = (uint8_t)(n >> 8 * i); }
        memcpy(b.data + 8, "{}", 2);
        check_bytes(b, "100 MB of header", over ? "100000001 bytes, at most 100000000" : NULL);
    }
    check_bytes(make_file(UINT64_MAX, "{}", 0), "2^64 - 1", "at most 100000000");
    check_bytes(make_file(UINT64_MAX - 7, "{}", 0), "2^64 - 8", "at most 100000000");
}

static void test_header_fits_file(void) {
    check_bytes(make_file(3, "{}", 0), "N = 3 of 2", "1 bytes of the header are missing");
    check_bytes(make_file(1000, "{}", 0), "N = 1000 of 2", "998 bytes of the header are missing");
    check_bytes(make_file(0, "", 0), "N = 0", "header of 0 bytes");
    check_bytes(make_file(0, "{}", 0), "N = 0", "header of 0 bytes");
    check_bytes(make_file(1, "{}", 0), "N = 1", "header of 1 bytes");
    check_header("{}", 0, NULL);
}

static void test_header_begins_with_brace(void) {
    check_header(" {}", 0, "begin with '{'");
    check_header("\n{}", 0, "begin with '{'");
    check_header("[]", 0, "begin with '{'");
    check_header("null", 0, "begin with '{'");
}

static void test_header_is_json(void) {
    check_header("{]", 0, "not valid JSON at byte 1");
    check_header("{} {}", 0, "not valid JSON at byte 3");
    check_header("{" T("a", "U8", "[0]", 0, 0) ",}", 0, "not valid JSON");
    check_header("{" T("a\\x", "U8", "[0]", 0, 0) "}", 0, "not valid JSON");
    SafeTensors st;
    Error err;
    Bytes b = make_file(3, "{}", 1); // a NUL as padding
    check(!parse(&st, b, &err) && strstr(err.text, "byte 2"));
    free(b.data);
}

static void test_header_is_utf8(void) {
    check_header("{" T("\xFF", "U8", "[0]", 0, 0) "}", 0, "invalid UTF-8");
    check_header("{" T("\xC3", "U8", "[0]", 0, 0) "}", 0, "invalid UTF-8");
    check_header("{" T("\xC3\xA9", "U8", "[0]", 0, 0) "}", 0, NULL);
}

static void test_trailing_spaces(void) {
    check_header("{}      ", 0, NULL);
    check_header("{" T("a", "U8", "[2]", 0, 2) "}     ", 2, NULL);
    check_header("{}     x", 0, "not valid JSON");
}

static void test_duplicate_names(void) {
    check_header("{" T("a", "U8", "[1]", 0, 1) "," T("a", "U8", "[1]", 1, 2) "}", 2, "\"a\" occurs twice");
    check_header("{" T("a", "U8", "[1]", 0, 1) "," T("a", "U8", "[1]", 0, 1) "}", 1, "\"a\" occurs twice");
    check_header("{" T("a", "U8", "[1]", 0, 1) "," T("\\u0061", "U8", "[1]", 1, 2) "}", 2, "\"a\" occurs twice");
    check_header("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "occurs twice");
}

static void test_name_with_nul(void) {
    check_header("{" T("a\\u0000b", "U8", "[1]", 0, 1) "}", 1, "'a\\x00b': its name contains a NUL");
    check_header("{" T("", "U8", "[1]", 0, 1) "}", 1, NULL); // an empty name is a valid name
}

static void test_offsets_begin_at_0(void) {
    check_header("{" T("a", "U8", "[1]", 1, 2) "}", 2, "begins at byte 1 of the data, want 0: a hole");
}

static void test_offsets_have_no_hole(void) {
    check_header("{" T("a", "U8", "[1]", 0, 1) "," T("b", "U8", "[1]", 2, 3) "}", 3, "'b' begins at byte 2");
}

static void test_offsets_do_not_overlap(void) {
    check_header("{" T("a", "U8", "[2]", 0, 2) "," T("b", "U8", "[2]", 1, 3) "}", 3, "tensor that overlaps");
    check_header("{" T("a", "U8", "[2]", 0, 2) "," T("b", "U8", "[2]", 0, 2) "}", 2, "tensor that overlaps");
    check_header("{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[2]", 1, 3) "}", 4, "tensor that overlaps");
}

static void test_offsets_in_any_listing(void) {
    check_header("{" T("a", "U8", "[1]", 2, 3) "," T("b", "U8", "[2]", 0, 2) "}", 3, NULL);
    check_header("{" T("a", "U8", "[0]", 1, 1) "," T("b", "U8", "[1]", 0, 1) "," T("c", "U8", "[0]", 0, 0) "}", 1,
                 NULL);
}

static void test_offsets_are_two_sizes(void) {
#define O(offsets) "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":" offsets "}}"
    static const char* const bad[] = {O("[1,0]"),         O("[0]"),     O("[]"),        O("[0,1,2]"),
                                      O("[-1,0]"),        O("[0,1.0]"), O("null"),      O("\"0,1\""),
                                      O("[\"0\",\"1\"]"), O("[0,1e0]"), O("{\"0\":1}"), O("[0,18446744073709551617]")};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) { check_header(bad[i], 1, "\"data_offsets\" is not"); }
    check_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "\"data_offsets\" is not");
    check_header(O("[0,1]"), 1, NULL);
    check_header(O("[9223372036854775806,9223372036854775807]"), 1, "begins at byte 9223372036854775806");
}

static void test_end_is_end_of_file(void) {
    check_header("{" T("a", "F32", "[2]", 0, 8) "}", 8, NULL);
    check_header("{" T("a", "F32", "[2]", 0, 8) "}", 7, "truncated: 1 bytes are missing");
    check_header("{" T("a", "F32", "[2]", 0, 8) "}", 0, "truncated: 8 bytes are missing");
    check_header("{" T("a", "F32", "[2]", 0, 8) "}", 9, "1 bytes too many");
    check_header("{}", 1, "1 bytes too many");
}

static void test_size_is_shape_times_dtype(void) {
    check_header("{" T("a", "F32", "[2]", 0, 7) "}", 7, "7 bytes by its offsets, 8 by its shape");
    check_header("{" T("a", "F32", "[3]", 0, 8) "}", 8, "8 bytes by its offsets, 12 by its shape");
    check_header("{" T("a", "F16", "[2,2]", 0, 16) "}", 16, "16 bytes by its offsets, 8 by its shape");
    check_header("{" T("a", "F32", "[]", 0, 4) "}", 4, NULL); // a scalar
    check_header("{" T("a", "F32", "[]", 0, 0) "}", 0, "4 by its shape");
    check_header("{" T("a", "F32", "[0]", 0, 0) "}", 0, NULL);
    check_header("{" T("a", "F32", "[5,0,7]", 0, 0) "}", 0, NULL);
    check_header("{" T("a", "F32", "[0]", 0, 4) "}", 4, "0 by its shape");
}

static void test_size_overflow(void) {
    // modulo 2^64, 2^32 * 2^32 elements are 0 elements, and 2^61 elements of 64 bits are 0 bits
    check_header("{" T("a", "U8", "[4294967296,4294967296]", 0, 0) "}", 0, "overflows");
    check_header("{" T("a", "F64", "[2305843009213693952]", 0, 0) "}", 0, "overflows");
    check_header("{" T("a", "F32", "[4611686018427387904]", 0, 0) "}", 0, "overflows");
    check_header("{" T("a", "U8", "[3,6148914691236517206]", 0, 2) "}", 2, "overflows");
    check_header("{" T("a", "U8", "[9223372036854775808]", 0, 0) "}", 0, "\"shape\" is not");
}

static void test_shape_is_a_list_of_sizes(void) {
#define S(shape) "{\"a\":{\"dtype\":\"U8\",\"shape\":" shape ",\"data_offsets\":[0,1]}}"
    static const char* const bad[] = {S("[-1]"),   S("[1.0]"), S("1"),  S("null"),
                                      S("[null]"), S("[[1]]"), S("{}"), S("\"1\"")};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) { check_header(bad[i], 1, "\"shape\" is not a list"); }
    check_header("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "\"shape\" is not a list");
    check_header(S("[1,1,1,1,1,1,1,1]"), 1, NULL);
    check_header(S("[1,1,1,1,1,1,1,1,1]"), 1, "9 dimensions, at most 8");
}

static void test_dtypes(void) {
    for (int d = 0; d < SAFE_NUM_DTYPES; d++) { // 8 elements are a whole number of bytes in every type
        char header[128];
        for (int wrong = 0; wrong < 2; wrong++) {
            size_t bytes = (size_t)(safe_dtypes[d].bits + wrong);
            snprintf(header, sizeof(header), "{\"a\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,%zu]}}",
                     safe_dtypes[d].name, bytes);
            check_header(header, bytes, wrong ? "by its shape and dtype" : NULL);
        }
    }
    static const struct {
        SafeDtype dtype;
        const char* name;
        int bits;
    } known[] = {{SAFE_BOOL, "BOOL", 8},       {SAFE_F4, "F4", 4},    {SAFE_F6_E3M2, "F6_E3M2", 6},
                 {SAFE_F8_E8M0, "F8_E8M0", 8}, {SAFE_F16, "F16", 16}, {SAFE_BF16, "BF16", 16},
                 {SAFE_F32, "F32", 32},        {SAFE_C64, "C64", 64}, {SAFE_U64, "U64", 64},
                 {SAFE_I16, "I16", 16},        {SAFE_U32, "U32", 32}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        check_str(safe_dtypes[known[i].dtype].name, known[i].name);
        check(safe_dtypes[known[i].dtype].bits == known[i].bits);
    }
    check_header("{" T("a", "F4", "[1]", 0, 0) "}", 0, "does not fill whole bytes");
    check_header("{" T("a", "F128", "[1]", 0, 16) "}", 16, "dtype 'F128' is not known");
    check_header("{" T("a", "f32", "[1]", 0, 4) "}", 4, "dtype 'f32' is not known");
    check_header("{" T("a", "", "[1]", 0, 4) "}", 4, "dtype '' is not known");
    check_header("{" T("a", "F32\\u0000", "[1]", 0, 4) "}", 4, "is not known");
    check_header("{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no \"dtype\"");
    check_header("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "no \"dtype\"");
    check_header("{\"a\":[]}", 0, "no \"dtype\"");
    check_header("{\"a\":null}", 0, "no \"dtype\"");
}

static void test_metadata(void) {
    check_header("{\"__metadata__\":{}}", 0, NULL);
    check_header("{\"__metadata__\":{\"a\":\"b\",\"c\":\"d\"}}", 0, NULL);
    check_header("{\"__metadata__\":{\"a\":1}}", 0, "not an object of strings");
    check_header("{\"__metadata__\":{\"a\":{}}}", 0, "not an object of strings");
    check_header("{\"__metadata__\":[\"a\"]}", 0, "not an object of strings");
    check_header("{\"__metadata__\":null}", 0, "not an object of strings");
}

static void test_every_truncation(void) {
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"}," T("a", "F32", "[2,3]", 0, 24) "," T("b", "BF16", "[5]", 24, 34) "}   ";
    Bytes whole = make_file(sizeof(header) - 1, header, 34);
    for (size_t n = 0; n < whole.size; n++) {
        SafeTensors st;
        Error err;
        Bytes part = bytes_new(whole.data, n);
        check_msg(!parse(&st, part, &err), "%zu of %zu bytes were taken", n, whole.size);
        check_msg(strstr(err.text, n == 0 ? "empty" : "truncated") && strstr(err.text, "download it again"),
                  "%zu bytes: %s", n, err.text);
        char missing[64];
        snprintf(missing, sizeof(missing), "truncated: %zu bytes are missing", whole.size - n);
        if (n >= 8 + sizeof(header) - 1) { check_msg(strstr(err.text, missing) != NULL, "%s", err.text); }
        free(part.data);
    }
    check_bytes(whole, "the whole file", NULL);
}

// Replaces each byte of the header by every value: the file is accepted or rejected, but nothing outside of it is read.
static void test_every_byte_damaged(void) {
    static const char header[] = "{" T("a", "F32", "[2,3]", 0, 24) "," T("b", "I8", "[5]", 24, 29) "}";
    Bytes b = make_file(sizeof(header) - 1, header, 29);
    for (size_t at = 0; at < 8 + sizeof(header) - 1; at++) {
        uint8_t saved = b.data[at];
        for (int value = 0; value < 256; value++) {
            SafeTensors st;
            Error err;
            b.data[at] = (uint8_t)value;
            if (!parse(&st, b, &err)) { continue; }
            for (size_t i = 0; i < st.num_tensors; i++) {
                const SafeTensor* t = &st.tensors[i];
                check(t->data >= b.data && t->bytes <= (size_t)(b.data + b.size - t->data));
            }
            safetensors_close(&st);
        }
        b.data[at] = saved;
    }
    free(b.data);
}

static void test_header_at_odd_offset(void) {
    static const char* const headers[] = {"{" T("a", "F32", "[2]", 0, 8) "}", "{" T("a", "F32", "[2]", 0, 8) "} ",
                                          "{" T("a", "F32", "[2]", 0, 8) "}  ", "{" T("a", "F32", "[2]", 0, 8) "}   "};
    static const float values[2] = {1.5f, -3.25e-7f};
    for (int i = 0; i < 4; i++) { // headers of four lengths, so the data have every alignment modulo 4
        Bytes b = make_file(strlen(headers[i]), headers[i], 8);
        SafeTensors st;
        Error err;
        float got[2] = {0, 0};
        memcpy(b.data + b.size - 8, values, 8);
        check(parse(&st, b, &err));
        safetensors_to_float(got, safetensors_find(&st, "a"), 0, 2);
        check(memcmp(got, values, 8) == 0);
        safetensors_to_float(got, safetensors_find(&st, "a"), 1, 1);
        check(got[0] == values[1]);
        safetensors_close(&st);
        free(b.data);
    }
}

// ---- files of other kinds ------------------------------------------------------------

static void check_mistake(const void* data, size_t size, const char* reason) {
    Bytes b = bytes_new(data, size);
    check_bytes(b, reason, reason);
}

static void test_mistaken_lfs_pointer(void) {
    static const char text[] =
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707\nsize 548105171\n";
    check_mistake(text, sizeof(text) - 1, "is a git-LFS pointer, not the file itself; run `git lfs pull`");
}

static void test_mistaken_pytorch_zip(void) {
    static const char text[] = "PK\3\4\0\0\10\10\0\0\0\0\0\0archive/data.pkl";
    check_mistake(text, sizeof(text) - 1,
                  "is a zip file, probably PyTorch's pytorch_model.bin; use the model.safetensors");
}

static void test_mistaken_pytorch_pickle(void) {
    static const char text[] = "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
    check_mistake(text, sizeof(text) - 1, "is a Python pickle, probably an old pytorch_model.bin");
    check_mistake("\x80\x04\x95\x10\0\0\0\0\0\0\0\0", 12, "is a Python pickle");
    // but the bytes 80 02 may also be the size of a header of 640 bytes
    char header[641];
    snprintf(header, sizeof(header), "%-640s", "{" T("a", "U8", "[1]", 0, 1) "}");
    Bytes b = make_file(640, header, 1);
    check(b.data[0] == 0x80 && b.data[1] == 2);
    check_bytes(b, "a header of 640 bytes", NULL);
}

static void test_mistaken_web_page(void) {
    static const char* const pages[] = {"<!DOCTYPE html>\n<html>", "<!doctype html>...", "\n\n <HTML><head>",
                                        "\xEF\xBB\xBF<html lang=\"en\">", "<?xml version=\"1.0\"?><Error>"};
    for (size_t i = 0; i < 5; i++) { check_mistake(pages[i], strlen(pages[i]), "is a web page"); }
}

static void test_mistaken_gguf(void) {
    check_mistake("GGUF\3\0\0\0\x10\0\0\0\0\0\0\0", 16, "is a GGUF file of llama.cpp");
}
static void test_mistaken_gzip(void) { check_mistake("\x1f\x8b\x08\0\0\0\0\0\0\0", 10, "compressed with gzip"); }
static void test_mistaken_empty(void) { check_mistake("", 0, "is empty; download it again"); }
static void test_mistaken_json(void) { check_mistake("{\"error\": \"not found\"}", 22, "is a JSON file, not a model"); }
static void test_mistaken_text(void) { check_mistake("Entry not found", 15, "not a safetensors file"); }

static void test_opening_files(void) {
    SafeTensors st;
    Error err;
    char path[128];
    snprintf(path, sizeof(path), "%s/none.safetensors", test_dir());
    check(!safetensors_open(&st, path, &err) && strstr(err.text, "No such file"));
    check(strncmp(err.text, path, strlen(path)) == 0);
    check(!safetensors_open(&st, test_dir(), &err) && strstr(err.text, "is a directory"));
    check(safetensors_open(&st, "dev/test/fixtures/tiny_gpt2/model.safetensors", &err));
    const SafeTensor* t = safetensors_find(&st, "transformer.wpe.weight");
    check(st.num_tensors == 28 && t && t->shape[0] == 64 && t->shape[1] == 128);
    safetensors_close(&st);
}

// ---- numbers -----------------------------------------------------------------------

static void test_f16_values(void) {
    for (uint32_t h = 0; h < 65536; h++) { // compared with the definition
        int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
        double want = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
        float got = safe_float_from_f16((uint16_t)h);
        if (exponent == 31) {
            check(mantissa == 0 ? isinf(got) : isnan(got));
        } else {
            check(got == (float)(h & 0x8000 ? -want : want));
        }
        check((bool)signbit(got) == (bool)(h & 0x8000));
    }
}

static void test_f16_rounding(void) {
    for (uint32_t h = 0; h < 0x7C00; h++) { // every number, and what lies between it and the next one
        double low = (double)safe_float_from_f16((uint16_t)h);
        double high = h + 1 < 0x7C00 ? (double)safe_float_from_f16((uint16_t)(h + 1)) : 65536.0; // infinity's place
        float middle = (float)((low + high) / 2); // exact: both have 11 bits
        uint32_t even = h % 2 == 0 ? h : h + 1;
        for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
            float s = sign ? -1.0f : 1.0f;
            check(safe_f16_from_float(s * (float)low) == (sign | h));
            check(safe_f16_from_float(s * middle) == (sign | even));
            check(safe_f16_from_float(s * nextafterf(middle, 0.0f)) == (sign | h));
            check(safe_f16_from_float(s * nextafterf(middle, INFINITY)) == (sign | (h + 1)));
        }
    }
    check(safe_f16_from_float(INFINITY) == 0x7C00 && safe_f16_from_float(-3e38f) == 0xFC00);
    check(safe_f16_from_float(0x1p-149f) == 0 && safe_f16_from_float(-0.0f) == 0x8000);
    for (uint32_t bits = 0x7F800001; bits < 0x80000000; bits += 4099) { // NaN
        check(isnan(safe_float_from_f16(safe_f16_from_float(safe_float_from_bits(bits)))));
        check(isnan(safe_float_from_f16(safe_f16_from_float(safe_float_from_bits(bits | 0x80000000)))));
    }
}

static void test_bf16_rounding(void) {
    static const struct {
        uint32_t bits;
        uint16_t want;
    } cases[] = {{0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, {0x3F808001, 0x3F81}, {0x3F818000, 0x3F82},
                 {0x3F817FFF, 0x3F81}, {0xBF808000, 0xBF80}, {0x00000000, 0x0000}, {0x80000000, 0x8000},
                 {0x7F7FFFFF, 0x7F80}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, {0x00008000, 0x0000},
                 {0x00018000, 0x0002}, {0x7F800001, 0x7FC0}, {0x7FFFFFFF, 0x7FFF}, {0xFF800001, 0xFFC0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint16_t got = safe_bf16_from_float(safe_float_from_bits(cases[i].bits));
        check_msg(got == cases[i].want, "%08x became %04x, want %04x", cases[i].bits, got, cases[i].want);
    }
    for (uint32_t h = 0; h < 65536; h++) { // every bf16 survives the round trip
        float f = safe_float_from_bf16((uint16_t)h);
        check(isnan(f) || safe_bf16_from_float(f) == h);
    }
}

static void test_to_float(void) {
    enum { N = 37 };
    static const SafeDtype dtypes[3] = {SAFE_F32, SAFE_F16, SAFE_BF16};
    for (int d = 0; d < 3; d++) {
        size_t size = dtypes[d] == SAFE_F32 ? 4 : 2;
        for (size_t shift = 0; shift < 4; shift++) { // every alignment
            uint8_t* data = (uint8_t*)malloc_check(N * size + shift);
            for (uint16_t i = 0; i < N; i++) {
                float f = (float)i - 8;
                uint16_t h = dtypes[d] == SAFE_F16 ? (uint16_t)(0x3C00 + i) : safe_bf16_from_float(f);
                memcpy(data + shift + i * size, size == 4 ? (const void*)&f : (const void*)&h, size);
            }
            SafeTensor t;
            memset(&t, 0, sizeof(t));
            t.dtype = dtypes[d];
            t.elements = N;
            t.data = data + shift;
            float got[N];
            safetensors_to_float(got, &t, 3, N - 3);
            for (int i = 3; i < N; i++) { check(got[i - 3] == (d == 1 ? 1 + (float)i / 1024 : (float)i - 8)); }
            free(data);
        }
    }
}

// ---- the writer ----------------------------------------------------------------------

static void test_writer_round_trip(void) {
    char path[128];
    Error err;
    SafeWriter w;
    SafeTensors st;
    uint64_t bytes = 0, shape_a[2] = {3, 5}, shape_b[1] = {0}, shape_d[3] = {2, 1, 3};
    uint32_t crc = 0;
    float a[15];
    for (int i = 0; i < 15; i++) { a[i] = (float)i * 0.5f; }
    snprintf(path, sizeof(path), "%s/written.safetensors", test_dir());
    safewriter_init(&w);
    safewriter_metadata(&w, "step", "17");
    safewriter_metadata(&w, "quote\"\n", "\xC3\xA9");
    safewriter_add(&w, "a", SAFE_F32, 2, shape_a);
    safewriter_add(&w, "b \"quoted\"", SAFE_F32, 1, shape_b);
    safewriter_add(&w, "scalar", SAFE_U8, 0, NULL);
    safewriter_add(&w, "d", SAFE_BF16, 3, shape_d);
    check(safewriter_begin(&w, path, &err));
    safewriter_data(&w, a, 7); // the pieces of data need not end where tensors end
    safewriter_data(&w, (uint8_t*)a + 7, 53);
    safewriter_data(&w, "x0123456789ab", 13);
    check(safewriter_end(&w, &err, &bytes, &crc));
    if (!safetensors_open(&st, path, &err)) {
        check_msg(false, "%s", err.text);
        return;
    }
    check(st.file.size == bytes && crc32c(0, st.file.data, st.file.size) == crc);
    check(safe_header_bytes(st.file.data, st.file.size) % 8 == 0);
    check(st.num_tensors == 4);
    const SafeTensor *ta = safetensors_find(&st, "a"), *td = safetensors_find(&st, "d");
    check(ta && ta->dtype == SAFE_F32 && ta->shape[0] == 3 && ta->shape[1] == 5 && memcmp(ta->data, a, 60) == 0);
    check((uintptr_t)ta->data % 8 == 0);
    check(td && td->num_dims == 3 && td->shape[2] == 3 && memcmp(td->data, "0123456789ab", 12) == 0);
    check(safetensors_find(&st, "scalar")->num_dims == 0 && safetensors_find(&st, "scalar")->data[0] == 'x');
    check(safetensors_find(&st, "b \"quoted\"")->bytes == 0);
    check_str(json_get(st.metadata, "format")->string, "pt");
    check_str(json_get(st.metadata, "step")->string, "17");
    check_str(json_get(st.metadata, "quote\"\n")->string, "\xC3\xA9");
    safetensors_close(&st);
}

static void test_writer_header_padding(void) {
    for (int n = 1; n <= 16; n++) { // name lengths that give every remainder of the header's size modulo 8
        char path[128], name[32] = "nnnnnnnnnnnnnnnnnnnn";
        Error err;
        SafeWriter w;
        SafeTensors st;
        uint64_t shape[1] = {3}, bytes;
        name[n] = '\0';
        snprintf(path, sizeof(path), "%s/padded.safetensors", test_dir());
        safewriter_init(&w);
        safewriter_add(&w, name, SAFE_U8, 1, shape);
        check(safewriter_begin(&w, path, &err));
        safewriter_data(&w, "abc", 3);
        check(safewriter_end(&w, &err, &bytes, NULL));
        check(bytes % 8 == 3 && safetensors_open(&st, path, &err));
        check(st.num_tensors == 1 && memcmp(st.tensors[0].data, "abc", 3) == 0);
        safetensors_close(&st);
    }
}

static void test_writer_errors(void) {
    Error err;
    SafeWriter w;
    uint64_t shape[1] = {3};
    safewriter_init(&w);
    safewriter_add(&w, "a", SAFE_U8, 1, shape);
    check(!safewriter_begin(&w, "/nonexistent/x.safetensors", &err) && strstr(err.text, "/nonexistent/x"));
    if (!file_exists("/dev/full")) {
        test_skip("needs /dev/full");
        return;
    }
    safewriter_init(&w);
    safewriter_add(&w, "a", SAFE_U8, 1, shape);
    check(safewriter_begin(&w, "/dev/full", &err));
    safewriter_data(&w, "abc", 3);
    check(!safewriter_end(&w, &err, NULL, NULL) && strstr(err.text, "/dev/full: write: No space"));
}

static const Test tests[] = {
    {"reads", "names, shapes, dtypes, data, metadata", test_reads},
    {"find_among_many", "300 tensors in scrambled order", test_find_among_many},
    {"header_size_limit", "N = 100,000,000 is taken, one more is not", test_header_size_limit},
    {"header_fits_file", "N against the size of the file", test_header_fits_file},
    {"header_begins_with_brace", "no white space, no other value first", test_header_begins_with_brace},
    {"header_is_json", "strict JSON, no text behind it", test_header_is_json},
    {"header_is_utf8", "invalid UTF-8 is refused", test_header_is_utf8},
    {"trailing_spaces", "spaces pad the header", test_trailing_spaces},
    {"duplicate_names", "no name twice", test_duplicate_names},
    {"name_with_nul", "a name is a C string", test_name_with_nul},
    {"offsets_begin_at_0", "the first tensor begins at byte 0", test_offsets_begin_at_0},
    {"offsets_have_no_hole", "each tensor begins where the last one ended", test_offsets_have_no_hole},
    {"offsets_do_not_overlap", "no byte belongs to two tensors", test_offsets_do_not_overlap},
    {"offsets_in_any_listing", "the header may list tensors in any order", test_offsets_in_any_listing},
    {"offsets_are_two_sizes", "[begin, end], begin <= end", test_offsets_are_two_sizes},
    {"end_is_end_of_file", "the last tensor ends with the file", test_end_is_end_of_file},
    {"size_is_shape_times_dtype", "end - begin = elements * size", test_size_is_shape_times_dtype},
    {"size_overflow", "products that wrap around", test_size_overflow},
    {"shape_is_a_list_of_sizes", "at most 8 dimensions", test_shape_is_a_list_of_sizes},
    {"dtypes", "the 22 types of the reference reader, no other", test_dtypes},
    {"metadata", "an object of strings", test_metadata},
    {"every_truncation", "each length of a small file, with the number of missing bytes", test_every_truncation},
    {"every_byte_damaged", "each byte of a header with each value", test_every_byte_damaged},
    {"header_at_odd_offset", "data at every alignment", test_header_at_odd_offset},
    {"mistaken_lfs_pointer", "refused by name with the remedy", test_mistaken_lfs_pointer},
    {"mistaken_pytorch_zip", "refused by name with the remedy", test_mistaken_pytorch_zip},
    {"mistaken_pytorch_pickle", "refused by name; a header of 640 bytes is not one", test_mistaken_pytorch_pickle},
    {"mistaken_web_page", "HTML and XML, in any case, behind white space", test_mistaken_web_page},
    {"mistaken_gguf", "refused by name", test_mistaken_gguf},
    {"mistaken_gzip", "refused by name", test_mistaken_gzip},
    {"mistaken_empty", "refused by name", test_mistaken_empty},
    {"mistaken_json", "a server's error, or the index itself", test_mistaken_json},
    {"mistaken_text", "anything else", test_mistaken_text},
    {"opening_files", "a missing file, a directory, the fixture", test_opening_files},
    {"f16_values", "all 65,536 against the definition", test_f16_values},
    {"f16_rounding", "nearest even, subnormal, infinity, NaN", test_f16_rounding},
    {"bf16_rounding", "nearest even, infinities, NaN", test_bf16_rounding},
    {"to_float", "three types, any alignment, an offset", test_to_float},
    {"writer_round_trip", "types, names, metadata, size and crc32c", test_writer_round_trip},
    {"writer_header_padding", "the data begin at a multiple of 8", test_writer_header_padding},
    {"writer_errors", "no such directory, a full disk", test_writer_errors},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
