/*
Configurations of kernels that were measured on the GPU: `make tune` in dev/cuda writes a file of them, and train_gpt2cu
--tuned FILE uses it. A configuration is a number of threads: those of a block or, in layernorm_backward, those of an SM.

The file is CSV with one row per op, GPU, precision and shape. config 0 means that no other configuration was faster than
the launcher's default by more than the noise:

    op,gpu,dtype,B,T,C,NH,V,config,median_ms,default_ms
    layernorm_forward,NVIDIA H200,bf16,64,1024,768,12,50257,128,0.05020,0.05130

A launcher asks tuned_config() for its configuration, or tuned_block_size(), which Execution::block_size overrides. Rows for other
GPUs and precisions are passed over, and so are those for rows of other lengths (C, or V for the classifier). Of what is left, the
row whose batch is nearest in size counts.

The sums of some kernels depend on their configuration, and with them the last bits of a run. llmc/choices.cuh therefore
saves the file beside a run's checkpoints.
*/
#ifndef LLMC_TUNED_H
#define LLMC_TUNED_H

#include "utils.h"
#include <math.h>

// ---- the ops ----------------------------------------------------------------------

// What a launch works on, as a function of a row's B, T, C and V.
typedef enum {
    TUNED_ROWS,       // B*T rows of factor * C elements
    TUNED_VOCABULARY, // B*T rows of V elements
    TUNED_ELEMENTS,   // B*T*C * factor elements; C alone does not matter
} TunedShape;

enum { TUNED_MAX_CONFIGS = 8 };

typedef struct {
    const char* op;
    TunedShape shape;
    int factor;
    // The configurations that the promoted kernel accepts, at every shape; 0 ends the list. dev/cuda/OP.cu tries these,
    // and a file with another one is refused.
    int configs[TUNED_MAX_CONFIGS];
} TunableOp;

// make tune in dev/cuda reads the names from here.
static const TunableOp tunable_ops[] = {
    {"encoder_forward", TUNED_ROWS, 1, {64, 128, 256, 512, 1024}},
    {"encoder_backward", TUNED_ROWS, 1, {64, 128, 256, 512}},
    {"layernorm_forward", TUNED_ROWS, 1, {64, 128, 256, 512}},
    {"fused_residual_layernorm", TUNED_ROWS, 1, {64, 128, 256, 512, 1024}},
    {"layernorm_backward", TUNED_ROWS, 1, {128, 256, 512}},
    {"gelu_forward", TUNED_ELEMENTS, 4, {64, 128, 256, 512, 1024}},
    {"gelu_backward", TUNED_ELEMENTS, 4, {64, 128, 256, 512, 1024}},
    {"matmul_backward_bias", TUNED_ROWS, 4, {64, 128, 256, 512, 1024}},
    {"fused_classifier", TUNED_VOCABULARY, 1, {128, 256, 512, 1024}},
    {"global_norm", TUNED_ELEMENTS, 1, {128, 256, 512, 1024}},
    {"adamw", TUNED_ELEMENTS, 1, {64, 128}},
};
enum { NUM_TUNABLE_OPS = sizeof(tunable_ops) / sizeof(tunable_ops[0]) };

// Returns the index in tunable_ops, or -1 for an op that is not there.
static inline int tunable_op(const char* op) {
    for (int i = 0; i < NUM_TUNABLE_OPS; i++) {
        if (strcmp(tunable_ops[i].op, op) == 0) { return i; }
    }
    return -1;
}

// ---- the table --------------------------------------------------------------------

typedef struct {
    int op; // index in tunable_ops
    char gpu[256], dtype[8];
    int B, T, C, NH, V;
    int config; // 0: the launcher's default
    double median_ms, default_ms;
    bool in_use; // a launch has asked for this op with rows of this length
} TunedRow;

typedef struct {
    TunedRow* rows; // (num_rows)
    int num_rows;
} TunedTable;

