/* Model files: every format that can be read, every rule by which a file is rejected, and writing and reading back bit
   for bit.

   gcc -O3 -std=gnu11 -fopenmp dev/test/unit/test_checkpoint.c -lm -lpthread -o dev/test/unit/test_checkpoint */
#include "../../../llmc/checkpoint.h"
#include "../test.h"
#include <float.h>

static const char tiny_dir[] = "dev/test/fixtures/tiny_gpt2";
static const char tiny_file[] = "dev/test/fixtures/tiny_gpt2/model.safetensors";

// ---- small models in memory and on disk ------------------------------------------------

static char* path_in(const char* dir, const char* name) { // returns one of 8 buffers, used in rotation
    static char paths[8][512];
    static int next;
    char* path = paths[next++ % 8];
    snprintf(path, 512, "%s/%s", dir, name);
    return path;
}

// Makes an empty directory with this name.
static char* fresh_dir(const char* name) {
    static char dirs[4][128];
    static int next;
    char *dir = dirs[next++ % 4], command[600];
    Error err;
    snprintf(dir, sizeof(dirs[0]), "%s/%s", test_dir(), name);
    snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    if (system(command) != 0 || !make_directories(dir, &err)) { die("%s", err.text); }
    return dir;
}

static void write_file(const char* path, const void* data, size_t n) {
    FileWriter w;
    Error err;
    if (!writer_open(&w, path, &err)) { die("%s", err.text); }
    writer_put(&w, data, n);
    if (!writer_close(&w, &err)) { die("%s", err.text); }
}

static void write_text(const char* path, const char* text) { write_file(path, text, strlen(text)); }

static GPT2Config make_config(int V, int maxT, int L, int NH, int C) {
    GPT2Config c;
    c.vocab_size = V;
    c.padded_vocab_size = padded_vocab(V);
    c.max_seq_len = maxT;
    c.num_layers = L;
    c.num_heads = NH;
    c.channels = C;
    gpt2_defaults(&c);
    return c;
}

// V is no multiple of 128 and C no multiple of the transposition's tile, so all partial tiles occur.
static GPT2Config odd_config(void) { return make_config(131, 7, 2, 3, 72); }

// Varied values. With bf16_exact they are multiples of 1/256 below 1, which are exact in bf16. Padding rows are zero.
static float* make_params(const GPT2Config* c, bool bf16_exact) {
    size_t n = num_parameters(c), C = (size_t)c->channels;
    float* params = (float*)malloc_check(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        int r = (int)((i * 2654435761u) >> 7 & 255) - 128;
        params[i] = bf16_exact ? (float)r / 256 : (float)r / 256 + (float)(i % 1021) * 1e-6f;
    }
    for (size_t i = (size_t)c->vocab_size * C; i < (size_t)c->padded_vocab_size * C; i++) {
        params[i] = 0;
        if (c->untied_head) { params[param_offset(c, NUM_PARAMS - 1) + i] = 0; }
    }
    return params;
}

// Opens the model, reads it into memory that was NaN before, and closes it. NULL on failure.
static float* read_model(const char* path, GPT2Config* config, int* eot_id, Error* err) {
    ModelFile model;
    err->text[0] = '\0';
    if (!model_open(&model, path, err)) { return NULL; }
    size_t n = num_parameters(&model.config);
    float* params = (float*)malloc_check(n * sizeof(float));
    memset(params, 0xFF, n * sizeof(float));
    if (!model_read(&model, params, err)) {
        free(params);
        params = NULL;
    }
    *config = model.config;
    if (eot_id) { *eot_id = model.eot_id; }
    model_close(&model);
    return params;
}

static void check_same(const float* got, const float* want, const GPT2Config* c) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t offset = param_offset(c, p), bytes = param_size(c, p) * sizeof(float);
        check_msg(memcmp(got + offset, want + offset, bytes) == 0, "%s differs", gpt2_params[p].name);
    }
}

// Checks that the model at path has this config and these parameters.
static void check_model(const char* path, const GPT2Config* want, const float* params) {
    GPT2Config c;
    Error err;
    float* got = read_model(path, &c, NULL, &err);
    check_msg(got != NULL, "%s", err.text);
    if (!got) { return; }
    check(memcmp(&c, want, sizeof(c)) == 0);
    if (memcmp(&c, want, sizeof(c)) == 0) { check_same(got, params, &c); }
    free(got);
}

// Checks that model_open rejects path with one line that begins with the file name and contains the reason.
static void check_refused(const char* path, const char* reason) {
    ModelFile model;
    Error err;
    err.text[0] = '\0';
    bool ok = model_open(&model, path, &err);
    check_msg(!ok, "%s was taken, want: %s", path, reason);
    if (ok) {
        model_close(&model);
        return;
    }
    check_msg(strstr(err.text, reason) != NULL, "'%s' lacks '%s'", err.text, reason);
    check_msg(strncmp(err.text, test_dir(), strlen(test_dir())) == 0 && !strchr(err.text, '\n'), "'%s'", err.text);
}

// One change to a valid Hugging Face file: a tensor is renamed, dropped, or gets another shape or dtype.
typedef struct {
    const char* name;     // the tensor to change: Hugging Face's name without its prefix
    const char* new_name; // NULL: the tensor is dropped
    SafeDtype dtype;
    int num_dims;
    uint64_t shape[3];
    const char* prefix; // put before all names
    const char* extra;  // one more tensor, or NULL
    const float* extra_data;
} Change;

// Writes a model file with the change. The data are zeros, except for extra_data, because only shapes matter here.
static void write_changed(const char* path, const GPT2Config* c, const Change* change) {
    SafeWriter w;
    Error err;
    safewriter_init(&w);
    for (int p = 0; p < NUM_PARAMS; p++) {
        for (int layer = 0; layer < param_copies(c, p); layer++) {
            char name[128], full[256];
            uint64_t shape[3];
            const char* used = name + 12;
            SafeDtype dtype = SAFE_F32;
            int num_dims = hf_shape(c, p, shape);
            param_hf_name(name, sizeof(name), p, layer);
            if (change->name && strcmp(change->name, name + 12) == 0) {
                if (!change->new_name) { continue; }
                used = change->new_name;
                dtype = change->dtype;
                num_dims = change->num_dims;
                memcpy(shape, change->shape, sizeof(shape));
            }
            snprintf(full, sizeof(full), "%s%s", change->prefix, used);
            safewriter_add(&w, full, dtype, num_dims, shape);
        }
    }
    uint64_t extra_shape[2] = {(uint64_t)c->vocab_size, (uint64_t)c->channels};
    if (change->extra) { safewriter_add(&w, change->extra, SAFE_F32, 2, extra_shape); }
    if (!safewriter_begin(&w, path, &err)) { die("%s", err.text); }
    size_t extra_bytes = change->extra ? 4 * (size_t)(extra_shape[0] * extra_shape[1]) : 0;
    uint8_t* zeros = (uint8_t*)calloc_check(w.declared, 1);
    safewriter_data(&w, zeros, w.declared - extra_bytes);
    if (extra_bytes > 0) {
        safewriter_data(&w, change->extra_data ? (const void*)change->extra_data : (const void*)zeros, extra_bytes);
    }
    free(zeros);
    if (!safewriter_end(&w, &err, NULL, NULL)) { die("%s", err.text); }
}

static Change no_change(void) {
    Change change;
    memset(&change, 0, sizeof(change));
    change.prefix = "";
    return change;
}

// ---- reading ---------------------------------------------------------------------------

static void test_fixture_directory(void) {
    GPT2Config c;
    Error err;
    int eot = 0;
    float* params = read_model(tiny_dir, &c, &eot, &err);
    check_msg(params != NULL, "%s", err.text);
    if (!params) { return; }
    check(c.vocab_size == 512 && c.padded_vocab_size == 512 && c.max_seq_len == 64 && c.num_layers == 2);
    check(c.num_heads == 2 && c.channels == 128 && eot == 511);
    // compares each element with the file, by the definition of the layout
    SafeTensors st;
    check(safetensors_open(&st, tiny_file, &err));
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t rows = param_rows(&c, p), cols = param_cols(&c, p);
        for (int layer = 0; layer < param_copies(&c, p); layer++) {
            char name[128];
            param_hf_name(name, sizeof(name), p, layer);
            const SafeTensor* t = safetensors_find(&st, name);
            const float* got = params + param_offset(&c, p) + (size_t)layer * rows * cols;
            size_t wrong = 0;
            for (size_t r = 0; r < rows; r++) {
                for (size_t k = 0; k < cols; k++) {
                    float want;
                    safetensors_to_float(&want, t, gpt2_params[p].conv1d ? k * rows + r : r * cols + k, 1);
                    wrong += !(got[r * cols + k] == want);
                }
            }
            check_msg(wrong == 0, "%s: %zu elements are wrong", name, wrong);
        }
    }
    safetensors_close(&st);
    free(params);
}

static void test_single_file(void) {
    GPT2Config c, alone;
    Error err;
    int eot = 0;
    float* params = read_model(tiny_dir, &c, NULL, &err);
    check_model(tiny_file, &c, params); // config.json is in the same directory
    char *dir = fresh_dir("single"), command[1200];
    snprintf(command, sizeof(command), "cp %s %s/any_name.bin", tiny_file, dir); // the contents decide, not the name
    check(system(command) == 0);
    float* got = read_model(path_in(dir, "any_name.bin"), &alone, &eot, &err);
    // without a config: 128 channels mean 2 heads of 64
    check_msg(got && memcmp(&c, &alone, sizeof(c)) == 0, "%s", err.text);
    if (got) { check_same(got, params, &c); }
    check(eot == -1);
    free(got);
    free(params);
}

static void test_single_file_needs_heads(void) {
    GPT2Config c = odd_config();
    char* dir = fresh_dir("heads");
    Change change = no_change();
    write_changed(path_in(dir, "m.safetensors"), &c, &change);
    check_refused(path_in(dir, "m.safetensors"), "72 channels do not divide into heads of 64");
    change.name = "wpe.weight";
    write_changed(path_in(dir, "m.safetensors"), &c, &change);
    check_refused(path_in(dir, "m.safetensors"), "tensor 'wpe.weight' is missing: not a GPT-2");
}

