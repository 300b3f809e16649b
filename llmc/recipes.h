/*
Recipes: values for the flags of a training run that are not typed. One table says what each recipe sets. The text of --help, the
line that a run prints and the run itself are made from it. A run saves what its recipe has set, and keeps that when it resumes.

    recipe_apply("pretrain", num_parameters);   // before it, for a run that resumes: recipe_load(file)
    ... open the model ...
    for (B = recipe_batch(&bounds); B > 1 && it needs too much memory;) { B = recipe_smaller_batch(&bounds, B); }
    recipe_set_batch(B);
    ... open the data ...
    recipe_settle(num_steps, micro_steps);      // from here on all values are known
    recipe_print(stdout), recipe_write_flags(file, false, "...", "", &err);

Names of flags and values are those of the command line, so this header knows nothing about the settings of a program.
*/
#ifndef LLMC_RECIPES_H
#define LLMC_RECIPES_H

#include "cli.h"
#include "utils.h"
#include <glob.h>
#include <sys/stat.h>

// ---- the table ----------------------------------------------------------------------

#define RECIPES "pretrain|finetune|overfit|llmc"

// How the value of a row is read.
typedef enum {
    RECIPE_VALUE,       // as it stands
    RECIPE_OF_RATE,     // times --learning-rate
    RECIPE_OF_STEPS,    // but at most `share` of the steps
    RECIPE_OF_PARTS,    // times the micro-batches of a step
    RECIPE_FROM_MEMORY, // as many sequences as the memory holds; without -d, at most this many tokens a step
} RecipeRule;

typedef struct {
    const char *recipe, *flag, *value;
    RecipeRule rule;
    double share;
    double most_params;    // for models of at most this many parameters; 0: for all
    const char* optimizer; // if --optimizer is this one; NULL: for all
    const char* with;      // only if this flag is given; NULL: always
    const char* without;   // only if this flag is not given; NULL: always
} RecipeRow;

