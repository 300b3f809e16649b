/*
The tree of valid files that whole_program.c changes: everything that the programs read, in each of its forms. The programs
make what they can write themselves; the rest is written here.

    text/     a.txt, b.jsonl, questions.jsonl, questions.txt, words.jsonl, arc_ai2.jsonl, arc_hf.jsonl
    vocab/    merges/ merges.txt    pair/ vocab.json, merges.txt    json/ tokenizer.json    added/ with added_tokens.json
              encoder/ encoder.json, vocab.bpe
    data/     x_train_00000N.bin, x_val_000000.bin and their vocabulary
    run/      checkpoints of steps 1 to 3, main.log, log.jsonl
    hf/ hf_bf16/ hf_shards/ hf_bf16_shards/    Hugging Face directories; the last two have three shards and an index
    llmc/     model3.bin (fp32), model5.bin (bf16), gpt2_tokenizer.bin
    eval/     h.bin, words.bin, arc.bin

Nothing in the tree depends on the time or on the process, so that a seed always finds the same files. C11.
*/
#ifndef LLMC_FUZZ_SEED_TREE_H
#define LLMC_FUZZ_SEED_TREE_H

#include "tree.h"

static const char seed_merges[] =
    "#version: 0.2\nt h\nth e\n\xc4\xa0 the\na n\nan d\n\xc4\xa0 and\ni n\nin g\ne r\no n\n"
    "\xc4\xa0 a\n\xc4\xa0 t\no r\ne n\n\xc3\x83 \xc2\xa9\n";

static const char seed_text[] =
    "The model reads the text and continues it, token by token.\n\nIn the beginning there was "
    "nothing;  then came 1234 caf\xc3\xa9s, \xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e and \xf0\x9f\x98\x80.\n"
    "It's what they've said: \"don't!\"\tand so on.\n\n";

static inline void write_text(const char* top, const char* name, const char* text) {
    char path[TREE_PATH];
    Bytes b = {0};
    join_path(path, "%s/%s", top, name);
    bytes_text(&b, text);
    bytes_write(&b, path);
    bytes_free(&b);
}

// Runs a program in the tree with arguments that are separated by spaces; it must succeed.
static inline void seed_program(const char* top, const char* programs, const char* name, const char* args) {
    enum { MAX_ARGS = 40 };
    char program[TREE_PATH], out[TREE_PATH], err[TREE_PATH], *argv[MAX_ARGS + 1] = {program},
                                                                              *words = strdup_check(args);
    int n = 1;
    for (char* word = strtok(words, " "); word && n < MAX_ARGS; word = strtok(NULL, " ")) { argv[n++] = word; }
    join_path(program, "%s/%s", programs, name);
    join_path(out, "%s.out", top);
    join_path(err, "%s.err", top);
    Child child = run_child(argv, NULL, NULL, top, out, err, 120);
    if (child.status != 0) { die("%s cannot make the seed tree: %s", program, (const char*)child.err.data); }
    bytes_free(&child.err);
    free(words);
    unlink(out);
    unlink(err);
}

static inline void seed_texts(const char* top) {
    static const char* const dirs[] = {"text",        "vocab/merges",  "vocab/pair", "vocab/json",
                                       "vocab/added", "vocab/encoder", "hf_shards",  "hf_bf16_shards",
                                       "hf",          "hf_bf16",       "llmc",       "eval"};
    char path[TREE_PATH];
    for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]); i++) {
        join_path(path, "%s/%s", top, dirs[i]);
        tree_make(path);
    }
    Bytes text = {0};
    for (int i = 0; i < 20; i++) { bytes_printf(&text, "%s%d\n", seed_text, i); }
    bytes_add(&text, "", 1);
    write_text(top, "text/a.txt", (const char*)text.data);
    bytes_free(&text);
    write_text(top, "text/b.jsonl",
               "{\"text\":\"one document\",\"id\":1}\n{\"id\":2,\"text\":\"another \\u00e9 \\ud83d\\ude00\"}\n\n"
               "{\"meta\":{\"a\":[1,2.5,null,true]},\"text\":\"a third one, and the last\"}\n");
    write_text(
        top, "text/questions.jsonl",
        "{\"ind\":1,\"ctx\":\"The man opens\",\"label\":1,\"endings\":[\"a door.\",\"the box and\",\"x\",\"it.\"]}\n"
        "{\"ctx\":\"In the sea\",\"label\":\"3\",\"endings\":[\"a\",\"bc\",\"the fish\",\"and then the whale.\"]}\n");
    write_text(top, "text/questions.txt",
               "The man opens\n0\na door.\nthe box\nthe sea\nnothing\n\nThen they\n3\nrun\nwalk\nsleep\nthink\n");
    write_text(top, "text/words.jsonl",
               "{\"text\":\"The man opens the door.\"}\n{\"id\":2,\"text\":\"in  the caf\\u00e9\\n\\n a\"}\n");
    write_text(top, "text/arc_ai2.jsonl",
               "{\"id\":\"a\",\"question\":{\"stem\":\"Which?\",\"choices\":[{\"text\":\"the "
               "fish\",\"label\":\"A\"},{\"text\":\"an "
               "\\u00e9\",\"label\":\"B\"}]},\"answerKey\":\"B\"}\n");
    write_text(top, "text/arc_hf.jsonl",
               "{\"question\":\"The?\",\"choices\":{\"text\":[\"a\",\"b\",\"the "
               "and\"],\"label\":[\"1\",\"2\",\"3\"]},\"answerKey\":"
               "\"3\"}\n{\"question\":\"An\",\"choices\":{\"text\":[\"a\",\"b\",\"c\",\"d\",\"e\"],\"label\":[\"A\","
               "\"B\",\"C\",\"D\","
               "\"E\"]},\"answerKey\":\"E\"}\n");
    write_text(top, "vocab/merges/merges.txt", seed_merges);
}

