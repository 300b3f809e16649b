/*
Matrix products by cuBLASLt with a row-major interface: out = epilogue(alpha * a b + add).

cuBLASLt's matrices are column-major. A row-major out (M,N) is a column-major out^T (N,M), so cuBLASLt computes b^T a^T.
That swap happens in cublaslt_plan() and nowhere else.

cuBLASLt offers several candidate algorithms for a product. By default the first call with a shape times them all, and later
calls use the fastest. So two runs of a program may choose differently, and then differ in the last bits; within a run
equal calls give equal bits. There are three ways to get equal bits in every run on the same kind of GPU.
cublaslt_open_cache() names a file of the user in which a run puts each choice that it times, and finds those of earlier
runs. cublaslt_save() writes the choices of a run to a file of its own, and cublaslt_load() repeats them in a later run;
they precede those of the cache. times_algorithms = false in an Execution takes cuBLASLt's first candidate.
Split-K algorithms that add their partial sums in 16 bits are not accepted.

A CublasLt has one handle and one workspace: calls may be on any stream, but no two of them may run at the same time.
*/
#pragma once

#include <algorithm>
#include <cublasLt.h>
#include <string>
#include <vector>

#include "cuda_common.cuh"
#include "mfu.h"
#include "profile.cuh"
#include "utils.h"
#include <sys/file.h>

