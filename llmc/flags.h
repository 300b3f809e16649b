/*
The flags of train_gpt2.c and train_gpt2.cu: their values, their defaults, and the table from which the command line,
--help and the printed header are made. Also what follows from flags alone: the task of the program, and the seed.

    parse_flags(argc, argv, "what the program is");
    switch (chosen_task()) { ... }          // from here on the flags are read through args
*/
#ifndef LLMC_FLAGS_H
#define LLMC_FLAGS_H

#include "cli.h"
#include "ranks.h"
#include "recipes.h"
#include "utils.h"

// ---- the table --------------------------------------------------------------------

// Which matrix products of training have operands in fp8; each stage has those of the ones before it. FP8_STAGES: how --fp8
// names them.
typedef enum { FP8_OFF, FP8_FORWARD, FP8_DX, FP8_HEAD, FP8_DW } Fp8Stage;
#define FP8_STAGES "off|forward|forward+dx|forward+dx+head|forward+dx+head+dw"

// The values of --tune.
enum { TUNE_OFF, TUNE_ON, TUNE_AGAIN };

// The value of every flag: as typed, from the recipe, or its default. Values that a run derives are in Batch and Training.
enum { BENCH_PROMPT = 512 }; // the default of --bench-prompt; a model may have fewer positions

typedef struct {
    const char *model, *tokenizer, *train_data, *val_data, *output, *config, *recipe, *memory;
    int plan;
    int layers, heads, channels, mlp_channels, positions;
    float norm_epsilon;
    const char* activation;
    int unscaled_attention, scale_by_layer, untied_head;
    int B, T, shuffle, overfit, resume;
    int64_t total_batch, num_steps, warmup_steps, seed;
    float learning_rate, final_fraction, weight_decay, beta1, beta2, eps, clip, skip_loss_z, skip_norm_z;
    const char *schedule, *optimizer;
    float muon_learning_rate, muon_momentum;
    int max_nonfinite, val_every, val_steps, sample_every, sample_tokens, save_every, async_save, keep, major_every;
    int keep_best;
    float save_minutes;
    const char *prompt, *prompt_file, *prompts, *prompt_ids;
    int special, num_samples, num_tokens, top_k, stop_at_eot;
    float temperature, top_p, min_p, repetition_penalty;
    CliList stops;
    int64_t log_every;
    int verbose;
    const char *eval_data, *hellaswag, *export_path, *export_type;
    int stride, json, bench, bench_prompt;
    int naive; // only in train_gpt2
    // only in train_gpt2cu
    int parallel;
    int fp8; // an Fp8Stage
    int recompute, gelu_fusion, tf32, master_weights, stochastic_rounding, use_graph, tune, profile, log_memory_every;
    const char *tuned, *overlap, *weights;
    int gpus, zero, restarts, num_processes, process_rank, gpus_per_node;
    float timeout;
    const char *server_ip, *init_method, *fs_path;
} Settings;

// Written only through the option table below, by the command line and the recipe. All other code reads it through args.
#if defined(__cplusplus) // members that are not listed are 0, as in C
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#endif
static Settings settings = {
    .model = "d12",
    .B = 4,
    .shuffle = 1,
    .num_steps = -1,
    .seed = 42,
    .learning_rate = 3e-4f,
    .final_fraction = 1.0f,
    .beta1 = 0.9f,
    .beta2 = 0.95f,
    .eps = 1e-8f,
    .clip = 1.0f,
    .schedule = "cosine",
    .optimizer = "adamw",
    .muon_momentum = 0.95f,
    .max_nonfinite = 10,
    .val_every = 20,
    .val_steps = 20,
    .sample_every = 20,
    .sample_tokens = 64,
    .async_save = 1,
    .keep = 5,
    .num_samples = 1,
    .num_tokens = 256,
    .stop_at_eot = 1,
    .temperature = 1.0f,
    .top_p = 1.0f,
    .repetition_penalty = 1.0f,
    .export_type = "f32",
    .bench_prompt = BENCH_PROMPT,
    .parallel = 64,
    .gelu_fusion = 3,
    .master_weights = 1,
    .use_graph = 1,
    .tune = TUNE_ON,
    .overlap = "auto",
    .weights = "full",
    .gpus = 1,
    .zero = 1,
    .num_processes = 1,
    .gpus_per_node = 8,
    .timeout = 60,
};
#if defined(__cplusplus)
#pragma GCC diagnostic pop
#endif
static const Settings* const args = &settings;

static char recipe_help[4096]; // written before the flags are parsed

