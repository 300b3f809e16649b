// llmc/tuned.h: the file of kernel configurations is read, refused, written and looked up.
#include "../test.h"
#include "../../../llmc/tuned.h"

#define HEADER TUNED_HEADER "\n"
#define ROW "layernorm_forward,NVIDIA H200,bf16,64,1024,768,12,50257,128,0.05020,0.05130\n"

static const char* path_of(const char* name) {
    static char path[4096];
    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}
static const char* write_text(const char* name, const char* text) {
    Error err;
    FileWriter w;
    check(writer_open(&w, path_of(name), &err));
    writer_put(&w, text, strlen(text));
    check_msg(writer_close(&w, &err), "%s", err.text);
    return path_of(name);
}
// Checks that the file has this text.
static void check_text(const char* path, const char* want) {
    Error err;
    MappedFile file;
    check_msg(map_file(&file, path, &err), "%s", err.text);
    check_msg(file.size == strlen(want) && memcmp(file.data, want, file.size) == 0, "got '%.*s', want '%s'",
              (int)file.size, (const char*)file.data, want);
    unmap_file(&file);
}

static void test_reads_what_it_wrote(void) {
    Error err;
    TunedTable table = {0};
    const char* text = HEADER ROW "adamw,NVIDIA H200,fp32,158,1024,768,12,50257,0,0.89210,0.89210\n"
                                  "layernorm_forward,Tesla T4,bf16,64,1024,768,12,50257,512,1.00000,2.50000\n";
    check_msg(tuned_read(&table, write_text("a.csv", text), &err), "%s", err.text);
    check(table.num_rows == 3);
    check_str(tunable_ops[table.rows[0].op].op, "layernorm_forward");
    check_str(table.rows[0].gpu, "NVIDIA H200");
    check(table.rows[0].B == 64 && table.rows[0].T == 1024 && table.rows[0].C == 768 && table.rows[0].NH == 12);
    check(table.rows[0].V == 50257 && table.rows[0].config == 128 && table.rows[1].config == 0);
    check_near(table.rows[2].default_ms, 2.5, 0);
    check_msg(tuned_write(&table, false, path_of("b.csv"), &err), "%s", err.text);
    check_text(path_of("b.csv"), text);
    check(!file_exists(path_of("b.csv.new")));
    check(tuned_write(&table, true, path_of("b.csv"), &err)); // no row is in use
    check_text(path_of("b.csv"), HEADER);
    tuned_free(&table);
    check(tuned_read(&table, path_of("b.csv"), &err) && table.num_rows == 0);
    check(!tuned_write(&table, false, path_of("no/such/folder.csv"), &err));
}

static void test_replaces_its_row(void) {
    Error err;
    TunedTable table = {0};
    check(tuned_parse(&table, HEADER ROW, strlen(HEADER ROW), "a.csv", &err));
    TunedRow row = table.rows[0];
    row.config = 256;
    tuned_put(&table, &row);
    check(table.num_rows == 1 && table.rows[0].config == 256);
    const char* dtype[] = {"fp16", "bf16", "bf16", "bf16"};
    for (int i = 0; i < 4; i++) { // another precision, GPU, shape, op
        TunedRow other = row;
        snprintf(other.dtype, sizeof(other.dtype), "%s", dtype[i]);
        if (i == 1) { snprintf(other.gpu, sizeof(other.gpu), "Tesla T4"); }
        other.T += i == 2;
        other.op += i == 3;
        tuned_put(&table, &other);
        check(table.num_rows == 2 + i);
    }
    tuned_free(&table);
}

