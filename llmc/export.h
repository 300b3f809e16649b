/*
--export: writes the weights that -e names in another format, without the rest of a checkpoint: a directory that Hugging
Face's from_pretrained opens, a single .safetensors file, llm.c's .bin, or llama.cpp's .gguf.
*/
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "checkpoint.h"
#include "cli.h"
#include "flags.h"
#include "gguf.h"
#include "gpt2.h"
#include "model_source.h"
#include "run_state.h"
#include "stop.h"
#include "tokenizer.h"
#include "utils.h"
#include <strings.h>

// True if path ends with the suffix, in capitals or not.
static inline bool has_suffix(const char* path, const char* suffix) {
    size_t n = strlen(path), m = strlen(suffix);
    return n >= m && strcasecmp(path + n - m, suffix) == 0;
}

// Ends the program if the name ends like that of a file, in a format that is not written. Any other name, and one with a slash
// at its end, is a directory's.
static inline void refuse_other_formats(const char* path) {
    const char *slash = strrchr(path, '/'), *dot = strrchr(slash ? slash : path, '.');
    size_t length = dot ? strspn(dot + 1, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") : 0;
    bool ending = length > 0 && length <= 12 && dot[1 + length] == '\0' && isalpha((unsigned char)dot[1]);
    if (!ending || has_suffix(path, ".safetensors") || has_suffix(path, ".bin") || has_suffix(path, ".gguf")) {
        return;
    }
    die("--export %s: %s is not written: name a .safetensors, .bin or .gguf file, or a directory, with a slash: %s/",
        path, dot, path);
}

// Writes a model directory: config.json, model.safetensors and the vocabulary. tokenizer may be NULL.
static inline bool export_directory(const char* path, const GPT2Config* config, const float* params, bool bf16,
                                    int eot_id, const Tokenizer* tokenizer, Error* err) {
    return make_directories(path, err) &&
           model_save_hf_files(path, config, params, bf16, run_tokens(eot_id, tokenizer), NULL, NULL, err) &&
           (!tokenizer || tokenizer_save(tokenizer, path, err)) && sync_directory(path, err);
}

// Ends the program if the model differs from what hf_infer_config() concludes from a .safetensors file alone.
static inline void check_single_file(const char* path, const GPT2Config* config) {
    char text[256];
    const char* variant = variant_text(text, sizeof(text), config, false);
    if (config->channels != 64 * config->num_heads) {
        die("--export %s: a reader of this file alone would take heads of 64 channels, but the model has %d: give the "
            "name of a directory, which gets a config.json",
            path, config->channels / config->num_heads);
    }
    if (variant) {
        die("--export %s: a reader of this file alone would not know that the model has %s: give the name of a "
            "directory, which gets "
            "a config.json",
            path, variant);
    }
}

// Removes what has been written under the temporary name, says why there is no export, and ends the program.
__attribute__((noreturn)) static inline void export_failed(const char* path, const char* temp, const Error* err) {
    if (is_directory(temp)) {
        run_remove_directory(temp, NULL);
    } else {
        unlink(temp);
    }
    if (run_stop_signal) {
        print_line(stderr, "error: --export %s: %s: nothing was written", path, strsignal(run_stop_signal));
        exit(128 + run_stop_signal);
    }
    size_t n = strlen(temp);
    bool ours = strncmp(err->text, temp, n) == 0; // the user knows only the other name
    die("--export %s%s%s", path, ours ? "" : ": ", err->text + (ours ? n : 0));
}

// Says that llama.cpp finds some added tokens in a text where the vocabulary would not.
static inline void note_inexact(const char* path, const Tokenizer* tokenizer) {
    int inexact = gguf_count_inexact(tokenizer);
    if (inexact == 0) { return; }
    print_line(stderr,
               "note: --export %s: %d added tokens include white space or are whole words only, which a .gguf file "
               "cannot say: llama.cpp finds them without it",
               path, inexact);
}

// Creates the parent directories of what is exported.
static inline void export_make_parents(const char* path) {
    Error err;
    Path parent = directory_of(path);
    if (!is_directory(parent.text) && !make_directories(parent.text, &err)) { die("--export %s", err.text); }
}

// Exports the model -e to args->export_path. It is written under a temporary name and renamed, so that what has the name is
// complete. Returns the exit code.
static inline int export_model(void) {
    static const char* const no_prefix[1] = {""};
    Error err;
    ModelSource source;
    Tokenizer tokenizer;
    Gguf file;
    GgufType type = gguf_type(args->export_type);
    bool has_tokenizer, bf16 = type == GGUF_BF16, gguf, ok;
    Path name, temporary;
    path_set(&name, "%s", args->export_path);
    char* path = name.text;
    size_t n = strlen(path);
    refuse_other_formats(path);
    while (n > 1 && path[n - 1] == '/') { path[--n] = '\0'; }
    if (n == 0) { die("--export: the name is empty"); }
    gguf = has_suffix(path, ".gguf");
    if (!gguf && type != GGUF_F32 && type != GGUF_BF16) {
        cli_fail("--type %s is for .gguf files; give f32 or bf16 for %s", args->export_type, path);
    }
    if (file_exists(path)) { die("--export %s: exists already, give another name", path); }
    path_set(&temporary, "%s.tmp-%ld", path, (long)getpid());
    const char* temp = temporary.text;
    model_source_open(&source, resolve_model_path(args->model), &has_tokenizer, &tokenizer);
    GPT2Config config = source.config;
    if (has_suffix(path, ".safetensors")) { check_single_file(path, &config); }
    if (has_suffix(path, ".bin") && !llmc_check(path, &config, &err)) { die("--export %s", err.text); }
    int eot = model_eot(&source, has_tokenizer ? &tokenizer : NULL);
    if (gguf && !gguf_open(&file, path, &config, type, has_tokenizer ? &tokenizer : NULL, eot, &err)) {
        die("--export %s", err.text);
    }
    // a signal ends the writing, so that nothing incomplete is left
    run_stop_is_silent = true;
    run_install_signal_handlers();
    writers_stop = &run_stop_signal;
    float* params = (float*)malloc_check(num_parameters(&config) * sizeof(float));
    const float* const arrays[1] = {params};
    model_source_read(&source, params);
    if (!gguf && bf16 && !params_check(&config, params, gguf_types[type].limit, &err)) {
        die("--export %s: %s: no value of bf16: give --type f32", path, err.text);
    }
    export_make_parents(path);
    if (gguf) {
        ok = gguf_write(&file, temp, params, &err);
        gguf_close(&file);
    } else if (has_suffix(path, ".bin")) {
        ok = model_save_llmc(temp, &config, params, bf16 ? 5 : 3, &err);
    } else if (has_suffix(path, ".safetensors")) {
        ok = params_save_safetensors(temp, &config, arrays, no_prefix, 1, bf16, NULL, &err);
    } else {
        ok = export_directory(temp, &config, params, bf16, eot, has_tokenizer ? &tokenizer : NULL, &err);
    }
    if (ok && rename(temp, path) != 0) { ok = error_set(&err, "%s: rename: %s", temp, strerror(errno)); }
    if (!ok) { export_failed(path, temp, &err); }
    print_line(stdout, "%s: %.2f M parameters in %s", path, (double)num_parameters(&config) * 1e-6,
               gguf_types[type].name);
    if (gguf) { note_inexact(path, &tokenizer); }
    free(params);
    if (has_tokenizer) { tokenizer_free(&tokenizer); }
    return EXIT_SUCCESS;
}

#endif