// for OPT_STR with a fixed set of choices, the unit field lists them, separated by |
static const Option shared_options[] = {
    {OPT_SECTION, 0, NULL, "Model", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 'e', NULL, "model", &settings.model, "MODEL",
     "descriptor of a new model (d6 d12 d24 d36 d48, gpt3:c768 ...), or weights to load: a Hugging Face directory, a "
     "file (.safetensors, llm.c's .bin) or the output directory of a run",
     0, 0},
    {OPT_STR, 0, NULL, "tokenizer", &settings.tokenizer, "PATH",
     "vocabulary, a directory or a file; it must equal the model's own, if it has one; default: look beside the "
     "model, then beside the training data",
     0, 0},
    {OPT_INT, 0, NULL, "layers", &settings.layers, "L", "layers of a new model; 0: from the descriptor", 0, 4096},
    {OPT_INT, 0, NULL, "heads", &settings.heads, "NH", "attention heads of a new model; 0: from the descriptor", 0,
     4096},
    {OPT_INT, 0, NULL, "channels", &settings.channels, "C", "channels of a new model; 0: from the descriptor", 0,
     65536},
    {OPT_INT, 0, NULL, "mlp-channels", &settings.mlp_channels, "F",
     "width of the hidden layer of a new model's MLPs; 0: 4 times the channels", 0, 1 << 22},
    {OPT_FLOAT, 0, NULL, "norm-epsilon", &settings.norm_epsilon, NULL,
     "added to the variance in the layernorms of a new model; 0: GPT-2's 1e-5", 0, 1},
    {OPT_STR, 0, NULL, "activation", &settings.activation, "NAME",
     "activation of a new model's MLPs, as transformers names it: gelu_new (GPT-2), gelu, relu, silu, tanh", 0, 0},
    {OPT_BOOL, 0, NULL, "unscaled-attention", &settings.unscaled_attention, NULL,
     "a new model's attention scores are not divided by the root of the head size", 0, 0},
    {OPT_BOOL, 0, NULL, "scale-by-layer", &settings.scale_by_layer, NULL,
     "a new model's attention scores in layer 1, 2, ... are divided by 1, 2, ...", 0, 0},
    {OPT_BOOL, 0, NULL, "untied-head", &settings.untied_head, NULL,
     "a new model's head has weights of its own, and not those of the token embedding", 0, 0},
    {OPT_INT, 0, NULL, "positions", &settings.positions, "T",
     "positions (maximum sequence length) of a new model; 0: from the descriptor", 0, 1 << 20},

    {OPT_SECTION, 0, NULL, "Data", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 'i', NULL, "train-data", &settings.train_data, "GLOB",
     "token shards to train on, made by dev/data/tokenize", 0, 0},
    {OPT_STR, 'j', NULL, "val-data", &settings.val_data, "GLOB", "token shards to validate on", 0, 0},
    {OPT_STR, 'o', NULL, "output", &settings.output, "DIR",
     "write checkpoints and logs to this directory; without it nothing is written", 0, 0},
    {OPT_INT, 'b', NULL, "batch-size", &settings.B, "sequences", "sequences per micro-batch, B", 1, 65536},
    {OPT_INT, 't', NULL, "seq-len", &settings.T, "tokens",
     "tokens per sequence, T; 0: as many as the model has positions, at most 1024", 0, 1 << 20},
    {OPT_LONG, 'd', NULL, "total-batch", &settings.total_batch, "tokens",
     "tokens per step, a multiple of B * T; gradients of several micro-batches are accumulated; 0: B * T", 0, 1e12},
    {OPT_BOOL, 0, NULL, "shuffle", &settings.shuffle, NULL,
     "permute the shards, and the sequences within each shard, in every epoch, by the seed", 0, 0},
    {OPT_BOOL, 'a', NULL, "overfit", &settings.overfit, NULL, "train on the first batch only, to test the setup", 0, 0},

    {OPT_SECTION, 0, NULL, "Optimization", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 0, NULL, "recipe", &settings.recipe, RECIPES, recipe_help, 0, 0},
    {OPT_STR, 0, NULL, "config", &settings.config, "FILE",
     "read flags from a file, one on each line; those of the command line count before them. A run writes its own to "
     "DIR/config, with which it can be repeated",
     0, 0},
    {OPT_BOOL, 0, NULL, "plan", &settings.plan, NULL,
     "print which micro-batches fit, for new models of GPT-2's sizes or for the model that -e names, and what the "
     "recipe sets; "
     "train nothing",
     0, 0},
    {OPT_STR, 0, NULL, "memory", &settings.memory, "SIZE",
     "--plan: the memory of one GPU (train_gpt2: of the machine), such as 24GB; default: of the one that is here", 0,
     0},
    {OPT_LONG, 'x', NULL, "steps", &settings.num_steps, "steps", "number of training steps; -1: one epoch", -1, 1e12},
    {OPT_FLOAT, 'l', NULL, "learning-rate", &settings.learning_rate, NULL, "peak learning rate", 0, 100},
    {OPT_STR, 'k', NULL, "schedule", &settings.schedule, "cosine|linear|constant|wsd", "learning rate schedule", 0, 0},
    {OPT_LONG, 'u', NULL, "warmup", &settings.warmup_steps, "steps", "steps of linear warm-up; 0: none", 0, 1e12},
    {OPT_FLOAT, 'q', NULL, "final-fraction", &settings.final_fraction, NULL,
     "final learning rate, as a fraction of the peak", 0, 1},
    {OPT_FLOAT, 'c', NULL, "weight-decay", &settings.weight_decay, NULL,
     "decoupled weight decay, applied to tensors with two or more dimensions", 0, 100},
    {OPT_STR, 0, NULL, "optimizer", &settings.optimizer, "adamw|muon",
     "muon: Muon for the matrices of the layers, and AdamW for the embeddings and vectors", 0, 0},
    {OPT_FLOAT, 0, NULL, "muon-learning-rate", &settings.muon_learning_rate, NULL,
     "peak learning rate of Muon's matrices, on the scale of AdamW's; 0: that of -l", 0, 100},
    {OPT_FLOAT, 0, NULL, "muon-momentum", &settings.muon_momentum, NULL, "Muon: decay of the momentum", 0, 0.999999},
    {OPT_FLOAT, 0, NULL, "beta1", &settings.beta1, NULL, "AdamW: decay of the first moment", 0, 0.999999},
    {OPT_FLOAT, 0, NULL, "beta2", &settings.beta2, NULL, "AdamW: decay of the second moment", 0, 0.999999},
    {OPT_FLOAT, 0, NULL, "eps", &settings.eps, NULL, "AdamW: added to the square root of the second moment", 1e-20, 1},
    {OPT_FLOAT, 0, NULL, "clip", &settings.clip, NULL, "clip the gradient to a norm of X; 0: no clipping", 0, 1e9},
    {OPT_FLOAT, 0, "sl", "skip-loss-z", &settings.skip_loss_z, "sigmas",
     "skip an update if the z-score of its loss is above X; 0: never", 0, 1000},
    {OPT_FLOAT, 0, "sg", "skip-norm-z", &settings.skip_norm_z, "sigmas",
     "skip an update if the z-score of its gradient norm is above X; 0: never", 0, 1000},
    {OPT_INT, 0, NULL, "max-nonfinite", &settings.max_nonfinite, "steps",
     "stop after N steps in a row whose loss or gradient is not finite", 1, 1000000},
    {OPT_LONG, 0, NULL, "seed", &settings.seed, NULL,
     "seed of the initial weights, shuffling and sampling; -1: drawn at random", -1, 4294967295.0},

    {OPT_SECTION, 0, NULL, "Validation and checkpoints", NULL, NULL, NULL, 0, 0},
    {OPT_INT, 'v', NULL, "val-every", &settings.val_every, "steps",
     "compute the validation loss every N steps; 0: never", 0, 1e9},
    {OPT_INT, 'm', NULL, "val-steps", &settings.val_steps, "batches",
     "batches per validation, on each GPU; at most all of the validation data", 1, 1e9},
    {OPT_INT, 's', NULL, "sample-every", &settings.sample_every, "steps", "print a sample every N steps; 0: never", 0,
     1e9},
    {OPT_INT, 'g', NULL, "sample-tokens", &settings.sample_tokens, "tokens", "length of that sample", 1, 1e9},
    {OPT_INT, 'n', NULL, "save-every", &settings.save_every, "steps",
     "save a checkpoint every N steps and at the end; 0: only at the end", 0, 1e9},
    {OPT_FLOAT, 0, NULL, "save-minutes", &settings.save_minutes, "minutes",
     "save so often that at most X minutes of work are lost, as long as saving takes at most 2% of the time; 0: not by "
     "the clock",
     0, 1e6},
    {OPT_BOOL, 0, NULL, "async-save", &settings.async_save, NULL,
     "copy the weights and go on training while the copy is written; off: wait, which needs less memory", 0, 0},
    {OPT_INT, 0, "nk", "keep", &settings.keep, "checkpoints", "keep the newest N checkpoints; 0: all", 0, 1e9},
    {OPT_INT, 0, "nm", "major-every", &settings.major_every, "steps",
     "never delete a checkpoint whose step is a multiple of N; 0: no such exception", 0, 1e9},
    {OPT_BOOL, 0, NULL, "keep-best", &settings.keep_best, NULL,
     "also save a checkpoint whenever the validation loss is the lowest so far, and keep it: -e DIR/best names it", 0,
     0},
    {OPT_BOOL, 'y', NULL, "resume", &settings.resume, NULL,
     "resume from the newest intact checkpoint in the output directory", 0, 0},

    {OPT_SECTION, 0, NULL, "Sampling", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 0, NULL, "prompt", &settings.prompt, "TEXT",
     "continue this text and exit; \"\" starts a new document, - reads standard input", 0, 0},
    {OPT_STR, 0, NULL, "prompt-file", &settings.prompt_file, "FILE",
     "continue the text of this file, without its last newline, and exit", 0, 0},
    {OPT_STR, 0, NULL, "prompts", &settings.prompts, "FILE", "continue each line of this file and exit", 0, 0},
    {OPT_STR, 0, NULL, "prompt-ids", &settings.prompt_ids, "IDS",
     "continue these token ids, separated by spaces or commas, and exit", 0, 0},
    {OPT_BOOL, 0, NULL, "special", &settings.special, NULL,
     "special tokens in a prompt or in text for --eval, such as <|endoftext|>, stand for themselves; off: they are "
     "ordinary "
     "text",
     0, 0},
    {OPT_INT, 0, NULL, "num-samples", &settings.num_samples, "texts", "number of continuations of the prompt", 1,
     65536},
    {OPT_INT, 0, NULL, "num-tokens", &settings.num_tokens, "tokens", "maximum number of tokens to generate", 1, 1e9},
    {OPT_FLOAT, 0, NULL, "temperature", &settings.temperature, NULL,
     "divides the logits; 0: always the most likely token", 0, 1000},
    {OPT_INT, 0, NULL, "top-k", &settings.top_k, "tokens", "sample from the N most likely tokens; 0: all", 0, 1e9},
    {OPT_FLOAT, 0, NULL, "top-p", &settings.top_p, NULL,
     "sample from the most likely tokens whose probabilities add up to X; 1: all", 1e-6, 1},
    {OPT_FLOAT, 0, NULL, "min-p", &settings.min_p, NULL,
     "sample from the tokens that are at least X times as likely as the most likely one; 0: all", 0, 1},
    {OPT_FLOAT, 0, NULL, "repetition-penalty", &settings.repetition_penalty, NULL,
     "divides the positive logits of tokens that the text has already, and multiplies the negative ones; 1: none", 0.01,
     100},
    {OPT_LIST, 0, NULL, "stop", &settings.stops, "TEXT",
     "end a text before this string, which is not printed; may be given several times", 0, 0},
    {OPT_BOOL, 0, NULL, "stop-at-eot", &settings.stop_at_eot, NULL, "stop at the end-of-text token", 0, 0},

    {OPT_SECTION, 0, NULL, "Evaluation and export", NULL, NULL, NULL, 0, 0},
    {OPT_STR, 0, NULL, "eval", &settings.eval_data, "GLOBS",
     "evaluate the model on these files and exit: loss and perplexity of token shards, texts and JSON lines, scores on "
     "the evaluation files of dev/data/lambada, arc and hellaswag; names or quoted patterns, separated by commas",
     0, 0},
    {OPT_INT, 0, NULL, "stride", &settings.stride, "tokens",
     "--eval of shards and texts: the window of T tokens (-t) advances by N, and each token is predicted once, from at "
     "least "
     "T - N + 1 tokens before it; 0: by T, so that windows do not overlap",
     0, 1 << 20},
    {OPT_BOOL, 0, NULL, "json", &settings.json, NULL,
     "print each result of --eval and --hellaswag as a line of JSON instead of text", 0, 0},
    {OPT_STR, 0, NULL, "hellaswag", &settings.hellaswag, "FILE",
     "accuracy on this multiple-choice file, made by dev/data/hellaswag: with each validation, or, without -i, at once",
     0, 0},
    {OPT_BOOL, 0, NULL, "bench", &settings.bench, NULL,
     "time the prompt and the generation of --num-tokens tokens for --num-samples texts, and exit", 0, 0},
    {OPT_INT, 0, NULL, "bench-prompt", &settings.bench_prompt, "tokens", "length of the prompt of --bench", 1, 1 << 20},
    {OPT_STR, 0, NULL, "export", &settings.export_path, "PATH",
     "write the weights to a new Hugging Face directory, or a file .safetensors, .bin (llm.c's) or .gguf "
     "(llama.cpp's), and exit",
     0, 0},
    {OPT_STR, 0, NULL, "type", &settings.export_type, "f32|f16|bf16|q8_0",
     "type of the exported weights; f16, and q8_0 (8 bits), only for .gguf", 0, 0},
    {OPT_STR, 0, NULL, "export-type", &settings.export_type, "fp32|bf16", "the same as --type", 0, 0},

    {OPT_SECTION, 0, NULL, "Progress", NULL, NULL,
     "On a terminal, the last line is rewritten with each step, and some lines stay; files and pipes get a line for "
     "each "
     "step. A line has the loss, the norm of the gradient before it is clipped, the learning rate, the time, and on a "
     "GPU "
     "MFU, the model FLOP utilization: FLOPs of the matmuls and the attention that the model needs, as a part of what "
     "the "
     "card can do at most in that type; recomputation does not count. (+2.50z): so many standard deviations above the "
     "mean "
     "of the last 128 steps, if that is more than 2.",
     0, 0},
    {OPT_LONG, 0, NULL, "log-every", &settings.log_every, "steps",
     "print a line every N steps; 0: each step to files and pipes, and on a terminal at most 200 in a run", 0, 1e12},
    {OPT_BOOL, 0, NULL, "verbose", &settings.verbose, NULL,
     "print the values of all flags before a run, and at once, also if its set-up fails", 0, 0},
};

