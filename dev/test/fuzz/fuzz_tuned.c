/* Fuzz target: the file of kernel configurations. Each row that is accepted has a configuration that its op takes,
   and a launch of its shape finds a row.

   clang -g -O1 -fsanitize=fuzzer,address,undefined dev/test/fuzz/fuzz_tuned.c -lm -o fuzz_tuned && ./fuzz_tuned */
#include "../../../llmc/tuned.h"

static bool takes(int op, int config) {
    const int* c = tunable_ops[op].configs;
    while (*c && *c != config) { c++; }
    return config == 0 || *c != 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    // most inputs would fail at the header, so it is put before them
    const size_t header = strlen(TUNED_HEADER) + 1;
    char* text = (char*)malloc_check(header + size);
    TunedTable table = {0};
    Error err;
    memcpy(text, TUNED_HEADER "\n", header);
    if (size > 0) { memcpy(text + header, data, size); }
    if (!tuned_parse(&table, text, header + size, "fuzz.csv", &err)) {
        require(strncmp(err.text, "fuzz.csv:", 9) == 0 && !strchr(err.text, '\n') && !table.rows);
    }
    for (int i = 0; i < table.num_rows; i++) {
        const TunedRow* row = &table.rows[i];
        require(row->op >= 0 && row->op < NUM_TUNABLE_OPS && takes(row->op, row->config));
        require(tuned_find(&table, row->op, tuned_count(row), tuned_length(row)) != NULL);
    }
    tuned_free(&table);
    free(text);
    return 0;
}
