/*
Command line flags. One table describes all flags of a program. It drives getopt_long, --help and the printed run
header, so these three cannot disagree. It also has columns for llm.c's one-letter and two-letter flags (-b, -lg).
A usage error prints one line to stderr and exits with 2. C11, also compiles as C++17.

    static int batch = 4;
    static const Option opts[] = {
        {OPT_SECTION, 0, NULL, "Data", NULL, NULL, NULL, 0, 0},
        {OPT_INT, 'b', NULL, "batch", &batch, "sequences", "sequences in a micro-batch", 1, 4096},
    };
    cli_parse(argc, argv, "Trains a model.", opts, 2);
*/
#ifndef LLMC_CLI_H
#define LLMC_CLI_H

#include "utils.h"
#include <ctype.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <strings.h>

typedef enum { OPT_SECTION, OPT_INT, OPT_LONG, OPT_FLOAT, OPT_STR, OPT_LIST, OPT_BOOL, OPT_CHOICE } OptType;

enum { CLI_LIST_MAX = 64 };

// The value of an OPT_LIST, a flag that may be given several times: its arguments, in their order.
typedef struct {
    const char* items[CLI_LIST_MAX];
    int n;
} CliList;

typedef struct {
    OptType type;
    char letter;       // one-letter flag, or 0; 'h' is taken by --help
    const char* alias; // llm.c's two-letter flag without its dash ("lg"), or NULL
    const char* name;  // long name without dashes; the title of an OPT_SECTION
    void* value; // int* (also for OPT_BOOL), int64_t*, float*, const char**, CliList*; before cli_parse(): the default.
                 // OPT_CHOICE: int*, the number of the choice, counted from 0
    const char* unit; // unit of a number ("steps"), or NULL; OPT_STR: the argument's name, FILES if it is a list of
                      // names, or its choices "a|b|c"; OPT_CHOICE: its choices; the flag without an argument means the
                      // last one; OPT_BOOL: a word for a third value, 2
    const char* help; // one sentence, no full stop
    double min, max;  // inclusive range of a number; min == max == 0 means no range
} Option;

enum {
    CLI_MAX = 128,       // entries in a table, sections included
    CLI_VERSION = 255,   // getopt code of --version
    CLI_CODE = 256,      // getopt codes of long flags: entry i has CLI_CODE + 2 i, its --no-NAME one more
    CLI_NAME_MAX = 40,   // bytes of a long name
    CLI_COLUMNS = 100,   // line width of --help
    CLI_LEFT_COLUMN = 34 // widest flag column of --help; the text of a longer flag starts on the next line
};

// The default values: the contents of the variables before cli_parse() changed them. cli_print() compares with them.
typedef struct {
    const Option* opts;    // the table that the values belong to
    int n;                 // its entries
    bool typed[CLI_MAX];   // the command line has the flag, or a file of flags (cli_parse_file)
    bool derived[CLI_MAX]; // the flag is not typed, and its value follows from another one; cli_print() leaves it out
    int64_t integer[CLI_MAX];
    float real[CLI_MAX];
    const char* text[CLI_MAX];
} CliDefaults;

static inline CliDefaults* cli_defaults(void) {
    static CliDefaults defaults;
    return &defaults;
}

static inline const char* cli_program(const char* argv0) {
    static const char* name = "program";
    if (argv0 && argv0[0]) { name = argv0; }
    return name;
}

// Returns what a usage error begins with: "FILE:LINE: " while a file of flags is read, "-l 60: ... " while a value is computed
// from that flag, and "" otherwise.
static inline char* cli_place(void) {
    static char place[512];
    return place;
}

// Prints one line to stderr and exits with 2. Control characters in the user's arguments are replaced by '?'.
PRINTF_LIKE(1, 2) __attribute__((noreturn)) static inline void cli_fail(const char* fmt, ...) {
    char line[2048];
    va_list args;
    va_start(args, fmt);
    format_line(line, sizeof(line), fmt, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "%s: %s%s\n", cli_program(NULL), cli_place(), line);
    exit(2);
}

// ---- values as text -------------------------------------------------------------

static inline bool cli_has_choices(const Option* o) {
    return o->type == OPT_CHOICE || (o->type == OPT_STR && o->unit && strchr(o->unit, '|'));
}
static inline bool cli_argument_is_optional(const Option* o) { return o->type == OPT_BOOL || o->type == OPT_CHOICE; }
static inline bool cli_is_number(const Option* o) {
    return o->type == OPT_INT || o->type == OPT_LONG || o->type == OPT_FLOAT;
}
static inline bool cli_has_range(const Option* o) { return cli_is_number(o) && !(o->min == 0 && o->max == 0); }

// Returns the number of `arg` among choices "a|a+b|a+b+c", counted from 0, or -1. The end of a choice stands for it if it
// begins with a plus: "+c" and "+b+c" are "a+b+c".
static inline int cli_find_choice(const char* choices, const char* arg) {
    size_t n = strlen(arg);
    for (int i = 0;; i++) {
        size_t length = strcspn(choices, "|");
        bool same = n == length || (n < length && arg[0] == '+');
        if (same && memcmp(choices + length - n, arg, n) == 0) { return i; }
        if (choices[length] == '\0') { return -1; }
        choices += length + 1;
    }
}

// Formats choice i of "a|b|c".
static inline void cli_format_choice(char* buf, size_t size, const char* choices, int i) {
    for (; i > 0; i--) { choices = strchr(choices, '|') + 1; }
    snprintf(buf, size, "%.*s", (int)strcspn(choices, "|"), choices);
}