// of train_gpt2cu only
static const Option gpu_options[] = {
    {OPT_SECTION, 0, NULL, "Machine", NULL, NULL, NULL, 0, 0},
    {OPT_INT, 0, NULL, "parallel", &settings.parallel, "texts",
     "continue at most N texts side by side, fewer if memory is short; one that ends makes room for the next", 1, 256},
    {OPT_STR, 0, NULL, "weights", &settings.weights, "full|int8|fp8",
     "--prompt, --eval and --bench: matrices in 8 bits, with a scale per output channel; full: in the build's type. "
     "Prompts and losses are computed in that type from weights rounded to 8 bits",
     0, 0},
    {OPT_INT, 'r', NULL, "recompute", &settings.recompute, NULL,
     "save memory by recomputing in the backward pass: 1 GELU, whose slope is then not saved, 2 also the layers' "
     "layernorms; 0: nothing",
     0, 2},
    {OPT_INT, 0, "ge", "gelu-fusion", &settings.gelu_fusion, NULL,
     "3: the forward pass saves GELU's slope where it can. 0 to 2: it saves GELU's argument", 0, 3},
    {OPT_BOOL, 'f', NULL, "tf32", &settings.tf32, NULL,
     "fp32 builds: run matmuls on the tensor cores, with a mantissa of 10 bits", 0, 0},
    {OPT_CHOICE, 0, NULL, "fp8", &settings.fp8, FP8_STAGES,
     "matrix products of training in 8 bits, on Hopper GPUs; bf16 programs only. forward: qkv and the MLP of the "
     "layers in the forward pass; +dx: also the gradients of their inputs; +head: also the head; +dw, or no argument: "
     "also the gradients of the weights. +head is short for forward+dx+head, and so on",
     0, 0},
    {OPT_BOOL, 'w', NULL, "master-weights", &settings.master_weights, NULL,
     "AdamW updates an fp32 copy of the 16-bit weights", 0, 0},
    {OPT_BOOL, 0, NULL, "stochastic-rounding", &settings.stochastic_rounding, NULL,
     "round updated bf16 weights up or down at random, so that small updates are kept on average", 0, 0},
    {OPT_BOOL, 0, NULL, "graph", &settings.use_graph, NULL, "launch each forward and backward pass as one CUDA graph",
     0, 0},
    {OPT_BOOL, 0, NULL, "tune", &settings.tune, "again",
     "time cuBLASLt's matmul algorithms, use the fastest, and keep the choice in ~/.cache for later runs; again: time "
     "again, except a resumed run's own choices; off: use its first candidate",
     0, 0},
    {OPT_STR, 0, NULL, "tuned", &settings.tuned, "FILE",
     "configurations of kernels that --tune leaves alone, measured by make tune in dev/cuda; a resumed run keeps those "
     "that it had",
     0, 0},
    {OPT_BOOL, 0, NULL, "profile", &settings.profile, NULL,
     "time every operation of a step, print the table with the card's clock and power, and exit; needs training data",
     0, 0},
    {OPT_INT, 0, "lg", "log-memory", &settings.log_memory_every, "steps",
     "print the GPU memory in use every N steps; 0: never", 0, 1e9},

    {OPT_SECTION, 0, NULL, "GPUs and hosts", NULL, NULL, NULL, 0, 0},
    {OPT_INT, 0, NULL, "gpus", &settings.gpus, NULL,
     "train on N GPUs of this machine, each with -b sequences; 0: all of them", 0, RANKS_MAX_LOCAL},
    {OPT_INT, 'z', NULL, "zero", &settings.zero, NULL,
     "1: ZeRO-1, each GPU keeps and updates a share of the optimizer's state, with Muon whole layers; 0: all of it", 0,
     1},
    {OPT_STR, 0, NULL, "overlap", &settings.overlap, "auto|on|off",
     "on: exchange gradients and weights while the GPUs compute; off: one after the other; auto: what costs less by a "
     "measurement at the start, and with --no-tune on. On one GPU, on and auto let AdamW update the layers during the "
     "next forward pass",
     0, 0},
    {OPT_FLOAT, 0, NULL, "timeout", &settings.timeout, "seconds",
     "end the run if a step takes longer, or a rank does not answer; the first step and HellaSwag's scores may take "
     "ten times as long; 0: never",
     0, 1e6},
    {OPT_INT, 0, NULL, "restarts", &settings.restarts, NULL,
     "with --gpus: start all ranks again from the newest checkpoint when one fails, N times at most", 0, 1e6},
    {OPT_INT, 0, "pn", "num-processes", &settings.num_processes, NULL,
     "llm.c's: the number of processes that were started by hand, one for each GPU", 1, RANKS_MAX},
    {OPT_INT, 0, "pr", "process-rank", &settings.process_rank, NULL, "llm.c's: the number of this process, from 0", 0,
     RANKS_MAX - 1},
    {OPT_INT, 0, "pg", "gpus-per-node", &settings.gpus_per_node, NULL, "llm.c's: the number of GPUs of each machine", 1,
     RANKS_MAX_LOCAL},
    {OPT_STR, 0, "ps", "server-ip", &settings.server_ip, "ADDRESS", "llm.c's: the machine of process 0", 0, 0},
    {OPT_STR, 0, "pi", "init-method", &settings.init_method, "tcp|mpi",
     "llm.c's: tcp, or mpi: started by mpirun. Not needed: what has started the program is found by itself", 0, 0},
    {OPT_STR, 0, "pf", "fs-path", &settings.fs_path, "PATH", "has no effect, accepted for llm.c's command lines", 0, 0},
};