// Each line is wrong, and the message names it.
static void test_refuses(void) {
    static const struct {
        const char *row, *message;
    } bad[] = {
        {"\n", "1 fields, not 11"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.0\n", "10 fields, not 11"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.0,1.0,\n", "12 fields, not 11"},
        {"layernorm,a,bf16,1,1,8,1,1,64,1.0,1.0\n", "no op 'layernorm' takes a configuration"},
        {"attention_forward,a,bf16,1,1,8,1,1,64,1.0,1.0\n", "no op 'attention_forward'"},
        {"layernorm_forward,,bf16,1,1,8,1,1,64,1.0,1.0\n", "no name of a GPU"},
        {"layernorm_forward,a,BF16,1,1,8,1,1,64,1.0,1.0\n", "dtype 'BF16' is none of"},
        {"layernorm_forward,a,bf16,0,1,8,1,1,64,1.0,1.0\n", "B is '0', not a number"},
        {"layernorm_forward,a,bf16,1,-1,8,1,1,64,1.0,1.0\n", "T is '-1'"},
        {"layernorm_forward,a,bf16,1,1, 8,1,1,64,1.0,1.0\n", "C is ' 8'"},
        {"layernorm_forward,a,bf16,1,1,8,1e3,1,64,1.0,1.0\n", "NH is '1e3'"},
        {"layernorm_forward,a,bf16,1,1,8,1,4294967297,64,1.0,1.0\n", "V is '4294967297'"},
        {"layernorm_forward,a,bf16,1,1,8,1,,64,1.0,1.0\n", "V is ''"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,,1.0,1.0\n", "config is ''"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,-64,1.0,1.0\n", "config is '-64'"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,96,1.0,1.0\n", "config 96: layernorm_forward takes 0, 64, 128, 256, 512"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,1024,1.0,1.0\n", "config 1024: layernorm_forward takes"},
        {"adamw,a,bf16,1,1,8,1,1,256,1.0,1.0\n", "config 256: adamw takes 0, 64, 128"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,0,1.0\n", "median_ms is '0'"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,nan,1.0\n", "median_ms is 'nan'"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.2.3,1.0\n", "median_ms is '1.2.3'"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.0,\n", "default_ms is ''"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.0,1.0\r\n", "default_ms is '1.0?'"},
        {"layernorm_forward,a,bf16,1,1,8,1,1,64,1.0,1.0", "the file is cut off here"},
        {ROW, "the same op, GPU, dtype and shape as line 2"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char text[1024], want[512];
        Error err;
        TunedTable table = {0};
        snprintf(text, sizeof(text), "%s%s%s", HEADER, ROW, bad[i].row);
        snprintf(want, sizeof(want), "f.csv:3: %s", bad[i].message);
        check_msg(!tuned_parse(&table, text, strlen(text), "f.csv", &err), "accepts %s", bad[i].row);
        check_msg(strncmp(err.text, want, strlen(want)) == 0, "says '%s', want '%s'", err.text, want);
        check_msg(strstr(err.text, "; delete the line, or the file") != NULL, "names no remedy: '%s'", err.text);
        check(table.num_rows == 0 && table.rows == NULL);
    }
}

static void test_refuses_other_files(void) {
    static const char* const texts[] = {
        "", "\n", ROW, "op,gpu\n" ROW, TUNED_HEADER, TUNED_HEADER "\r\n" ROW, "op,kernel,block_size\n"};
    Error err;
    TunedTable table = {0};
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        check_msg(!tuned_parse(&table, texts[i], strlen(texts[i]), "f.csv", &err), "accepts %s", texts[i]);
        check_msg(strncmp(err.text, "f.csv:1: is not 'op,gpu,dtype,", 30) == 0, "says '%s'", err.text);
    }
    char binary[sizeof(HEADER ROW)] = HEADER ROW, *longer = (char*)malloc_check(8192);
    binary[sizeof(HEADER) + 3] = '\0';
    check(!tuned_parse(&table, binary, sizeof(binary) - 1, "f.csv", &err));
    check_msg(strstr(err.text, "f.csv:2: is not a line of text") != NULL, "says '%s'", err.text);
    snprintf(longer, 8192, "%s%06000d\n", HEADER, 7);
    check(!tuned_parse(&table, longer, strlen(longer), "f.csv", &err));
    check_msg(strstr(err.text, "f.csv:2: is not a line of text") != NULL, "says '%s'", err.text);
    free(longer);
    check(!tuned_read(&table, path_of("not_there.csv"), &err) && !tuned_read(&table, test_dir(), &err));
}

// the row with the same length of rows and the nearest batch, of this GPU and precision
static void test_lookup(void) {
    Error err;
    TunedState state = {0};
    check(tuned_config(NULL, "layernorm_forward", 65536, 768, 64) == 64);
    write_text("a.csv", HEADER "layernorm_forward,H200,bf16,1,1024,768,12,50257,512,1.0,1.0\n"
                               "layernorm_forward,H200,bf16,64,1024,768,12,50257,128,1.0,1.0\n"
                               "layernorm_forward,H200,bf16,64,1024,1600,12,50257,0,1.0,1.0\n"
                               "layernorm_forward,H200,fp32,64,1024,64,12,50257,256,1.0,1.0\n"
                               "layernorm_forward,T4,bf16,64,1024,64,12,50257,256,1.0,1.0\n"
                               "matmul_backward_bias,H200,bf16,64,1024,768,12,50257,1024,1.0,1.0\n"
                               "fused_classifier,H200,bf16,8,1024,768,12,50257,256,1.0,1.0\n"
                               "gelu_forward,H200,bf16,64,1024,768,12,50257,64,1.0,1.0\n"
                               "gelu_forward,H200,bf16,1,64,64,12,50257,512,1.0,1.0\n");
    check(tuned_config(&state, "layernorm_forward", 65536, 768, 64) == 64); // no file yet
    check_msg(tuned_open(&state, path_of("a.csv"), "H200", "bf16", &err), "%s", err.text);
    check(state.table.num_rows == 7);
    check(tuned_config(&state, "layernorm_forward", 65536, 768, 64) == 128);
    check(tuned_config(&state, "layernorm_forward", 1 << 20, 768, 64) == 128);
    check(tuned_config(&state, "layernorm_forward", 8193, 768, 64) == 128); // the middle of 1024 and 65536 is 8192
    check(tuned_config(&state, "layernorm_forward", 8191, 768, 64) == 512);
    check(tuned_config(&state, "layernorm_forward", 1, 768, 64) == 512);
    check(tuned_config(&state, "layernorm_forward", 65536, 1600, 64) == 64); // config 0
    check(tuned_config(&state, "layernorm_forward", 65536, 64, 32) == 32);   // other GPUs and precisions only
    check(tuned_config(&state, "matmul_backward_bias", 65536, 3072, 512) == 1024);
    check(tuned_config(&state, "matmul_backward_bias", 65536, 768, 512) == 512);
    check(tuned_config(&state, "fused_classifier", 65536, 50257, 512) == 256);
    check(tuned_config(&state, "fused_classifier", 65536, 50304, 512) == 512);
    check(tuned_config(&state, "gelu_forward", (size_t)4 * 65536 * 768, 1, 128) == 64);
    check(tuned_config(&state, "gelu_forward", 1000, 1, 128) == 512);
    check(tuned_config(&state, "adamw", 1000, 1, 128) == 128);
    tuned_close(&state);
    check(tuned_config(&state, "layernorm_forward", 65536, 768, 64) == 64);
    check(tuned_open(&state, path_of("a.csv"), "H100", "bf16", &err)); // prints a note
    check(state.active && state.table.num_rows == 0);
    check(tuned_config(&state, "layernorm_forward", 65536, 768, 64) == 64);
    tuned_close(&state);
}

// What is saved are all rows from which a launch may choose: other batches may follow after the save.
static void test_saves_rows_in_use(void) {
    Error err;
    TunedState state = {0};
    const char *used = "layernorm_forward,H200,bf16,1,1024,768,12,50257,512,1.00000,1.00000\n"
                       "layernorm_forward,H200,bf16,64,1024,768,12,50257,128,1.00000,1.00000\n",
               *not_used = "layernorm_forward,H200,bf16,64,1024,1600,12,50257,128,1.00000,1.00000\n"
                           "layernorm_forward,T4,bf16,64,1024,768,12,50257,256,1.00000,1.00000\n"
                           "adamw,H200,bf16,64,1024,768,12,50257,64,1.00000,1.00000\n";
    char text[2048], want[1024];
    snprintf(text, sizeof(text), "%s%s%s", HEADER, used, not_used);
    snprintf(want, sizeof(want), "%s%s", HEADER, used);
    check_msg(tuned_open(&state, write_text("a.csv", text), "H200", "bf16", &err), "%s", err.text);
    check(tuned_config(&state, "layernorm_forward", 65536, 768, 64) == 128);
    check(tuned_write(&state.table, true, path_of("b.csv"), &err));
    check_text(path_of("b.csv"), want);
    tuned_close(&state);
}

// every list of configurations fits, ascends and belongs to an op of its own
static void test_ops(void) {
    for (int i = 0; i < NUM_TUNABLE_OPS; i++) {
        const TunableOp* op = &tunable_ops[i];
        check(tunable_op(op->op) == i && op->factor >= 1);
        check(op->configs[0] > 0 && op->configs[TUNED_MAX_CONFIGS - 1] == 0);
        for (int j = 1; op->configs[j]; j++) { check(op->configs[j] > op->configs[j - 1]); }
    }
    check(tunable_op("attention_forward") == -1);
}

static const Test tests[] = {
    {"reads_what_it_wrote", "rows come back, the file is replaced as a whole", test_reads_what_it_wrote},
    {"replaces_its_row", "the row of the same op, GPU, precision and shape", test_replaces_its_row},
    {"refuses", "malformed rows, each with its line and what is wrong", test_refuses},
    {"refuses_other_files", "no header, no text, no file", test_refuses_other_files},
    {"lookup", "which row a launch gets", test_lookup},
    {"saves_rows_in_use", "rows of other lengths and GPUs are left out", test_saves_rows_in_use},
    {"ops", "the table of tunable ops", test_ops},
};

int main(int argc, char** argv) { return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0])); }