// Formats the value of entry i of the table as a user would type it: the current value, or the default if `was` is
// true.
static inline void cli_format_value(char* buf, size_t size, const Option* o, int i, bool was) {
    const CliDefaults* d = cli_defaults();
    switch (o->type) {
    case OPT_INT:
    case OPT_BOOL: {
        int v = was ? (int)d->integer[i] : *(const int*)o->value;
        if (o->type == OPT_BOOL && v == 2) {
            snprintf(buf, size, "%s", o->unit);
        } else {
            snprintf(buf, size, "%d", v);
        }
        break;
    }
    case OPT_LONG:
        snprintf(buf, size, "%lld", was ? (long long)d->integer[i] : (long long)*(const int64_t*)o->value);
        break;
    case OPT_FLOAT:
        format_float(buf, size, was ? d->real[i] : *(const float*)o->value);
        break;
    case OPT_CHOICE:
        cli_format_choice(buf, size, o->unit, was ? (int)d->integer[i] : *(const int*)o->value);
        break;
    case OPT_LIST: {
        const CliList* list = (const CliList*)o->value;
        size_t used = (size_t)snprintf(buf, size, "%s", was || list->n == 0 ? "none" : list->items[0]);
        for (int k = 1; !was && k < list->n && used < size; k++) {
            used += (size_t)snprintf(buf + used, size - used, ", %s", list->items[k]);
        }
        break;
    }
    default: {
        const char* s = was ? d->text[i] : *(const char* const*)o->value;
        snprintf(buf, size, "%s", s && s[0] ? s : "none");
    }
    }
    for (char* p = buf; *p; p++) {
        if (iscntrl((unsigned char)*p)) { *p = '?'; }
    }
}

static inline void cli_remember_defaults(const Option* opts, int n) {
    CliDefaults* d = cli_defaults();
    d->opts = opts;
    d->n = n;
    memset(d->typed, 0, sizeof(d->typed));
    memset(d->derived, 0, sizeof(d->derived));
    for (int i = 0; i < n; i++) {
        const Option* o = &opts[i];
        switch (o->type) {
        case OPT_INT:
        case OPT_BOOL:
        case OPT_CHOICE:
            d->integer[i] = *(const int*)o->value;
            break;
        case OPT_LONG:
            d->integer[i] = *(const int64_t*)o->value;
            break;
        case OPT_FLOAT:
            d->real[i] = *(const float*)o->value;
            break;
        case OPT_STR:
            d->text[i] = *(const char* const*)o->value;
            break;
        case OPT_LIST: // empty, also if this is not the first call in this process
            ((CliList*)o->value)->n = 0;
            break;
        case OPT_SECTION:
            break;
        }
    }
}

static inline bool cli_changed(const Option* opts, int i) {
    const CliDefaults* d = cli_defaults();
    const Option* o = &opts[i];
    if (d->opts != opts || o->type == OPT_SECTION) { return false; }
    switch (o->type) {
    case OPT_INT:
    case OPT_BOOL:
    case OPT_CHOICE:
        return d->integer[i] != *(const int*)o->value;
    case OPT_LONG:
        return d->integer[i] != *(const int64_t*)o->value;
    case OPT_FLOAT:
        return d->real[i] != *(const float*)o->value;
    case OPT_LIST:
        return ((const CliList*)o->value)->n > 0;
    default: {
        const char *s = *(const char*const*)o->value, *was = d->text[i];
        return strcmp(s ? s : "", was ? was : "") != 0;
    }
    }
}

// Returns the entry with this long name of the table that was parsed; -1 if there is none.
static inline int cli_find(const char* name) {
    const CliDefaults* d = cli_defaults();
    int i = d->n - 1;
    while (i >= 0 && (d->opts[i].type == OPT_SECTION || strcmp(d->opts[i].name, name) != 0)) { i--; }
    return i;
}

// True if the command line has the flag whose variable is `value`.
static inline bool cli_typed(const void* value) {
    const CliDefaults* d = cli_defaults();
    for (int i = 0; i < d->n; i++) {
        if (d->typed[i] && d->opts[i].value == value) { return true; }
    }
    return false;
}

// Formats the range as "1 to 4096", "at least 1" or "at most 0". A bound that is the limit of the type is not
// mentioned.
static inline void cli_format_range(char* buf, size_t size, const Option* o) {
    double type_max = o->type == OPT_INT ? INT_MAX : o->type == OPT_LONG ? (double)INT64_MAX : 1e30;
    const char* fmt = o->type == OPT_FLOAT ? "%.9g" : "%.0f";
    char low[64], high[64];
    snprintf(low, sizeof(low), fmt, o->min);
    snprintf(high, sizeof(high), fmt, o->max);
    if (o->max >= type_max) {
        snprintf(buf, size, "at least %s", low);
    } else if (o->min <= -type_max) {
        snprintf(buf, size, "at most %s", high);
    } else {
        snprintf(buf, size, "%s to %s", low, high);
    }
}

// ---- --help and the run header ----------------------------------------------------

// Lists for the help and the error messages of a program with many flags. Each list ends with {NULL, NULL}.
typedef struct {
    const char* const (*most_used)[2]; // {long name, one line about it}: --help shows these flags only
    const char* const (*examples)[2];  // {flags, one line about them}: example command lines
    const char* const (*habits)[2];    // {a name that other programs use, our flag or what to do instead}
    const char* sibling;               // another program, whose flags this one does not have; or NULL
    const Option* sibling_options;     // its flags that this program does not have
    int num_sibling_options;
} CliExtras;

static const CliExtras* cli_extras; // set before cli_parse(), or NULL

// Prints text that starts in column `at`, wrapped at CLI_COLUMNS; continuation lines are indented. Ends the line.
static inline void cli_print_wrapped(FILE* f, const char* text, int at, int indent) {
    int column = at;
    bool first = true; // the next word is the first of its line
    while (*text) {
        if (*text == '\n') {
            fprintf(f, "\n%*s", indent, "");
            column = indent;
            first = true;
            text++;
            continue;
        }
        int length = (int)strcspn(text, " \n");
        if (length > 0) {
            if (!first && column + 1 + length > CLI_COLUMNS) {
                fprintf(f, "\n%*s", indent, "");
                column = indent;
                first = true;
            }
            column += fprintf(f, "%s%.*s", first ? "" : " ", length, text);
            first = false;
        }
        text += length;
        text += strspn(text, " ");
    }
    fputc('\n', f);
}