// of train_gpt2 only
static const Option cpu_options[] = {
    {OPT_SECTION, 0, NULL, "Machine", NULL, NULL, NULL, 0, 0},
    {OPT_BOOL, 0, NULL, "naive", &settings.naive, NULL,
     "run matmul and attention as the plain loops of train_gpt2.c: slow, for comparison", 0, 0},
};

// ---- --help, and flags by other names -------------------------------------------------

static const char* const most_used_flags[][2] = {
    {"model", "d6, d12, d24, d36, d48: a new model; or a directory or file with weights"},
    {"train-data", "shards of tokens to train on, as dev/data/tokenize makes them; in quotes"},
    {"val-data", "shards to validate on"},
    {"output", "checkpoints and logs go here; -e DIR uses the newest checkpoint"},
    {"steps", "steps of training; without it, one pass over the data"},
    {"learning-rate", "peak learning rate"},
    {"batch-size", "sequences that are computed at once: what fits the memory"},
    {"seq-len", "tokens of a sequence"},
    {"total-batch", "tokens of a step, a multiple of B * T"},
    {"resume", "go on from the newest checkpoint in the output directory"},
    {"prompt", "continue this text, with --num-tokens N and --temperature X"},
    {"eval", "loss and perplexity on shards or texts"},
    {NULL, NULL},
};