static void test_round_trip_hf(void) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        GPT2Config c = odd_config();
        Error err;
        SavedFile saved[5];
        int num_saved = 1, eot = 0;
        float* params = make_params(&c, bf16);
        char* dir = fresh_dir("hf");
        check_msg(model_save_hf_files(dir, &c, params, bf16, (ModelTokens){130, 130, -1}, saved, &num_saved, &err),
                  "%s", err.text);
        check_model(dir, &c, params);
        free(read_model(dir, &c, &eot, &err));
        check(eot == 130 && num_saved == 4);
        check_str(saved[1].name, "model.safetensors");
        check_str(saved[2].name, "config.json");
        check_str(saved[3].name, "generation_config.json");
        for (int i = 1; i < 4; i++) {
            MappedFile file;
            check(map_file(&file, path_in(dir, saved[i].name), &err));
            check(file.size == saved[i].bytes && crc32c(0, file.data, file.size) == saved[i].crc);
            unmap_file(&file);
        }
        free(params);
    }
}

static void test_round_trip_llmc(void) {
    for (int version = 3; version <= 5; version += 2) {
        GPT2Config c = odd_config();
        Error err;
        float* params = make_params(&c, version == 5);
        char* path = path_in(fresh_dir("llmc"), "gpt2.bin");
        check_msg(model_save_llmc(path, &c, params, version, &err), "%s", err.text);
        check_model(path, &c, params);
        free(params);
    }
}

// a model whose MLP is not four times as wide, and whose epsilon is any float
static void test_round_trip_mlp_and_epsilon(void) {
    static const float epsilons[] = {1e-6f, 1e-12f, 1.0f / 3, 1.1920929e-7f, FLT_TRUE_MIN};
    for (size_t i = 0; i < sizeof(epsilons) / sizeof(epsilons[0]); i++) {
        GPT2Config c = make_config(131, 7, 2, 1, 64);
        Error err;
        c.mlp_channels = i == 0 ? 1000 : 40; // rows longer and shorter than those of qkvw
        c.norm_epsilon = epsilons[i];
        float* params = make_params(&c, false);
        char* dir = fresh_dir("mlp");
        check_msg(model_save_hf(dir, &c, params, false, 130, &err), "%s", err.text);
        check_model(dir, &c, params);
        check(remove(path_in(dir, "config.json")) == 0); // the tensors alone give the width, but no epsilon
        c.norm_epsilon = 1e-5f;
        check_model(path_in(dir, "model.safetensors"), &c, params);
        free(params);
    }
}

// llm.c's header has room for sizes only
static void test_llmc_cannot_hold(void) {
    for (int i = 0; i < 6; i++) {
        static const char* const reasons[] = {"6 MLP channels",     "an epsilon of 1e-06",           "activation relu",
                                              "unscaled attention", "attention scaled by the layer", "an untied head"};
        GPT2Config c = make_config(3, 2, 1, 1, 2);
        Error err;
        char want[128];
        if (i == 0) { c.mlp_channels = 6; }
        if (i == 1) { c.norm_epsilon = 1e-6f; }
        if (i == 2) { c.activation = ACT_RELU; }
        c.unscaled_attention = i == 3, c.scale_by_layer = i == 4, c.untied_head = i == 5;
        float* params = make_params(&c, true);
        char* path = path_in(fresh_dir("hold"), "m.bin");
        check(!model_save_llmc(path, &c, params, 3, &err) && !file_exists(path));
        snprintf(want, sizeof(want), ": llm.c's .bin cannot hold %s: write a Hugging Face directory", reasons[i]);
        check_msg(strncmp(err.text, path, strlen(path)) == 0 && strstr(err.text, want), "%s", err.text);
        free(params);
    }
}

static void test_round_trip_fixture(void) {
    GPT2Config c;
    Error err;
    float* params = read_model(tiny_dir, &c, NULL, &err);
    char* dir = fresh_dir("fixture");
    check(model_save_hf(dir, &c, params, false, 511, &err));
    check_model(dir, &c, params);
    check(model_save_llmc(path_in(dir, "v3.bin"), &c, params, 3, &err));
    check_model(path_in(dir, "v3.bin"), &c, params);
    for (size_t i = 0; i < num_parameters(&c); i++) {
        params[i] = safe_float_from_bf16(safe_bf16_from_float(params[i]));
    }
    check(model_save_llmc(path_in(dir, "v5.bin"), &c, params, 5, &err));
    check_model(path_in(dir, "v5.bin"), &c, params);
    char* half = fresh_dir("fixture_bf16");
    check(model_save_hf(half, &c, params, true, 511, &err));
    check_model(half, &c, params);
    free(params);
}

// the file as FORMATS describes it: header, then the tensors in order, wte with Vp rows
static void test_llmc_bytes(void) {
    GPT2Config c = make_config(3, 2, 1, 1, 2);
    Error err;
    MappedFile file;
    int32_t h[256];
    float* params = make_params(&c, true);
    char* path = path_in(fresh_dir("bytes"), "m.bin");
    check(model_save_llmc(path, &c, params, 3, &err) && map_file(&file, path, &err));
    memcpy(h, file.data, sizeof(h));
    check(h[0] == 20240326 && h[1] == 3 && h[2] == 2 && h[3] == 3 && h[4] == 1 && h[5] == 1 && h[6] == 2 &&
          h[7] == 128);
    for (int i = 8; i < 256; i++) { check(h[i] == 0); }
    check(file.size == 1024 + 4 * num_parameters(&c) && memcmp(file.data + 1024, params, file.size - 1024) == 0);
    unmap_file(&file);
    free(params);
}

static void test_124m_sizes(void) { // the sizes of the published files
    GPT2Config c;
    Error err;
    check(config_from_descriptor(&c, "d12", &err));
    check(1024 + 4 * num_parameters(&c) == 497904640 && 1024 + 2 * num_parameters(&c) == 248952832);
}

static void test_read_tensor(void) {
    ModelFile model;
    Error err;
    check(model_open(&model, tiny_dir, &err));
    GPT2Config c = model.config;
    float* all = (float*)malloc_check(num_parameters(&c) * sizeof(float));
    check(model_read(&model, all, &err));
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t n = param_layer_size(&c, p);
        for (int layer = 0; layer < param_copies(&c, p); layer++) {
            float* one = (float*)malloc_check(n * sizeof(float));
            check(model_read_tensor(&model, p, layer, one, &err));
            check(memcmp(one, all + param_offset(&c, p) + (size_t)layer * n, n * sizeof(float)) == 0);
            free(one);
        }
    }
    model_close(&model);
    free(all);
}

static void test_padding_rows_are_zero(void) { // even if llm.c's file has other values there
    GPT2Config c = odd_config(), got;
    Error err;
    size_t C = (size_t)c.channels, first = (size_t)c.vocab_size * C, last = (size_t)c.padded_vocab_size * C;
    float* params = make_params(&c, true);
    for (size_t i = first; i < last; i++) { params[i] = 7; }
    char* path = path_in(fresh_dir("padding"), "m.bin");
    check(model_save_llmc(path, &c, params, 3, &err));
    float* back = read_model(path, &got, NULL, &err);
    for (size_t i = first; back && i < last; i++) { check(back[i] == 0); }
    free(back);
    free(params);
}

static void test_types_may_differ(void) { // F16, BF16 and F32 in one file, unaligned
    GPT2Config c = make_config(5, 3, 1, 1, 64), got;
    Error err;
    SafeWriter w;
    char* dir = fresh_dir("types");
    static const SafeDtype dtypes[3] = {SAFE_F16, SAFE_BF16, SAFE_F32};
    safewriter_init(&w);
    uint64_t one[1] = {1};
    // a buffer of one byte puts all other tensors at odd addresses
    safewriter_add(&w, "h.0.attn.masked_bias", SAFE_U8, 1, one);
    for (int p = 0; p < NUM_PARAMS - 1; p++) { // all but lmhead
        char name[128];
        uint64_t shape[2];
        param_hf_name(name, sizeof(name), p, 0);
        safewriter_add(&w, name + 12, dtypes[p % 3], hf_shape(&c, p, shape), shape);
    }
    check(safewriter_begin(&w, path_in(dir, "m.safetensors"), &err));
    safewriter_data(&w, "x", 1);
    for (int p = 0; p < NUM_PARAMS - 1; p++) {
        size_t n = p == 0 ? 5 * 64 : param_layer_size(&c, p);
        float f = 1.0f;
        uint16_t h = p % 3 == 0 ? 0x3C00 : 0x3F80;
        for (size_t i = 0; i < n; i++) { safewriter_data(&w, p % 3 == 2 ? (void*)&f : (void*)&h, p % 3 == 2 ? 4 : 2); }
    }
    check(safewriter_end(&w, &err, NULL, NULL));
    float* params = read_model(path_in(dir, "m.safetensors"), &got, NULL, &err);
    check_msg(params != NULL, "%s", err.text);
    for (size_t i = 0; params && i < num_parameters(&c); i++) {
        check(params[i] == (i >= 5 * 64 && i < 128 * 64 ? 0.0f : 1.0f));
    }
    free(params);
}

// ---- names and shapes --------------------------------------------------------------------

// writes a valid model of 64 channels, with the change, to a file without a config
static const char* changed_file(const Change* change) {
    GPT2Config c = make_config(5, 3, 2, 1, 64);
    char* path = path_in(fresh_dir("changed"), "m.safetensors");
    write_changed(path, &c, change);
    return path;
}

// A valid file with changes: names get a prefix instead of "transformer.", one tensor is dropped, and copies of tensors are added.
typedef struct {
    const char* prefix; // NULL: as they are
    const char* drop;
    struct {
        const char *name, *source; // source NULL: a byte of type `dtype`
        SafeDtype dtype;
        float delta; // added to the last value
    } extra[3];
} Rewrite;

static GPT2Config tied_config(void) { return make_config(5, 3, 1, 1, 64); }

