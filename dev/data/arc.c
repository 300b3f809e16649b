/*
Converts ARC, or other questions with 2 to 5 choices, to an evaluation file (llmc/eval_loader.h).

    dev/data/arc -i ARC-Easy-Test.jsonl --tokenizer gpt2/ -o arc_easy.bin

The input has one JSON object per line, in the form of AI2 or in that of Hugging Face's data sets:

    {"question": {"stem": "...", "choices": [{"text": "...", "label": "A"}, ...]}, "answerKey": "A"}
    {"question": "...", "choices": {"text": ["...", ...], "label": ["A", ...]}, "answerKey": "A"}

As in the LM Evaluation Harness's arc_easy and arc_challenge, the context is "Question: ...\nAnswer:", and each choice
is encoded with a blank before it.

Source: Clark et al. 2018, arXiv:1803.05457.
*/
#include "eval_writer.h"

// A question as it is read.
typedef struct {
    Text stem, answer; // answer: the label of the right choice
    uint32_t num_choices;
    Text choices[EVAL_MAX_ENDINGS], labels[EVAL_MAX_ENDINGS];
} Question;

static bool set_count(Question* q, uint32_t count, const char* where, Error* err) {
    q->num_choices = count;
    return (count >= 2 && count <= EVAL_MAX_ENDINGS) ||
           error_set(err, "%s: %u choices, want 2 to %d", where, count, (int)EVAL_MAX_ENDINGS);
}

// {"stem": "...", "choices": [{"text": "...", "label": "A"}, ...]}
static bool read_ai2(Question* q, const JsonValue* question, const char* where, Error* err) {
    const JsonValue *stem, *choices, *text, *label;
    if (!json_want(question, "stem", JSON_STRING, &stem, where, err) ||
        !json_want(question, "choices", JSON_ARRAY, &choices, where, err) ||
        !set_count(q, choices->count, where, err)) {
        return false;
    }
    q->stem.s = stem->string, q->stem.n = stem->length;
    for (uint32_t i = 0; i < q->num_choices; i++) {
        if (!json_want(&choices->items[i], "text", JSON_STRING, &text, where, err) ||
            !json_want(&choices->items[i], "label", JSON_STRING, &label, where, err)) {
            return false;
        }
        q->choices[i].s = text->string, q->choices[i].n = text->length;
        q->labels[i].s = label->string, q->labels[i].n = label->length;
    }
    return true;
}

// "question": stem, "choices": {"text": ["...", ...], "label": ["A", ...]}
static bool read_hugging_face(Question* q, const JsonValue* stem, const JsonValue* root, const char* where,
                              Error* err) {
    const JsonValue *choices, *texts, *labels;
    if (!json_want(root, "choices", JSON_OBJECT, &choices, where, err) ||
        !json_want(choices, "text", JSON_ARRAY, &texts, where, err) ||
        !json_want(choices, "label", JSON_ARRAY, &labels, where, err) || !set_count(q, texts->count, where, err)) {
        return false;
    }
    if (labels->count != texts->count) {
        return error_set(err, "%s: %u texts of choices, but %u labels", where, texts->count, labels->count);
    }
    q->stem.s = stem->string, q->stem.n = stem->length;
    for (uint32_t i = 0; i < q->num_choices; i++) {
        if (!want_text(&q->choices[i], texts, i, "choice", where, err) ||
            !want_text(&q->labels[i], labels, i, "label", where, err)) {
            return false;
        }
    }
    return true;
}

static bool same_text(const Text* a, const Text* b) { return a->n == b->n && memcmp(a->s, b->s, a->n) == 0; }

static bool put_json(const JsonValue* root, const char* where, Error* err) {
    static const char before[] = "Question: ", after[] = "\nAnswer:";
    const JsonValue *question = json_get(root, "question"), *answer;
    Question q;
    if (!check_answer(root, "answerKey", where, err) || !json_want_text(root, "answerKey", &answer, where, "", err)) {
        return false;
    }
    bool flat = question && question->type == JSON_STRING;
    if (!flat && !json_want(root, "question", JSON_OBJECT, &question, where, err)) { return false; }
    if (flat ? !read_hugging_face(&q, question, root, where, err) : !read_ai2(&q, question, where, err)) {
        return false;
    }
    Text key = {answer->string, answer->length};
    int label = -1, matches = 0;
    for (int i = (int)q.num_choices - 1; i >= 0; i--) {
        if (!same_text(&q.labels[i], &key)) { continue; }
        label = i;
        matches++;
    }
    if (matches != 1) {
        char got[64];
        return error_set(err, "%s: %d choices have the label '%s' of \"answerKey\", want one", where, matches,
                         json_printable(got, sizeof(got), key.s, key.n));
    }
    size_t n = sizeof(before) - 1 + q.stem.n + sizeof(after) - 1;
    char* text = (char*)malloc_check(n);
    memcpy(text, before, sizeof(before) - 1);
    memcpy(text + sizeof(before) - 1, q.stem.s, q.stem.n);
    memcpy(text + n - (sizeof(after) - 1), after, sizeof(after) - 1);
    Text context = {text, n};
    bool ok = put_example(&context, q.choices, (int)q.num_choices, label, where, err);
    free(text);
    return ok;
}

static bool convert(Error* err) { return convert_json(put_json, err); }

int main(int argc, char** argv) {
    return convert_main(
        argc, argv, EVAL_CHOICES,
        "Converts ARC, or other questions with 2 to 5 choices, to an evaluation file for train_gpt2 --eval, by "
        "the rules of the LM Evaluation Harness's arc_easy.",
        "questions in the form of AI2's ARC-Easy-Test.jsonl, or in that of Hugging Face's ai2_arc, one per line or in "
        "an array",
        "arc_easy.bin", convert);
}