// The names are listed here because cublasLtGetStatusName() is in libcublasLt, and a program may link -lcublas alone.
#define cublasCheck(expr) cublas_check((expr), #expr, __FILE__, __LINE__)
inline void cublas_check(cublasStatus_t status, const char* expr, const char* file, int line) {
    static const struct {
        cublasStatus_t status;
        const char* name;
    } names[] = {
        {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED"},
        {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED"},
        {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE"},
        {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH"},
        {CUBLAS_STATUS_MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR"},
        {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED"},
        {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR"},
        {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED"},
        {CUBLAS_STATUS_LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR"},
    };
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    const char* name = "a status without a name";
    for (const auto& known : names) {
        if (known.status == status) { name = known.name; }
    }
    cudaError_t e = cudaGetLastError(); // the reason, if an earlier operation has broken the context
    // without memory, the library says that it could not be initialized
    bool no_memory = status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_NOT_INITIALIZED;
    die("%s:%d: %s: %s (%d)%s%s%s", file, line, expr, name, (int)status, e == cudaSuccess ? "" : ": ",
        e == cudaSuccess ? "" : cudaGetErrorString(e), no_memory ? "; if GPU memory is full, " OTHER_PROGRAMS : "");
}

// The library's name for floatX.
#if defined(ENABLE_FP32)
constexpr cudaDataType_t cublaslt_floatX = CUDA_R_32F;
#elif defined(ENABLE_FP16)
constexpr cudaDataType_t cublaslt_floatX = CUDA_R_16F;
#else
constexpr cudaDataType_t cublaslt_floatX = CUDA_R_16BF;
#endif

// ---- the interface --------------------------------------------------------------

enum MatmulEpilogue {
    MATMUL_PLAIN,     // out = y, where y = alpha * a b + add + bias
    MATMUL_GELU_AUX,  // aux = y, out = gelu(y), tanh form; needs bias
    MATMUL_DGELU,     // out = y * gelu'(aux); no bias
    MATMUL_BIAS_GRAD, // out = y, bias_grad[m] = sum over k of a[m][k]: the bias gradient if out is the weight gradient
    MATMUL_GELU,      // out = gelu(y); needs bias
};

// Every pointer is aligned to 16 bytes, and the length of every row is a multiple of 16 bytes.
struct MatmulCall {
    void* out = NULL; // (M,N) floatX, or float if out_is_float
    bool out_is_float = false;
    const void* a = NULL; // (M,K), or (K,M) if a_transposed; floatX, or fp8
    const void* b = NULL; // (K,N), or (N,K) if b_transposed
    bool a_transposed = false, b_transposed = false;
    int M = 0, N = 0, K = 0;
    // Operands in fp8 (CUDA_R_8F_E4M3 or CUDA_R_8F_E5M2, not both of e5m2) come with scales: one float each, in device memory
    // and aligned to 16 bytes, that multiplies the stored values. They need b_transposed alone, a plain epilogue, N and K that
    // are multiples of 16, and compute capability 8.9. fast_accumulation: the tensor cores keep the sum, with
    // about 14 bits; otherwise cuBLASLt adds partial sums in fp32, which takes longer.
    cudaDataType_t a_type = cublaslt_floatX, b_type = cublaslt_floatX;
    const float *a_scale = NULL, *b_scale = NULL;
    bool fast_accumulation = true;
    float alpha = 1.0f;
    const void* add = NULL;  // (M,N) of out's type, or NULL to add nothing; pass out to accumulate
    const void* bias = NULL; // (N) of out's type, or NULL for none
    MatmulEpilogue epilogue = MATMUL_PLAIN;
    void* aux = NULL;       // (M,N) of out's type: GELU's input; must not be out
    void* bias_grad = NULL; // (M) of out's type
};

// ---- the library's state --------------------------------------------------------

// Identifies a product, by all that the choice of its algorithm depends on. All members are ints: there is no padding,
// so memcmp can compare keys.
struct CublasLtKey {
    int M, N, K, a_transposed, b_transposed, out_is_float, epilogue, has_add, has_bias, alignment;
    int mode;     // bit 0: TF32, bit 1: tuned, bit 2: fast_accumulation
    int reserved; // multiprocessors that it leaves to others
    int a_type, b_type;
};

// A product that this process has called: its cuBLASLt descriptors and the chosen algorithm.
struct CublasLtPlan {
    CublasLtKey key;
    bool found; // false: the library has no algorithm for it
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, out; // named as cuBLASLt sees them: its a is our b
    cublasLtMatmulAlgo_t algo;
};

// A choice of an earlier run, read from a file.
struct CublasLtChoice {
    CublasLtKey key;
    cublasLtMatmulAlgo_t algo; // plain data: may be stored and used again with the same version of the library
};
static_assert(sizeof(CublasLtChoice) == sizeof(CublasLtKey) + sizeof(cublasLtMatmulAlgo_t), "written as it is");

// The choices of all runs of this program on this kind of GPU, in a file of the user. Each one that is timed is put there at once.
struct CublasLtCache {
    Path path = {""};                    // of the file; "": none is used
    std::string header;                  // first line of the file
    bool again = false;                  // products are timed again, and replace what the file has
    std::vector<CublasLtChoice> choices; // found in the file when it was opened
};

struct CublasLt {
    cublasLtHandle_t handle = NULL;
    void* workspace = NULL;
    size_t workspace_bytes = 0;
    bool tf32 =
        false; // in FP32 builds, operands are rounded to TF32, which has 10 bits of mantissa, for the tensor cores
    std::vector<CublasLtPlan> plans;
    std::vector<CublasLtChoice> loaded; // by cublaslt_load()
    CublasLtCache cache;
};
// The library of operations that get only a stream: those of a ladder in dev/cuda.
inline CublasLt& cublaslt() {
    static CublasLt state;
    return state;
}
inline CublasLt& cublaslt_of(const Execution& exec) { return exec.library ? *exec.library : cublaslt(); }

// The fastest algorithms need up to 32 MB of workspace, and split-K algorithms need more.
constexpr size_t CUBLASLT_WORKSPACE_BYTES = (size_t)64 << 20;

// Call it on the device that is used; a second call does nothing. workspace_bytes may be 0.
inline void cublaslt_open(CublasLt& lt = cublaslt(), size_t workspace_bytes = CUBLASLT_WORKSPACE_BYTES) {
    if (lt.handle) { return; }
    cublasCheck(cublasLtCreate(&lt.handle));
    lt.workspace_bytes = workspace_bytes;
    if (workspace_bytes) { lt.workspace = device_malloc_check(workspace_bytes, "cuBLASLt's workspace"); }
}
inline void cublaslt_close(CublasLt& lt) {
    if (!lt.handle) { return; }
    for (CublasLtPlan& plan : lt.plans) {
        cublasCheck(cublasLtMatmulDescDestroy(plan.product));
        cublasCheck(cublasLtMatrixLayoutDestroy(plan.a));
        cublasCheck(cublasLtMatrixLayoutDestroy(plan.b));
        cublasCheck(cublasLtMatrixLayoutDestroy(plan.out));
    }
    cudaCheck(cudaFree(lt.workspace));
    cublasCheck(cublasLtDestroy(lt.handle));
    lt = CublasLt();
}

// ---- a call ---------------------------------------------------------------------

template <class T>
inline void cublaslt_describe(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, T value) {
    cublasCheck(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)));
}

// The vector of the epilogue: the bias, which is read, or the bias gradient, which is written.
inline const void* cublaslt_vector(const MatmulCall& c) {
    return c.epilogue == MATMUL_BIAS_GRAD ? c.bias_grad : c.bias;
}

inline bool cublaslt_is_fp8(const MatmulCall& c) { return c.a_type != cublaslt_floatX; }

inline void cublaslt_describe_scales(cublasLtMatmulDesc_t product, const MatmulCall& c) { // its a is our b
    cublaslt_describe(product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.b_scale);
    cublaslt_describe(product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.a_scale);
}

// The largest power of two up to 256 that divides every address. The choice of algorithms depends on it.
inline int cublaslt_alignment(const MatmulCall& c) {
    const void* pointers[] = {c.out, c.a, c.b, c.add, c.aux, cublaslt_vector(c)};
    uintptr_t bits = 256;
    for (const void* p : pointers) { bits |= (uintptr_t)p; }
    return (int)(bits & (~bits + 1));
}

inline cublasStatus_t cublaslt_launch(const CublasLtPlan& plan, const cublasLtMatmulAlgo_t& algo, const MatmulCall& c,
                                      const Execution& exec) {
    CublasLt& lt = cublaslt_of(exec);
    float beta = c.add ? 1.0f : 0.0f;
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, cublaslt_vector(c));
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, c.aux);
    if (cublaslt_is_fp8(c)) { cublaslt_describe_scales(plan.product, c); }
    return cublasLtMatmul(lt.handle, plan.product, &c.alpha, c.b, plan.a, c.a, plan.b, &beta, c.add ? c.add : c.out,
                          plan.out, c.out, plan.out, &algo, lt.workspace, lt.workspace_bytes, exec.stream);
}

// The mean time of n launches in ms, INFINITY if the algorithm does not run. One launch before them warms up, and keeps the
// GPU busy until the next is queued: so only the kernels are timed.
template <class Launch>
float cublaslt_time(int n, cudaEvent_t start, cudaEvent_t end, cudaStream_t stream, Launch launch) {
    if (launch() != CUBLAS_STATUS_SUCCESS) { return INFINITY; }
    bool good = true;
    cudaCheck(cudaEventRecord(start, stream));
    for (int i = 0; i < n; i++) { good &= launch() == CUBLAS_STATUS_SUCCESS; }
    cudaCheck(cudaEventRecord(end, stream));
    cudaCheck(cudaEventSynchronize(end));
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, start, end));
    return good ? ms / (float)n : INFINITY;
}

// Returns the index of the fastest of n algorithms, or -1 if none of them runs; launch(i) launches algorithm i. Each
// algorithm is timed in three rounds, and its minimum counts. To replace the best one so far, an algorithm must be 1%
// faster, so that noise rarely decides.
//
// A training step holds the GPU at its power limit, where an algorithm that draws less power can win: on an H200 by 6% for
// the weight gradient of the head, with an algorithm that is 0.2% slower when run alone. So if the product takes long enough
// for that to matter, all that are within 3% of the best race once more, each launched back to back for 25 ms.
template <class Launch> int cublaslt_fastest(int n, const Execution& exec, Launch launch) {
    const float matters_ms = 0.2f, load_ms = 25.0f;
    cudaEvent_t start, end;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&end));
    std::vector<float> alone(n, INFINITY), loaded(n, INFINITY);
    auto race = [&](std::vector<float>& least_ms, int rounds, float ms, float limit) {
        for (int i = 0; i < n * rounds; i++) {
            int which = i % n, launches = ms > 0 ? (int)(ms / alone[which]) + 1 : 1;
            if (alone[which] > limit) { continue; }
            float time = cublaslt_time(launches, start, end, exec.stream, [&] { return launch(which); });
            least_ms[which] = fminf(least_ms[which], time);
        }
        int best = -1;
        for (int i = 0; i < n; i++) {
            if (least_ms[i] < (best < 0 ? INFINITY : 0.99f * least_ms[best])) { best = i; }
        }
        return best;
    };
    int best = race(alone, 3, 0, INFINITY);
    float limit = best < 0 ? 0.0f : 1.03f * alone[best];
    if (best >= 0 && alone[best] > matters_ms &&
        std::count_if(alone.begin(), alone.end(), [&](float ms) { return ms <= limit; }) > 1) {
        best = race(loaded, 2, load_ms, limit);
    }
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(end));
    return best;
}