// Writes a model of tied_config() or, with an untied head, of that, with the changes. Values are exact in every type.
static void write_rewritten(const char* path, const GPT2Config* c, const float* params, const Rewrite* r) {
    static const char* const no_prefix[1] = {""};
    const float* const arrays[1] = {params};
    SafeTensors st;
    SafeWriter w;
    Error err;
    char whole[512];
    snprintf(whole, sizeof(whole), "%s/whole.safetensors", test_dir());
    if (!params_save_safetensors(whole, c, arrays, no_prefix, 1, false, NULL, &err)) { die("%s", err.text); }
    if (!safetensors_open(&st, whole, &err)) { die("%s", err.text); }
    for (int writing = 0; writing < 2; writing++) {
        if (!writing) { safewriter_init(&w); }
        if (writing && !safewriter_begin(&w, path, &err)) { die("%s", err.text); }
        for (size_t i = 0; i < st.num_tensors; i++) {
            const SafeTensor* t = &st.tensors[i];
            char name[256];
            bool inside = r->prefix && has_prefix(t->name, "transformer.");
            if (r->drop && strcmp(t->name, r->drop) == 0) { continue; }
            snprintf(name, sizeof(name), "%s%s", inside ? r->prefix : "", t->name + (inside ? 12 : 0));
            if (writing) {
                safewriter_data(&w, t->data, t->bytes);
            } else {
                safewriter_add(&w, name, t->dtype, t->num_dims, t->shape);
            }
        }
        for (int i = 0; i < 3 && r->extra[i].name; i++) {
            const SafeTensor* t = r->extra[i].source ? safetensors_find(&st, r->extra[i].source) : NULL;
            SafeDtype dtype = r->extra[i].dtype;
            if (!writing) {
                safewriter_add(&w, r->extra[i].name, dtype, t ? t->num_dims : 0, t ? t->shape : NULL);
                continue;
            }
            for (size_t k = 0; k < (t ? t->elements : 1); k++) {
                float value = 0.0f;
                if (t) { safetensors_to_float(&value, t, k, 1); }
                if (t && k + 1 == t->elements) { value += r->extra[i].delta; }
                uint32_t bits = dtype == SAFE_F32    ? safe_bits_from_float(value)
                                : dtype == SAFE_BF16 ? safe_bf16_from_float(value)
                                                     : safe_f16_from_float(value);
                uint64_t element = bits;
                safewriter_data(&w, &element, (size_t)safe_dtypes[dtype].bits / 8);
            }
        }
    }
    if (!safewriter_end(&w, &err, NULL, NULL)) { die("%s", err.text); }
    safetensors_close(&st);
}

// Checks that the model at `path` opens with these notes, each followed by a newline.
static void check_notes(const char* path, const char* want) {
    ModelFile model;
    Error err;
    char got[2000] = "";
    bool ok = model_open(&model, path, &err);
    check_msg(ok, "%s", err.text);
    if (!ok) { return; }
    for (int i = 0; i < model.notes.count; i++) {
        snprintf(got + strlen(got), sizeof(got) - strlen(got), "%s\n", model.notes.text[i]);
    }
    check_str(got, want);
    model_close(&model);
}

static void test_prefix(void) {
    static const char* const wrapped[] = {"module.",
                                          "_orig_mod.",
                                          "model.",
                                          "module._orig_mod.",
                                          "_orig_mod.module.model.",
                                          "module.module.",
                                          "_fsdp_wrapped_module.",
                                          "_forward_module.",
                                          "base_model.model."};
    GPT2Config c = tied_config();
    float* params = make_params(&c, true);
    char* path = path_in(fresh_dir("prefix"), "m.safetensors");
    for (int i = -1; i < (int)(sizeof(wrapped) / sizeof(wrapped[0])); i++) {
        for (int with = 0; with < 2; with++) {
            char prefix[128], note[256] = "";
            snprintf(prefix, sizeof(prefix), "%s%s", i < 0 ? "" : wrapped[i], with ? "transformer." : "");
            Rewrite r = {prefix, NULL, {{0}}};
            write_rewritten(path, &c, params, &r);
            check_model(path, &c, params);
            if (i >= 0) {
                snprintf(note, sizeof(note), "%swte.weight and 15 more: read without the names of wrappers\n", prefix);
            }
            check_notes(path, note);
        }
    }
    // wrappers of single layers, and behind "transformer."
    Rewrite inner = {NULL,
                     "transformer.h.0.ln_1.bias",
                     {{"transformer.module.h.0._checkpoint_wrapped_module._orig_mod.ln_1.bias",
                       "transformer.h.0.ln_1.bias", SAFE_F32, 0.0f}}};
    write_rewritten(path, &c, params, &inner);
    check_model(path, &c, params);
    static const char* const others[] = {"encoder.", "modules.", "amodule.", "model", "transformer.transformer."};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        Rewrite r = {others[i], NULL, {{0}}};
        write_rewritten(path, &c, params, &r);
        check_refused(path, "tensor 'wte.weight' is missing: not a GPT-2");
    }
    free(params);
}

static void test_missing_tensor(void) {
    static const char* const names[] = {"h.0.ln_1.weight", "h.1.attn.c_attn.bias", "h.0.mlp.c_proj.weight",
                                        "ln_f.bias"};
    for (size_t i = 0; i < 4; i++) {
        char reason[128];
        Change change = no_change();
        change.name = names[i];
        snprintf(reason, sizeof(reason), "tensor 'transformer.%s' is missing", names[i]);
        check_refused(changed_file(&change), reason);
    }
}

static void test_wrong_shape(void) {
    Change change = no_change();
    change.name = change.new_name = "h.1.attn.c_attn.weight";
    change.dtype = SAFE_F32;
    change.num_dims = 2;
    change.shape[0] = 192; // (out, in), but Hugging Face stores (in, out)
    change.shape[1] = 64;
    check_refused(changed_file(&change), "'h.1.attn.c_attn.weight' has the shape [192, 64], want [64, 192]");
    change.num_dims = 1;
    check_refused(changed_file(&change), "has the shape [192], want [64, 192]");
    change.num_dims = 3;
    change.shape[0] = 64;
    change.shape[1] = 192;
    change.shape[2] = 1;
    check_refused(changed_file(&change), "has the shape [64, 192, 1], want [64, 192]");
}

static void test_wrong_dtype(void) {
    Change change = no_change();
    change.name = change.new_name = "h.0.mlp.c_fc.bias";
    change.dtype = SAFE_I8;
    change.num_dims = 1;
    change.shape[0] = 256;
    check_refused(changed_file(&change), "'h.0.mlp.c_fc.bias' has the dtype I8, want F32, F16 or BF16");
    change.dtype = SAFE_F64;
    check_refused(changed_file(&change), "has the dtype F64");
}

static void test_unexpected_tensor(void) {
    static const char* const names[] = {"lm_head.bias",
                                        "h.0.attn.c_attn.lora_A",
                                        "wte.bias",
                                        "wte.module",
                                        "wte.weight.model",
                                        "h.weight",
                                        "h.01.ln_1.weight",
                                        "h.-1.ln_1.weight",
                                        "h.99999999999.ln_1.weight",
                                        "h.0.crossattention.c_attn.weight",
                                        "transformer.lm_head.weight",
                                        "transformer.transformer.wte.weight",
                                        "h.0.attn.bias2",
                                        "scores.weight",
                                        "module.",
                                        ""};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char reason[128];
        Change change = no_change();
        change.extra = names[i];
        snprintf(reason, sizeof(reason), "tensor '%s' is not a tensor of GPT-2", names[i]);
        check_refused(changed_file(&change), reason);
    }
}

static void test_layer_out_of_range(void) {
    Change change = no_change();
    change.extra = "h.2.ln_1.weight";
    char* dir = fresh_dir("layers");
    GPT2Config c = make_config(5, 3, 2, 1, 64);
    write_changed(path_in(dir, "model.safetensors"), &c, &change);
    write_text(path_in(dir, "config.json"), "{\"model_type\":\"gpt2\",\"vocab_size\":5,\"n_positions\":3,\"n_embd\":64,"
                                            "\"n_layer\":2,\"n_head\":1}");
    check_refused(dir, "tensor 'h.2.ln_1.weight' is of layer 2, but the model has 2 layers");
}

static void test_buffers_are_skipped(void) { // a mask may have any shape and type; GPT-2's own files have them
    GPT2Config c = tied_config();
    float* params = make_params(&c, true);
    char* path = path_in(fresh_dir("masks"), "m.safetensors");
    for (int d = 0; d < SAFE_NUM_DTYPES; d++) {
        if (safe_dtypes[d].bits % 8 != 0) { continue; }
        Rewrite r = {NULL,
                     NULL,
                     {{"h.0.attn.bias", NULL, (SafeDtype)d, 0.0f},
                      {"transformer.h.0.attn.masked_bias", NULL, (SafeDtype)d, 0.0f},
                      {"module.transformer.h.7.crossattention.bias", NULL, (SafeDtype)d, 0.0f}}};
        write_rewritten(path, &c, params, &r);
        check_model(path, &c, params);
        check_notes(path, "");
    }
    free(params);
}

static void test_other_heads(void) { // are ignored, with one note
    static const char* const names[] = {"v_head.summary.weight",
                                        "v_head.0.bias",
                                        "score.weight",
                                        "classifier.bias",
                                        "qa_outputs.weight",
                                        "multiple_choice_head.summary.weight",
                                        "position_ids",
                                        "transformer.position_ids",
                                        "module.v_head.summary.bias"};
    GPT2Config c = tied_config();
    float* params = make_params(&c, true);
    char *path = path_in(fresh_dir("heads"), "m.safetensors"), note[128];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        Rewrite r = {NULL, NULL, {{names[i], NULL, SAFE_I64, 0.0f}, {"score.bias", NULL, SAFE_F32, 0.0f}}};
        write_rewritten(path, &c, params, &r);
        check_model(path, &c, params);
        snprintf(note, sizeof(note), "%s and 1 more: not of the model itself, ignored\n", names[i]);
        check_notes(path, note);
    }
    free(params);
}

static void test_tensor_under_two_names(void) {
    static const char* const sources[] = {"transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight",
                                          "transformer.ln_f.bias"};
    static const SafeDtype dtypes[] = {SAFE_F32, SAFE_BF16, SAFE_F16};
    GPT2Config c = tied_config();
    float* params = make_params(&c, true);
    char *path = path_in(fresh_dir("twice"), "m.safetensors"), text[256];
    for (int i = 0; i < 9; i++) {
        const char* source = sources[i % 3];
        Rewrite r = {NULL, NULL, {{source + 12, source, dtypes[i / 3], 0.0f}}};
        write_rewritten(path, &c, params, &r);
        check_model(path, &c, params);
        snprintf(text, sizeof(text), "%s: stored twice, with equal values\n", source + 12);
        check_notes(path, text);
        r.extra[0].delta = 1.0f / 256;
        write_rewritten(path, &c, params, &r);
        snprintf(text, sizeof(text), "tensor '%s' is stored twice with different values, also in %s as '%s'",
                 source + 12, path, source);
        check_refused(path, text);
    }
    free(params);
}

// Writes a directory with this model file and a config.json for tied_config() that goes on with `more`.
static char* rewritten_dir(const GPT2Config* c, const float* params, const Rewrite* r, const char* more) {
    char *dir = fresh_dir("tie"), text[512];
    write_rewritten(path_in(dir, "model.safetensors"), c, params, r);
    snprintf(text, sizeof(text), "{\"vocab_size\":5,\"n_positions\":3,\"n_embd\":64,\"n_layer\":1,\"n_head\":1%s}",
             more);
    write_text(path_in(dir, "config.json"), text);
    return dir;
}

#define WTE "transformer.wte.weight"
#define UNTIED ",\"tie_word_embeddings\":false"