static const char* const example_commands[][2] = {
    {"-e d6 -i 'data/ts_train_*.bin' -j 'data/ts_val_*.bin' -o log", "train a new model"},
    {"-e data/gpt2 -i 'data/ts_train_*.bin' -o tuned -x 100", "fine-tune GPT-2"},
    {"-e log --prompt 'Once upon a time'", "continue a text"},
    {"-e log --export shakespeare.gguf", "for llama.cpp"},
    {NULL, NULL},
};

// Flags as nanoGPT, llm.c's Python, Hugging Face's trainer, torchrun and llama.cpp have them.
static const char* const flags_elsewhere[][2] = {
    {"lr", "learning-rate"},
    {"max-lr", "learning-rate"},
    {"min-lr", "final-fraction"},
    {"max-iters", "steps"},
    {"max-steps", "steps"},
    {"num-iterations", "steps"},
    {"iterations", "steps"},
    {"epochs", "steps"},
    {"num-epochs", "steps"},
    {"num-train-epochs", "steps"},
    {"micro-batch-size", "batch-size"},
    {"device-batch-size", "batch-size"},
    {"per-device-train-batch-size", "batch-size"},
    {"gradient-accumulation-steps", "total-batch"},
    {"grad-accum", "total-batch"},
    {"total-batch-size", "total-batch"},
    {"block-size", "seq-len"},
    {"sequence-length", "seq-len"},
    {"context-length", "seq-len"},
    {"max-seq-len", "seq-len"},
    {"ctx-size", "seq-len"},
    {"n-layer", "layers"},
    {"num-layers", "layers"},
    {"depth", "layers"},
    {"n-head", "heads"},
    {"n-embd", "channels"},
    {"hidden-size", "channels"},
    {"d-model", "channels"},
    {"warmup-iters", "warmup"},
    {"warmup-steps", "warmup"},
    {"wd", "weight-decay"},
    {"grad-clip", "clip"},
    {"max-grad-norm", "clip"},
    {"lr-scheduler-type", "schedule"},
    {"optim", "optimizer"},
    {"data", "train-data"},
    {"dataset", "train-data"},
    {"train-file", "train-data"},
    {"input-bin", "train-data"},
    {"validation-file", "val-data"},
    {"input-val-bin", "val-data"},
    {"out-dir", "output"},
    {"output-dir", "output"},
    {"save-dir", "output"},
    {"m", "model"},
    {"init-from", "model"},
    {"model-name-or-path", "model"},
    {"model-path", "model"},
    {"checkpoint", "model"},
    {"ckpt", "model"},
    {"resume-from-checkpoint", "resume"},
    {"eval-interval", "val-every"},
    {"eval-steps", "val-every"},
    {"eval-iters", "val-steps"},
    {"save-steps", "save-every"},
    {"save-interval", "save-every"},
    {"log-interval", "log-every"},
    {"logging-steps", "log-every"},
    {"p", "prompt"},
    {"file", "prompt-file"},
    {"max-tokens", "num-tokens"},
    {"max-new-tokens", "num-tokens"},
    {"n-predict", "num-tokens"},
    {"repeat-penalty", "repetition-penalty"},
    {"generate", "prompt"},
    {"nproc-per-node", "gpus"},
    {"nproc_per_node", "gpus"},
    {"dtype", "make train_gpt2cu PRECISION=FP32, BF16 or FP16 chooses the type"},
    {"bf16", "make train_gpt2cu PRECISION=FP32, BF16 or FP16 chooses the type"},
    {"fp16", "make train_gpt2cu PRECISION=FP32, BF16 or FP16 chooses the type"},
    {"device", "CUDA_VISIBLE_DEVICES chooses GPUs; ./train_gpt2 is the program for the CPU"},
    {"threads", "OMP_NUM_THREADS sets the number of threads"},
    {"compile", "leave it out, the program is compiled"},
    {"dropout", "leave it out, this program trains without"},
    {NULL, NULL},
};

