// Tests that the file of chosen cuBLASLt algorithms (llmc/cublas_common.cuh) is written and read back correctly. The
// library is not called, so no GPU is needed. dev/test/gpu/test_cublaslt.sh builds and runs this program.
#include "../test.h"
#include "../../../llmc/cublas_common.cuh"

static const char* header = "cublasLt 1, bf16, a GPU\n";

static CublasLtKey key_of(int M) { return {M, 8, 16, 0, 1, 0, MATMUL_PLAIN, 0, 1, 256, 0, 1}; }
static cublasLtMatmulAlgo_t algo_of(uint64_t value) {
    cublasLtMatmulAlgo_t algo = {};
    for (int i = 0; i < 8; i++) { algo.data[i] = value * 1000 + i + (value << 40); }
    return algo;
}

// Adds a plan, as if this process had met the product and chosen `algo`. found: the library has an algorithm for it.
static void meet(int M, uint64_t algo, bool found = true) {
    CublasLtPlan plan = {};
    plan.key = key_of(M), plan.found = found, plan.algo = algo_of(algo);
    cublaslt().plans.push_back(plan);
}
// Forgets all plans and loaded choices, as if a new process had started.
static void restart() { cublaslt() = CublasLt(); }

static const char* choices_path() {
    static std::string path = std::string(test_dir()) + "/matmul_choices.txt";
    return path.c_str();
}
static std::string text() {
    Error err;
    MappedFile file;
    if (!map_file(&file, choices_path(), &err)) { return err.text; }
    std::string s((const char*)file.data, file.size);
    unmap_file(&file);
    return s;
}
static std::string save() {
    Error err;
    check_msg(cublaslt_write_choices(cublaslt_choices(cublaslt()), choices_path(), header, &err), "%s", err.text);
    return text();
}
static void load() {
    Error err;
    bool foreign;
    check_msg(cublaslt_read_choices(&cublaslt().loaded, choices_path(), header, &foreign, &err), "%s", err.text);
}

// Checks that exactly these (M, algo) are loaded, in this order.
static void check_loaded(const std::vector<std::pair<int, uint64_t>>& want) {
    restart();
    load();
    const std::vector<CublasLtChoice>& loaded = cublaslt().loaded;
    check_msg(loaded.size() == want.size(), "%zu choices, want %zu", loaded.size(), want.size());
    for (size_t i = 0; i < want.size() && i < loaded.size(); i++) {
        CublasLtKey key = key_of(want[i].first);
        cublasLtMatmulAlgo_t algo = algo_of(want[i].second);
        check_msg(memcmp(&loaded[i].key, &key, sizeof(key)) == 0, "choice %zu is of M %d, want %d", i, loaded[i].key.M,
                  key.M);
        check_msg(memcmp(&loaded[i].algo, &algo, sizeof(algo)) == 0, "choice %zu, of M %d: another algorithm", i,
                  key.M);
    }
}

static void test_reads_what_it_wrote() {
    restart();
    meet(1, 10), meet(2, 20), meet(3, 30, false);
    save();
    check_loaded({{1, 10}, {2, 20}});
}

// a resumed run may save before it has met every product of the earlier run: the loaded choices must not be lost
static void test_keeps_what_it_loaded() {
    restart();
    meet(1, 10), meet(2, 20), meet(3, 30);
    save();
    restart();
    load();
    meet(2, 20);
    save();
    check_loaded({{1, 10}, {2, 20}, {3, 30}});
    restart();
    load(); // the same for a run that meets no product
    save();
    check_loaded({{1, 10}, {2, 20}, {3, 30}});
}

static void test_once_each_in_order() {
    restart();
    meet(1, 10), meet(2, 20);
    std::string first = save();
    restart();
    load(), load(); // the same file twice
    std::string second = save();
    check_str(second.c_str(), first.c_str());
    meet(4, 40), meet(2, 20), meet(3, 30), meet(1, 10);
    save();
    check_loaded({{1, 10}, {2, 20}, {4, 40}, {3, 30}});
}

// a choice made in this run replaces the loaded one: the library had refused that, so the product was tuned again
static void test_newer_choice_counts() {
    restart();
    meet(1, 10), meet(2, 20);
    save();
    restart();
    load();
    meet(1, 11), meet(2, 21, false);
    save();
    check_loaded({{1, 11}, {2, 20}});
}

// the format of a line, the same in every version of the program: 14 words of the key, 16 words of the algorithm
static void test_format() {
    restart();
    meet(77, 3);
    std::string want = std::string(header) + "77 8 16 0 1 0 0 0 1 256 0 1 0 0";
    for (int i = 0; i < 8; i++) { want += " " + std::to_string(3000 + i) + " 768"; }
    std::string line = save();
    want += "\n";
    char sum[32];
    snprintf(sum, sizeof(sum), "crc32c %08x\n", crc32c(0, want.data(), want.size()));
    want += sum;
    check_str(line.c_str(), want.c_str());
}

static void test_passes_over_other_gpus() {
    restart();
    meet(1, 10);
    save();
    restart();
    Error err;
    bool foreign;
    check(!cublaslt_read_choices(&cublaslt().loaded, choices_path(), "cublasLt 2, bf16, a GPU\n", &foreign, &err));
    check(foreign && cublaslt().loaded.empty());
}

// a digit changed, a choice lost, lines added; nothing is taken from such a file. Files without a checksum are good: earlier
// versions of the program wrote them.
static void test_refuses_damage() {
    restart();
    meet(1, 10), meet(2, 20);
    std::string whole = save();
    size_t sum = whole.find("crc32c"), second = whole.find("\n2 ") + 1;
    std::string lines = whole.substr(0, sum), digit = whole;
    digit[second] = '3';
    struct {
        std::string text;
        bool good;
    } files[] = {
        {whole, true},
        {lines, true},
        {digit, false},
        {whole + "1 2 3\n", false},
        {lines + "x\n", false},
        {whole + "\n", false},
        {lines + "1 2 3", false},
        {whole.substr(0, second) + whole.substr(sum), false},
    };
    for (const auto& file : files) {
        Error err;
        FileWriter w;
        bool foreign;
        check(writer_open(&w, choices_path(), &err));
        writer_put(&w, file.text.data(), file.text.size());
        check(writer_close(&w, &err));
        restart();
        bool good = cublaslt_read_choices(&cublaslt().loaded, choices_path(), header, &foreign, &err);
        check_msg(good == file.good && !foreign, "%s is %s", file.text.c_str(), good ? "read" : err.text);
        check(cublaslt().loaded.size() == (good ? 2u : 0u));
        check_msg(good || strstr(err.text, "is damaged") != NULL, "says '%s'", err.text);
    }
}

static const Test tests[] = {
    {"reads_what_it_wrote", "choices come back, products without an algorithm are left out", test_reads_what_it_wrote},
    {"keeps_what_it_loaded", "loaded choices that the run has not met are written again", test_keeps_what_it_loaded},
    {"once_each_in_order", "no choice twice, the file's order first", test_once_each_in_order},
    {"newer_choice_counts", "a product chosen again replaces the loaded choice", test_newer_choice_counts},
    {"format", "the words of a line, the checksum", test_format},
    {"passes_over_other_gpus", "a file with another header", test_passes_over_other_gpus},
    {"refuses_damage", "lines that are cut, changed, lost or no numbers", test_refuses_damage},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