// Returns the index of the fastest of cuBLASLt's candidates for a call, timed on the call's own operands. If the call
// accumulates into c.out, the timed launches write to scratch memory instead, so that c.out keeps its values. Without memory for
// that, returns the first one, and *timed = false.
inline int cublaslt_fastest(const CublasLtPlan& plan, MatmulCall c, const cublasLtMatmulHeuristicResult_t* candidates,
                            int n, const Execution& exec, bool* timed) {
    void* stand_in = NULL;
    if (c.add == c.out) {
        size_t bytes = (size_t)c.M * c.N * (c.out_is_float ? sizeof(float) : sizeof(floatX));
        if (cudaMalloc(&stand_in, bytes) != cudaSuccess) {
            cudaGetLastError(); // clears the error
            *timed = false;
            return 0;
        }
        cudaCheck(cudaMemsetAsync(stand_in, 0, bytes, exec.stream));
        c.add = c.out = stand_in;
    }
    int best = cublaslt_fastest(n, exec, [&](int i) { return cublaslt_launch(plan, candidates[i].algo, c, exec); });
    cudaCheck(cudaFree(stand_in));
    return best;
}

// Sets plan.algo to the choice for its product that is among `choices`. Returns false if there is none, or it is not valid.
inline bool cublaslt_recall(const std::vector<CublasLtChoice>& choices, const CublasLt& lt, CublasLtPlan& plan) {
    for (const CublasLtChoice& choice : choices) {
        if (memcmp(&choice.key, &plan.key, sizeof(plan.key)) != 0) { continue; }
        cublasLtMatmulHeuristicResult_t result;
        plan.algo = choice.algo;
        plan.found = cublasLtMatmulAlgoCheck(lt.handle, plan.product, plan.a, plan.b, plan.out, plan.out, &plan.algo,
                                             &result) == CUBLAS_STATUS_SUCCESS &&
                     result.workspaceSize <= lt.workspace_bytes;
        return plan.found;
    }
    return false;
}