// Formats "  -b, -lg, --name ARG". Returns the length.
static inline int cli_format_flag(char* buf, size_t size, const Option* o) {
    char letter[8] = "    ", alias[16] = "";
    if (o->letter) { snprintf(letter, sizeof(letter), "-%c, ", o->letter); }
    if (o->alias) { snprintf(alias, sizeof(alias), "-%s, ", o->alias); }
    const char* arg = o->type == OPT_INT || o->type == OPT_LONG ? " N" : o->type == OPT_FLOAT ? " X" : "";
    if (o->type == OPT_STR || o->type == OPT_LIST) {
        return snprintf(buf, size, "  %s%s--%s %s", o->letter || !o->alias ? letter : "", alias, o->name,
                        o->unit && o->unit[0] ? o->unit : "TEXT");
    }
    if (o->type == OPT_CHOICE || (o->type == OPT_BOOL && o->unit)) {
        return snprintf(buf, size, "  %s%s--%s [%s]", o->letter || !o->alias ? letter : "", alias, o->name, o->unit);
    }
    return snprintf(buf, size, "  %s%s--%s%s", o->letter || !o->alias ? letter : "", alias, o->name, arg);
}

// Prints the program's name and version, and how it was compiled.
static inline void cli_version(FILE* f) {
    const char* slash = strrchr(cli_program(NULL), '/');
    fprintf(f, "%s %s (compiler %s", slash ? slash + 1 : cli_program(NULL), LLMC_VERSION, __VERSION__);
#ifdef _OPENMP
    fprintf(f, ", OpenMP");
#endif
#if defined(__CUDACC__) && defined(ENABLE_FP32)
    fprintf(f, ", fp32");
#elif defined(__CUDACC__) && defined(ENABLE_FP16)
    fprintf(f, ", fp16");
#elif defined(__CUDACC__)
    fprintf(f, ", bf16");
#endif
#ifdef CUDART_VERSION
    fprintf(f, ", CUDA %d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
#endif
    fprintf(f, ")\n");
}

// Formats the help of entry i, of which a clause "; VALUE: WORDS" becomes the default if that is VALUE. The words of a value
// say more than the value: "(default: from the descriptor)".
static inline void cli_format_help(char* buf, size_t size, const Option* o, int i) {
    char value[1024], needle[1040], range[160] = "";
    const char *help = o->help ? o->help : "", *unit = cli_is_number(o) && o->unit ? o->unit : "";
    cli_format_value(value, sizeof(value), o, i, true);
    snprintf(needle, sizeof(needle), "; %s: ", value);
    if (strcmp(value, "1") == 0) { unit = ""; } // "texts"
    Option shown = *o;
    if (o->max >= 1e6) { shown.max = INFINITY; } // only keeps numbers from overflowing
    if (cli_has_range(o) && !(shown.min <= 0 && shown.max > o->max)) { cli_format_range(range, sizeof(range), &shown); }
    const char *words = strstr(help, needle), *separator = range[0] ? "; " : "";
    const char* text_default = o->type == OPT_STR ? cli_defaults()->text[i] : "";
    bool absent = o->type == OPT_LIST || (o->type == OPT_STR && !(text_default && text_default[0]));
    if (words) {
        const char* text = words + strlen(needle);
        const char* sentence = strstr(text, ". ");
        int length = (int)strcspn(text, ";");
        if (sentence && sentence < text + length) { length = (int)(sentence - text); }
        snprintf(buf, size, "%.*s%s (default: %.*s%s%s)", (int)(words - help), help, text + length, length, text,
                 separator, range);
    } else if (o->type == OPT_BOOL) {
        bool third = o->unit && strcmp(value, o->unit) == 0;
        snprintf(buf, size, "%s (default %s)", help, third ? value : strcmp(value, "0") == 0 ? "off" : "on");
    } else if (absent) {
        snprintf(buf, size, "%s", help);
    } else {
        snprintf(buf, size, "%s (default %s%s%s%s%s)", help, value, unit[0] ? " " : "", unit, separator, range);
    }
}

// True if entry i belongs to `topic`: it is "all", the beginning of a word in the title of the flag's section, or the flag.
static inline bool cli_in_topic(const Option* opts, int i, const char* topic) {
    const char* bare = topic + strspn(topic, "-");
    size_t length = strlen(bare);
    if (strcmp(topic, "all") == 0) { return true; }
    if (opts[i].type != OPT_SECTION && (strcmp(bare, opts[i].name) == 0 || (length == 1 && bare[0] == opts[i].letter) ||
                                        (opts[i].alias && strcmp(bare, opts[i].alias) == 0))) {
        return true;
    }
    while (i > 0 && opts[i].type != OPT_SECTION) { i--; }
    for (const char* word = opts[i].name; opts[i].type == OPT_SECTION && length >= 3 && *word;) {
        if (strncasecmp(word, bare, length) == 0) { return true; }
        word += strcspn(word, " ");
        word += strspn(word, " ");
    }
    return false;
}

static inline void cli_help_end(FILE* f, int width) {
    fprintf(f, "\n%-*sshow this text; with a topic or a flag, what there is to it\n", width, "  -h, --help [TOPIC]");
    fprintf(f, "%-*sshow the version and how the program was compiled\n", width, "      --version");
    fprintf(f, "A flag without an argument is a switch: --NAME turns it on, --no-NAME or --NAME=0 off.\n");
}

// Prints the flags of `topic`. arguments: what the usage line names besides the flags (" RUN ..."), or "".
static inline void cli_help(FILE* f, const char* about, const char* arguments, const char* topic, const Option* opts,
                            int n) {
    char flag[512], text[4096];
    bool all = strcmp(topic, "all") == 0, some = false;
    int width = (int)strlen("  -h, --help [TOPIC]");
    for (int i = 0; i < n; i++) {
        int w = opts[i].type == OPT_SECTION ? 0 : cli_format_flag(flag, sizeof(flag), &opts[i]);
        if (w > width && w <= CLI_LEFT_COLUMN) { width = w; }
        some |= cli_in_topic(opts, i, topic);
    }
    width += 2;
    if (!some) { cli_fail("--help: no topic and no flag '%s', see %s --help", topic, cli_program(NULL)); }
    if (all) {
        cli_print_wrapped(f, about, 0, 0);
        fprintf(f, "\nusage: %s [flags]%s\n", cli_program(NULL), arguments);
    }
    for (int i = 0; i < n; i++) {
        const Option* o = &opts[i];
        if (!cli_in_topic(opts, i, topic)) { continue; }
        if (o->type == OPT_SECTION) {
            fprintf(f, "%s%s:\n", all ? "\n" : "", o->name);
            if (o->help) { cli_print_wrapped(f, o->help, fprintf(f, "  "), 2); }
            continue;
        }
        int w = cli_format_flag(flag, sizeof(flag), o);
        int left = w + 2 <= width ? fprintf(f, "%-*s", width, flag) : fprintf(f, "%s\n%*s", flag, width, "") - w - 1;
        cli_format_help(text, sizeof(text), o, i);
        cli_print_wrapped(f, text, left, width);
    }
    if (all) { cli_help_end(f, width); }
}

// Prints the flags that are used most, examples, and the topics: one screen.
static inline void cli_help_screen(FILE* f, const char* about, const Option* opts, int n) {
    char flag[512], topics[1024] = "--help TOPIC shows more of:";
    int width = 0, example_width = 0;
    cli_print_wrapped(f, about, 0, 0);
    fprintf(f, "\n");
    for (int i = 0; i < n; i++) {
        if (opts[i].type != OPT_SECTION) { continue; }
        size_t used = strlen(topics), start = used + 1;
        snprintf(topics + used, sizeof(topics) - used, " %.*s,", (int)strcspn(opts[i].name, " "), opts[i].name);
        topics[start] = (char)tolower((unsigned char)topics[start]);
    }
    snprintf(topics + strlen(topics), sizeof(topics) - strlen(topics), " or of a flag. --help all shows all flags.");
    for (int pass = 0; pass < 2; pass++) { // the first one measures the columns
        for (int k = 0; cli_extras->most_used[k][0]; k++) {
            int i = 0;
            while (i < n && strcmp(opts[i].name, cli_extras->most_used[k][0]) != 0) { i++; }
            require(i < n);
            int w = cli_format_flag(flag, sizeof(flag), &opts[i]);
            width = w > width ? w : width;
            if (pass == 1) { fprintf(f, "%-*s  %s\n", width, flag, cli_extras->most_used[k][1]); }
        }
        if (pass == 1) { fprintf(f, "\n"); }
        for (int k = 0; cli_extras->examples[k][0]; k++) {
            const char* const* example = cli_extras->examples[k];
            int w = (int)strlen(example[0]);
            example_width = w > example_width ? w : example_width;
            if (pass == 1) { fprintf(f, "%s %-*s  # %s\n", cli_program(NULL), example_width, example[0], example[1]); }
        }
    }
    fprintf(f, "\n");
    cli_print_wrapped(f, topics, 0, 0);
}

// Appends " WORD" to text, quoted as a shell needs it. A text that is full is cut.
static inline void cli_append_word(char* text, size_t size, const char* word) {
    const char* safe = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./,:=@%+-";
    const char* quote = word[0] && !word[strspn(word, safe)] ? "" : "'";
    size_t n = strlen(text);
    if (n + 8 > size) { return; }
    n += (size_t)snprintf(text + n, size - n, " %s", quote);
    for (; *word && n + 6 < size; word++) {
        n += (size_t)snprintf(text + n, size - n, "%.*s", *word == '\'' ? 4 : 1, *word == '\'' ? "'\\''" : word);
    }
    snprintf(text + n, size - n, "%s", quote);
}

// Prints the flags that the command line has, in the order of the table, as one could type them again.
static inline void cli_print_typed(FILE* f, const Option* opts, int n) {
    char line[8192] = "flags:", value[4096];
    for (int i = 0; i < n; i++) {
        const Option* o = &opts[i];
        char flag[CLI_NAME_MAX + 8];
        if (o->type == OPT_SECTION || !cli_defaults()->typed[i]) { continue; }
        cli_format_value(value, sizeof(value), o, i, false);
        bool off = o->type == OPT_BOOL && strcmp(value, "0") == 0, on = o->type == OPT_BOOL && strcmp(value, "1") == 0;
        snprintf(flag, sizeof(flag), "--%s%s", off ? "no-" : "", o->name);
        const CliList* list = o->type == OPT_LIST ? (const CliList*)o->value : NULL;
        for (int k = 0; k < (list ? list->n : 1); k++) {
            cli_append_word(line, sizeof(line), flag);
            if (!off && !on) { cli_append_word(line, sizeof(line), list ? list->items[k] : value); }
        }
    }
    print_line(f, "%s", line);
}

// Prints the run header: one line per flag that differs from its default, then a paragraph with all other flags.
static inline void cli_print(FILE* f, const Option* opts, int n) {
    char value[1024], was[1024], rest[CLI_MAX * (CLI_NAME_MAX + 64)] = "defaults:";
    size_t used = strlen(rest);
    for (int i = 0; i < n; i++) {
        const Option* o = &opts[i];
        if (o->type == OPT_SECTION || cli_defaults()->derived[i]) { continue; }
        cli_format_value(value, sizeof(value), o, i, false);
        if (!cli_changed(opts, i)) {
            used += (size_t)snprintf(rest + used, sizeof(rest) - used, " %s=%.48s", o->name, value);
            continue;
        }
        bool number = cli_is_number(o) && o->unit && o->unit[0];
        cli_format_value(was, sizeof(was), o, i, true);
        print_line(f, "%-16s %s%s%s (default %s)", o->name, value, number ? " " : "", number ? o->unit : "", was);
    }
    cli_print_wrapped(f, rest, 0, 2);
}

// ---- parsing ------------------------------------------------------------------------

// Reads a decimal integer; the whole string must be one, without white space. *fits is false if it does not fit
// int64_t.
static inline bool cli_read_integer(const char* s, int64_t* v, bool* fits) {
    const char* digits = s + (s[0] == '-' || s[0] == '+');
    if (!digits[0] || digits[strspn(digits, "0123456789")]) { return false; }
    errno = 0;
    *v = strtoll(s, NULL, 10);
    *fits = errno == 0;
    return true;
}

// Reads a decimal number; the whole string must be one: no white space, nan, inf or hex. *fits is false if it does not
// fit a float.
static inline bool cli_read_float(const char* s, float* v, bool* fits) {
    if (!s[0] || s[strspn(s, "0123456789.eE+-")]) { return false; }
    char* end = NULL;
    errno = 0;
    double d = strtod(s, &end);
    if (end == s || *end) { return false; }
    *fits = errno == 0 && fabs(d) <= (double)3.402823466e38f && !(d != 0 && (float)d == 0.0f);
    *v = *fits ? (float)d : 0.0f;
    return true;
}

__attribute__((noreturn)) static inline void cli_fail_range(const Option* o, const char* arg) {
    char range[160];
    double real = o->type == OPT_FLOAT ? strtod(arg, NULL) : 0;
    if (real != 0 && (float)real == 0) { cli_fail("--%s %s is too small for a 32-bit float", o->name, arg); }
    if (cli_has_range(o)) {
        cli_format_range(range, sizeof(range), o);
    } else if (o->type == OPT_FLOAT) {
        snprintf(range, sizeof(range), "a number that a float can hold");
    } else {
        bool is_int = o->type == OPT_INT;
        snprintf(range, sizeof(range), "%lld to %lld", (long long)(is_int ? INT_MIN : INT64_MIN),
                 (long long)(is_int ? INT_MAX : INT64_MAX));
    }
    cli_fail("--%s wants %s, got '%s'", o->name, range, arg);
}

static inline void cli_set_number(const Option* o, const char* arg) {
    int64_t integer = 0;
    float real = 0;
    bool fits = true, is_float = o->type == OPT_FLOAT;
    bool ok = is_float ? cli_read_float(arg, &real, &fits) : cli_read_integer(arg, &integer, &fits);
    if (!ok) {
        char range[160] = "";
        if (cli_has_range(o)) { cli_format_range(range, sizeof(range), o); }
        cli_fail("--%s wants %s%s%s, got '%s'", o->name, is_float ? "a number" : "a whole number", range[0] ? ", " : "",
                 range, arg);
    }
    // compare as floats, so that --x 0.1 satisfies a bound of 0.1
    double v = is_float ? (double)real : (double)integer;
    if (!fits || (o->type == OPT_INT && (integer < INT_MIN || integer > INT_MAX)) ||
        (cli_has_range(o) &&
         !(v >= (is_float ? (double)(float)o->min : o->min) && v <= (is_float ? (double)(float)o->max : o->max)))) {
        cli_fail_range(o, arg);
    }
    if (is_float) {
        *(float*)o->value = real;
    } else if (o->type == OPT_INT) {
        *(int*)o->value = (int)integer;
    } else {
        *(int64_t*)o->value = integer;
    }
}

// The value of an OPT_BOOL: 0, 1, or 2 for its word; -1: arg is none of these.
static inline int cli_find_bool(const Option* o, const char* arg) {
    if (strcmp(arg, "0") == 0 || strcmp(arg, "1") == 0) { return arg[0] == '1'; }
    return o->unit && strcmp(arg, o->unit) == 0 ? 2 : -1;
}

static inline void cli_set(const Option* o, const char* arg) {
    if (o->type == OPT_BOOL) {
        int v = cli_find_bool(o, arg);
        if (v < 0 && o->unit) { cli_fail("--%s wants 0, 1 or %s, got '%s'", o->name, o->unit, arg); }
        if (v < 0) { cli_fail("--%s wants 0 or 1, got '%s'", o->name, arg); }
        *(int*)o->value = v;
        return;
    }
    if (cli_is_number(o)) {
        cli_set_number(o, arg);
        return;
    }
    if (o->type == OPT_LIST) {
        CliList* list = (CliList*)o->value;
        if (!arg[0]) { cli_fail("--%s wants a text, got ''", o->name); }
        if (list->n == CLI_LIST_MAX) { cli_fail("--%s: more than %d of them", o->name, (int)CLI_LIST_MAX); }
        list->items[list->n++] = arg;
        return;
    }
    int choice = cli_has_choices(o) ? cli_find_choice(o->unit, arg) : 0;
    if (choice < 0) { cli_fail("--%s wants one of %s, got '%s'", o->name, o->unit, arg); }
    if (o->type == OPT_CHOICE) {
        *(int*)o->value = choice;
    } else {
        *(const char**)o->value = arg;
    }
}

// Levenshtein distance of two names; INT_MAX if one is longer than CLI_NAME_MAX.
static inline int cli_distance(const char* a, const char* b) {
    int na = (int)strlen(a), nb = (int)strlen(b), row[CLI_NAME_MAX + 1];
    if (na > CLI_NAME_MAX || nb > CLI_NAME_MAX) { return INT_MAX; }
    for (int j = 0; j <= nb; j++) { row[j] = j; }
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) { best = row[j] + 1; }
            if (row[j - 1] + 1 < best) { best = row[j - 1] + 1; }
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[nb];
}

