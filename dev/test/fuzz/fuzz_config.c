/* Fuzz target: everything that model_open() decides from text and headers: config.json, the index of a sharded model,
   llm.c's header, and which tensor is which.

   The first byte chooses the reader, and whether the rest is its text or a list of edits (two bytes of offset, one new
   byte) of a valid text. For tensor names, the text is the header of a safetensors file, to which this target adds the
   data.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_config.c -lm -o fuzz_config && ./fuzz_config */
#include "../../../llmc/checkpoint.h"

static void check_error(const Error* err, const char* where) {
    require(strncmp(err->text, where, strlen(where)) == 0 && !strchr(err->text, '\n'));
}

static void fuzz_config(const char* text, size_t n) {
    GPT2Config config;
    Error err;
    int bos_id = -2, eot_id = -2;
    float dropout;
    if (!hf_config_parse(&config, &bos_id, &eot_id, &dropout, text, n, "config.json", &err)) {
        check_error(&err, "config.json: ");
        return;
    }
    require(config_check(&config, "config.json", &err) && config.padded_vocab_size % 128 == 0);
    require(bos_id >= -1 && bos_id < config.vocab_size);
    require(eot_id >= -1 && eot_id < config.vocab_size);
}

static void fuzz_index(const char* text, size_t n) {
    HfIndex index;
    Error err;
    if (!hf_index_parse(&index, text, n, "index.json", &err)) {
        check_error(&err, "index.json: ");
        return;
    }
    for (uint32_t i = 0; i < index.weight_map->count; i++) {
        require(index.file_of[i] >= 0 && index.file_of[i] < index.num_files);
        require(strcmp(index.files[index.file_of[i]], index.weight_map->items[i].string) == 0);
    }
    for (int i = 0; i < index.num_files; i++) {
        require(index.files[i][0] && !strchr(index.files[i], '/') && !strstr(index.files[i], ".."));
    }
    hf_index_free(&index);
}

// Reads all of a small model. The data of a huge one do not exist: only its header claims so.
static void read_all(ModelFile* model) {
    if (num_parameters(&model->config) > 1 << 20) { return; }
    float* params = (float*)malloc_check(num_parameters(&model->config) * sizeof(float));
    model_read(model, params, NULL); // false if a value is not finite
    free(params);
}

static void fuzz_llmc(const uint8_t* data, size_t n) {
    // 8 words, then as much data as a tiny model needs
    enum { SIZE = LLMC_HEADER_BYTES + (1 << 16) };
    ModelFile model;
    Error err;
    uint8_t* file = (uint8_t*)calloc_check(SIZE, 1);
    memcpy(file, data, n < 32 ? n : 32);
    size_t size = n >= 35 ? data[32] + (size_t)data[33] * 256 + (size_t)(data[34] & 1) * 65536 : SIZE;
    if (size > SIZE) { size = SIZE; }
    int32_t h[8];
    memcpy(h, file, sizeof(h));
    bool tiny = true; // true: a size that this program can provide, so the file gets exactly the right size
    for (int i = 2; i < 7; i++) { tiny = tiny && h[i] > 0 && h[i] <= 8; }
    if (tiny && h[7] == 128 && (h[1] == 3 || h[1] == 5) && n < 35) {
        GPT2Config c = {h[2], h[3], h[7], h[4], h[5], h[6], 0, 0.0f, 0, 0, 0, 0};
        gpt2_defaults(&c);
        size = LLMC_HEADER_BYTES + num_parameters(&c) * (h[1] == 3 ? 4 : 2);
    }
    uint8_t* exact = (uint8_t*)malloc_check(size);
    memcpy(exact, file, size < SIZE ? size : SIZE);
    if (llmc_parse(&model, exact, size, "model.bin", &err)) {
        read_all(&model);
        model_close(&model);
    } else {
        check_error(&err, "model.bin: ");
    }
    free(exact);
    free(file);
}

// The largest end offset of a tensor in a header; 0 if none is below the limit.
static size_t data_bytes(const uint8_t* header, size_t n, int64_t limit) {
    JsonDoc doc;
    int64_t end = 0;
    if (!json_parse(&doc, (const char*)header, n, "header", NULL)) { return 0; }
    for (uint32_t i = 0; i < doc.root->count; i++) {
        const JsonValue* offsets = json_get(&doc.root->items[i], "data_offsets");
        for (uint32_t k = 0; offsets && k < offsets->count; k++) {
            int64_t v = offsets->items[k].integer;
            if (v > end && v < limit) { end = v; }
        }
    }
    json_free(&doc);
    return (size_t)end;
}