static void test_tied_head(void) { // every way in which a tied lm_head.weight can be stored
    GPT2Config c = tied_config();
    float* params = make_params(&c, true);
    const struct {
        Rewrite r;
        const char *refused, *notes;
    } cases[] = {
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_F32, 0.0f}}}, NULL, ""},
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_BF16, 0.0f}}}, NULL, ""},
        {{"", NULL, {{"lm_head.weight", WTE, SAFE_F16, 0.0f}}}, NULL, ""},
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_F32, 0.0f}, {"module.lm_head.weight", WTE, SAFE_F32, 0.0f}}},
         NULL,
         "module.lm_head.weight: read without the names of wrappers\nmodule.lm_head.weight: stored twice, with equal "
         "values\n"},
        {{NULL, WTE, {{"lm_head.weight", WTE, SAFE_F32, 0.0f}}},
         NULL,
         "lm_head.weight: read as wte.weight, to which it is tied\n"},
        {{NULL, WTE, {{"_orig_mod.lm_head.weight", WTE, SAFE_BF16, 0.0f}}},
         NULL,
         "_orig_mod.lm_head.weight: read without the names of wrappers\n_orig_mod.lm_head.weight: read as wte.weight, "
         "to which it "
         "is tied\n"},
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_F32, 1.0f}}},
         "model.safetensors: lm_head.weight differs from wte.weight, but config.json ties them: if the head has "
         "weights of its own, it "
         "must say \"tie_word_embeddings\": false",
         NULL},
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_BF16, 1.0f}}}, "lm_head.weight differs from wte.weight", NULL},
        {{NULL, NULL, {{"lm_head.weight", "transformer.wpe.weight", SAFE_F32, 0.0f}}},
         "tensor 'lm_head.weight' has the shape [3, 64], want [5, 64]",
         NULL},
        {{NULL, NULL, {{"lm_head.weight", WTE, SAFE_I32, 0.0f}}}, "tensor 'lm_head.weight' has the dtype I32", NULL},
        {{NULL, WTE, {{0}}}, "tensor 'transformer.wte.weight' is missing", NULL},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* dir = rewritten_dir(&c, params, &cases[i].r, "");
        if (cases[i].refused) {
            check_refused(dir, cases[i].refused);
            continue;
        }
        check_model(dir, &c, params);
        check_notes(dir, cases[i].notes);
        check(remove(path_in(dir, "config.json")) == 0); // the same from the tensors alone
        check_model(path_in(dir, "model.safetensors"), &c, params);
    }
    // write_rewritten() adds 0.0f to the last value of lm_head, which makes it 0.0f: an equal number with other bits
    params[5 * 64 - 1] = -0.0f;
    for (int i = 0; i < 2; i++) {
        check_refused(rewritten_dir(&c, params, &cases[i].r, ""), "lm_head.weight differs from wte.weight");
    }
    free(params);
}

static void test_untied_head(void) {
    GPT2Config c = tied_config(), untied = c;
    untied.untied_head = 1;
    float* params = make_params(&untied, true);
    Rewrite as_is = {NULL, NULL, {{0}}}, wrapped = {"module.transformer.",
                                                    "lm_head.weight",
                                                    {{"module.lm_head.weight", "lm_head.weight", SAFE_BF16, 0.0f}}};
    check_model(rewritten_dir(&untied, params, &as_is, UNTIED), &untied, params);
    check_model(rewritten_dir(&untied, params, &wrapped, UNTIED), &untied, params);
    check_refused(rewritten_dir(&untied, params, &as_is, ""), "lm_head.weight differs from wte.weight");
    check_refused(rewritten_dir(&c, params, &as_is, UNTIED),
                  "tensor 'lm_head.weight' is missing: \"tie_word_embeddings\" is false");
    Rewrite no_wte = {NULL, WTE, {{0}}},
            twice = {NULL, NULL, {{"model.lm_head.weight", "lm_head.weight", SAFE_F32, 1.0f}}};
    check_refused(rewritten_dir(&untied, params, &no_wte, UNTIED), "tensor 'transformer.wte.weight' is missing");
    check_refused(rewritten_dir(&untied, params, &twice, UNTIED),
                  "tensor 'model.lm_head.weight' is stored twice with different values");
    char* dir = rewritten_dir(&untied, params, &as_is, UNTIED); // without a config, the values tell
    check(remove(path_in(dir, "config.json")) == 0);
    check_model(path_in(dir, "model.safetensors"), &untied, params);
    // equal values, but each with a life of its own
    memcpy(params + param_offset(&untied, NUM_PARAMS - 1), params, param_size(&untied, 0) * sizeof(float));
    check_model(rewritten_dir(&untied, params, &as_is, UNTIED), &untied, params);
    free(params);
}

// ---- shards ------------------------------------------------------------------------------

// Writes the fixture as two shards, each with half of the tensors; the tensor `both`, unless NULL, is written to both.
static char* shard_fixture(const char* name, const char* index, const char* both) {
    static const char* const files[2] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
    char *dir = fresh_dir(name), command[1200];
    SafeTensors st;
    Error err;
    FileWriter w;
    if (!safetensors_open(&st, tiny_file, &err)) { die("%s", err.text); }
    if (!writer_open(&w, path_in(dir, "model.safetensors.index.json"), &err)) { die("%s", err.text); }
    writer_printf(&w, "{\"metadata\": {\"total_size\": 1882112}, \"weight_map\": {");
    for (int s = 0; s < 2; s++) {
        SafeWriter shard;
        safewriter_init(&shard);
        for (size_t i = 0; i < st.num_tensors; i++) {
            const SafeTensor* t = &st.tensors[i];
            bool here = (int)(2 * i / st.num_tensors) == s;
            if (here || (both && strcmp(t->name, both) == 0)) {
                safewriter_add(&shard, t->name, t->dtype, t->num_dims, t->shape);
            }
            if (here) { writer_printf(&w, "%s\"%s\": \"%s\"", i ? ", " : "", t->name, files[s]); }
        }
        if (!safewriter_begin(&shard, path_in(dir, files[s]), &err)) { die("%s", err.text); }
        for (size_t i = 0; i < st.num_tensors; i++) {
            const SafeTensor* t = &st.tensors[i];
            bool here = (int)(2 * i / st.num_tensors) == s;
            if (here || (both && strcmp(t->name, both) == 0)) { safewriter_data(&shard, t->data, t->bytes); }
        }
        if (!safewriter_end(&shard, &err, NULL, NULL)) { die("%s", err.text); }
    }
    writer_printf(&w, "}}\n");
    if (!writer_close(&w, &err)) { die("%s", err.text); }
    if (index) { write_text(path_in(dir, "model.safetensors.index.json"), index); }
    snprintf(command, sizeof(command), "cp %s/config.json %s/", tiny_dir, dir);
    if (system(command) != 0) { die("%s", command); }
    safetensors_close(&st);
    return dir;
}

static void test_shards(void) {
    GPT2Config c;
    Error err;
    float* params = read_model(tiny_dir, &c, NULL, &err);
    char* dir = shard_fixture("shards", NULL, NULL);
    check_model(dir, &c, params);
    free(params);
    remove(path_in(dir, "model-00002-of-00002.safetensors"));
    check_refused(dir, "model-00002-of-00002.safetensors: No such file");
    write_text(path_in(dir, "model-00002-of-00002.safetensors"), "version https://git-lfs.github.com/spec/v1\n");
    check_refused(dir, "model-00002-of-00002.safetensors: is a git-LFS pointer");
}

static void test_tensor_in_two_shards(void) {
    char* dir = shard_fixture("twice", NULL, "transformer.h.0.ln_1.bias");
    check_notes(dir, "transformer.h.0.ln_1.bias: stored twice, with equal values\n");
    char* second = path_in(dir, "model-00002-of-00002.safetensors");
    SafeTensors st;
    Error err;
    check(safetensors_open(&st, second, &err));
    off_t at = (off_t)(safetensors_find(&st, "transformer.h.0.ln_1.bias")->data - st.file.data);
    safetensors_close(&st);
    int fd = open(second, O_WRONLY);
    check(pwrite(fd, "\x3f", 1, at + 3) == 1);
    close(fd);
    check_refused(dir, "model-00002-of-00002.safetensors: tensor 'transformer.h.0.ln_1.bias' is stored twice with "
                       "different values, also in");
    check_refused(dir, "model-00001-of-00002.safetensors as 'transformer.h.0.ln_1.bias'");
}