// True if a and b are the same name; a dash and an underscore are the same.
static inline bool cli_same_name(const char* a, const char* b) {
    for (; *a && (*a == *b || (*a == '_' && *b == '-') || (*a == '-' && *b == '_')); a++) { b++; }
    return *a == *b;
}

// Reports an unknown flag that other programs have, or the sibling program. name: the flag without dashes and value.
static inline void cli_fail_known_elsewhere(const char* token, int shown, const char* name,
                                            const struct option* longs) {
    const CliExtras* e = cli_extras;
    const char* bare = strncmp(name, "no-", 3) == 0 ? name + 3 : name;
    for (int i = 0; e && i < e->num_sibling_options; i++) {
        const Option* o = &e->sibling_options[i];
        bool letter =
            o->letter && token[0] == '-' && token[1] == o->letter && (!token[2] || isdigit((unsigned char)token[2]));
        if (o->type == OPT_SECTION ||
            !(letter || strcmp(bare, o->name) == 0 || (o->alias && strcmp(name, o->alias) == 0))) {
            continue;
        }
        cli_fail("unknown flag '%.*s': %s has it, this program does not", shown, token, e->sibling);
    }
    for (int k = 0; e && e->habits[k][0]; k++) {
        if (!cli_same_name(name, e->habits[k][0])) { continue; }
        const char* ours = e->habits[k][1];
        for (int i = 0; longs[i].name; i++) {
            if (strcmp(longs[i].name, ours) != 0) { continue; }
            cli_fail("unknown flag '%.*s', did you mean '--%s'? see %s --help %s", shown, token, ours,
                     cli_program(NULL), ours);
        }
        cli_fail("unknown flag '%.*s': %s", shown, token, ours);
    }
}