// Finds cuBLASLt's candidates for a product, at most `max` of them, its favourite first. The algorithms may assume that
// addresses are multiples of `alignment`, and may use the whole workspace.
inline cublasStatus_t cublaslt_candidates(const CublasLt& lt, cublasLtMatmulHeuristicResult_t* candidates, int max,
                                          int* n, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                          cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t add,
                                          cublasLtMatrixLayout_t out, int alignment) {
    cublasLtMatmulPreference_t preference;
    cublasCheck(cublasLtMatmulPreferenceCreate(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        cublasCheck(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)lt.workspace_bytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)alignment);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)alignment);
    *n = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(lt.handle, product, a, b, add, out, preference, max, candidates, n);
    cublasCheck(cublasLtMatmulPreferenceDestroy(preference));
    return status;
}

// ---- choices on disk ----------------------------------------------------------------

// Writes to text (512) what a file of choices is valid for: this version of the library on this kind of GPU.
inline void cublaslt_choices_header(char* text) {
    char gpu[256];
    device_name(gpu);
    snprintf(text, 512, "cublasLt %zu, %s, %s, third form\n", cublasLtGetVersion(), PRECISION_NAME, gpu);
}

// Puts a choice in the place of the one for the same product, or at the end.
inline void cublaslt_put(std::vector<CublasLtChoice>& choices, const CublasLtChoice& choice) {
    size_t i = 0;
    while (i < choices.size() && memcmp(&choices[i].key, &choice.key, sizeof(choice.key)) != 0) { i++; }
    if (i == choices.size()) { choices.push_back(choice); }
    choices[i] = choice;
}

