/*
Peak rates of GPUs: the dense matmul rates of the vendor's data sheets, for MFU (model FLOPs utilization, Chowdhery et
al. 2022, arXiv:2204.02311). They are rates with fp32 accumulation. On GeForce cards this is half of the data sheet's
rate with 16-bit accumulation; on the other cards both rates are equal. If the data sheet gives only a rate with
sparsity, we use half of it. C11, also compiles as C++17.

Sources: NVIDIA's data sheets of the data-center cards; the white papers of GH100, GA102, Ada and the Blackwell GeForce
cards. For a GeForce card that no white paper lists, the peak is computed as 2 FLOP x CUDA cores x boost clock without
tensor cores, and twice that with tensor cores. This agrees with the white papers for the cards that they list.
*/
#ifndef LLMC_MFU_H
#define LLMC_MFU_H

#include "utils.h"

typedef struct {
    const char* name;                  // words of cudaDeviceProp.name; the first entry that gpu_is() matches is used
    double tflops_16, tf32, tflops_32; // peaks of bf16 and fp16; of tf32 (0: no tf32, no bf16); of fp32 on CUDA cores
} GpuPeak;

static const GpuPeak gpu_peaks[] = {
    {"H100 PCIe", 756.5, 378, 51},
    {"H100 NVL", 835.5, 417.5, 60},
    {"H100", 989.4, 494.7, 66.9},
    {"H200 NVL", 835.5, 417.5, 60},
    {"H200", 989.4, 494.7, 66.9},
    {"GH200", 989.4, 494.7, 66.9},
    {"H800 PCIe", 756.5, 378, 51},
    {"H800", 989.4, 494.7, 66.9},
    {"GB200", 2500, 1250, 80},
    {"B200", 2250, 1100, 75},
    {"A100", 312, 156, 19.5},
    {"A800", 312, 156, 19.5},
    {"L40S", 362, 183, 91.6},
    {"L40", 181, 90.5, 90.5},
    {"L4", 121, 60, 30.3},
    {"A40", 149.7, 74.8, 37.4},
    {"A10G", 70, 35, 31.5},
    {"A10", 125, 62.5, 31.2},
    {"T4", 65, 0, 8.1},
    {"RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
    {"RTX A6000", 154.8, 77.4, 38.7},
    {"RTX 5090", 209.5, 104.8, 104.8},
    {"RTX 5080", 112.6, 56.3, 56.3},
    {"RTX 5070 Ti", 87.9, 43.9, 43.9},
    {"RTX 5070", 61.7, 30.9, 30.9},
    {"RTX 4090", 165.2, 82.6, 82.6},
    {"RTX 4080 SUPER", 104.4, 52.2, 52.2},
    {"RTX 4080", 97.5, 48.7, 48.7},
    {"RTX 4070 Ti SUPER", 88.2, 44.1, 44.1},
    {"RTX 4070 Ti", 80.2, 40.1, 40.1},
    {"RTX 4070 SUPER", 71, 35.5, 35.5},
    {"RTX 4070", 58.3, 29.1, 29.1},
    {"RTX 4060 Ti", 44.1, 22.1, 22.1},
    {"RTX 4060", 30.2, 15.1, 15.1},
    {"RTX 3090 Ti", 80, 40, 40},
    {"RTX 3090", 71, 35.6, 35.6},
    {"RTX 3080 Ti", 68.2, 34.1, 34.1},
    {"RTX 3080", 59.5, 29.8, 29.8},
    {"RTX 3070 Ti", 43.5, 21.7, 21.7},
    {"RTX 3070", 40.6, 20.3, 20.3},
    {"RTX 3060 Ti", 32.4, 16.2, 16.2},
    {"RTX 3060", 25.5, 12.7, 12.7},
};

// True if a device's name contains `words` as whole words, followed at most by its memory size or its connector (HBM,
// SXM, PCI). So "RTX 4070" matches neither "RTX 4070 Ti" nor "RTX 4070 Laptop GPU", and "A100" does not match a slice
// of an A100 ("MIG 1g.5gb").
static inline bool gpu_is(const char* name, const char* words) {
    const char* at = strstr(name, words);
    if (!at || (at != name && at[-1] != ' ')) { return false; }
    for (const char* rest = at + strlen(words); *rest;) {
        if (*rest != ' ' && *rest != '-') { return false; }
        rest++;
        size_t n = strcspn(rest, " -"), digits = strspn(rest, "0123456789");
        bool memory =
            digits > 0 && (n == digits + 1 || n == digits + 2) && strncmp(rest + digits, "GB", n - digits) == 0;
        bool plug = strncmp(rest, "HBM", 3) == 0 || strncmp(rest, "SXM", 3) == 0 || strncmp(rest, "PCI", 3) == 0;
        if (!memory && !plug) { return false; }
        rest += n;
    }
    return true;
}

// Returns the peak TFLOP/s of the device called `name` for precision "bf16", "fp16" or "fp32". If tf32 is true, fp32
// runs as TF32 on the tensor cores where they support it. Returns 0 if the device is unknown, and for "bf16" if it has
// no tensor cores for bf16.
static inline double gpu_peak_tflops(const char* name, const char* precision, bool tf32) {
    for (size_t i = 0; i < sizeof(gpu_peaks) / sizeof(gpu_peaks[0]); i++) {
        const GpuPeak* g = &gpu_peaks[i];
        if (!gpu_is(name, g->name)) { continue; }
        if (strcmp(precision, "fp16") == 0) { return g->tflops_16; }
        if (strcmp(precision, "bf16") == 0) { return g->tf32 > 0 ? g->tflops_16 : 0; }
        return tf32 && g->tf32 > 0 ? g->tf32 : g->tflops_32;
    }
    return 0.0;
}

#endif