// Reports an unknown flag and suggests the nearest name. `longs` is getopt's table, terminated by a NULL name.
__attribute__((noreturn)) static inline void cli_fail_unknown(const char* token, const struct option* longs) {
    char name[CLI_NAME_MAX + 2];
    const char* bare = token + strspn(token, "-");
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(bare, "="), bare);
    int length = (int)strlen(name), best = length >= 6 ? 3 : length >= 3 ? 2 : 0;
    const char* nearest = NULL;
    int shown = (int)strcspn(token, "=");
    cli_fail_known_elsewhere(token, shown, name, longs);
    for (int k = 0; longs[k].name; k++) {
        int d = cli_distance(name, longs[k].name);
        if (d < best) {
            best = d;
            nearest = longs[k].name;
        }
    }
    if (nearest) {
        cli_fail("unknown flag '%.*s', did you mean '--%s'? see %s --help", shown, token, nearest, cli_program(NULL));
    }
    cli_fail("unknown flag '%.*s', see %s --help", shown, token, cli_program(NULL));
}

// Reports the error for which getopt returned '?': an unknown or ambiguous flag, or a value for a flag that takes none.
__attribute__((noreturn)) static inline void cli_fail_flag(const char* token, const struct option* longs) {
    if (strncmp(token, "--", 2) != 0 || token[2] == '=') { cli_fail_unknown(token, longs); }
    size_t length = strcspn(token + 2, "=");
    char list[1024] = "";
    int matches = 0;
    for (int k = 0; longs[k].name; k++) {
        if (strncmp(longs[k].name, token + 2, length) != 0) { continue; }
        if (longs[k].name[length] == '\0') { cli_fail("--%s takes no value, got '%s'", longs[k].name, token); }
        size_t used = strlen(list);
        snprintf(list + used, sizeof(list) - used, "%s--%s", matches++ ? ", " : "", longs[k].name);
    }
    if (matches == 1) { cli_fail("%s takes no value, got '%s'", list, token); }
    if (matches == 0) { cli_fail_unknown(token, longs); }
    cli_fail("flag '%.*s' is ambiguous: %s", (int)length + 2, token, list);
}