// Of several rows for a flag, the first that applies counts. The rates are those of dev/measured/README.md (Muon) and llm.c's
// (AdamW, scripts/run_gpt2_*.sh there). llmc sets nothing: it stands for the defaults of the flags.
static const RecipeRow recipe_rows[] = {
    {"pretrain", "optimizer", "muon", RECIPE_VALUE, 0, 250e6, NULL, NULL, NULL},
    {"pretrain", "optimizer", "adamw", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "learning-rate", "1.8e-3", RECIPE_VALUE, 0, 0, "muon", NULL, NULL},
    {"pretrain", "learning-rate", "6e-4", RECIPE_VALUE, 0, 250e6, NULL, NULL, NULL},
    {"pretrain", "learning-rate", "3e-4", RECIPE_VALUE, 0, 500e6, NULL, NULL, NULL},
    {"pretrain", "learning-rate", "2.5e-4", RECIPE_VALUE, 0, 1000e6, NULL, NULL, NULL},
    {"pretrain", "learning-rate", "6e-4", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "muon-learning-rate", "2", RECIPE_OF_RATE, 0, 0, "muon", NULL, NULL},
    {"pretrain", "schedule", "wsd", RECIPE_VALUE, 0, 0, "muon", NULL, NULL},
    {"pretrain", "schedule", "cosine", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "warmup", "700", RECIPE_OF_STEPS, 0.07, 0, NULL, NULL, NULL},
    {"pretrain", "final-fraction", "0", RECIPE_VALUE, 0, 1000e6, NULL, NULL, NULL},
    {"pretrain", "final-fraction", "0.1", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "weight-decay", "0.1", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "batch-size", "65536", RECIPE_FROM_MEMORY, 0, 0, NULL, NULL, NULL},
    {"pretrain", "val-every", "250", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "val-steps", "20", RECIPE_OF_PARTS, 0, 0, NULL, NULL, NULL},
    {"pretrain", "sample-every", "1000", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"pretrain", "save-minutes", "10", RECIPE_VALUE, 0, 0, NULL, "output", "save-every"},
    {"pretrain", "keep", "2", RECIPE_VALUE, 0, 0, NULL, "output", "save-every"},

    {"finetune", "optimizer", "adamw", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"finetune", "learning-rate", "1e-4", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"finetune", "schedule", "cosine", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"finetune", "warmup", "100", RECIPE_OF_STEPS, 0.07, 0, NULL, NULL, NULL},
    {"finetune", "final-fraction", "0", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"finetune", "batch-size", "4096", RECIPE_FROM_MEMORY, 0, 0, NULL, NULL, NULL},
    {"finetune", "save-minutes", "10", RECIPE_VALUE, 0, 0, NULL, "output", "save-every"},
    {"finetune", "keep", "2", RECIPE_VALUE, 0, 0, NULL, "output", "save-every"},

    {"overfit", "overfit", "1", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"overfit", "steps", "100", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"overfit", "learning-rate", "1e-3", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"overfit", "schedule", "constant", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"overfit", "val-every", "0", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
    {"overfit", "sample-every", "0", RECIPE_VALUE, 0, 0, NULL, NULL, NULL},
};
enum { NUM_RECIPE_ROWS = sizeof(recipe_rows) / sizeof(recipe_rows[0]) };

// What each recipe is for.
static const char* const recipe_purposes[][2] = {
    {"pretrain", "a new model; the default if -e is a descriptor"},
    {"finetune", "a model with weights; the default if -e names some"},
    {"overfit", "the first batch again and again, to test the setup; the default with -a"},
    {"llmc", "the defaults of the flags, which are llm.c's"},
};

// Appends the value of a row to text, with the conditions under which it counts: "700, at most 7% of the steps".
static inline void recipe_format_row(char* text, size_t size, const RecipeRow* row) {
    size_t n = strlen(text);
#define APPEND(...) n += (size_t)snprintf(text + n, n < size ? size - n : 0, __VA_ARGS__)
    if (row->rule == RECIPE_FROM_MEMORY) {
        APPEND(" what the memory holds (on a CPU 4 at most; without -d %s tokens a step at most)", row->value);
    } else {
        APPEND(" %s", row->value);
    }
    if (row->rule == RECIPE_OF_RATE) { APPEND(" times -l"); }
    if (row->rule == RECIPE_OF_STEPS) { APPEND(" (at most %g%% of the steps)", 100 * row->share); }
    if (row->rule == RECIPE_OF_PARTS) { APPEND(" times the micro-batches of a step"); }
    if (row->optimizer) { APPEND(" with %s", row->optimizer); }
    if (row->most_params > 0) { APPEND(" up to %gM parameters", row->most_params * 1e-6); }
    if (row->with) { APPEND(" with --%s", row->with); }
    if (row->without) { APPEND(" and without --%s", row->without); }
#undef APPEND
}

// Formats the text of --recipe for --help: what each recipe is for, and what it sets.
static inline const char* recipe_format_help(char* text, size_t size) {
    snprintf(text, size, "values for what is not typed, when a model is trained; a resumed run keeps its own");
    for (size_t r = 0; r < sizeof(recipe_purposes) / sizeof(recipe_purposes[0]); r++) {
        const char *name = recipe_purposes[r][0], *before = "";
        size_t n = strlen(text);
        snprintf(text + n, size - n, "\n%s: %s", name, recipe_purposes[r][1]);
        for (int i = 0; i < NUM_RECIPE_ROWS; i++) {
            const RecipeRow* row = &recipe_rows[i];
            if (strcmp(row->recipe, name) != 0) { continue; }
            n = strlen(text);
            bool same = strcmp(before, row->flag) == 0;
            snprintf(text + n, size - n, same ? ", else" : "; --%s", row->flag);
            recipe_format_row(text, size, row);
            before = row->flag;
        }
    }
    return text;
}

// ---- applying a recipe ----------------------------------------------------------------

typedef struct {
    const char* name;      // "" before recipe_apply()
    bool loaded;           // recipe_load() has been called
    bool pending[CLI_MAX]; // the recipe sets this flag, but its value is not known yet
} Recipe;
static Recipe recipe = {"", false, {false}};

static inline bool recipe_flag_is_typed(const char* flag) { return cli_defaults()->typed[cli_find(flag)]; }
// True if the flag is typed, or if the run that is resumed had it.
static inline bool recipe_flag_is_given(const char* flag) {
    return recipe_flag_is_typed(flag) || cli_defaults()->derived[cli_find(flag)];
}

// Sets the flag, unless it is typed.
static inline void recipe_set(const char* flag, const char* value) {
    CliDefaults* d = cli_defaults();
    int i = cli_find(flag);
    require(i >= 0);
    if (d->typed[i]) { return; }
    cli_set(&d->opts[i], value);
    d->derived[i] = true;
    recipe.pending[i] = false;
}

// Whether a row counts for a model of num_params parameters.
static inline bool recipe_row_applies(const RecipeRow* row, double num_params) {
    const char* optimizer = *(const char* const*)cli_defaults()->opts[cli_find("optimizer")].value;
    return strcmp(row->recipe, recipe.name) == 0 && (row->most_params == 0 || num_params <= row->most_params) &&
           (!row->optimizer || strcmp(optimizer, row->optimizer) == 0) &&
           (!row->with || recipe_flag_is_given(row->with)) && (!row->without || !recipe_flag_is_given(row->without));
}

// Applies a recipe to a model of num_params parameters, as far as it is known now. Flags that are typed or loaded stay. name: one
// of RECIPES.
static inline void recipe_apply(const char* name, double num_params) {
    CliDefaults* d = cli_defaults();
    char text[64];
    recipe.name = name;
    recipe_set("recipe", name);
    for (int i = 0; i < NUM_RECIPE_ROWS; i++) {
        const RecipeRow* row = &recipe_rows[i];
        int flag = cli_find(row->flag);
        require(flag >= 0);
        if (d->typed[flag] || d->derived[flag] || !recipe_row_applies(row, num_params)) { continue; }
        d->derived[flag] = true;
        if (row->rule == RECIPE_VALUE) {
            recipe_set(row->flag, row->value);
        } else if (row->rule == RECIPE_OF_RATE) {
            double rate = as_typed(*(const float*)d->opts[cli_find("learning-rate")].value);
            snprintf(text, sizeof(text), "%.6g", rate * strtod(row->value, NULL));
            snprintf(cli_place(), 512, "-l %g: recipe %s sets %s times that: ", rate, name, row->value);
            recipe_set(row->flag, text);
            cli_place()[0] = '\0';
        } else {
            recipe.pending[flag] = true;
        }
    }
}

// Sets the values that depend on the length of the run and on the micro-batches of a step.
static inline void recipe_settle(int64_t num_steps, int64_t micro_steps) {
    char text[64];
    for (int i = 0; i < NUM_RECIPE_ROWS && recipe.name[0]; i++) {
        const RecipeRow* row = &recipe_rows[i];
        bool of_steps = row->rule == RECIPE_OF_STEPS, of_parts = row->rule == RECIPE_OF_PARTS;
        if (strcmp(row->recipe, recipe.name) != 0 || !recipe.pending[cli_find(row->flag)]) { continue; }
        double value = strtod(row->value, NULL), most = of_steps ? floor(row->share * (double)num_steps) : 1e9;
        if (!of_steps && !of_parts) { continue; }
        if (of_parts) { value *= (double)micro_steps; }
        snprintf(text, sizeof(text), "%.0f", value < most ? value : most);
        recipe_set(row->flag, text);
    }
}

// ---- the micro-batch --------------------------------------------------------------------

typedef struct {
    int T, num_ranks;
    int64_t total_batch; // -d, or 0
    int most;            // sequences, whatever the memory
    const char* data;    // -i
    bool multiple_of_16; // B * T must be one
    // set by recipe_batch()
    int64_t longest_shard; // tokens; 0: unknown
} RecipeBounds;

// Finds how many tokens the shards have together, and the longest one, from the sizes of their files.
static inline int64_t recipe_count_tokens(const char* pattern, int64_t* longest) {
    enum { HEADER = 1024, TOKEN = 2 }; // bytes
    glob_t found;
    struct stat st;
    int64_t sum = 0;
    *longest = 0;
    if (!pattern) { return 0; }
    bool one = stat(pattern, &st) == 0;
    if (!one && glob(pattern, 0, NULL, &found) != 0) { return 0; }
    for (size_t i = 0; i < (one ? 1 : found.gl_pathc); i++) {
        if (!one && stat(found.gl_pathv[i], &st) != 0) { continue; }
        int64_t tokens = ((int64_t)st.st_size - HEADER) / TOKEN;
        sum += tokens > 0 ? tokens : 0;
        *longest = tokens > *longest ? tokens : *longest;
    }
    if (!one) { globfree(&found); }
    return sum;
}

// Returns the largest micro-batch, less than `below`, that divides -d or is a power of two, and of which the longest shard has
// one at least for each rank. Returns 1 if there is none.
static inline int recipe_smaller_batch(const RecipeBounds* b, int below) {
    for (int B = below - 1; B > 1; B--) {
        int64_t tokens = (int64_t)B * b->T * b->num_ranks;
        bool fits = b->total_batch > 0 ? b->total_batch % tokens == 0 : (B & (B - 1)) == 0;
        bool aligned = !b->multiple_of_16 || (int64_t)B * b->T % 16 == 0;
        if (fits && aligned && (b->longest_shard == 0 || tokens < b->longest_shard)) { return B; }
    }
    return 1;
}

// Returns the largest micro-batch to try, or 0 if the recipe does not choose it. Without -d, where it decides on the tokens of a
// step, an epoch has 64 steps at least, unless these have fewer tokens than llm.c's 4 sequences.
static inline int recipe_batch(RecipeBounds* b) {
    const CliDefaults* d = cli_defaults();
    int flag = recipe.name[0] ? cli_find("batch-size") : -1, before = flag < 0 ? 0 : *(const int*)d->opts[flag].value;
    const RecipeRow* row = recipe_rows;
    if (flag < 0 || !d->derived[flag]) { return 0; }
    while (strcmp(row->recipe, recipe.name) != 0 || row->rule != RECIPE_FROM_MEMORY) { row++; }
    int64_t data = recipe_count_tokens(b->data, &b->longest_shard) / 64, tokens = (int64_t)strtod(row->value, NULL);
    int64_t sequence = (int64_t)b->T * b->num_ranks, most = b->most;
    if (b->total_batch == 0) {
        if (data > 0 && tokens > data) { tokens = data; }
        int64_t few = 4, B = tokens / sequence < few ? few : tokens / sequence;
        most = B < most ? B : most;
    }
    if (!recipe.pending[flag]) { most = before; } // that of the run, unless it no longer divides -d or fits the memory
    return recipe_smaller_batch(b, (int)most + 1);
}

// Sets the micro-batch that was found; 1 also if none divides -d, which is then refused.
static inline void recipe_set_batch(int B) {
    char text[32];
    snprintf(text, sizeof(text), "%d", B);
    recipe_set("batch-size", text);
}

// ---- of a run -----------------------------------------------------------------------------

// Writes all flags that a run has been given, by the command line or by the recipe; or only its recipe and what that has set.
// Each is a line of a file that cli_parse_file() reads. head: a comment above them. last: lines after them, which override them.
static inline bool recipe_write_flags(const char* path, bool all, const char* head, const char* last, Error* err) {
    const CliDefaults* d = cli_defaults();
    Path temp;
    FileWriter w;
    if (!path_set(&temp, "%s.tmp", path) || !writer_open(&w, temp.text, err)) { return false; }
    writer_printf(&w, "# %s\n", head);
    for (int i = 0; i < d->n; i++) {
        const Option* o = &d->opts[i];
        if (o->type == OPT_SECTION || strcmp(o->name, "config") == 0 || strcmp(o->name, "resume") == 0) { continue; }
        bool typed = d->typed[i] && (all || strcmp(o->name, "recipe") == 0);
        if (typed || d->derived[i]) { cli_write_flag(&w, o, i); }
    }
    writer_printf(&w, "%s", last);
    bool ok = writer_close(&w, err);
    if (ok && rename(temp.text, path) != 0) { ok = error_set(err, "%s: rename: %s", path, strerror(errno)); }
    if (!ok) { unlink(temp.text); }
    return ok;
}

// Sets the flag in a line that recipe_write_flags() has written, unless it is typed.
static inline void recipe_load_line(const char* line) {
    char* text = keep_text(line); // the value points into it
    char* value = text + strcspn(text, " ");
    if (*value) { *value++ = '\0'; }
    if (strncmp(text, "--", 2) != 0 || cli_find(text + 2) < 0) { cli_fail("'%s' is not a flag", text); }
    recipe_set(text + 2, cli_unquote(value));
}

// Takes what a run has saved with recipe_write_flags(), except for flags that are typed; nothing if another recipe is typed.
// Returns the name of the recipe. Called before recipe_apply(), which adds what is not in the file.
static inline const char* recipe_load(const char* path, const char* typed) {
    const char* name = NULL;
    char* line = NULL;
    size_t size = 0;
    FILE* f = fopen(path, "r");
    for (int pass = 0; f && pass < 2; pass++) { // the first one finds the name
        if (name && typed && strcmp(name, typed) != 0) { break; }
        rewind(f);
        for (int number = 1; getline(&line, &size, f) >= 0; number++) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(cli_place(), 512, "%.480s:%d: ", path, number);
            if (pass == 0 && strncmp(line, "--recipe ", 9) == 0) { name = keep_text(line + 9); }
            if (pass == 1 && line[0] != '#') { recipe_load_line(line); }
            recipe.loaded = pass == 1;
        }
    }
    cli_place()[0] = '\0';
    if (!f || ferror(f)) { die("%s: cannot read the recipe of the run: %s", path, strerror(errno)); }
    if (!name || cli_find_choice(RECIPES, name) < 0) {
        die("%s: has no line --recipe %s: type the recipe of the run", path, RECIPES);
    }
    free(line);
    fclose(f);
    return typed ? typed : name;
}