// The choices of a run: first the loaded ones in their order, each replaced by this process's own choice if it has
// called that product, then the choices for products that only this process has called. So saving after loading loses
// nothing, and repeats nothing.
inline std::vector<CublasLtChoice> cublaslt_choices(const CublasLt& lt) {
    std::vector<CublasLtChoice> choices;
    for (const CublasLtChoice& choice : lt.loaded) { cublaslt_put(choices, choice); }
    for (const CublasLtPlan& plan : lt.plans) {
        if (plan.found) { cublaslt_put(choices, {plan.key, plan.algo}); }
    }
    return choices;
}

// Writes the header, one line per choice (the key and then the algorithm, as decimal ints) and the crc32c of these lines.
inline bool cublaslt_write_choices(const std::vector<CublasLtChoice>& choices, const char* path, const char* header,
                                   Error* err) {
    Path temporary;
    FileWriter w;
    path_set(&temporary, "%s.new", path);
    if (!writer_open(&w, temporary.text, err)) { return false; }
    writer_printf(&w, "%s", header);
    for (const CublasLtChoice& choice : choices) {
        const int n = sizeof(choice) / sizeof(int);
        int words[n];
        memcpy(words, &choice, sizeof(choice));
        for (int i = 0; i < n; i++) { writer_printf(&w, "%d%c", words[i], i + 1 < n ? ' ' : '\n'); }
    }
    writer_printf(&w, "crc32c %08x\n", w.crc);
    bool ok = writer_close(&w, err);
    if (ok && rename(temporary.text, path) != 0) {
        ok = error_set(err, "%s: cannot rename to it: %s", path, strerror(errno));
    }
    if (!ok) { unlink(temporary.text); }
    return ok;
}

// Reads a file of cublaslt_write_choices() into choices, to which it adds only if the file is good. A file with another header
// sets *foreign. Files of earlier versions of this program have no checksum.
inline bool cublaslt_read_choices(std::vector<CublasLtChoice>* choices, const char* path, const char* header,
                                  bool* foreign, Error* err) {
    MappedFile file;
    *foreign = false;
    if (!map_file(&file, path, err)) { return false; }
    std::string text((const char*)file.data, file.size);
    unmap_file(&file);
    if (text.compare(0, strlen(header), header) != 0) {
        *foreign = true;
        return error_set(err, "%s: of another GPU, library or version", path);
    }
    std::vector<CublasLtChoice> found;
    const char* at = text.c_str() + strlen(header);
    unsigned sum;
    while (*at && sscanf(at, "crc32c %8x", &sum) != 1) {
        CublasLtChoice choice;
        int words[sizeof(choice) / sizeof(int)];
        for (int& word : words) {
            char* end;
            word = (int)strtol(at, &end, 10);
            if (end == at) { return error_set(err, "%s: is damaged", path); }
            at = end;
        }
        while (*at == '\n' || *at == ' ') { at++; }
        memcpy(&choice, words, sizeof(choice));
        found.push_back(choice);
    }
    bool good = !*at || (strlen(at) == strlen("crc32c 01234567\n") &&
                         crc32c(0, text.c_str(), (size_t)(at - text.c_str())) == sum);
    if (!good) { return error_set(err, "%s: is damaged", path); }
    choices->insert(choices->end(), found.begin(), found.end());
    return true;
}

// Writes the choices of lt, and of the file that it loaded.
inline bool cublaslt_save(const CublasLt& lt, const char* path, Error* err) {
    char header[512];
    cublaslt_choices_header(header);
    return cublaslt_write_choices(cublaslt_choices(lt), path, header, err);
}

// Loads an earlier run's choices, for products that have not been called yet. A file for another library or GPU
// is skipped, with a message. Returns false if the file cannot be read.
inline bool cublaslt_load(CublasLt& lt, const char* path, Error* err) {
    char header[512];
    bool foreign;
    cublaslt_choices_header(header);
    bool ok = cublaslt_read_choices(&lt.loaded, path, header, &foreign, err);
    if (foreign) { printf("%s: matmuls are timed again, and last bits may differ\n", err->text); }
    return ok || foreign || error_set(err, "%s; without it matmuls are timed again", std::string(err->text).c_str());
}

// ---- the cache of choices -------------------------------------------------------------

