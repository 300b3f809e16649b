/*
Continues a text with a model that train_gpt2 or train_gpt2cu has saved: how another program uses this one.

    generate DIR TEXT N     DIR: the -o directory of a run, one of its checkpoints, or a Hugging Face directory

Prints TEXT and the N tokens that follow it, the most probable one each time. 11_the_model.md explains the calls.
*/
#define TESTING // train_gpt2.c without its main
#include "../../train_gpt2.c"

int main(int argc, char** argv) {
    int num_tokens = argc == 4 ? atoi(argv[3]) : 0;
    if (num_tokens < 1) { return fprintf(stderr, "usage: generate DIR TEXT N, where N is 1 or more\n"), 2; }
    Error err;

    // 1. the newest intact checkpoint, if DIR belongs to a run
    Path newest;
    const char* path = argv[1];
    if (run_has_checkpoints(path)) {
        if (!run_find_newest(path, &newest, false, &err)) { die("%s", err.text); }
        path = newest.text;
    }

    // 2. its shape, its weights, its vocabulary
    ModelFile file;
    GPT2 model;
    Tokenizer tokenizer;
    if (!model_open(&file, path, &err)) { die("%s", err.text); }
    gpt2_allocate(&model, &file.config);
    if (!model_read(&file, model.params_memory, &err)) { die("%s", err.text); }
    model_close(&file);
    if (!tokenizer_load(&tokenizer, path, &err)) { die("%s", err.text); }

    // 3. the prompt: end-of-text, as before every document in training, and the tokens of TEXT
    TokenBuffer text = {0};
    tokenizer_encode_text(&tokenizer, argv[2], strlen(argv[2]), false, &text);
    int n = 1 + (int)text.count, maxT = model.config.max_seq_len;
    if (n > maxT) { die("a prompt of %d tokens, and the model has %d positions", n, maxT); }
    int* prompt = (int*)malloc_check((size_t)n * sizeof(int));
    prompt[0] = tokenizer.eot_id;
    for (int i = 1; i < n; i++) { prompt[i] = (int)text.ids[i - 1]; }

    // 4. its continuation, printed as it is made
    Sampler greedy = sampler_make(0.0f, 0, 1.0f, 0); // temperature 0
    text_prompt(argv[2], strlen(argv[2]), stdout);
    TextOutput out = text_begin(&tokenizer, stdout);
    int made = generate(&model, &greedy, prompt, n, num_tokens, tokenizer.eot_id, NULL, &out, NULL);
    text_end(&out);
    if (made < 0) { die("%s: its logits are not numbers", path); }

    free(prompt), free(out.text);
    token_buffer_free(&text);
    tokenizer_free(&tokenizer);
    gpt2_free(&model);
    (void)train, (void)sample, (void)evaluate, (void)bench, (void)plan; // tasks of train_gpt2 that are not used here
    return EXIT_SUCCESS;
}
