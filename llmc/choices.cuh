/*
The choices that a run makes for speed and on which its last bits depend: cuBLASLt's algorithms (cublas_common.cuh) and the
configurations of kernels (tuned.h). They are files in the run's output directory, beside the checkpoints, so that a resumed
run makes the same ones. The algorithms are also kept in the user's cache folder, so that other runs make the same ones and
need not time them again.
*/
#pragma once

#include "cublas_common.cuh"
#include "cuda_common.cuh"
#include "tuned.h"
#include "utils.h"

// The folder for what the program keeps for later runs: $XDG_CACHE_HOME/train_gpt2cu, or ~/.cache/train_gpt2cu. False: none.
// Relative paths do not count (XDG Base Directory Specification).
inline bool choices_folder(Path* folder) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/') { return path_set(folder, "%s/train_gpt2cu", cache); }
    return home && home[0] == '/' && path_set(folder, "%s/.cache/train_gpt2cu", home);
}

// Takes the algorithms that earlier runs have chosen, with this program and this driver on such a GPU. again: they are timed
// again, and replaced. Called before the first matmul.
inline void choices_open_cache(const Execution& exec, bool again) {
    Path folder;
    int driver = 0;
    char validity[128], module[256] = "";
    if (!choices_folder(&folder)) { return; }
    cudaCheck(cudaDriverGetVersion(&driver));
    FILE* f = fopen("/proc/driver/nvidia/version", "r"); // tells two drivers of the same CUDA version apart
    if (f && !fgets(module, sizeof(module), f)) { module[0] = '\0'; }
    if (f) { fclose(f); }
    snprintf(validity, sizeof(validity), "driver %d (%08x), program %016llx", driver, crc32c(0, module, strlen(module)),
             (unsigned long long)hash_of_program());
    cublaslt_open_cache(*exec.library, folder.text, validity, again);
}

// Prints from where the run takes its algorithms. Called after choices_load().
inline void choices_print(const Execution& exec) {
    const CublasLt& lt = *exec.library;
    const char* file = lt.cache.path.text;
    if (!lt.loaded.empty()) { printf("matmul choices: %zu of the run itself\n", lt.loaded.size()); }
    if (!lt.cache.choices.empty()) {
        print_line(stdout, "matmul choices: %zu from %s; --tune again times them again", lt.cache.choices.size(), file);
    } else if (file[0]) {
        print_line(stdout, "matmul choices: what this run times is kept in %s", file);
    }
}

// Uses the kernel configurations in the file `tuned`, which may be NULL. Called before the first launch.
inline void choices_open(const Execution& exec, const char* tuned) {
    char gpu[256];
    Error err;
    if (!tuned) { return; }
    device_name(gpu);
    if (!tuned_open(exec.tuned, tuned, gpu, PRECISION_NAME, &err)) { die("--tuned %s", err.text); }
}

// Writes the choices to dir, those for kernels only if a file of them is in use. If that fails, prints a warning.
inline void choices_save(const Execution& exec, const char* dir) {
    Path path;
    Error err;
    path_set(&path, "%s/matmul_choices.txt", dir);
    if (!cublaslt_save(*exec.library, path.text, &err)) { fprintf(stderr, "warning: %s\n", err.text); }
    path_set(&path, "%s/tuned.csv", dir);
    if (exec.tuned->active && !tuned_write(&exec.tuned->table, true, path.text, &err)) {
        fprintf(stderr, "warning: %s\n", err.text);
    }
}

// Loads the choices that a resumed run has saved in dir. If choices_open() has read a file, that file counts, and the first
// launch of each op that it changes prints a note.
inline void choices_load(const Execution& exec, const char* dir) {
    Path path;
    char gpu[256];
    Error err;
    TunedState* tuned = exec.tuned;
    path_set(&path, "%s/matmul_choices.txt", dir);
    if (file_exists(path.text) && !cublaslt_load(*exec.library, path.text, &err)) { die("%s", err.text); }
    path_set(&path, "%s/tuned.csv", dir);
    tuned->compares = tuned->active;
    if (!file_exists(path.text)) { return; }
    device_name(gpu);
    bool ok = tuned->compares ? tuned_read_for(&tuned->before, path.text, gpu, PRECISION_NAME, &err)
                              : tuned_open(tuned, path.text, gpu, PRECISION_NAME, &err);
    if (!ok) { die("%s", err.text); }
}