// Reports argv[optind], which is no flag.
__attribute__((noreturn)) static inline void cli_fail_stray(char** argv) {
    // the shell has replaced an unquoted pattern by the names of several files
    bool expanded = optind >= 2 && file_exists(argv[optind]) && argv[optind - 1][0] != '-';
    cli_fail("stray argument '%s'%s, see %s --help", argv[optind],
             expanded ? ": put patterns such as 'data/*.bin' in quotes" : "", cli_program(NULL));
}

// Checks the table for programming errors. Without this, one of two flags of the same name would silently hide the
// other.
static inline void cli_check_table(const Option* opts, int n) {
    require(n <= CLI_MAX);
    for (int i = 0; i < n; i++) {
        if (opts[i].type == OPT_SECTION) { continue; }
        require(opts[i].value && opts[i].name && opts[i].letter != 'h' && strcmp(opts[i].name, "help") != 0 &&
                strcmp(opts[i].name, "version") != 0);
        require(strlen(opts[i].name) + 3 <= CLI_NAME_MAX && !strchr(opts[i].name, '='));
        require(opts[i].letter == 0 || isalnum((unsigned char)opts[i].letter));
        require(!opts[i].alias || strlen(opts[i].alias) >= 2);
        require(opts[i].type != OPT_CHOICE || (opts[i].unit && strchr(opts[i].unit, '|')));
        for (int j = 0; j < i; j++) {
            if (opts[j].type == OPT_SECTION) { continue; }
            bool same_letter = opts[i].letter && opts[i].letter == opts[j].letter;
            bool same_alias = opts[i].alias && opts[j].alias && strcmp(opts[i].alias, opts[j].alias) == 0;
            if (same_letter || same_alias || strcmp(opts[i].name, opts[j].name) == 0) {
                die("the flag table has two flags like --%s", opts[i].name);
            }
        }
    }
}