// an index that names tensors which no file has
static void test_index_names_more(void) {
    GPT2Config c = tied_config(), untied = c;
    untied.untied_head = 1;
    float* params = make_params(&untied, true);
    Rewrite as_is = {NULL, NULL, {{0}}}, head_alone = {NULL, WTE, {{"lm_head.weight", WTE, SAFE_F32, 0.0f}}};
#define NAMED(name) "{\"weight_map\":{\"" name "\":\"m.safetensors\"}}"
    const struct {
        const GPT2Config* c;
        const Rewrite* r;
        const char *index, *notes, *refused;
    } cases[] = {
        {&c, &as_is, NAMED("lm_head.weight"), "lm_head.weight: in the index, but in no file, and not needed\n", NULL},
        {&c, &as_is, NAMED("module.lm_head.weight"),
         "module.lm_head.weight: in the index, but in no file, and not needed\n", NULL},
        {&c, &head_alone, NAMED(WTE),
         WTE
         ": in the index, but in no file, and not needed\nlm_head.weight: read as wte.weight, to which it is tied\n",
         NULL},
        {&c, &as_is, NAMED("transformer.h.0.attn.bias"),
         "transformer.h.0.attn.bias: in the index, but in no file, and not needed\n", NULL},
        {&c, &as_is, NAMED("lm_head.bias"), NULL,
         "tensor 'lm_head.bias' is not in m.safetensors, where the index places it"},
        {&untied, &as_is, NAMED("lm_head.weight"), "", NULL},
        {&untied, &as_is, NAMED("module.lm_head.weight"), NULL,
         "'module.lm_head.weight' is not in m.safetensors, where the index places it"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* dir = rewritten_dir(cases[i].c, params, cases[i].r, cases[i].c->untied_head ? UNTIED : "");
        check(rename(path_in(dir, "model.safetensors"), path_in(dir, "m.safetensors")) == 0);
        write_text(path_in(dir, "model.safetensors.index.json"), cases[i].index);
        if (cases[i].refused) {
            check_refused(dir, cases[i].refused);
            continue;
        }
        check_model(dir, cases[i].c, params);
        check_notes(dir, cases[i].notes);
    }
    free(params);
}

// a sharded model whose head is in another file than its embedding
static void test_untied_shards(void) {
    GPT2Config c = tied_config(), untied = c;
    untied.untied_head = 1;
    float* params = make_params(&untied, true);
    Rewrite body = {NULL, "lm_head.weight", {{0}}}, head = {NULL, NULL, {{0}}};
    char* dir = rewritten_dir(&untied, params, &body, UNTIED);
    check(rename(path_in(dir, "model.safetensors"), path_in(dir, "a.safetensors")) == 0);
    write_rewritten(path_in(dir, "b.safetensors"), &untied, params, &head);
    write_text(path_in(dir, "model.safetensors.index.json"),
               "{\"weight_map\":{\"transformer.wte.weight\":\"a.safetensors\",\"lm_head.weight\":\"b.safetensors\"}}");
    check_model(dir, &untied, params);
    check_notes(dir, WTE " and 15 more: stored twice, with equal values\n");
    free(params);
}

static void test_index_refused(void) {
#define INDEX(file) "{\"weight_map\":{\"transformer.wte.weight\":\"" file "\"}}"
    static const struct {
        const char *index, *reason;
    } cases[] = {
        {INDEX("../model.safetensors"), "is not a plain file name"},
        {INDEX("/etc/passwd"), "'/etc/passwd' is not a plain file name"},
        {INDEX("sub/model.safetensors"), "is not a plain file name"},
        {INDEX(".."), "is not a plain file name"},
        {INDEX("."), "is not a plain file name"},
        {INDEX(""), "is not a plain file name"},
        {INDEX("a..b"), "is not a plain file name"},
        {INDEX("a\\\\b"), "is not a plain file name"},
        {INDEX("a\\u0000b"), "is not a plain file name"},
        {INDEX("model-00002-of-00002.safetensors\\n"), "is not a plain file name"},
        {"{\"weight_map\":{\"a\":1}}", "tensor 'a': its file is a number"},
        {"{\"weight_map\":{}}", "\"weight_map\" is empty"},
        {"{\"weight_map\":[]}", "\"weight_map\" is an array, want an object"},
        {"{}", "\"weight_map\" is missing"},
        {"[]", "\"weight_map\" is missing"},
        {"{", "not valid JSON at byte 1"},
        {INDEX("model-00001-of-00002.safetensors"), "'transformer.wte.weight' is not in model-00001-of-00002"},
        {INDEX("model-00002-of-00002.safetensors"), "'transformer.h.0.ln_1.weight' is missing"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"x.safetensors\"}}", "\"a\" occurs twice"},
    };
    char* dir = shard_fixture("index", NULL, NULL);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        write_text(path_in(dir, "model.safetensors.index.json"), cases[i].index);
        check_refused(dir, cases[i].reason);
    }
}

static void test_too_many_shards(void) {
    char *text = (char*)malloc_check(MODEL_MAX_SHARDS * 40), *at = text;
    for (int n = MODEL_MAX_SHARDS; n <= MODEL_MAX_SHARDS + 1; n++) {
        HfIndex index;
        Error err;
        at = text + sprintf(text, "{\"weight_map\":{");
        for (int i = 0; i < n; i++) { at += sprintf(at, "%s\"t%d\":\"f%d\"", i ? "," : "", i, i); }
        strcpy(at, "}}");
        bool ok = hf_index_parse(&index, text, strlen(text), "index", &err);
        check(ok == (n == MODEL_MAX_SHARDS));
        if (ok) { hf_index_free(&index); }
    }
    free(text);
}

// ---- config.json ---------------------------------------------------------------------------

#define CONFIG(more)                                                                                                   \
    "{\"model_type\":\"gpt2\",\"vocab_size\":512,\"n_positions\":64,\"n_embd\":128,\"n_layer\":2,\"n_head\":2" more "}"

static void check_config(const char* text, const char* reason) {
    GPT2Config c;
    Error err;
    int bos = 0, eot = 0;
    float dropout;
    err.text[0] = '\0';
    bool ok = hf_config_parse(&c, &bos, &eot, &dropout, text, strlen(text), "config.json", &err);
    check_msg(ok == !reason, "%s: %s", text, ok ? "taken" : err.text);
    if (!ok && reason) {
        check_msg(strstr(err.text, reason) && strncmp(err.text, "config.json: ", 13) == 0 && !strchr(err.text, '\n'),
                  "'%s' lacks '%s'", err.text, reason);
    }
}

static void test_config_cannot_be_honoured(void) {
    check_config(CONFIG(",\"n_inner\":\"512\""), "\"n_inner\" is a string");
    check_config(CONFIG(",\"n_inner\":0"), "\"n_inner\" is 0, want 1 to");
    check_config(CONFIG(",\"n_inner\":-512"), "\"n_inner\" is -512, want 1 to");
    check_config(CONFIG(",\"n_inner\":512.5"), "\"n_inner\" is 512.5, want an integer");
    check_config(CONFIG(",\"n_inner\":4194305"), "the number of MLP channels is 4194305, want 1 to 4194304");
    check_config(CONFIG(",\"activation_function\":\"relu\\n\""),
                 "\"relu\\x0a\"; supported are gelu_new, gelu_fast, gelu_accurate, gelu_python_tanh, "
                 "gelu_pytorch_tanh, gelu, gelu_python, relu, relu2, silu, swish, tanh");
    static const char* const others[] = {"gelu_10", "quick_gelu", "mish",       "linear", "relu6",
                                         "sigmoid", "laplace",    "leaky_relu", "GELU",   ""};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]);
         i++) { // what transformers has besides, and what it has not
        char text[512], reason[64];
        snprintf(text, sizeof(text), CONFIG(",\"activation_function\":\"%s\""), others[i]);
        snprintf(reason, sizeof(reason), "\"activation_function\" is \"%s\"; supported are gelu_new,", others[i]);
        check_config(text, reason);
    }
    check_config(CONFIG(",\"activation_function\":null"), "\"activation_function\" is null");
    static const char* const flags[] = {"scale_attn_weights", "scale_attn_by_inverse_layer_idx",
                                        "reorder_and_upcast_attn", "tie_word_embeddings", "add_cross_attention"};
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        static const char* const values[][2] = {{"1", "a number"}, {"null", "null"}, {"\"true\"", "a string"}};
        for (int k = 0; k < 3; k++) {
            char text[512], reason[128];
            snprintf(text, sizeof(text), CONFIG(",\"%s\":%s"), flags[i], values[k][0]);
            snprintf(reason, sizeof(reason), "\"%s\" is %s", flags[i], values[k][1]);
            check_config(text, reason);
        }
    }
    check_config(CONFIG(",\"add_cross_attention\":true"), "\"add_cross_attention\" is true");
    check_config(CONFIG(",\"is_encoder_decoder\":true"), "\"is_encoder_decoder\" is true");
    check_config(CONFIG(",\"layer_norm_epsilon\":-1e-5"), "\"layer_norm_epsilon\" is -1e-05, want 0 to 1");
    check_config(CONFIG(",\"layer_norm_epsilon\":1.5"), "\"layer_norm_epsilon\" is 1.5, want 0 to 1");
    check_config(CONFIG(",\"layer_norm_epsilon\":0"), "the epsilon of the layernorms is 0, want more than 0");
    check_config(CONFIG(",\"layer_norm_epsilon\":1e-60"), "the epsilon of the layernorms is 0, want more than 0");
    check_config(CONFIG(",\"layer_norm_epsilon\":null"), "\"layer_norm_epsilon\" is null");
    check_config(CONFIG(",\"quantization_config\":{\"bits\":4}"), "\"quantization_config\"");
    check_config(CONFIG(",\"quantization_config\":null"), NULL);
    check_config(CONFIG(",\"pruned_heads\":{\"0\":[1]}"), "\"pruned_heads\"");
    check_config(CONFIG(",\"pruned_heads\":{}"), NULL);
    check_config(CONFIG(",\"attn_pdrop\":0.1,\"embd_pdrop\":0.1,\"resid_pdrop\":0.1,\"something\":{}"), NULL);
}

static void test_config_mlp_and_epsilon(void) {
    static const struct {
        const char* text;
        int mlp_channels;
        float norm_epsilon;
    } cases[] = {{CONFIG(""), 512, 1e-5f},
                 {CONFIG(",\"n_inner\":null"), 512, 1e-5f},
                 {CONFIG(",\"n_inner\":512,\"layer_norm_epsilon\":0.00001"), 512, 1e-5f},
                 {CONFIG(",\"n_inner\":1,\"layer_norm_epsilon\":1"), 1, 1.0f},
                 {CONFIG(",\"n_inner\":4194304,\"layer_norm_epsilon\":1e-6"), 4194304, 1e-6f}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        GPT2Config c;
        Error err;
        int bos, eot;
        float dropout;
        check(hf_config_parse(&c, &bos, &eot, &dropout, cases[i].text, strlen(cases[i].text), "config.json", &err));
        check_msg(c.mlp_channels == cases[i].mlp_channels && c.norm_epsilon == cases[i].norm_epsilon, "%s: %d, %g",
                  cases[i].text, c.mlp_channels, (double)c.norm_epsilon);
    }
}

// Parses the text; a config that is refused has no layers.
static GPT2Config parsed_config(const char* text, float* dropout) {
    GPT2Config c;
    Error err;
    int bos, eot;
    bool ok = hf_config_parse(&c, &bos, &eot, dropout, text, strlen(text), "config.json", &err);
    check_msg(ok, "%s", err.text);
    if (!ok) { memset(&c, 0, sizeof(c)); }
    return c;
}

// every setting that changes how a model computes
static void test_config_variants(void) {
    float dropout;
    for (int i = 0; i < NUM_ACTIVATION_NAMES; i++) {
        char text[512];
        snprintf(text, sizeof(text), CONFIG(",\"activation_function\":\"%s\""), gpt2_activations[i].name);
        check(parsed_config(text, &dropout).activation == (int)gpt2_activations[i].activation);
    }
    static const char* const settings[] = {"\"scale_attn_weights\":false", "\"scale_attn_by_inverse_layer_idx\":true",
                                           "\"tie_word_embeddings\":false", "\"reorder_and_upcast_attn\":true"};
    for (int set = 0; set < 16; set++) {
        char text[512];
        snprintf(text, sizeof(text), CONFIG(""));
        for (int i = 0; i < 4; i++) {
            if (set >> i & 1) { snprintf(strrchr(text, '}'), 100, ",%s}", settings[i]); }
        }
        GPT2Config c = parsed_config(text, &dropout), want = make_config(512, 64, 2, 2, 128);
        want.unscaled_attention = set & 1, want.scale_by_layer = set >> 1 & 1, want.untied_head = set >> 2 & 1;
        check_msg(memcmp(&c, &want, sizeof(c)) == 0, "%s", text);
    }
}