// The length of the rows, and the number of rows, that a launch must have to match this row of the table exactly.
static inline int tuned_length(const TunedRow* row) {
    const TunableOp* op = &tunable_ops[row->op];
    return op->shape == TUNED_ROWS ? op->factor * row->C : op->shape == TUNED_VOCABULARY ? row->V : 1;
}
static inline double tuned_count(const TunedRow* row) {
    const TunableOp* op = &tunable_ops[row->op];
    return (double)row->B * row->T * (op->shape == TUNED_ELEMENTS ? (double)op->factor * row->C : 1);
}

static inline bool tuned_same_place(const TunedRow* a, const TunedRow* b) {
    return a->op == b->op && strcmp(a->gpu, b->gpu) == 0 && strcmp(a->dtype, b->dtype) == 0 && a->B == b->B &&
           a->T == b->T && a->C == b->C && a->NH == b->NH && a->V == b->V;
}

// Replaces the row for the same op, GPU, precision and shape, or appends one.
static inline void tuned_put(TunedTable* table, const TunedRow* row) {
    int i = 0;
    while (i < table->num_rows && !tuned_same_place(&table->rows[i], row)) { i++; }
    if (i == table->num_rows) {
        table->rows = (TunedRow*)realloc_check(table->rows, (size_t)++table->num_rows * sizeof(TunedRow));
    }
    table->rows[i] = *row;
}

static inline void tuned_free(TunedTable* table) {
    free(table->rows);
    table->rows = NULL;
    table->num_rows = 0;
}

// ---- the file ---------------------------------------------------------------------

#define TUNED_HEADER "op,gpu,dtype,B,T,C,NH,V,config,median_ms,default_ms"
enum { TUNED_FIELDS = 11 };

// Reads a whole number without a sign, 0 to 999999999.
static inline bool tuned_read_int(const char* text, int* value) {
    size_t n = strlen(text);
    *value = n >= 1 && n <= 9 && strspn(text, "0123456789") == n ? atoi(text) : -1;
    return *value >= 0;
}
static inline bool tuned_read_ms(const char* text, double* value) {
    char* end;
    *value = strtod(text, &end);
    return text[0] && text[strspn(text, "0123456789.")] == '\0' && *end == '\0' && *value > 0 && isfinite(*value);
}

// Parses one line, which is split in place. On failure says in err what is wrong, without the place and the remedy.
static inline bool tuned_parse_row(TunedRow* row, char* line, Error* err) {
    static const char* const names[] = {"B", "T", "C", "NH", "V", "config"};
    char *fields[TUNED_FIELDS] = {line}, configs[128] = "0";
    int* const numbers[] = {&row->B, &row->T, &row->C, &row->NH, &row->V, &row->config};
    int n = 1;
    memset(row, 0, sizeof(*row));
    for (char* p = line; *p; p++) {
        if (*p != ',') { continue; }
        *p = '\0';
        if (n < TUNED_FIELDS) { fields[n] = p + 1; }
        n++;
    }
    if (n != TUNED_FIELDS) { return error_set(err, "%d fields, not %d", n, TUNED_FIELDS); }
    row->op = tunable_op(fields[0]);
    if (row->op < 0) { return error_set(err, "no op '%.64s' takes a configuration", fields[0]); }
    if (!fields[1][0] || strlen(fields[1]) >= sizeof(row->gpu)) { return error_set(err, "no name of a GPU"); }
    snprintf(row->gpu, sizeof(row->gpu), "%s", fields[1]);
    if (strcmp(fields[2], "bf16") != 0 && strcmp(fields[2], "fp16") != 0 && strcmp(fields[2], "fp32") != 0) {
        return error_set(err, "dtype '%.64s' is none of bf16, fp16, fp32", fields[2]);
    }
    snprintf(row->dtype, sizeof(row->dtype), "%s", fields[2]);
    for (int i = 0; i < 6; i++) {
        bool is_config = i == 5;
        if (!tuned_read_int(fields[3 + i], numbers[i]) || (!is_config && *numbers[i] == 0)) {
            return error_set(err, "%s is '%.64s', not a number", names[i], fields[3 + i]);
        }
    }
    bool accepted = row->config == 0;
    size_t used = strlen(configs);
    for (const int* config = tunable_ops[row->op].configs; *config; config++) {
        accepted |= *config == row->config;
        used += (size_t)snprintf(configs + used, sizeof(configs) - used, ", %d", *config);
    }
    if (!accepted) { return error_set(err, "config %d: %s takes %s", row->config, fields[0], configs); }
    if (!tuned_read_ms(fields[9], &row->median_ms)) { return error_set(err, "median_ms is '%.64s'", fields[9]); }
    if (!tuned_read_ms(fields[10], &row->default_ms)) { return error_set(err, "default_ms is '%.64s'", fields[10]); }
    return true;
}