// Reads the cache's file, if there is one. validity: what besides library, precision and GPU it depends on. again: products
// are timed again. A file that cannot be used is reported by a note, and replaced when the first product is timed.
inline void cublaslt_open_cache(CublasLt& lt, const char* folder, const char* validity, bool again) {
    Error err;
    char header[512];
    bool foreign;
    CublasLtCache& cache = lt.cache;
    cublaslt_choices_header(header);
    cache.header.assign(header, strcspn(header, "\n"));
    cache.header += std::string(", ") + validity + "\n";
    cache.again = again;
    uint32_t name = crc32c(0, cache.header.data(), cache.header.size());
    if (!path_set(&cache.path, "%s/matmul_choices_%08x.txt", folder, name)) { cache.path.text[0] = '\0'; }
    if (!cache.path.text[0] || again || !file_exists(cache.path.text)) { return; }
    if (!cublaslt_read_choices(&cache.choices, cache.path.text, cache.header.c_str(), &foreign, &err)) {
        fprintf(stderr, "note: %s: it is not used, and matmuls are timed again\n", err.text);
    }
}

// Locks a folder, so that of several processes one at a time changes its files. Returns a descriptor, whose close() unlocks it,
// or -1. Where folders cannot be locked, or another process keeps the lock for a second, goes on without.
inline int cublaslt_lock_folder(const char* folder) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; i < 100 && fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; i++) {
        usleep(10000);
    }
    return fd;
}

// Puts the choice of a plan that was just timed into the cache's file. If another process has put one for this product there
// since this one has opened the file, the plan takes that: so all processes compute the same bits, however many begin at once.
inline void cublaslt_publish(CublasLt& lt, CublasLtPlan& plan) {
    CublasLtCache& cache = lt.cache;
    Error err;
    Path mine;
    bool foreign;
    std::vector<CublasLtChoice> choices;
    if (!cache.path.text[0]) { return; }
    cublasLtMatmulAlgo_t timed = plan.algo;
    Path folder = directory_of(cache.path.text);
    bool ok = make_directories(folder.text, &err);
    int lock = ok ? cublaslt_lock_folder(folder.text) : -1;
    if (ok && file_exists(cache.path.text)) { // a file that is not good is replaced
        cublaslt_read_choices(&choices, cache.path.text, cache.header.c_str(), &foreign, &err);
    }
    if (cache.again || !cublaslt_recall(choices, lt, plan)) {
        plan.algo = timed, plan.found = true;
        cublaslt_put(choices, {plan.key, plan.algo});
        ok = ok && path_set(&mine, "%s.%d", cache.path.text, (int)getpid()) &&
             cublaslt_write_choices(choices, mine.text, cache.header.c_str(), &err);
        if (ok && rename(mine.text, cache.path.text) != 0) {
            ok = error_set(&err, "%s: %s", cache.path.text, strerror(errno));
            unlink(mine.text);
        }
    }
    if (lock >= 0) { close(lock); }
    if (ok) { return; }
    fprintf(stderr, "note: choices of matmul algorithms cannot be kept: %s; the last bits of the next run may differ\n",
            err.text);
    cache.path.text[0] = '\0';
}

// ---- choosing -------------------------------------------------------------------------

// True during stream capture, when nothing can be timed.
inline bool cublaslt_is_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus capturing;
    cudaCheck(cudaStreamIsCapturing(stream, &capturing));
    return capturing != cudaStreamCaptureStatusNone;
}

// Sets plan.algo to one of cuBLASLt's candidates: the fastest, or the first one if they cannot be timed.
inline void cublaslt_choose(CublasLtPlan& plan, const MatmulCall& c, const Execution& exec) {
    // the heuristic uses only the alignment of these two pointers, so pass an address with the alignment of the key
    const void* least_aligned = (const void*)(uintptr_t)plan.key.alignment;
    if (cublaslt_vector(c)) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, least_aligned); }
    if (c.aux) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, least_aligned); }
    const int max_candidates = 16;
    cublasLtMatmulHeuristicResult_t candidates[max_candidates];
    int n;
    cublasStatus_t status =
        cublaslt_candidates(cublaslt_of(exec), candidates, exec.times_algorithms ? max_candidates : 1, &n, plan.product,
                            plan.a, plan.b, plan.out, plan.out, plan.key.alignment);
    // with fp8, two other status codes also mean "unsupported"
    bool none =
        status == CUBLAS_STATUS_NOT_SUPPORTED ||
        (cublaslt_is_fp8(c) && (status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_ARCH_MISMATCH));
    if (status != CUBLAS_STATUS_SUCCESS && !none) { cublasCheck(status); }
    int best = n > 0 && !none ? 0 : -1;
    bool timed = n > 1 && !none && !cublaslt_is_captured(exec.stream);
    if (timed) { best = cublaslt_fastest(plan, c, candidates, n, exec, &timed); }
    plan.found = best >= 0;
    if (plan.found) { plan.algo = candidates[best].algo; }
    if (plan.found && timed) { cublaslt_publish(cublaslt_of(exec), plan); }
}