// Opens a model of one file without a config: a header of n bytes, then zeros as data.
static void fuzz_names(const char* header, size_t n) {
    ModelFile model;
    Error err;
    size_t size = 8 + n + data_bytes((const uint8_t*)header, n, 1 << 18);
    uint8_t* file = (uint8_t*)calloc_check(size, 1);
    for (int i = 0; i < 8; i++) { file[i] = (uint8_t)((uint64_t)n >> 8 * i); }
    memcpy(file + 8, header, n);
    memset(&model, 0, sizeof(model));
    model_reserve(&model, 1);
    if (safetensors_parse(&model.shards[0], file, size, "file", &err)) {
        model.paths[model.num_files++] = strdup_check("file");
        if (hf_infer_config(&model.config, &model.shards[0], "file", &err) && model_map_hf(&model, "file", &err)) {
            model.num_files = 0; // there is no file whose size could be read
            read_all(&model);
            model.num_files = 1;
        } else {
            check_error(&err, "file: ");
        }
    }
    model_close(&model);
    free(file);
}

// Writes the header of a valid model with V = 2, maxT = 3, C = 64, L = 1 in BF16, with a buffer and a tied head.
// Returns its size in bytes.
static size_t good_header(char* out, size_t size) {
    GPT2Config c = {3, 2, 128, 1, 1, 64, 256, 1e-5f, 0, 0, 0, 0};
    size_t used = (size_t)snprintf(out, size, "{"), at = 0;
    for (int p = 0; p <= NUM_PARAMS; p++) { // the last parameter is the head
        char name[128];
        uint64_t shape[2];
        int num_dims = hf_shape(&c, p < NUM_PARAMS ? p : 0, shape);
        size_t bytes = 2 * (size_t)shape[0] * (num_dims == 2 ? (size_t)shape[1] : 1);
        if (p < NUM_PARAMS) {
            param_hf_name(name, sizeof(name), p, 0);
        } else {
            snprintf(name, sizeof(name), "h.0.attn.bias");
            num_dims = 0;
            bytes = 2;
        }
        char text[64];
        used += (size_t)snprintf(out + used, size - used, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":%s,", p ? "," : "",
                                 name, safe_shape_text(text, sizeof(text), shape, num_dims));
        used += (size_t)snprintf(out + used, size - used, "\"data_offsets\":[%zu,%zu]}", at, at + bytes);
        at += bytes;
    }
    return used + (size_t)snprintf(out + used, size - used, "}");
}

static const char good_config[] =
    "{\"model_type\":\"gpt2\",\"vocab_size\":512,\"n_positions\":64,\"n_embd\":128,\"n_layer\":2,\"n_head\":2,"
    "\"n_inner\":512,\"activation_function\":\"gelu_new\",\"layer_norm_epsilon\":1e-05,\"scale_attn_weights\":true,"
    "\"scale_attn_by_inverse_layer_idx\":false,\"tie_word_embeddings\":true,\"eos_token_id\":511,\"pruned_heads\":{},"
    "\"quantization_config\":null}";
static const char good_index[] =
    "{\"metadata\":{\"total_size\":12},\"weight_map\":{\"wte.weight\":\"model-00001-of-00002.safetensors\","
    "\"wpe.weight\":\"model-00002-of-00002.safetensors\",\"h.0.ln_1.weight\":\"model-00001-of-00002.safetensors\"}}";

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) { return 0; }
    int reader = data[0] % 4;
    bool edits = data[0] & 4;
    data++;
    size--;
    if (reader == 3) {
        fuzz_llmc(data, size);
        return 0;
    }
    char good[4096];
    const char* text = (const char*)data;
    size_t n = size;
    if (edits) {
        n = reader == 0 ? sizeof(good_config) - 1 : sizeof(good_index) - 1;
        if (reader == 2) { n = good_header(good, sizeof(good)); }
        if (reader < 2) { memcpy(good, reader == 0 ? good_config : good_index, n); }
        for (size_t i = 0; i + 3 <= size; i += 3) {
            good[(data[i] + (size_t)data[i + 1] * 256) % n] = (char)data[i + 2];
        }
        text = good;
    }
    char* exact = (char*)malloc_check(n); // exact size, so that a read past the end is detected
    memcpy(exact, text, n);
    if (reader == 0) { fuzz_config(exact, n); }
    if (reader == 1) { fuzz_index(exact, n); }
    if (reader == 2) { fuzz_names(exact, n); }
    free(exact);
    return 0;
}