#if defined(__CUDACC__) || defined(GPU_PROGRAM) // the second one in the emulation of dev/cuda
#define OWN_OPTIONS gpu_options
#define SIBLING_OPTIONS cpu_options
#define SIBLING "train_gpt2"
#else
#define OWN_OPTIONS cpu_options
#define SIBLING_OPTIONS gpu_options
#define SIBLING "train_gpt2cu"
#endif
enum {
    NUM_SHARED_OPTIONS = sizeof(shared_options) / sizeof(shared_options[0]),
    NUM_OWN_OPTIONS = sizeof(OWN_OPTIONS) / sizeof(OWN_OPTIONS[0]),
    NUM_OPTIONS = NUM_SHARED_OPTIONS + NUM_OWN_OPTIONS
};

// The flags of this program: the shared ones, then its own.
static inline const Option* program_options(void) {
    static Option all[NUM_OPTIONS];
    memcpy(all, shared_options, sizeof(shared_options));
    memcpy(all + NUM_SHARED_OPTIONS, OWN_OPTIONS, sizeof(OWN_OPTIONS));
    return all;
}

// Goes back to the settings that were typed, so that a recipe can be applied to another model.
static inline void forget_recipe(const Settings* typed) {
    settings = *typed;
    memset(cli_defaults()->derived, 0, sizeof(cli_defaults()->derived));
    memset(&recipe, 0, sizeof(recipe));
    recipe.name = "";
}