static void test_config_dropout(void) { // 0.1 is transformers' default
    static const struct {
        const char* text;
        float dropout;
    } cases[] = {{CONFIG(""), 0.1f},
                 {CONFIG(",\"attn_pdrop\":0.0,\"embd_pdrop\":0,\"resid_pdrop\":0.0"), 0.0f},
                 {CONFIG(",\"attn_pdrop\":0.0,\"embd_pdrop\":0.25,\"resid_pdrop\":0.2"), 0.25f},
                 {CONFIG(",\"attn_pdrop\":0.0,\"embd_pdrop\":0.0"), 0.1f}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        float dropout = -1.0f;
        parsed_config(cases[i].text, &dropout);
        check_msg(dropout == cases[i].dropout, "%s: %g", cases[i].text, (double)dropout);
    }
    ModelFile model; // a file without a config says nothing
    Error err;
    Change change = no_change();
    check(model_open(&model, changed_file(&change), &err) && model.dropout == 0.0f);
    model_close(&model);
}

// GPT-2's config.json of 2019, names that transformers has for all models, and what its defaults stand for
static void test_config_spellings(void) {
    static const struct {
        const char* text;
        int V, maxT, L, NH, C;
    } cases[] = {
        {"{\"attn_pdrop\":0.1,\"embd_pdrop\":0.1,\"initializer_range\":0.02,\"layer_norm_epsilon\":1e-05,\"n_ctx\":"
         "1024,"
         "\"n_embd\":1024,\"n_head\":16,\"n_layer\":24,\"n_positions\":1024,\"resid_pdrop\":0.1,\"vocab_size\":50257}",
         50257, 1024, 24, 16, 1024},
        {"{}", 50257, 1024, 12, 12, 768},
        {"{\"model_type\":\"gpt2\",\"n_ctx\":77}", 50257, 1024, 12, 12, 768},
        {"{\"max_position_embeddings\":64,\"hidden_size\":128,\"num_hidden_layers\":3,\"num_attention_heads\":4,"
         "\"vocab_size\":100}",
         100, 64, 3, 4, 128},
        {CONFIG(
             ",\"hidden_size\":128,\"max_position_embeddings\":64,\"num_hidden_layers\":2,\"num_attention_heads\":2"),
         512, 64, 2, 2, 128},
        // what other models have, GPT-2 has not
        {CONFIG(",\"intermediate_size\":100,\"hidden_act\":\"relu\",\"afn\":\"gelu\",\"layer_norm_eps\":1e-3"), 512, 64,
         2, 2, 128},
        {CONFIG(",\"torch_dtype\":\"float16\",\"dtype\":\"bfloat16\",\"use_cache\":false,\"_attn_implementation\":"
                "\"eager\""),
         512, 64, 2, 2, 128},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        float dropout;
        GPT2Config c = parsed_config(cases[i].text, &dropout);
        GPT2Config want = make_config(cases[i].V, cases[i].maxT, cases[i].L, cases[i].NH, cases[i].C);
        check_msg(memcmp(&c, &want, sizeof(c)) == 0, "%s", cases[i].text);
    }
    check_config(CONFIG(",\"hidden_size\":64"), "\"n_embd\" is 128, but \"hidden_size\" is 64");
    check_config(CONFIG(",\"num_attention_heads\":4"), "\"n_head\" is 2, but \"num_attention_heads\" is 4");
    check_config(CONFIG(",\"num_hidden_layers\":null"), "\"num_hidden_layers\" is null");
    check_config("{\"n_head\":null}", "\"n_head\" is null");
    check_config("{\"model_type\":null}", "\"model_type\" is null");
    check_config("{\"model_type\":\"gpt_neo\"}", "\"model_type\" is \"gpt_neo\"; only \"gpt2\" is supported");
}

// the config.json of published models (fixtures/gpt2_families.jsonl)
static void test_config_families(void) {
    static const struct {
        const char* name;
        int V, maxT, L, NH, C, F, activation, by_layer;
        float dropout;
    } want[] = {{"gpt2", 50257, 1024, 12, 12, 768, 3072, ACT_GELU_TANH, 0, 0.1f},
                {"distilgpt2", 50257, 1024, 6, 12, 768, 3072, ACT_GELU_TANH, 0, 0.1f},
                {"dialogpt", 50257, 1024, 24, 16, 1024, 4096, ACT_GELU_TANH, 0, 0.1f},
                {"codeparrot", 32768, 1024, 48, 25, 1600, 6400, ACT_GELU_TANH, 1, 0.1f},
                {"mistral", 50257, 1024, 12, 12, 768, 3072, ACT_GELU_TANH, 1, 0.1f},
                {"cerebras_111m", 50257, 2048, 10, 12, 768, 3072, ACT_GELU, 0, 0.0f},
                {"cerebras_1_3b", 50257, 2048, 24, 16, 2048, 8192, ACT_GELU, 0, 0.0f},
                {"cerebras_2_7b", 50257, 2048, 32, 32, 2560, 10240, ACT_GELU, 0, 0.0f},
                {"rugpt3small", 50264, 2048, 12, 12, 768, 3072, ACT_GELU_TANH, 0, 0.1f},
                {"gpt_sw3", 64000, 2048, 12, 12, 768, 3072, ACT_GELU, 0, 0.1f},
                {"gpt2_chinese", 21128, 1024, 12, 12, 768, 3072, ACT_GELU_TANH, 0, 0.1f},
                {"japanese_gpt2", 32000, 1024, 24, 16, 1024, 4096, ACT_GELU_TANH, 0, 0.1f},
                {"protgpt2", 50257, 1024, 36, 20, 1280, 5120, ACT_GELU_TANH, 0, 0.1f},
                {"kogpt2", 51200, 1024, 12, 12, 768, 3072, ACT_GELU_TANH, 0, 0.1f}};
    MappedFile file;
    Error err;
    size_t n = 0;
    check(map_file(&file, "dev/test/fixtures/gpt2_families.jsonl", &err));
    const char *at = (const char*)file.data, *end = at + file.size;
    for (; at < end; n++) {
        const char *newline = (const char*)memchr(at, '\n', (size_t)(end - at)), *name = want[n].name;
        const char* text =
            (const char*)memmem(at, (size_t)(newline - at), "\"config\":", 9) + 9; // to the last but one byte
        GPT2Config c, w;
        int bos, eot;
        float dropout;
        check(n < sizeof(want) / sizeof(want[0]) && strncmp(at + 9, name, strlen(name)) == 0);
        bool ok = hf_config_parse(&c, &bos, &eot, &dropout, text, (size_t)(newline - 1 - text), name, &err);
        check_msg(ok, "%s", err.text);
        w = make_config(want[n].V, want[n].maxT, want[n].L, want[n].NH, want[n].C);
        w.mlp_channels = want[n].F, w.activation = want[n].activation, w.scale_by_layer = want[n].by_layer;
        check_msg(ok && memcmp(&c, &w, sizeof(c)) == 0 && dropout == want[n].dropout, "%s", name);
        at = newline + 1;
    }
    check(n == sizeof(want) / sizeof(want[0]));
    unmap_file(&file);
}

static void test_config_sizes(void) {
    static const char* const keys[] = {"vocab_size", "n_positions", "n_embd", "n_layer", "n_head"};
    for (size_t i = 0; i < 5; i++) { // the numbers must be positive integers
        char text[512], reason[128];
        strcpy(text, CONFIG(""));
        char* value = strchr(strstr(text, keys[i]), ':') + 1;
        value[0] = '0';
        for (char* c = value + 1; *c >= '0' && *c <= '9'; c++) { *c = ' '; }
        snprintf(reason, sizeof(reason), "\"%s\" is 0, want 1", keys[i]);
        check_config(text, reason);
    }
    check_config("{\"model_type\":\"llama\"}", "\"model_type\" is \"llama\"; only \"gpt2\"");
    check_config(
        "{\"model_type\":\"gpt2\",\"vocab_size\":512,\"n_positions\":64,\"n_embd\":100,\"n_layer\":2,\"n_head\":3}",
        "100 channels do not divide into 3 heads");
    check_config("{\"model_type\":\"gpt2\",\"vocab_size\":4294967808,\"n_positions\":64,\"n_embd\":128,\"n_layer\":2,"
                 "\"n_head\":2}",
                 "\"vocab_size\" is 4294967808");
    check_config("{\"model_type\":\"gpt2\",\"vocab_size\":2147483647,\"n_positions\":64,\"n_embd\":128,\"n_layer\":2,"
                 "\"n_head\":2}",
                 "the vocabulary size is 2147483647");
    check_config(
        "{\"model_type\":\"gpt2\",\"vocab_size\":512.0,\"n_positions\":64,\"n_embd\":128,\"n_layer\":2,\"n_head\":2}",
        "want an integer");
    size_t large = (1 << 20) + 1; // the text is valid, but larger than any config.json
    char* spaces = (char*)malloc_check(large + 1);
    memset(spaces, ' ', large);
    spaces[large] = '\0';
    spaces[0] = '{', spaces[large - 1] = '}';
    check_config(spaces, "has 1048577 bytes, at most 1 MB is read");
    free(spaces);
    check_config("[]", "not a JSON object");
    check_config("", "not valid JSON");
    check_config(CONFIG(",\"n_head\":4"), "\"n_head\" occurs twice");
}