// A row-major matrix (rows, columns) is a column-major matrix (columns, rows).
inline cublasLtMatrixLayout_t cublaslt_layout(cudaDataType_t type, int rows, int columns) {
    cublasLtMatrixLayout_t layout;
    cublasCheck(cublasLtMatrixLayoutCreate(&layout, type, columns, rows, columns));
    return layout;
}

inline CublasLtPlan cublaslt_plan(const CublasLtKey& key, const MatmulCall& c, const Execution& exec) {
    CublasLtPlan plan;
    plan.key = key;
    plan.a = c.b_transposed ? cublaslt_layout(c.b_type, c.N, c.K) : cublaslt_layout(c.b_type, c.K, c.N);
    plan.b = c.a_transposed ? cublaslt_layout(c.a_type, c.K, c.M) : cublaslt_layout(c.a_type, c.M, c.K);
    plan.out = cublaslt_layout(c.out_is_float ? CUDA_R_32F : cublaslt_floatX, c.M, c.N);
    cublasComputeType_t compute =
        cublaslt_floatX == CUDA_R_32F && (key.mode & 1) ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasCheck(cublasLtMatmulDescCreate(&plan.product, compute, CUDA_R_32F));
    cublasOperation_t op_a = c.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t op_b = c.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)op_a);
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)op_b);
    cublasLtEpilogue_t epilogue = c.epilogue == MATMUL_GELU_AUX    ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                  : c.epilogue == MATMUL_GELU      ? CUBLASLT_EPILOGUE_GELU_BIAS
                                  : c.epilogue == MATMUL_DGELU     ? CUBLASLT_EPILOGUE_DGELU
                                  : c.epilogue == MATMUL_BIAS_GRAD ? CUBLASLT_EPILOGUE_BGRADB // our a is cuBLASLt's b
                                  : c.bias                         ? CUBLASLT_EPILOGUE_BIAS
                                                                   : CUBLASLT_EPILOGUE_DEFAULT;
    cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)epilogue);
    if (c.aux) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)c.N); }
    if (cublaslt_is_fp8(c)) {
        cublaslt_describe_scales(plan.product, c);
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)c.fast_accumulation);
        if (c.bias) { cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)cublaslt_floatX); }
    }
    if (key.reserved) {
        cublaslt_describe(plan.product, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, (int32_t)exec.free_sms());
    }
    const CublasLt& lt = cublaslt_of(exec);
    if (!cublaslt_recall(lt.loaded, lt, plan) && !cublaslt_recall(lt.cache.choices, lt, plan)) {
        cublaslt_choose(plan, c, exec);
    }
    return plan;
}