// Parses the command line, and the file that --config names, into the settings. about: for --help.
static inline void parse_flags(int argc, char** argv, const char* about) {
    static const CliExtras extras = {most_used_flags, example_commands,
                                     flags_elsewhere, SIBLING,
                                     SIBLING_OPTIONS, sizeof(SIBLING_OPTIONS) / sizeof(SIBLING_OPTIONS[0])};
    cli_extras = &extras;
    recipe_format_help(recipe_help, sizeof(recipe_help));
    const Option* opts = program_options();
    cli_parse(argc, argv, about, opts, NUM_OPTIONS);
    const char* config = args->config;
    int num_stops = args->stops.n;
    if (!config) { return; }
    cli_parse_file(config, opts, NUM_OPTIONS);
    if (args->config != config) { cli_fail("%s names another --config, which only the command line can", config); }
    if (num_stops > 0) { settings.stops.n = 0; }
    // once more, because the command line counts before the file
    cli_parse_more(argc, argv, about, opts, NUM_OPTIONS, "", NULL);
}

// Prints the header of a run: the flags that were typed or, with --verbose, the values of all.
static inline void print_flags(void) {
    if (args->verbose) {
        cli_print(stdout, program_options(), NUM_OPTIONS);
    } else {
        cli_print_typed(stdout, program_options(), NUM_OPTIONS);
    }
}

static inline bool uses_muon(void) { return strcmp(args->optimizer, "muon") == 0; }

// ---- what the program does ------------------------------------------------------------

typedef enum { TASK_TRAIN, TASK_SAMPLE, TASK_EVALUATE, TASK_BENCH, TASK_EXPORT, TASK_PLAN } Task;

enum {
    TRAINS = 1 << TASK_TRAIN,
    SAMPLES = 1 << TASK_SAMPLE,
    EVALUATES = 1 << TASK_EVALUATE,
    TIMES = 1 << TASK_BENCH,
    EXPORTS = 1 << TASK_EXPORT
};

// The tasks that read a flag: those of its name, or else of the title of its section, or else all.
static inline int tasks_of_flag(const char* section, const char* name) {
    static const struct {
        const char* name;
        int tasks;
    } rows[] = {
        {"train-data", ~0}, // its vocabulary serves all of them
        {"config", ~0},
        {"batch-size", TRAINS | EVALUATES},
        {"seq-len", TRAINS | EVALUATES},
        {"Data", TRAINS},
        {"seed", ~0},
        {"Optimization", TRAINS},
        {"Validation and checkpoints", TRAINS},
        {"Progress", TRAINS},
        {"special", SAMPLES | EVALUATES},
        {"num-samples", SAMPLES | TIMES},
        {"num-tokens", SAMPLES | TIMES},
        {"Sampling", SAMPLES},
        {"eval", EVALUATES},
        {"stride", EVALUATES},
        {"json", TRAINS | EVALUATES},
        {"hellaswag", TRAINS | EVALUATES},
        {"bench", TIMES},
        {"bench-prompt", TIMES},
        {"Evaluation and export", EXPORTS},
        {"parallel", SAMPLES | TIMES},
        {"weights", ~0}, // refused where it has no effect
        {"tf32", ~EXPORTS},
        {"tune", ~EXPORTS},
        {"tuned", ~EXPORTS},
        {"naive", ~EXPORTS},
        {"Machine", TRAINS},
        {"GPUs and hosts", TRAINS},
    };
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            if (strcmp(rows[i].name, pass == 0 ? name : section) == 0) { return rows[i].tasks; }
        }
    }
    return ~0;
}