static void test_config_bos_eot(void) {
    static const struct {
        const char* text;
        int bos, eot;
    } cases[] = {{CONFIG(",\"eos_token_id\":511"), -1, 511},
                 {CONFIG(",\"eos_token_id\":0,\"bos_token_id\":1"), 1, 0},
                 {CONFIG(",\"eos_token_id\":512,\"bos_token_id\":511"), 511, -1},
                 {CONFIG(",\"eos_token_id\":50256,\"bos_token_id\":50256"), -1, -1},
                 {CONFIG(",\"eos_token_id\":null,\"bos_token_id\":0"), 0, -1},
                 {CONFIG(",\"eos_token_id\":[1,2],\"bos_token_id\":\"3\""), -1, -1},
                 {CONFIG(""), -1, -1},
                 {CONFIG(",\"eos_token_id\":-5,\"bos_token_id\":1.5"), -1, -1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        GPT2Config c;
        Error err;
        int bos = -7, eot = -7;
        float dropout;
        check(hf_config_parse(&c, &bos, &eot, &dropout, cases[i].text, strlen(cases[i].text), "config.json", &err));
        check_msg(bos == cases[i].bos && eot == cases[i].eot, "%s: %d, %d", cases[i].text, bos, eot);
    }
}

static void test_config_against_tensors(void) { // the shapes must match the config
    char *dir = fresh_dir("against"), command[1200];
    snprintf(command, sizeof(command), "cp %s %s/", tiny_file, dir);
    check(system(command) == 0);
    check_refused(dir, "no config.json in it");
    write_text(path_in(dir, "config.json"),
               "{\"model_type\":\"gpt2\",\"vocab_size\":513,\"n_positions\":64,\"n_embd\":128,"
               "\"n_layer\":2,\"n_head\":2}");
    check_refused(dir, "'transformer.wte.weight' has the shape [512, 128], want [513, 128]");
    // the config in the file's directory is used as well
    check_refused(path_in(dir, "model.safetensors"), "want [513, 128]");
    write_text(path_in(dir, "config.json"),
               "{\"model_type\":\"gpt2\",\"vocab_size\":512,\"n_positions\":64,\"n_embd\":128,"
               "\"n_layer\":3,\"n_head\":2}");
    check_refused(dir, "'transformer.h.2.ln_1.weight' is missing");
    write_text(path_in(dir, "config.json"), "<!DOCTYPE html><html>");
    check_refused(dir, "config.json: is a web page");
}

// ---- files that are not a model ---------------------------------------------------------------

static void check_mistake(const char* name, const void* data, size_t n, const char* reason) {
    char* dir = fresh_dir("mistake");
    write_file(path_in(dir, name), data, n);
    check_refused(path_in(dir, name), reason);
    // the same file under the name that is expected in a directory
    write_file(path_in(dir, "model.safetensors"), data, n);
    write_text(path_in(dir, "config.json"), CONFIG(""));
    check_refused(dir, "model.safetensors: ");
}

static void test_mistaken_files(void) {
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:248dfc39\nsize 548105171\n";
    check_mistake("m.safetensors", lfs, sizeof(lfs) - 1, "is a git-LFS pointer");
    check_mistake("m.bin", lfs, sizeof(lfs) - 1, "is a git-LFS pointer");
    check_mistake("pytorch_model.bin", "PK\3\4\0\0\0\0\0\0\0\0", 12,
                  "is a zip file, probably PyTorch's pytorch_model.bin");
    check_mistake("pytorch_model.bin", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 15, "is a Python pickle");
    check_mistake("m.safetensors", "<!DOCTYPE html>\n<html><body>404", 31, "is a web page");
    check_mistake("m.gguf", "GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16, "is a GGUF file");
    check_mistake("m.bin", "", 0, "is empty; download it again");
    check_mistake("m.bin", "abc", 3, "truncated");
    check_mistake("m.bin", "some other bytes", 16, "neither a safetensors file nor a model file of llm.c");
    check_mistake("x.json", "{\"weight_map\": {}}", 18, "is a JSON file, not a model; give the directory");
    check_refused(path_in(test_dir(), "nothing_here"), "No such file");
    check_refused(fresh_dir("empty"), "no config.json in it: not a Hugging Face model directory");
}

static void test_directory_with_pickle_only(void) {
    char* dir = fresh_dir("pickle");
    write_text(path_in(dir, "config.json"), CONFIG(""));
    check_refused(dir, "contains neither model.safetensors nor model.safetensors.index.json");
    write_text(path_in(dir, "pytorch_model.bin"), "PK");
    check_refused(dir, "contains only PyTorch's pytorch_model.bin; download model.safetensors");
}

static void test_llmc_other_files(void) {
    static const struct {
        int32_t magic, version;
        const char* reason;
    } cases[] = {{20240326, 1, "version 1 of llm.c's model file is too old (unpadded vocabulary)"},
                 {20240326, 2, "version 2 of llm.c's model file is too old"},
                 {20240326, 4, "version 4 of llm.c's model file is not known, want 3 (fp32) or 5 (bf16)"},
                 {20240327, 2, "is a debug state of llm.c, not a GPT-2 model"},
                 {20240328, 2, "is a tokenizer of llm.c"},
                 {20240520, 1, "is a token shard of llm.c"},
                 {20240522, 1, "is an eval file of llm.c"},
                 {20240801, 7, "is a Llama 3 shard of llm.c"},
                 {20240803, 5, "is a Llama 3 model of llm.c"},
                 {20249999, 3, "not a model file of llm.c"}};
    char* path = path_in(fresh_dir("others"), "x.bin");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int32_t h[300] = {cases[i].magic, cases[i].version, 3, 5, 1, 1, 2, 128};
        write_file(path, h, sizeof(h));
        check_refused(path, cases[i].reason);
    }
}

static void test_llmc_header_is_checked(void) {
    static const struct {
        int word, value;
        const char* reason;
    } cases[] = {{2, 0, "number of positions is 0"},
                 {3, -1, "the vocabulary size is -1"},
                 {4, 5000, "number of layers is 5000"},
                 {5, 3, "2 channels do not divide into 3 heads"},
                 {6, 1 << 30, "number of channels is"},
                 {7, 1, "padded vocabulary 1 is smaller than the vocabulary 3"},
                 {7, 129, "padded vocabulary 129 is not a multiple of 128"},
                 {7, 2147483520, "bytes are missing"},
                 {7, 256, "of 3400 bytes are missing"},
                 {2, 3, "truncated: 8 of 2384 bytes are missing"},
                 {2, 1, "8 bytes too many"}};
    GPT2Config c = make_config(3, 2, 1, 1, 2);
    Error err;
    float* params = make_params(&c, true);
    char* path = path_in(fresh_dir("header"), "x.bin");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check(model_save_llmc(path, &c, params, 3, &err));
        int fd = open(path, O_WRONLY);
        check(pwrite(fd, &cases[i].value, 4, 4 * cases[i].word) == 4);
        close(fd);
        check_refused(path, cases[i].reason);
    }
    free(params);
}

static void check_truncations(const char* path) {
    struct stat st;
    check(stat(path, &st) == 0);
    for (off_t n = st.st_size - 1; n >= 0; n--) {
        check(truncate(path, n) == 0);
        check_refused(path, n == 0 ? "empty" : "truncated");
    }
}

static void test_every_truncation(void) {
    GPT2Config c = make_config(3, 2, 1, 1, 2);
    Error err;
    float* params = make_params(&c, true);
    char* dir = fresh_dir("whole");
    check(model_save_llmc(path_in(dir, "m.bin"), &c, params, 5, &err));
    check_truncations(path_in(dir, "m.bin"));
    check(model_save_hf(dir, &c, params, true, -1, &err));
    check_truncations(path_in(dir, "model.safetensors"));
    free(params);
}

static void test_changed_after_open(void) {
    GPT2Config c = make_config(3, 2, 1, 1, 2);
    Error err;
    ModelFile model;
    float* params = make_params(&c, true);
    char* path = path_in(fresh_dir("cut_later"), "m.bin");
    check(model_save_llmc(path, &c, params, 3, &err) && model_open(&model, path, &err));
    check(truncate(path, 1030) == 0);
    check(!model_read(&model, params, &err) && strstr(err.text, "changed from 2376 to 1030 bytes"));
    check(!model_read_tensor(&model, 1, 0, params, &err));
    model_close(&model);
    free(params);
}

// ---- writing -----------------------------------------------------------------------------------

static void test_written_config(void) { // the keys that from_pretrained() reads
    GPT2Config c = odd_config();
    Error err;
    JsonDoc doc;
    MappedFile file;
    float* params = make_params(&c, true);
    for (int eot = -1; eot <= 130; eot += 131) {
        char* dir = fresh_dir("config");
        check(model_save_hf(dir, &c, params, eot < 0, eot, &err));
        check(map_file(&file, path_in(dir, "config.json"), &err));
        check_msg(json_parse(&doc, (const char*)file.data, file.size, "config.json", &err), "%s", err.text);
        check_str(json_get(doc.root, "model_type")->string, "gpt2");
        check_str(json_get(doc.root, "architectures")->items[0].string, "GPT2LMHeadModel");
        check_str(json_get(doc.root, "torch_dtype")->string, eot < 0 ? "bfloat16" : "float32");
        check(json_get(doc.root, "vocab_size")->integer == 131 && json_get(doc.root, "n_positions")->integer == 7);
        check(json_get(doc.root, "n_inner")->type == JSON_NULL);
        static const char epsilon[] = "\"layer_norm_epsilon\": 1e-05,\n"; // as transformers writes it
        check(memmem(file.data, file.size, epsilon, sizeof(epsilon) - 1) != NULL);
        check(json_get(doc.root, "eos_token_id")->type == (eot < 0 ? JSON_NULL : JSON_NUMBER));
        json_free(&doc);
        unmap_file(&file);
        check(map_file(&file, path_in(dir, "generation_config.json"), &err));
        check_msg(json_parse(&doc, (const char*)file.data, file.size, "generation_config.json", &err), "%s", err.text);
        check(json_get(doc.root, "eos_token_id")->type == (eot < 0 ? JSON_NULL : JSON_NUMBER));
        json_free(&doc);
        unmap_file(&file);
    }
    free(params);
}

static void test_written_names(void) { // names with prefix, Hugging Face's shapes, V rows, nothing else
    GPT2Config c = odd_config();
    Error err;
    SafeTensors st;
    float* params = make_params(&c, true);
    char* dir = fresh_dir("names");
    check(model_save_hf(dir, &c, params, false, -1, &err));
    check(safetensors_open(&st, path_in(dir, "model.safetensors"), &err));
    const SafeTensor* wte = safetensors_find(&st, "transformer.wte.weight");
    const SafeTensor* fc = safetensors_find(&st, "transformer.h.1.mlp.c_fc.weight");
    const SafeTensor* proj = safetensors_find(&st, "transformer.h.0.mlp.c_proj.weight");
    check(st.num_tensors == 28 && wte && fc && proj);
    check(wte->shape[0] == 131 && wte->shape[1] == 72);
    check(fc->shape[0] == 72 && fc->shape[1] == 288 && proj->shape[0] == 288 && proj->shape[1] == 72);
    const float* fcw = params + param_offset(&c, 10) + param_layer_size(&c, 10); // layer 1, (F, C)
    for (size_t o = 0; o < 288; o++) {
        for (size_t i = 0; i < 72; i++) {
            float f;
            safetensors_to_float(&f, fc, i * 288 + o, 1);
            check(f == fcw[o * 72 + i]);
        }
    }
    safetensors_close(&st);
    free(params);
}

static void test_large_matrices(void) { // several chunks per tensor, which hold no whole number of rows
    GPT2Config c = make_config(1500, 9, 1, 1, 760);
    Error err;
    float* params = make_params(&c, false);
    char* dir = fresh_dir("large");
    check(model_save_hf(dir, &c, params, false, -1, &err));
    check_model(dir, &c, params);
    check(model_save_llmc(path_in(dir, "m.bin"), &c, params, 3, &err));
    check_model(path_in(dir, "m.bin"), &c, params);
    free(params);
}

