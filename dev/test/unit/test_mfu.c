// llmc/mfu.h: finding a device by its name, and rates that are plausible in relation to each other.
#include "../test.h"
#include "../../../llmc/mfu.h"

static void test_names(void) {
    static const struct {
        const char* name;
        double bf16, tf32, fp32;
    } cases[] = {
        {"NVIDIA H200", 989.4, 494.7, 66.9},
        {"NVIDIA H200 NVL", 835.5, 417.5, 60},
        {"NVIDIA GH200 480GB", 989.4, 494.7, 66.9},
        {"NVIDIA GH200 144G HBM3e", 989.4, 494.7, 66.9},
        {"NVIDIA H100 80GB HBM3", 989.4, 494.7, 66.9},
        {"NVIDIA H100 PCIe", 756.5, 378, 51},
        {"NVIDIA H100 NVL", 835.5, 417.5, 60},
        {"NVIDIA B200", 2250, 1100, 75},
        {"NVIDIA GB200", 2500, 1250, 80},
        {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5},
        {"NVIDIA A100-PCIE-40GB", 312, 156, 19.5},
        {"NVIDIA A100 80GB PCIe", 312, 156, 19.5},
        {"A100-SXM4-40GB", 312, 156, 19.5},
        {"NVIDIA L4", 121, 60, 30.3},
        {"NVIDIA L40", 181, 90.5, 90.5},
        {"NVIDIA L40S", 362, 183, 91.6},
        {"NVIDIA A10", 125, 62.5, 31.2},
        {"NVIDIA A10G", 70, 35, 31.5},
        {"NVIDIA A40", 149.7, 74.8, 37.4},
        {"Tesla T4", 0, 8.1, 8.1}, // has neither bf16 nor tf32
        {"NVIDIA RTX A6000", 154.8, 77.4, 38.7},
        {"NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
        {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6},
        {"NVIDIA GeForce RTX 4070", 58.3, 29.1, 29.1},
        {"NVIDIA GeForce RTX 4070 SUPER", 71, 35.5, 35.5},
        {"NVIDIA GeForce RTX 4070 Ti", 80.2, 40.1, 40.1},
        {"NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1, 44.1},
        {"NVIDIA GeForce RTX 3090 Ti", 80, 40, 40},
        {"GeForce RTX 3090", 71, 35.6, 35.6},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char* name = cases[i].name;
        double bf16 = gpu_peak_tflops(name, "bf16", true), tf32 = gpu_peak_tflops(name, "fp32", true),
               fp32 = gpu_peak_tflops(name, "fp32", false);
        check_msg(bf16 == cases[i].bf16 && tf32 == cases[i].tf32 && fp32 == cases[i].fp32, "%s: %g, %g, %g", name, bf16,
                  tf32, fp32);
        if (bf16 > 0) { check(gpu_peak_tflops(name, "fp16", false) == bf16); }
    }
    check(gpu_peak_tflops("Tesla T4", "fp16", true) == 65);
}

static void test_unknown(void) {
    static const char* const names[] = {
        "",
        "NVIDIA",
        "unknown",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "NVIDIA GeForce RTX 5080 SUPER",
        "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H200 MIG 3g.71gb",
        "NVIDIA A10-24Q",
        "NVIDIA L4-24Q",
        "NVIDIA L400",
        "NVIDIA XL4",
        "NVIDIA H20",
        "NVIDIA H2000",
        "NVIDIA T400",
        "NVIDIA RTX 6000",
        "Quadro RTX 6000",
        "h200",
        "NVIDIA H200 ",
        "NVIDIA H200-",
        "NVIDIA H200 141",
        "NVIDIA H200 141GBx",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        double got = gpu_peak_tflops(names[i], "bf16", true) + gpu_peak_tflops(names[i], "fp16", false) +
                     gpu_peak_tflops(names[i], "fp32", false);
        check_msg(got == 0, "'%s' is known: %g", names[i], got);
    }
}

// Each entry is found by its own name. 16-bit types are twice as fast as tf32, and tf32 is at least as fast as fp32.
static void test_table(void) {
    for (size_t i = 0; i < sizeof(gpu_peaks) / sizeof(gpu_peaks[0]); i++) {
        const GpuPeak* g = &gpu_peaks[i];
        char name[128];
        snprintf(name, sizeof(name), "NVIDIA %s", g->name);
        check_msg(gpu_peak_tflops(name, "fp16", false) == g->tflops_16, "%s: another entry is in front of it", name);
        if (g->tf32 > 0) { check_near(g->tflops_16 / g->tf32, 2.0, 0.05); }
        check_msg(g->tf32 == 0 || g->tf32 >= g->tflops_32, "%s", name);
        check_msg(g->tflops_32 > 0, "%s", name);
    }
}

static const Test tests[] = {
    {"names", "the names that drivers give, and their rates", test_names},
    {"unknown", "laptops, slices and look-alikes have no rate", test_unknown},
    {"table", "no entry hides another, the rates fit together", test_table},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