// Fills getopt's tables longs (2 CLI_MAX + 3) and shorts (3 CLI_MAX + 8). The leading '+' of shorts makes getopt stop
// at a stray argument; ':' makes it distinguish a missing value from an unknown flag.
static inline void cli_getopt_tables(const Option* opts, int n, char (*no_names)[CLI_NAME_MAX + 1],
                                     struct option* longs, char* shorts) {
    int k = 0;
    size_t used = (size_t)snprintf(shorts, 8, "+:h::");
    for (int i = 0; i < n; i++) {
        if (opts[i].type == OPT_SECTION) { continue; }
        bool is_bool = opts[i].type == OPT_BOOL, is_optional = cli_argument_is_optional(&opts[i]);
        struct option yes = {opts[i].name, is_optional ? optional_argument : required_argument, NULL, CLI_CODE + 2 * i};
        longs[k++] = yes;
        if (is_bool) {
            snprintf(no_names[i], CLI_NAME_MAX + 1, "no-%s", opts[i].name);
            struct option no = {no_names[i], no_argument, NULL, CLI_CODE + 2 * i + 1};
            longs[k++] = no;
        }
        if (opts[i].letter) {
            used += (size_t)snprintf(shorts + used, 4, "%c%s", opts[i].letter, is_optional ? "::" : ":");
        }
    }
    struct option help = {"help", optional_argument, NULL, 'h'}, version = {"version", no_argument, NULL, CLI_VERSION};
    struct option end = {NULL, 0, NULL, 0};
    longs[k++] = help;
    longs[k++] = version;
    longs[k] = end;
}

// Rewrites a two-letter flag to its long name in buf: -lg becomes --log-memory. Reports an error for an unknown
// two-letter flag (-lx) and for a long name with a single dash (-batch); getopt would read -lx as -l with the value
// "x". Returns any other token unchanged.
static inline char* cli_rewrite(char* token, const Option* opts, int n, const struct option* longs, char* buf,
                                size_t size) {
    if (token[0] != '-' || token[1] == '\0' || token[1] == '-') { return token; }
    for (int i = 0; i < n; i++) {
        if (opts[i].type != OPT_SECTION && opts[i].alias && strcmp(opts[i].alias, token + 1) == 0) {
            snprintf(buf, size, "--%s", opts[i].name);
            return buf;
        }
    }
    for (int i = 0; i < n; i++) {
        if (opts[i].type == OPT_SECTION || opts[i].letter != token[1]) { continue; }
        bool text = opts[i].type == OPT_STR || opts[i].type == OPT_LIST || opts[i].type == OPT_CHOICE;
        bool wrong = !text && isalpha((unsigned char)token[2]); // no number begins with a letter
        for (int k = 0; longs[k].name; k++) { wrong |= token[2] && strcmp(longs[k].name, token + 1) == 0; }
        if (wrong) { cli_fail_unknown(token, longs); }
    }
    return token;
}

// Ends the program after the help or the version: with 1 if stdout cannot take the text.
__attribute__((noreturn)) static inline void cli_end(void) {
    bool written = fflush(stdout) == 0 && !ferror(stdout);
    if (!written) { die("cannot write the text to stdout: %s", strerror(errno)); }
    exit(0);
}

// Called for a flag that is given a second time: notes which files are not used, if it is a list of files.
static inline void cli_note_again(const Option* o, const char* arg) {
    if (o->type != OPT_STR || !o->unit || strcmp(o->unit, "FILES") != 0) { return; }
    print_line(stderr, "note: --%s is given twice: '%s' is used, '%s' is not", o->name, arg, *(const char**)o->value);
}

// Does the work of cli_parse_arguments(), on top of the values that the variables have.
static inline int cli_parse_more(int argc, char** argv, const char* about, const Option* opts, int n,
                                 const char* arguments, const char** rest) {
    static char no_names[CLI_MAX][CLI_NAME_MAX + 1];
    static struct option longs[2 * CLI_MAX + 3];
    char shorts[3 * CLI_MAX + 8], renamed[CLI_NAME_MAX + 3];
    bool given[CLI_MAX] = {false};
    int num_rest = 0;
    cli_getopt_tables(opts, n, no_names, longs, shorts);
    opterr = 0;
    optind = 0; // restart getopt, in case this is not the first call in this process
    for (;;) {
        // argv[optind] is always a whole token that begins the next flag, never a value: '+' makes getopt stop at a
        // stray argument, and short flags cannot be combined, because each of them takes a value
        int at = optind ? optind : 1;
        char* token = at < argc ? argv[at] : NULL;
        if (token) { argv[at] = cli_rewrite(token, opts, n, longs, renamed, sizeof(renamed)); }
        int code = getopt_long(argc, argv, shorts, longs, NULL);
        if (token) { argv[at] = token; }
        if (code == -1) {
            if (optind >= argc) { return num_rest; }
            if (!rest) { cli_fail_stray(argv); }
            bool no_more_flags = optind > 1 && strcmp(argv[optind - 1], "--") == 0;
            do { rest[num_rest++] = argv[optind++]; } while (no_more_flags && optind < argc);
            if (no_more_flags) { return num_rest; } // getopt would begin again after the "--"
            continue;
        }
        if (cli_place()[0] && (code == 'h' || code == CLI_VERSION)) { cli_fail("%s is for the command line", token); }
        if (code == 'h') {
            const char* topic = optarg ? optarg : optind < argc && argv[optind][0] != '-' ? argv[optind] : NULL;
            if (!topic && cli_extras) {
                cli_help_screen(stdout, about, opts, n);
            } else {
                cli_help(stdout, about, arguments, topic ? topic : "all", opts, n);
            }
            cli_end();
        }
        if (code == CLI_VERSION) {
            cli_version(stdout);
            cli_end();
        }
        if (code == '?') { cli_fail_flag(token, longs); }
        if (code == ':') { cli_fail("flag '%s' wants a value, see %s --help", token, cli_program(NULL)); }
        int i = 0;
        while (code >= CLI_CODE ? i != (code - CLI_CODE) / 2 : opts[i].type == OPT_SECTION || opts[i].letter != code) {
            i++;
        }
        if (given[i]) { cli_note_again(&opts[i], optarg); }
        cli_defaults()->typed[i] = given[i] = true;
        if (opts[i].type == OPT_BOOL && !optarg) {
            bool no = code >= CLI_CODE && (code - CLI_CODE) % 2 == 1;
            bool next = !no && optind < argc && cli_find_bool(&opts[i], argv[optind]) >= 0;
            cli_set(&opts[i], no ? "0" : next ? argv[optind++] : "1");
        } else if (opts[i].type == OPT_CHOICE && !optarg) {
            bool next = optind < argc && argv[optind][0] != '-';
            cli_set(&opts[i], next ? argv[optind++] : strrchr(opts[i].unit, '|') + 1);
        } else {
            cli_set(&opts[i], optarg);
        }
    }
}