// Notes the flags that were typed and that the task does not read.
static inline void note_ignored_flags(Task task) {
    static const char* const names[] = {"training", "--prompt", "--eval", "--bench", "--export"};
    const Option* options = program_options();
    const char* section = "";
    char list[512] = "";
    if ((size_t)task >= sizeof(names) / sizeof(names[0])) { return; }
    for (int i = 0; i < NUM_OPTIONS; i++) {
        if (options[i].type == OPT_SECTION) { section = options[i].name; }
        if (options[i].type == OPT_SECTION || !cli_defaults()->typed[i]) { continue; }
        if (tasks_of_flag(section, options[i].name) >> task & 1) { continue; }
        size_t used = strlen(list);
        snprintf(list + used, sizeof(list) - used, "%s--%s", used ? ", " : "", options[i].name);
    }
    if (list[0] && run_rank == 0) { print_line(stderr, "note: %s does not use %s", names[task], list); }
}

// The task that the flags name. Two of them are a usage error, and so is a text without a model to continue it.
static inline Task chosen_task(void) {
    bool sample = args->prompt || args->prompt_file || args->prompts || args->prompt_ids;
    bool evaluate = args->eval_data || (args->hellaswag && !args->train_data);
    if (sample + evaluate + args->bench + args->plan + (args->export_path != NULL) > 1) {
        cli_fail("give only one of --prompt, --eval, --bench, --export and --plan");
    }
    if (args->memory && !args->plan) { cli_fail("--memory is for --plan"); }
    Task task = sample              ? TASK_SAMPLE
                : evaluate          ? TASK_EVALUATE
                : args->bench       ? TASK_BENCH
                : args->export_path ? TASK_EXPORT
                : args->plan        ? TASK_PLAN
                                    : TASK_TRAIN;
    if ((sample || evaluate || args->export_path) && !cli_typed(&settings.model)) {
        cli_fail(
            "%s needs a model: -e DIR, such as the -o directory of a run, or data/gpt2 after scripts/download.sh gpt2",
            sample     ? "a prompt"
            : evaluate ? "an evaluation"
                       : "--export");
    }
    if (strcmp(args->weights, "full") != 0 && (task == TASK_TRAIN || task == TASK_EXPORT)) {
        cli_fail("--weights %s is for --prompt, --eval and --bench, not for %s", args->weights,
                 task == TASK_TRAIN ? "training" : "--export (there --type q8_0 gives 8 bits)");
    }
    note_ignored_flags(task);
    return task;
}

// The bytes that --memory names; 0: it is not given.
static inline double memory_flag(void) {
    char* unit = NULL;
    double size = args->memory ? strtod(args->memory, &unit) : 0;
    if (!args->memory) { return 0; }
    double scale = strcmp(unit, "GB") == 0 || !unit[0] ? 1e9
                   : strcmp(unit, "GiB") == 0          ? 1073741824.0
                   : strcmp(unit, "MB") == 0           ? 1e6
                                                       : 0;
    bool number = isdigit((unsigned char)args->memory[0]) && size > 0 && size < 1e6 && scale > 0;
    if (!number) { cli_fail("--memory wants a size such as 24GB, got '%s'", args->memory); }
    return size * scale;
}

static int64_t drawn_seed = -1; // of --seed -1

// The seed of this run: --seed, or one that is drawn when it is first asked for.
static inline int64_t run_seed(void) {
    uint32_t bits = (uint32_t)time(NULL) ^ (uint32_t)getpid() << 16;
    if (args->seed >= 0) { return args->seed; }
    FILE* f = drawn_seed < 0 ? fopen("/dev/urandom", "rb") : NULL;
    if (f) {
        if (fread(&bits, sizeof(bits), 1, f) != 1) { bits ^= (uint32_t)time_ms(); }
        fclose(f);
    }
    if (drawn_seed < 0) { drawn_seed = bits; }
    return drawn_seed;
}

// Replaces the program by the demo, scripts/demo.sh beside the program itself, whatever the current directory is.
__attribute__((noreturn)) static inline void run_demo(const char* argv0) {
    Path program, script, name;
    if (!realpath("/proc/self/exe", program.text) && !realpath(argv0, program.text)) {
        path_set(&program, "%s", argv0);
    }
    path_set(&script, "%s/scripts/demo.sh", directory_of(program.text).text);
    if (!file_exists(script.text)) {
        die("the demo, %s, is not there: give -i to train or --prompt to continue a text; --help shows all flags",
            script.text);
    }
    const char* slash = strrchr(program.text, '/'); // the script changes to the program's directory
    path_set(&name, "./%s", slash ? slash + 1 : program.text);
    execl("/bin/sh", "sh", script.text, name.text, (char*)NULL);
    die("cannot run %s: %s", script.text, strerror(errno));
}

#endif
