/*
The choices that a run makes for speed and on which its last bits depend: cuBLASLt's algorithms (cublas_common.cuh) and the
configurations of kernels (tuned.h). They are files in the run's output directory, beside the checkpoints, so that a resumed
run makes the same ones.
*/
#pragma once

#include "cublas_common.cuh"
#include "cuda_common.cuh"
#include "tuned.h"
#include "utils.h"

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