// Takes the flags of saving from the file of all flags that the run wrote when it last began, except for flags that are typed.
// Otherwise the recipe's --keep would remove checkpoints that it was told to keep. Called before recipe_apply().
static inline void recipe_load_saving(const char* path) {
    static const char* const flags[] = {"--save-every ", "--save-minutes ", "--keep ", "--major-every "};
    char* line = NULL;
    size_t size = 0;
    FILE* f = fopen(path, "r");
    snprintf(cli_place(), 512, "%.480s: ", path);
    while (f && getline(&line, &size, f) >= 0) {
        line[strcspn(line, "\n")] = '\0';
        for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
            if (strncmp(line, flags[i], strlen(flags[i])) == 0) { recipe_load_line(line); }
        }
    }
    cli_place()[0] = '\0';
    free(line);
    bool ok = f ? !ferror(f) : errno == ENOENT;
    if (!ok) { die("%s: cannot be read: %s", path, strerror(errno)); }
    if (f) { fclose(f); }
}

// Prints which values come from the recipe, as flags.
static inline void recipe_print(FILE* f) {
    const CliDefaults* d = cli_defaults();
    char text[CLI_MAX * (CLI_NAME_MAX + 64)], value[1024];
    if (!recipe.name[0]) { return; }
    int n = snprintf(text, sizeof(text), "recipe %s%s:", recipe.name, recipe.loaded ? ", resumed" : ""), start = n;
    for (int i = 0; i < d->n; i++) {
        if (!d->derived[i] || strcmp(d->opts[i].name, "recipe") == 0) { continue; }
        cli_format_value(value, sizeof(value), &d->opts[i], i, false);
        n += snprintf(text + n, sizeof(text) - (size_t)n, " --%s %.48s", d->opts[i].name,
                      recipe.pending[i] ? "(by the steps)" : value);
    }
    if (n == start) { snprintf(text + n, sizeof(text) - (size_t)n, " sets nothing beyond what is typed"); }
    cli_print_wrapped(f, text, 0, 2);
}

#endif