// Parses the text of a file (size bytes) into table, which is empty before. Returns false with a line like `FILE:3: config 96:
// ...; remedy`, and an empty table. path is for messages only.
static inline bool tuned_parse(TunedTable* table, const char* text, size_t size, const char* path, Error* err) {
    const size_t header = strlen(TUNED_HEADER);
    if (size <= header || memcmp(text, TUNED_HEADER "\n", header + 1) != 0) {
        return error_set(err, "%s:1: is not '%s'; make tune in dev/cuda writes such a file", path, TUNED_HEADER);
    }
    int number = 2;
    for (size_t at = header + 1; at < size; number++) {
        char line[1024];
        Error wrong;
        TunedRow row;
        const char* end = (const char*)memchr(text + at, '\n', size - at);
        size_t length = end ? (size_t)(end - text) - at : size - at;
        bool ok = false;
        if (!end) {
            error_set(&wrong, "the file is cut off here");
        } else if (length >= sizeof(line) || memchr(text + at, '\0', length)) {
            error_set(&wrong, "is not a line of text");
        } else {
            memcpy(line, text + at, length);
            line[length] = '\0';
            ok = tuned_parse_row(&row, line, &wrong);
        }
        for (int i = 0; ok && i < table->num_rows; i++) {
            if (tuned_same_place(&table->rows[i], &row)) {
                ok = error_set(&wrong, "the same op, GPU, dtype and shape as line %d", i + 2);
            }
        }
        if (!ok) {
            tuned_free(table);
            return error_set(err, "%s:%d: %.600s; delete the line, or the file and let make tune in dev/cuda write it",
                             path, number, wrong.text);
        }
        tuned_put(table, &row);
        at += length + 1;
    }
    return true;
}

static inline bool tuned_read(TunedTable* table, const char* path, Error* err) {
    MappedFile file;
    if (!map_file(&file, path, err)) { return false; }
    bool ok = tuned_parse(table, (const char*)file.data, file.size, path, err);
    unmap_file(&file);
    return ok;
}

// Writes the rows, or only those in use. The file is replaced as a whole or not at all.
static inline bool tuned_write(const TunedTable* table, bool only_in_use, const char* path, Error* err) {
    Path temporary;
    FileWriter w;
    path_set(&temporary, "%s.new", path);
    if (!writer_open(&w, temporary.text, err)) { return false; }
    writer_printf(&w, "%s\n", TUNED_HEADER);
    for (int i = 0; i < table->num_rows; i++) {
        const TunedRow* r = &table->rows[i];
        if (only_in_use && !r->in_use) { continue; }
        writer_printf(&w, "%s,%s,%s,%d,%d,%d,%d,%d,%d,%.5f,%.5f\n", tunable_ops[r->op].op, r->gpu, r->dtype, r->B, r->T,
                      r->C, r->NH, r->V, r->config, r->median_ms, r->default_ms);
    }
    bool ok = writer_close(&w, err);
    if (ok && rename(temporary.text, path) != 0) {
        ok = error_set(err, "%s: cannot rename to it: %s", path, strerror(errno));
    }
    if (!ok) { unlink(temporary.text); }
    return ok;
}