// Parses argv into the variables of the table. If a flag is given twice, the last value counts; an OPT_LIST keeps all of
// them, and a repeated list of FILES is noted. Exits with 0 on -h, --help and --version, with 2 on a usage error.
// String values point into argv, which is unchanged on return.
// rest (argc) receives the arguments that are not flags, wherever they stand, and everything after "--". If it is NULL, such
// an argument is a usage error. arguments: what the usage line of --help calls them. Returns how many there are.
static inline int cli_parse_arguments(int argc, char** argv, const char* about, const Option* opts, int n,
                                      const char* arguments, const char** rest) {
    cli_program(argc > 0 ? argv[0] : NULL);
    cli_check_table(opts, n);
    cli_remember_defaults(opts, n);
    return cli_parse_more(argc, argv, about, opts, n, arguments, rest);
}

// The same for a program that takes flags only: any other argument is a usage error.
static inline void cli_parse(int argc, char** argv, const char* about, const Option* opts, int n) {
    cli_parse_arguments(argc, argv, about, opts, n, "", NULL);
}

// ---- flags in a file ------------------------------------------------------------------

// Removes a pair of quotes around the value, in place.
static inline char* cli_unquote(char* value) {
    size_t length = strlen(value);
    if (length < 2 || (value[0] != '\'' && value[0] != '"') || value[length - 1] != value[0]) { return value; }
    value[length - 1] = '\0';
    return value + 1;
}

// Parses a line of a file of flags, which it changes and which the values then point into.
static inline void cli_parse_line(char* line, const Option* opts, int n) {
    char *argv[4] = {(char*)cli_program(NULL), line + strspn(line, " \t"), NULL, NULL}, *flag = argv[1];
    int argc = 2;
    for (char* end = flag + strlen(flag); end > flag && isspace((unsigned char)end[-1]);) { *--end = '\0'; }
    if (flag[0] == '\0' || flag[0] == '#') { return; }
    if (flag[0] != '-') { cli_fail("'%s' is no flag: each line has one, as on the command line", flag); }
    char *value = flag + strcspn(flag, " \t="), *begin = value + 1;
    if (*value == '=') {
        char* bare = cli_unquote(begin);
        memmove(begin, bare, strlen(bare) + 1);
    } else if (*value) {
        *value = '\0';
        argv[argc++] = cli_unquote(begin + strspn(begin, " \t"));
    }
    cli_parse_more(argc, argv, "", opts, n, "", NULL);
}

// Sets the flags that the file `path` has, one on each line: `-b 64`, `--output log`, with the rest of the line as the value.
// Skips blank lines and those that begin with #. A usage error names the file and the line. The text stays allocated.
static inline void cli_parse_file(const char* path, const Option* opts, int n) {
    char* line = NULL;
    size_t size = 0;
    ssize_t length;
    FILE* f = fopen(path, "r");
    for (int number = 1; f && (length = getline(&line, &size, f)) >= 0; number++) {
        snprintf(cli_place(), 512, "%.480s:%d: ", path, number);
        if (strlen(line) != (size_t)length) { cli_fail("has a NUL byte, which no flag has"); }
        cli_parse_line(keep_text(line), opts, n);
    }
    cli_place()[0] = '\0';
    if (!f || ferror(f)) { die("%s: cannot read the flags: %s", path, strerror(errno)); }
    free(line);
    fclose(f);
}

// Writes the flag of entry i with its value, as cli_parse_file() reads it. A value with a line break becomes a comment.
static inline void cli_write_flag(FileWriter* w, const Option* o, int i) {
    char text[1024];
    const CliList* list = (const CliList*)o->value;
    for (int k = 0; k < (o->type == OPT_LIST ? list->n : 1); k++) {
        cli_format_value(text, sizeof(text), o, i, false);
        const char* value = o->type == OPT_LIST ? list->items[k] : o->type == OPT_STR ? *(const char**)o->value : text;
        size_t length = value ? strlen(value) : 0;
        bool plain = length > 0 && value[0] != '\'' && value[0] != '"' && !isspace((unsigned char)value[0]) &&
                     !isspace((unsigned char)value[length - 1]);
        const char* broken = length > 0 && strpbrk(value, "\r\n") ? "# a value with a line break: " : "";
        writer_printf(w, "%s--%s%s", broken, o->name, broken[0] ? "\n" : plain ? " " : " '");
        if (!broken[0]) { writer_put(w, value, length), writer_printf(w, "%s\n", plain ? "" : "'"); }
    }
}

#endif