// Writes tokenizer.json, with pairs of strings as merges, from a vocabulary in the two files of GPT-2.
static inline void seed_tokenizer_json(const char* top) {
    char path[TREE_PATH];
    Bytes vocab, out = {0};
    Error err;
    join_path(path, "%s/vocab/pair/vocab.json", top);
    if (!bytes_read(&vocab, path, &err)) { die("%s", err.text); }
    bytes_text(&out,
               "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":271,\"content\":\"<|endoftext|>\",\"special\":true}],"
               "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
               "\"use_regex\":true},\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"vocab\":");
    bytes_add(&out, vocab.data, vocab.size);
    bytes_text(&out, ",\"merges\":[");
    for (const char* line = strchr(seed_merges, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
        int left = (int)(strchr(line, ' ') - line), length = (int)(strchr(line, '\n') - line);
        bytes_printf(&out, "%s[\"%.*s\",\"%.*s\"]", line[-1] == '\n' && out.data[out.size - 1] == '[' ? "" : ",", left,
                     line, length - left - 1, line + left + 1);
    }
    bytes_text(&out, "]}}\n");
    join_path(path, "%s/vocab/json/tokenizer.json", top);
    bytes_write(&out, path);
    join_path(path, "%s/hf_bf16/tokenizer.json", top);
    bytes_write(&out, path);
    bytes_free(&vocab);
    bytes_free(&out);
}

// Splits `from`/model.safetensors into three shards of the directory `to`, with an index.
static inline void seed_shards(const char* from, const char* to) {
    char path[TREE_PATH], name[64];
    Bytes file, shard = {0}, index = {0};
    join_path(path, "%s/model.safetensors", from);
    if (!bytes_read(&file, path, NULL)) { die("%s: not there", path); }
    Tensors* list = tensors_parse(&file);
    require(list);
    bytes_text(&index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (size_t i = 0; i < 3; i++) {
        size_t first = list->count * i / 3, last = list->count * (i + 1) / 3;
        tensors_format(list, first, last, "\"__metadata__\":{\"format\":\"pt\"}", &shard);
        snprintf(name, sizeof(name), "model-0000%zu-of-00003.safetensors", i + 1);
        join_path(path, "%s/%s", to, name);
        bytes_write(&shard, path);
        for (size_t k = first; k < last; k++) {
            bytes_printf(&index, "%s\"%s\":\"%s\"", k ? "," : "", list->items[k].name, name);
        }
    }
    bytes_text(&index, "}}\n");
    join_path(path, "%s/model.safetensors.index.json", to);
    bytes_write(&index, path);
    tensors_free(list);
    bytes_free(&file);
    bytes_free(&shard);
    bytes_free(&index);
}

// Copies the files of the directory `from` whose names are given, up to NULL, to the directory `to`.
static inline void seed_copy(const char* top, const char* from, const char* to, const char* const* names) {
    char a[TREE_PATH], b[TREE_PATH];
    for (; *names; names++) {
        join_path(a, "%s/%s/%s", top, from, *names);
        join_path(b, "%s/%s/%s", top, to, *names);
        copy_file(a, b);
        if (!file_exists(b)) { die("%s: not there", a); }
    }
}

// Writes the model of the run's last checkpoint in all other formats.
static inline void seed_models(const char* top) {
    static const char* const vocabulary[] = {"vocab.json", "merges.txt", NULL};
    static const char* const settings[] = {"config.json", "generation_config.json", NULL};
    static const char* const configs[] = {"config.json", NULL};
    char path[TREE_PATH], shards[TREE_PATH];
    ModelFile model;
    Tokenizer tokenizer;
    Error err;
    join_path(path, "%s/run/step_00000003", top);
    if (!model_open(&model, path, &err)) { die("%s", err.text); }
    GPT2Config config = model.config;
    float* params = (float*)malloc_check(num_parameters(&config) * sizeof(float));
    if (!model_read(&model, params, &err)) { die("%s", err.text); }
    model_close(&model);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const char* dir = bf16 ? "hf_bf16" : "hf";
        join_path(path, "%s/%s", top, dir);
        join_path(shards, "%s/%s_shards", top, dir);
        if (!model_save_hf(path, &config, params, bf16, 271, &err)) { die("%s", err.text); }
        seed_shards(path, shards);
        if (!bf16) { seed_copy(top, "vocab/pair", dir, vocabulary); }
        seed_copy(top, "vocab/pair", bf16 ? "hf_bf16_shards" : "hf_shards", vocabulary);
        seed_copy(top, dir, bf16 ? "hf_bf16_shards" : "hf_shards", bf16 ? configs : settings);
        join_path(path, "%s/llmc/model%d.bin", top, bf16 ? 5 : 3);
        if (!model_save_llmc(path, &config, params, bf16 ? 5 : 3, &err)) { die("%s", err.text); }
    }
    free(params);
    join_path(path, "%s/vocab/pair", top);
    if (!tokenizer_load(&tokenizer, path, &err)) { die("%s", err.text); }
    tokenizer.can_encode = false; // tokenizer_save() then writes gpt2_tokenizer.bin
    join_path(path, "%s/llmc", top);
    if (!tokenizer_save(&tokenizer, path, &err)) { die("%s", err.text); }
    tokenizer_free(&tokenizer);
}

// The vocabulary of vocab/pair in the other forms.
static inline void seed_vocabularies(const char* top) {
    static const char* const both[] = {"vocab.json", "merges.txt", NULL};
    char a[TREE_PATH], b[TREE_PATH];
    seed_copy(top, "data", "vocab/pair", both);
    seed_copy(top, "data", "vocab/added", both);
    write_text(top, "vocab/added/added_tokens.json", "{\"<pad>\": 272, \"caf\xc3\xa9 au lait\": 273}\n");
    for (int i = 0; i < 2; i++) {
        join_path(a, "%s/vocab/pair/%s", top, both[i]);
        join_path(b, "%s/vocab/encoder/%s", top, i ? "vocab.bpe" : "encoder.json");
        copy_file(a, b);
    }
    seed_tokenizer_json(top);
}

// Removes what names the time, the process or the speed of this machine.
static inline void seed_clean_run(const char* top) {
    char path[TREE_PATH];
    TreeList list = tree_list(top, false);
    for (size_t i = 0; i < list.count; i++) {
        if (!strstr(list.items[i].path, "run/events.") && !ends_with(list.items[i].path, "run.lock")) { continue; }
        join_path(path, "%s/%s", top, list.items[i].path);
        unlink(path);
    }
    tree_free(&list);
    Bytes b;
    join_path(path, "%s/run/log.jsonl", top);
    if (!bytes_read(&b, path, NULL)) { die("%s: not there", path); }
    static const char mark[] = "\"time_ms\":", same[] = "\"time_ms\":1.5,\"tokens_per_second\":10000}";
    for (size_t at = bytes_find(&b, 0, mark); at < b.size; at = bytes_find(&b, at + 1, mark)) {
        bytes_splice(&b, at, bytes_find(&b, at, "\n") - at, same, strlen(same));
    }
    bytes_write(&b, path);
    bytes_free(&b);
}

// Makes the tree in the new directory `top` with the programs below `programs`, both absolute paths.
static inline void seed_tree_make(const char* top, const char* programs) {
    tree_make(top);
    seed_texts(top);
    seed_program(top, programs, "dev/data/tokenize",
                 "-i text/a.txt -t vocab/merges/merges.txt -o data/x -v 300 -s 1000");
    seed_vocabularies(top);
    seed_program(top, programs, "train_gpt2",
                 "--recipe llmc -e d6 --layers 2 --heads 2 --channels 16 --positions 32 -i data/x_train_*.bin -b 2 -t "
                 "8 -x 3 -n 1 -nk 0 "
                 "-s 0 -o run");
    seed_clean_run(top);
    seed_models(top);
    seed_program(top, programs, "dev/data/hellaswag", "-i text/questions.jsonl -t vocab/pair -o eval/h.bin");
    seed_program(top, programs, "dev/data/lambada", "-i text/words.jsonl -t vocab/pair -o eval/words.bin");
    seed_program(top, programs, "dev/data/arc", "-i text/arc_hf.jsonl -t vocab/pair -o eval/arc.bin");
}

#endif