// ---- the launchers' side ----------------------------------------------------------

// The tables that launches use. A program fills them before its first launch.
typedef struct TunedState {
    bool active;       // a file was read
    TunedTable table;  // its rows for this GPU and precision
    bool compares;     // a resumed run has taken another file than before: tells which choices that changes
    TunedTable before; // the rows that the run had before
    bool told[NUM_TUNABLE_OPS];
} TunedState;

// Reads a file and keeps its rows for this GPU and precision.
static inline bool tuned_read_for(TunedTable* table, const char* path, const char* gpu, const char* dtype, Error* err) {
    if (!tuned_read(table, path, err)) { return false; }
    int n = 0;
    for (int i = 0; i < table->num_rows; i++) {
        const TunedRow* row = &table->rows[i];
        if (strcmp(row->gpu, gpu) == 0 && strcmp(row->dtype, dtype) == 0) { table->rows[n++] = *row; }
    }
    table->num_rows = n;
    return true;
}

// Uses the file's rows for this GPU and precision from now on.
static inline bool tuned_open(TunedState* s, const char* path, const char* gpu, const char* dtype, Error* err) {
    if (!tuned_read_for(&s->table, path, gpu, dtype, err)) { return false; }
    s->active = true;
    if (s->table.num_rows == 0) {
        print_line(stderr, "note: %s has no row for %s in %s: the kernels run with their defaults", path, gpu, dtype);
    }
    return true;
}

static inline void tuned_close(TunedState* s) {
    tuned_free(&s->table);
    tuned_free(&s->before);
    memset(s, 0, sizeof(*s));
}

// Returns the row of `op` for a launch on `count` rows of `length` elements: of those with the same length the one whose
// count is nearest as a ratio. Returns NULL if there is none.
static inline const TunedRow* tuned_find(const TunedTable* table, int op, double count, int length) {
    const TunedRow* nearest = NULL;
    double least = INFINITY;
    for (int i = 0; i < table->num_rows; i++) {
        const TunedRow* row = &table->rows[i];
        if (row->op != op || tuned_length(row) != length) { continue; }
        double distance = fabs(log(tuned_count(row) / count));
        if (distance < least) { nearest = row, least = distance; }
    }
    return nearest;
}

// Returns the configuration for a launch of `op` on `count` rows of `length` elements; for an op without rows, length is 1.
// `otherwise` is the launcher's own default. s may be NULL.
static inline int tuned_config(TunedState* s, const char* op, size_t count, int length, int otherwise) {
    if (!s || !s->active) { return otherwise; }
    int index = tunable_op(op);
    require(index >= 0);
    const TunedRow* row = tuned_find(&s->table, index, (double)count, length);
    int config = row && row->config ? row->config : otherwise;
    for (int i = 0; row && !row->in_use && i < s->table.num_rows; i++) {
        // another launch may have another count, so all rows of this length are wanted when the run is resumed
        TunedRow* other = &s->table.rows[i];
        other->in_use |= other->op == index && tuned_length(other) == length;
    }
    if (!s->compares || s->told[index]) { return config; }
    row = tuned_find(&s->before, index, (double)count, length);
    int before = row && row->config ? row->config : otherwise;
    if (before != config) {
        printf("note: --tuned changes the configuration of %s from %d to %d: last bits may differ from here on\n", op,
               before, config);
        s->told[index] = true;
    }
    return config;
}
#ifdef __cplusplus
// Returns the number of threads of a block for a launch by exec, an Execution. Other arguments as for tuned_config().
template <class Execution>
int tuned_block_size(const Execution& exec, const char* op, size_t count, int length, int otherwise) {
    return exec.block_size ? exec.block_size : tuned_config(exec.tuned, op, count, length, otherwise);
}
#endif

#endif
