/*
Converts HellaSwag's questions to an evaluation file in llm.c's format (llmc/eval_loader.h).

    dev/data/hellaswag -i hellaswag_val.jsonl --tokenizer gpt2/ -o hellaswag_val.bin

The input is either the original file, which has one JSON object per line with ctx, label and 4 endings, or text with
six lines per question: context, label, 4 endings. The original, or an array of its objects, is recognized by its
beginning. The context is encoded unchanged, each ending with a space before it. The output is written under a temporary
name and renamed when it is complete.

Source: Zellers et al. 2019, arXiv:1905.07830.
*/
#include "eval_writer.h"

enum { TEXT_LINES = 2 + EVAL_ENDINGS };

static bool convert_text(Error* err) {
    char where[1000], got[64];
    for (Text lines[TEXT_LINES]; next_line(&lines[0]);) {
        if (is_blank(&lines[0])) { continue; } // between questions, and at the end
        size_t first = in.items.lines.line;
        for (int i = 1; i < TEXT_LINES; i++) {
            bool there = next_line(&lines[i]);
            in.items.lines.line += !there; // the one that is missing
            set_where(where, sizeof(where));
            if (!there || is_blank(&lines[i])) {
                return error_set(err, "%s: %s, want line %d of the question that begins in line %zu: %s", where,
                                 there ? "an empty line" : "the file ends", i + 1, first, "context, label, 4 endings");
            }
            if (i == 1 && (lines[1].n != 1 || lines[1].s[0] < '0' || lines[1].s[0] >= '0' + EVAL_ENDINGS)) {
                return error_set(err, "%s: the label is '%s', want 0 to %d", where,
                                 json_printable(got, sizeof(got), lines[1].s, lines[1].n), EVAL_ENDINGS - 1);
            }
        }
        if (!put_example(&lines[0], lines + 2, EVAL_ENDINGS, lines[1].s[0] - '0', where, err)) { return false; }
        if (out.examples % 64 == 0) { print_progress(); }
    }
    return true;
}

static bool put_json(const JsonValue* root, const char* where, Error* err) {
    const JsonValue *context, *endings;
    int64_t label = 0;
    // the datasets library writes labels as strings, "0" to "3"
    const JsonValue* v = json_get(root, "label");
    bool digit =
        v && v->type == JSON_STRING && v->length == 1 && v->string[0] >= '0' && v->string[0] < '0' + EVAL_ENDINGS;
    if (digit) { label = v->string[0] - '0'; }
    if (!json_want_text(root, "ctx", &context, where, "", err) || !check_answer(root, "label", where, err) ||
        (!digit && !json_int(root, "label", 0, EVAL_ENDINGS - 1, &label, where, err)) ||
        !json_want(root, "endings", JSON_ARRAY, &endings, where, err)) {
        return false;
    }
    if (endings->count != EVAL_ENDINGS) {
        return error_set(err, "%s: \"endings\" has %u elements, want %d", where, endings->count, EVAL_ENDINGS);
    }
    Text text = {context->string, context->length}, texts[EVAL_ENDINGS];
    for (uint32_t i = 0; i < EVAL_ENDINGS; i++) {
        if (!want_text(&texts[i], endings, i, "ending", where, err)) { return false; }
    }
    return put_example(&text, texts, EVAL_ENDINGS, (int)label, where, err);
}

static bool convert(Error* err) {
    const TextLines* text = &in.items.lines;
    size_t at = json_skip_spaces(text->text, text->n, 0);
    bool json = in.items.array || (at < text->n && text->text[at] == '{');
    return json ? convert_json(put_json, err) : convert_text(err);
}

int main(int argc, char** argv) {
    return convert_main(argc, argv, EVAL_LLMC_CHOICES,
                        "Converts HellaSwag's questions to an evaluation file in llm.c's format.",
                        "HellaSwag's .jsonl, or an array of its objects, or text with six lines per question: context, "
                        "label, 4 endings",
                        "hellaswag_val.bin", convert);
}
