/*
Converts LAMBADA to an evaluation file (llmc/eval_loader.h): the last word of each text is to be predicted from all
before it.

    dev/data/lambada -i lambada_test.jsonl --tokenizer gpt2/ -o lambada_test.bin

The input has one JSON object per line with the member text. Its last word is what follows the last blank (U+0020), and
is encoded with this blank before it; punctuation and line breaks are part of a word. Nothing else of the text is
changed.

The scores depend on how the texts were prepared. OpenAI's lambada_test.jsonl (scripts/download.sh lambada: 5,153 texts
with capitals, quotation marks and punctuation as in the books) gives those of the LM Evaluation Harness's
lambada_openai. The original data set, in lower case and cut into words (lambada_standard), gives lower ones.

Source: Paperno et al. 2016, arXiv:1606.06031; Radford et al. 2019.
*/
#include "eval_writer.h"

static bool put_json(const JsonValue* root, const char* where, Error* err) {
    const JsonValue* v;
    if (!json_want_text(root, "text", &v, where, "", err)) { return false; }
    size_t at = v->length;
    while (at > 0 && v->string[at - 1] != ' ') { at--; }
    if (at == 0) { return error_set(err, "%s: the text has no blank, want a last word with others before it", where); }
    if (json_skip_spaces(v->string, v->length, at) == v->length) {
        return error_set(err, "%s: the text ends in a blank, want a word", where);
    }
    Text context = {v->string, at - 1}, word = {v->string + at, v->length - at};
    return put_example(&context, &word, 1, 0, where, err);
}

static bool convert(Error* err) { return convert_json(put_json, err); }

int main(int argc, char** argv) {
    return convert_main(
        argc, argv, EVAL_LAST_WORDS,
        "Converts LAMBADA to an evaluation file for train_gpt2 --eval. The last word of each text is to be "
        "predicted, by the rules of the LM Evaluation Harness's lambada_openai.",
        "one {\"text\": \"...\"} per line, or in an array: OpenAI's lambada_test.jsonl, or texts of that form",
        "lambada_test.bin", convert);
}