static void test_arrays(void) { // the optimizer's moments
    GPT2Config c = odd_config();
    Error err;
    SavedFile saved;
    static const char* const prefixes[2] = {"m.", "v."};
    static const char* const swapped[2] = {"v.", "m."};
    static const char* const others[2] = {"m.", "w."};
    static const char* const same[1] = {"m."};
    size_t bytes = num_parameters(&c) * sizeof(float);
    float *m = make_params(&c, false), *v = make_params(&c, true);
    float *m2 = (float*)malloc_check(bytes), *v2 = (float*)malloc_check(bytes);
    const float* in[2] = {m, v};
    float* out[2] = {m2, v2};
    char* path = path_in(fresh_dir("arrays"), "optimizer.safetensors");
    memset(m2, 0xFF, bytes);
    memset(v2, 0xFF, bytes);
    check(params_save_safetensors(path, &c, in, prefixes, 2, false, &saved, &err));
    check_str(saved.name, "optimizer.safetensors");
    check(params_load_safetensors(path, &c, out, prefixes, 2, &err));
    check_same(m2, m, &c);
    check_same(v2, v, &c);
    check(params_load_safetensors(path, &c, out, swapped, 2, &err));
    check_same(m2, v, &c);
    check(!params_load_safetensors(path, &c, out, same, 1, &err) &&
          strstr(err.text, "'v.transformer.wte.weight' is not a tensor"));
    check(!params_load_safetensors(path, &c, out, others, 2, &err) && strncmp(err.text, path, strlen(path)) == 0);
    GPT2Config other = c;
    other.max_seq_len++;
    check(!params_load_safetensors(path, &other, out, prefixes, 2, &err));
    check(strstr(err.text, "'m.transformer.wpe.weight' has the shape [7, 72], want [8, 72]"));
    Change change = no_change(); // a file of moments may have neither a head nor a buffer
    change.prefix = "m.transformer.";
    change.extra = "m.lm_head.weight";
    write_changed(path, &c, &change);
    check(!params_load_safetensors(path, &c, out, same, 1, &err) &&
          strstr(err.text, "'m.lm_head.weight' is not a tensor"));
    // the file has one array, but two are requested
    check(params_save_safetensors(path, &c, in, same, 1, false, NULL, &err));
    check(!params_load_safetensors(path, &c, out, prefixes, 2, &err) &&
          strstr(err.text, "'v.transformer.wte.weight' is missing"));
    check_refused(path, "tensor 'wte.weight' is missing: not a GPT-2"); // and it is not a model either
    free(m);
    free(v);
    free(m2);
    free(v2);
}

// in blocks of 4096, with a limit that is itself allowed
static void test_first_above(void) {
    static float x[9000];
    static const size_t at[] = {0, 1, 4095, 4096, 8191, 8192, 8999};
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 9000; i++) { x[i] = i % 2 ? FLT_MAX : -FLT_MAX; }
    check(first_above(x, 9000, FLT_MAX) == 9000 && first_above(x, 0, FLT_MAX) == 0 && first_above(x, 9000, 65504) == 0);
    for (size_t i = 0; i < sizeof(at) / sizeof(at[0]); i++) {
        for (int b = 0; b < 4; b++) {
            float before = x[at[i]];
            x[at[i]] = bad[b];
            check_msg(first_above(x, 9000, FLT_MAX) == at[i], "%g at %zu", (double)bad[b], at[i]);
            check(first_above(x, at[i], FLT_MAX) == at[i]);
            x[at[i]] = before;
        }
    }
}

// every format names the same tensor, index and value
static void test_not_finite(void) {
    static const struct {
        int p, layer;
        size_t at; // in our layout
        float value;
        const char* message;
    } cases[] = {
        {0, 0, 130 * 72 + 71, INFINITY, "tensor 'wte.weight' is not finite: inf at [130, 71]"},
        {4, 1, 200 * 72 + 5, NAN, "tensor 'h.1.attn.c_attn.weight' is not finite: nan at [5, 200]"},
        {13, 0, 70, -INFINITY, "tensor 'h.0.mlp.c_proj.bias' is not finite: -inf at [70]"},
    };
    GPT2Config c = odd_config();
    Error err;
    char *dir = fresh_dir("not_finite"), want[700];
    for (int k = 0; k < 3; k++) {
        float* params = make_params(&c, true);
        params[param_offset(&c, cases[k].p) + (size_t)cases[k].layer * param_layer_size(&c, cases[k].p) + cases[k].at] =
            cases[k].value;
        for (int form = 0; form < 4; form++) {
            char* path = form < 2 ? dir : path_in(dir, "m.bin");
            bool written = form < 2 ? model_save_hf(dir, &c, params, form == 1, -1, &err)
                                    : model_save_llmc(path, &c, params, form == 2 ? 3 : 5, &err);
            check(written && !read_model(path, &c, NULL, &err));
            snprintf(want, sizeof(want), "%s: %s: take other weights or an earlier checkpoint",
                     form < 2 ? path_in(dir, "model.safetensors") : path, cases[k].message);
            check_str(err.text, want);
        }
        free(params);
    }
}

static void test_write_errors(void) {
    GPT2Config c = make_config(3, 2, 1, 1, 2);
    Error err;
    SavedFile saved[3];
    int num_saved = 0;
    float* params = make_params(&c, true);
    check(!model_save_hf("/nonexistent", &c, params, false, -1, &err) &&
          strstr(err.text, "/nonexistent/model.safetensors"));
    check(!model_save_llmc("/nonexistent/m.bin", &c, params, 3, &err));
    if (file_exists("/dev/full")) { // writing each of the three files fails
        static const char* const names[] = {"model.safetensors", "config.json", "generation_config.json"};
        for (int i = 0; i < 3; i++) {
            char* dir = fresh_dir("full");
            check(symlink("/dev/full", path_in(dir, names[i])) == 0);
            check(!model_save_hf_files(dir, &c, params, false, (ModelTokens){-1, -1, -1}, saved, &num_saved, &err));
            check_msg(strstr(err.text, names[i]) && strstr(err.text, "No space"), "%s", err.text);
        }
        check(!model_save_llmc("/dev/full", &c, params, 5, &err) && strstr(err.text, "No space"));
        check(num_saved == 0);
    }
    free(params);
}

static const Test tests[] = {
    {"fixture_directory", "a directory of transformers, each element", test_fixture_directory},
    {"single_file", "with a config beside it, and without, under any name", test_single_file},
    {"single_file_needs_heads", "72 channels say nothing of the heads", test_single_file_needs_heads},
    {"round_trip_hf", "fp32 and bf16, bit for bit; size and crc32c of each file", test_round_trip_hf},
    {"round_trip_llmc", "version 3 and 5, bit for bit", test_round_trip_llmc},
    {"round_trip_mlp_and_epsilon", "with a config, and without", test_round_trip_mlp_and_epsilon},
    {"llmc_cannot_hold", "all but sizes, one line", test_llmc_cannot_hold},
    {"round_trip_fixture", "the fixture through all four forms", test_round_trip_fixture},
    {"llmc_bytes", "llm.c's layout, byte for byte", test_llmc_bytes},
    {"124m_sizes", "the sizes of llm.c's published files", test_124m_sizes},
    {"read_tensor", "one tensor is the same as in the whole", test_read_tensor},
    {"padding_rows_are_zero", "whatever the file has there", test_padding_rows_are_zero},
    {"types_may_differ", "F16, BF16, F32 side by side at odd addresses", test_types_may_differ},
    {"prefix", "with and without transformer. and wrappers", test_prefix},
    {"missing_tensor", "is named", test_missing_tensor},
    {"wrong_shape", "is named, got and want", test_wrong_shape},
    {"wrong_dtype", "integers and doubles are refused", test_wrong_dtype},
    {"unexpected_tensor", "is named", test_unexpected_tensor},
    {"layer_out_of_range", "more layers than the config says", test_layer_out_of_range},
    {"buffers_are_skipped", "masks of every type", test_buffers_are_skipped},
    {"other_heads", "v_head, score and more: ignored, with a note", test_other_heads},
    {"tensor_under_two_names", "taken if the values are equal, in any type", test_tensor_under_two_names},
    {"tied_head", "every way to store a tied lm_head.weight", test_tied_head},
    {"untied_head", "with and without tie_word_embeddings", test_untied_head},
    {"shards", "a directory of two files; one missing, one a pointer", test_shards},
    {"tensor_in_two_shards", "taken if equal; else both files are named", test_tensor_in_two_shards},
    {"index_names_more", "a tied head or a mask that no file has", test_index_names_more},
    {"untied_shards", "the head in a file of its own", test_untied_shards},
    {"index_refused", "paths, types, tensors that are not there", test_index_refused},
    {"too_many_shards", "1,024 are enough", test_too_many_shards},
    {"config_cannot_be_honoured", "each setting by name", test_config_cannot_be_honoured},
    {"config_mlp_and_epsilon", "n_inner and layer_norm_epsilon, given or not", test_config_mlp_and_epsilon},
    {"config_variants", "activations, scales of attention, the head", test_config_variants},
    {"config_dropout", "the largest rate, given or not", test_config_dropout},
    {"config_spellings", "of 2019, of other models, contradictions", test_config_spellings},
    {"config_families", "of published models", test_config_families},
    {"config_sizes", "each in range", test_config_sizes},
    {"config_bos_eot", "only tokens of the vocabulary", test_config_bos_eot},
    {"config_against_tensors", "a config of another model", test_config_against_tensors},
    {"mistaken_files", "as a file and in a directory", test_mistaken_files},
    {"directory_with_pickle_only", "says what to do", test_directory_with_pickle_only},
    {"llmc_other_files", "old versions, shards, tokenizers, Llama 3", test_llmc_other_files},
    {"llmc_header_is_checked", "each word, and the size to the byte", test_llmc_header_is_checked},
    {"every_truncation", "each length of a small .bin and a small .safetensors", test_every_truncation},
    {"changed_after_open", "a file cut while it is open is no crash", test_changed_after_open},
    {"written_config", "config.json and generation_config.json", test_written_config},
    {"written_names", "names, shapes and orientation of what we write", test_written_names},
    {"large_matrices", "more than one chunk", test_large_matrices},
    {"first_above", "NaN, infinity, too large", test_first_above},
    {"not_finite", "each format: name, index and value", test_not_finite},
    {"arrays", "moments by prefix; missing, foreign, misshapen", test_arrays},
    {"write_errors", "no directory, a full disk at each file", test_write_errors},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