// Launches the product. Returns false, and launches nothing, if the library cannot do it with this epilogue and these
// types.
inline bool cublaslt_matmul(const MatmulCall& c, const Execution& exec) {
    CublasLt& lt = cublaslt_of(exec);
    require(lt.handle != NULL); // cublaslt_open() has been called
    require(c.out && c.a && c.b && c.M > 0 && c.N > 0 && c.K > 0);
    require((c.epilogue == MATMUL_GELU_AUX || c.epilogue == MATMUL_DGELU) == (c.aux != NULL) && c.aux != c.out);
    require((c.epilogue == MATMUL_BIAS_GRAD) == (c.bias_grad != NULL));
    bool has_gelu = c.epilogue == MATMUL_GELU || c.epilogue == MATMUL_GELU_AUX;
    require(c.epilogue == MATMUL_PLAIN || has_gelu == (c.bias != NULL));
    require(!cublaslt_is_fp8(c) || (c.epilogue == MATMUL_PLAIN && c.b_transposed && !c.a_transposed && c.a_scale &&
                                    c.b_scale && c.N % 16 == 0 && c.K % 16 == 0));
    CublasLtKey key = {c.M,
                       c.N,
                       c.K,
                       c.a_transposed,
                       c.b_transposed,
                       c.out_is_float,
                       c.epilogue,
                       c.add != NULL,
                       c.bias != NULL,
                       cublaslt_alignment(c),
                       lt.tf32 + 2 * exec.times_algorithms + 4 * c.fast_accumulation,
                       exec.reserved_sms,
                       c.a_type,
                       c.b_type};
    require(key.alignment >= 16);
    size_t i = 0;
    while (i < lt.plans.size() && memcmp(&lt.plans[i].key, &key, sizeof(key)) != 0) { i++; }
    if (i == lt.plans.size()) { lt.plans.push_back(cublaslt_plan(key, c, exec)); }
    const CublasLtPlan& plan = lt.plans[i];
    if (!plan.found) { return false; }
    profile().library_flops += 2.0 * c.M * c.N * c.K;
    cublasCheck(cublaslt_launch(plan, plan.algo, c, exec));
    return true;
}

// ---- rates ---------------------------------------------------------------------------

// Measures the rate of matrix products on this GPU in TFLOP/s: 8192^3 with random numbers, or 4096^3 on a small GPU.
// Zeros would be faster, because they cost less power. Returns INFINITY if there is no memory for the matrices.
inline double cublaslt_matrix_rate(const Execution& exec) {
    const int n = device_attribute(cudaDevAttrMultiProcessorCount) >= 64 ? 8192 : 4096, num_products = 10;
    const size_t period = 1 << 20; // the random numbers repeat after this many
    std::vector<floatX> values(period);
    for (size_t i = 0; i < period; i++) {
        values[i] = (floatX)((float)hash_bits((uint32_t)i, 1) * (2.0f / 4294967296.0f) - 1.0f);
    }
    Error err;
    size_t bytes = (size_t)n * n * sizeof(floatX);
    floatX* inp = (floatX*)device_malloc(2 * bytes, "measuring the rate of matmuls", &err);
    if (!inp) { return INFINITY; }
    floatX* out = inp + (size_t)n * n;
    for (size_t i = 0; i < (size_t)n * n; i += period) {
        cudaCheck(cudaMemcpy(inp + i, values.data(), period * sizeof(floatX), cudaMemcpyHostToDevice));
    }
    MatmulCall call;
    call.out = out, call.a = inp, call.b = inp, call.b_transposed = true;
    call.M = call.N = call.K = n;
    cudaEvent_t start, end;
    cudaCheck(cudaEventCreate(&start));
    cudaCheck(cudaEventCreate(&end));
    for (int i = 0; i <= num_products; i++) {
        bool supported = cublaslt_matmul(call, exec);
        require(supported);
        if (i == 0) { cudaCheck(cudaEventRecord(start, exec.stream)); } // the first product is not timed
    }
    cudaCheck(cudaEventRecord(end, exec.stream));
    cudaCheck(cudaEventSynchronize(end));
    float ms;
    cudaCheck(cudaEventElapsedTime(&ms, start, end));
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(end));
    cudaCheck(cudaFree(inp));
    return 2.0 * n * n * (double)n * num_products / ms * 1e-9;
}

// FLOP/s at 100% MFU of the current GPU: from the table in mfu.h, or else the rate that cublaslt_matrix_rate() measures;
// INFINITY, so that MFU is 0, if there is no memory for that. Prints where the figure is from unless it is the table.
inline double find_machine_flops(const Execution& exec) {
    char name[256];
    device_name(name);
    double tflops = gpu_peak_tflops(name, PRECISION_NAME, cublaslt_of(exec).tf32);
    if (tflops > 0) { return 1e12 * tflops; }
    tflops = cublaslt_matrix_rate(exec);
    if (tflops == INFINITY) {
        printf("%s is not in the table of peak rates, and no memory is left to measure one: MFU is 0\n", name);
    } else {
        printf("%s is not in the table of peak rates: MFU counts against a measured matmul, %.1f TFLOP/s\n", name,
               tflops);
    }
    return 1e12 * tflops;
}
