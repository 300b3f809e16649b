/*
GPT-2 on the GPU: trains from raw tokens, evaluates, saves, resumes, samples. train_gpt2.c is the same program for the
CPU and explains the arithmetic; read it first.

    1. operations    a declaration for each: what it computes, on which shapes
    2. the model     tensors; forward, loss, backward; how parameters lie in memory; update; then memory, loading and saving
    3. generation    key/value cache, prefill, one token at a time
    4. training      batches, one step, its report one step later, evaluation, checkpoints
    5. runs          train, profile, continue a text, evaluate, time; main
    6. kernels       how the operations of section 1 are computed: copies of the best kernels of dev/cuda

Sections 1 to 5 are the program; section 6 is machinery. Code shared by both programs is in llmc/. gpt2.h has the table of
parameters, flags.h the flags (args), and run.h what a training run is besides its model: its data, its checkpoints, the
reports of its steps, and what is due between two of them (validation, a sample, a checkpoint).

One stream, in order. The host queues a step, and prints the report of the previous step while the GPU works. In training
the host waits for the GPU

    in a step           for a batch buffer that is still being copied (load_batch)
                        for the report of the previous step (report_step)
                        with -sl or -sg, for loss and norm, before it allows the update (judge_before_update)
                        to time cuBLASLt's algorithms for a matmul that has no saved or cached choice, usually in the first step;
                          not with --no-tune (cublaslt_fastest)
    between steps       for the buffers and the loss of a validation, each batch of HellaSwag, each token of a sample, and the copies of
                          a checkpoint
    before the first    for the copies of the weights; to measure a GPU whose speed is not in llmc/mfu.h (find_machine_flops);
                          for samples, whose kernels are loaded (load_sampling_kernels)
                        with several GPUs, for rank 0's choice of algorithms, and the timed exchanges of --overlap auto (ranks_choose)
    with --profile      once, before the profiled steps, to measure the rates of copies and matmuls (profile_run)

With several GPUs, the hosts also wait for one another (ranks_agree): in every micro-batch, twice between steps, and more often where
validation, a sample or a checkpoint is due. Decisions that depend on a step's results are made on the GPU: gradient clipping,
fp16's loss scale, fp8's scales, and whether the weights are updated at all. They are not when the loss or the gradient is NaN or
infinite (adamw_prepare). The host decides what -sl and -sg skip, and whether to stop after --max-nonfinite such steps in a row
(report_step).

With --gpus N there is a process like this for each GPU, a rank, with its own part of each batch. Gradients are summed over
the ranks, and updated weights are passed on, by NCCL on a second stream (distributed.cuh): gradients_ready, await_weights and
their like order it with the first one, and do nothing when there is one GPU.

A micro-step (forward and backward of one micro-batch) is launched kernel by kernel the first time. The second time it is
captured as a CUDA graph, and from then on it is one graph launch. There is a graph for the first micro-step of a step, which
overwrites the gradients, and one for the others, which add to them. If the exchange of gradients overlaps with computation, the
last micro-step, which may also be the first, has a separate graph, which leaves SMs free for the exchange. In generation, a step of
all sequences is a graph launch; two graphs alternate.

Matmuls run on kernels of our own where these are faster, otherwise on cuBLASLt. In training ours need Hopper and 16 bits:

    matmul                       our kernel       where it runs
    forward                      gemm             sums of up to 2048 terms; out has two or more tiles of 128x192 per SM
    input gradient, with GELU    gemm             dinp has two or more tiles of 128x192 per SM
    weight gradient              stream-K         16384 or more tokens, tiles that divide dweight exactly, and 40 or more of the
                                                  library's tiles, 128x256, which would fill less than 4/5 of their waves
    head with its loss           gemm             bf16, on the condition for forward
    both with GELU, --fp8 +dw    matmul_fp8       where GELU's slope is saved (plan_training)
    Muon's Newton-Schulz         newton_schulz    always; it has kernels for other GPUs and fp32 as well

matmul_forward_choice, matmul_backward_input_choice, matmul_backward_weight_choice and linear_cross_entropy_choice decide this for
the first four. In generation, decode_matvec runs on every GPU; decode_matmul, for several texts, and decode_layers need Hopper.

When a matmul on cuBLASLt meets a new shape, the library's algorithms are timed and the fastest is kept (--no-tune, and in prompts:
the first one that the library proposes). The choice goes to a file in the user's cache folder, from which later runs of the same
build, on such a card with this driver, take it (--tune again: times again). The choices are also saved in the output directory. A
resumed run uses its own, also with --tune again, but with --no-tune none that were timed. Another flag, --tuned, names a file of
block sizes, which take the place of those in the launchers; it is also saved there.

With the same choices on the same kind of GPU, a run gives the same bits every time: the order of every sum in our kernels
depends only on the shapes and the GPU, and with several GPUs on --overlap, and no floating-point sum uses atomics.

Shapes: B batch, T time, C channels, V vocabulary, Vp V padded to 128, NH heads, HS head size, L layers, OC output
channels, F channels in the middle of the MLP. Every tensor is row-major. floatX is the type of weights and activations
(bf16, or -DENABLE_FP16, -DENABLE_FP32); gradients of parameters, AdamW's moments and the master weights are float. The gradient of an activation
is called d + name.

Words:
    rank              with several GPUs: the process of one of them
    share             with ZeRO-1: the part of the optimizer's state that a rank keeps
    bucket            what the ranks exchange, and AdamW updates, at once: the embeddings, a layer, or the last layernorm and an
                      untied head
    deferred update   AdamW of all layers except the first during the next forward pass; on one Hopper GPU in 16 bits (section 2),
                      without --overlap off, --profile, --fp8 and Muon
    ladder            a file of dev/cuda: one operation as a series of numbered kernels, from naive to fast
    promoted          copied here from a ladder by dev/cuda/promote.sh, between marks: its best kernel, with its number
    launcher          the host function that checks the shapes and launches an operation's kernels
    x128              a vector of 16 bytes of floatX: one load or store of a thread
    launch_early      programmatic dependent launch: a kernel's blocks start while the previous kernel is finishing
    sm90              needs wgmma and TMA, which exist only in code compiled for sm_90a (H100, H200)
    lse               log of the sum of the exponentials of a query's scaled scores: the log of softmax's denominator
    mean, rstd        statistics of one row in a layernorm; rstd = 1 / sqrt(variance + epsilon)
    master weights    the fp32 copy of the 16-bit weights; AdamW updates this copy
    recompute         -r: the output of the MLP's activation, and with -r 2 also the outputs of a layer's two layernorms, are not kept,
                      but computed again in the backward pass

Sources: Radford et al. 2019, "Language models are unsupervised multitask learners"; the structure of the program
follows karpathy/llm.c. The source of an algorithm is named at its operation, or in the file of its ladder.
*/
#include "llmc/adamw_state.cuh"   // defines: AdamW, StepState, DeferredUpdate
#include "llmc/column_sums.cuh"   // defines: ColumnSums, column_sums_flush
#include "llmc/cublas_common.cuh" // defines: CublasLt, cublaslt_open, cublaslt_matmul, find_machine_flops
#include "llmc/cuda_common.cuh" // defines: floatX, x128, Execution, cudaCheck, ceil_div, launch_early, LaunchGraph, ...
#include "llmc/decode_layer.cuh"  // defines: DecodeLayer, DecodeLayers
#include "llmc/fp8.cuh"           // defines: Fp8Tensor, Fp8Matrix, Fp8Seen
#include "llmc/gelu.cuh"          // defines: GeluSaved, gelu, gelu_slope
#include "llmc/profile.cuh"       // defines: Range, profile_open, profile_begin, profile_end, profile_print
#include "llmc/ptx.cuh"           // defines: mbarrier_*, wgmma_*, tma_*, cp_async_*, ldmatrix_*, has_sm90a
#include "llmc/tma_ring.cuh"      // defines: TmaRing, TmaRingPlace
#include "llmc/tuned.h"           // defines: TunedState, tuned_block_size
#include "llmc/utils.h"           // defines: Error, die, require, malloc_check, time_ms, path_set
#include "llmc/weight_matrix.cuh" // defines: WeightMatrix, weight_dispatch, weight_pairs
#include <algorithm>
#include <math.h>
#ifndef PART
#define PART 0 // of the program, to compile: 0 is all of it; see section 6
#endif
#if PART <= 1                   // the kernels include no more than the above
#include "llmc/checkpoint.h"    // defines: advise_huge, params_check
#include "llmc/choices.cuh"     // defines: choices_open_cache, choices_open, choices_save, choices_load
#include "llmc/crc32c.h"        // defines: crc32c
#include "llmc/dataloader.h"    // defines: Batch, DataLoader, dataloader_next, dataloader_reset
#include "llmc/distributed.cuh" // defines: ranks, ranks_agree, is_alone, reduce_gradients, gather_weights, ...
#include "llmc/eval_loader.h"   // defines: EvalLoader, eval_close
#include "llmc/evaluation.h"    // defines: Evaluator, evaluate_files, evaluate_hellaswag, Bench, bench_begin
#include "llmc/export.h"        // defines: export_model
#include "llmc/flags.h"         // defines: args, parse_flags, print_flags, chosen_task, uses_muon, Fp8Stage, run_demo
#include "llmc/gpt2.h"          // defines: GPT2Config, num_parameters
#include "llmc/logger.h"        // defines: logger_eval
#include "llmc/memory_plan.cuh" // defines: Plan, plan_add, plan_allocate, is_free, most_that_fit
#include "llmc/model_source.h"  // defines: ModelSource, resolve_model_path, model_source_open, model_source_read
#include "llmc/prompts.h"       // defines: Prompts, prompts_read, Continuations, GenerationTimes, flags_sampler
#include "llmc/rand.h"          // defines: splitmix64
#include "llmc/ranks.h"         // defines: run_rank, run_num_ranks
#include "llmc/run.h"           // defines: Training, StepReport, Due, settle_batch, training_begin, training_due, ...
#include "llmc/run_parts.h"     // defines: RunParts, RunPart, run_parts
#include "llmc/run_state.h"     // defines: RunState
#include "llmc/sampler.h"       // defines: Sampler, sampler_make, sampler_argmax, seen_words
#include "llmc/saver.h"         // defines: Saver
#include "llmc/schedulers.h"    // defines: lr_at
#include "llmc/status.h"        // defines: output_begin, output_release
#include "llmc/stop.h"          // defines: run_stop_signal, run_will_save, run_install_signal_handlers
#include "llmc/text_output.h"   // defines: text_token
#include "llmc/tokenizer.h"     // defines: Tokenizer, tokenizer_free
#include <vector>
#endif

// ================================================================================================
// 1. operations
// ================================================================================================
// Order of arguments: outputs, scratch, inputs, sizes, and exec, which says on which stream and how (cuda_common.cuh). In
// comments, `|` separates outputs from inputs, and f?(x) means that step f is optional. Activations and their gradients are
// overwritten; gradients of parameters are added to (matmul_backward_weight can do either), those of vectors, with exec.sums,
// only by column_sums_flush. An operation launches its kernels and returns; if it does not support a shape, it ends the program
// with a message. An *_scratch function returns the size of the scratch buffer, in floats or in ints.

// out (B,T,C) = wte[inp] + wpe | inp (B,T) token ids | wte (Vp,C) | wpe (maxT,C)
void encoder_forward(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                     const Execution& exec);
// Adds rows of dout (B,T,C) to their tokens' rows of dwte (Vp,C), their positions' of dwpe (maxT,C) | inp (B,T); scratch in ints
void encoder_backward(float* dwte, float* dwpe, int* scratch, const floatX* dout, const int* inp, int B, int T, int C,
                      int V, const Execution& exec);
size_t encoder_backward_scratch(int B, int T, int V);

// out (N,C) = (inp - mean) * rstd * weight + bias; mean, rstd (N) | inp (N,C) | weight, bias (C). arXiv:1607.06450.
// fused_residual_layernorm, layernorm_quantize, decode_matvec, decode_head, decode_matmul, decode_matmul_head and decode_layers also
// contain a layernorm; dev/learn/experiments/rmsnorm.patch changes all of them.
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, float epsilon, const Execution& exec);
// residual (N,C) = inp1 + inp2; normed (N,C), mean, rstd (N) are its layernorm. For the last layernorm with --fp8, whose MLP does not
// add to the residual stream itself; in the layers, layernorm_quantize adds.
void fused_residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                      const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                      float epsilon, const Execution& exec);
// dinp (N,C) = gradient of inp + dresidual (N,C), which may be NULL or dinp itself; dinp_sums (C), which may be NULL, += the
// column sums of dinp; dweight, dbias (C) += | dout (N,C)
void layernorm_backward(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                        const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                        const float* mean, const float* rstd, int N, int C, const Execution& exec);
size_t layernorm_backward_scratch(int C);

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC); bias and residual may be NULL. With saved.has_gelu(),
// out receives gelu(sum), and saved.tensor (N,OC), if it is not NULL, the sum or, with saved.is_slope, gelu'(sum); this needs a
// bias and takes no residual. With exec.update, its idle warps may also update weights of later layers.
void matmul_forward(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                    const floatX* residual, int N, int C, int OC, const Execution& exec);
// out (N,OC) float = inp (N,C) weight (OC,C)^T
void matmul_forward_float(float* out, const floatX* inp, const floatX* weight, int N, int C, int OC,
                          const Execution& exec);
// In generation only: out (N,OC) = inp weight^T + bias + residual, rounded once, where cuBLASLt would round the product first. product
// (N,OC) is scratch.
void matmul_forward_residual(floatX* out, float* product, const floatX* inp, const floatX* weight, const floatX* bias,
                             const floatX* residual, int N, int C, int OC, const Execution& exec);
// dinp (N,C) = dout (N,OC) weight (OC,C). If saved.tensor (N,C) is not NULL, dinp is multiplied by GELU's slope, and
// dinp_sums (C), which may be NULL, += the column sums of dinp.
void matmul_backward_input(floatX* dinp, float* dinp_sums, float* scratch, const floatX* dout, const floatX* weight,
                           GeluSaved saved, int N, int C, int OC, const Execution& exec);
// Whether matmul_forward (N,C) to (N,OC) can save the slope, and its backward product can read it.
bool matmul_can_save_slope(int N, int C, int OC);
size_t matmul_backward_input_scratch(int N, int C);
// dweight (OC,C) = dout (N,OC)^T inp (N,C), or += if accumulate
void matmul_backward_weight(float* dweight, float* scratch, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            bool accumulate, const Execution& exec);
size_t matmul_backward_weight_scratch(int N, int C, int OC);

// Causal self-attention, softmax(scale q k^T) v in each head; the (T,T) matrix is never in memory. out (B,T,C),
// lse (B,NH,T) | qkv (B,T,3,NH,HS). Dao 2023, FlashAttention-2, arXiv:2307.08691. Which kernel runs depends on the head size, the
// precision, the device and the sequence length: attention_forward_choice, attention_backward_choice.
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, float scale,
                       const Execution& exec);
// the kernel's number; 6 runs on CUDA cores, the others on tensor cores
int attention_forward_choice(int B, int T, int NH, int HS);
// dqkv (B,T,3,NH,HS); dbias (3,NH,HS), which may be NULL, += dqkv summed over all tokens | dout, out (B,T,C) | qkv
// (B,T,3,NH,HS) | lse (B,NH,T)
void attention_backward(floatX* dqkv, float* dbias, float* scratch, const floatX* dout, const floatX* qkv,
                        const floatX* out, const float* lse, int B, int T, int C, int NH, float scale,
                        const Execution& exec);
size_t attention_backward_scratch(int B, int T, int C, int NH);
size_t attention_backward_bias_terms(int B, int T, int C, int NH); // floats at the beginning of scratch: dbias's terms

// out (n) = the activation of inp (n), and slope (n), which may be NULL, its derivative there. out or slope may be inp. GELU's tanh
// form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), is in matmul_forward, too: for it this kernel serves -r and fp32. Hendrycks and
// Gimpel 2016, arXiv:1606.08415.
void activation_forward(floatX* out, floatX* slope, const floatX* inp, size_t n, Activation kind,
                        const Execution& exec);
// dinp (n) = dout (n) times the derivative of the activation at inp (n). dinp may be dout.
void activation_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Activation kind,
                         const Execution& exec);

// Softmax and cross-entropy over the first V of Vp columns: losses (N) = -log(softmax(logits (N,Vp))[targets (N)]). If dloss
// (1, device memory) is not NULL, the logits are overwritten by their gradients, (softmax - onehot(target)) * dloss.
void fused_classifier(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                      const Execution& exec);
// The head and its loss: losses (N) of the logits inp (N,C) weight (Vp,C)^T, as by fused_classifier. logits (N,Vp) receives what
// linear_cross_entropy_backward needs. Without dloss, the first V numbers of a row are its logits, or other numbers that increase
// with them: the largest belongs to the largest logit. Where gemm computes it (bf16, Hopper), each logit is limited to the target's logit plus 97.
void linear_cross_entropy_forward(floatX* logits, float* losses, float* scratch, const floatX* inp,
                                  const floatX* weight, const int* targets, const float* dloss, int N, int C, int V,
                                  int Vp, const Execution& exec);
size_t linear_cross_entropy_scratch(int N, int C, int Vp);
// dinp (N,C) and dweight (Vp,C), written, or added to if accumulate, after that forward pass with dloss. inp is overwritten.
void linear_cross_entropy_backward(floatX* dinp, float* dweight, float* scratch, floatX* logits, float* losses,
                                   floatX* inp, const floatX* weight, const float* dloss, int N, int C, int Vp,
                                   bool accumulate, const Execution& exec);
// mean (1) += scale * sum of losses (N)
void mean_loss(float* mean, const float* losses, int N, float scale, const Execution& exec);

// norm (1) = the Euclidean norm of grads (n)
void global_norm(float* norm, float* scratch, const float* grads, size_t n, const Execution& exec);
size_t global_norm_scratch();

// Decides whether the weights are updated: state->applied becomes 1 unless loss or norm is not finite or skip is true. Sets
// norm, num_updates, grad_scale and the bias corrections for adamw. In fp16 it also sets the next step's loss scale, always within 1
// to 65536: half where the loss is finite and the norm is not, double after 2000 finite steps. deferred: see the deferred update in
// section 2.
void adamw_prepare(StepState* state, const AdamW& optimizer, bool skip, bool deferred, const Execution& exec);
// AdamW on n parameters, if state->applied: params (n) floatX, master (n) float or NULL, m, v (n) | grads (n). seed 0:
// params are rounded to nearest; else stochastically, with new random bits in every update.
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
           const AdamW& optimizer, uint32_t seed, const Execution& exec);
// Finishes the deferred update of the layers before `layer`: llmc/adamw_state.cuh.
void finish_deferred_update(int layer, const Execution& exec);
// params (n) = master (n), rounded as adamw rounded them in update number `update`
void adamw_round_weights(floatX* params, const float* master, size_t n, uint32_t seed, int update,
                         const Execution& exec);

// ---- training in fp8 ----

typedef __nv_fp8_e4m3 E4M3;
typedef __nv_fp8_e5m2 E5M2;

// `to` is a quantized tensor (N,C), written as rows, and as columns unless these are NULL. unquantized (N,C), which may be NULL,
// receives the same values in floatX. N and C are multiples of 16.

// to = inp (N,C)
void quantize(const Fp8Tensor<E4M3>& to, const floatX* inp, int N, int C, const Execution& exec);
void quantize(const Fp8Tensor<E5M2>& to, const floatX* inp, int N, int C, const Execution& exec);
// to = gelu(inp)
void quantize_gelu(const Fp8Tensor<E4M3>& to, floatX* unquantized, const floatX* inp, int N, int C,
                   const Execution& exec);
// to = dout times GELU's slope at inp; unquantized may be dout
void quantize_gelu_backward(const Fp8Tensor<E5M2>& to, floatX* unquantized, const floatX* dout, const floatX* inp,
                            int N, int C, const Execution& exec);
// to (N,Vp) = (softmax(logits) - onehot(target)) * dloss, with columns | losses (N) and the logits from which they were made
void quantize_dlogits(const Fp8Tensor<E5M2>& to, const floatX* logits, const float* losses, const int* targets,
                      const float* dloss, int N, int V, int Vp, const Execution& exec);
// to = the layernorm of residual (N,C) = inp + inp2; residual and inp2 may be NULL: that of inp. mean, rstd (N); C <= 1792
void layernorm_quantize(const Fp8Tensor<E4M3>& to, floatX* unquantized, floatX* residual, float* mean, float* rstd,
                        const floatX* inp, const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                        float epsilon, const Execution& exec);

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC), which may be NULL
void matmul_fp8_forward(floatX* out, const Fp8Matrix<E4M3>& inp, const Fp8Matrix<E4M3>& weight, const floatX* bias,
                        int N, int C, int OC, const Execution& exec);
// to (N,OC) = gelu(that), with columns; slope (N,OC) = GELU's slope there
void matmul_fp8_gelu(const Fp8Tensor<E4M3>& to, floatX* slope, const Fp8Matrix<E4M3>& inp,
                     const Fp8Matrix<E4M3>& weight, const floatX* bias, int N, int C, int OC, const Execution& exec);
// dinp (N,C) = dout (N,OC) weight (OC,C), of which `weight` has the columns (C,OC)
void matmul_fp8_backward_input(floatX* dinp, const Fp8Matrix<E5M2>& dout, const Fp8Matrix<E4M3>& weight, int N, int C,
                               int OC, const Execution& exec);
// to (N,C) = that times slope (N,C), with columns; dinp_sums (C) += its column sums
void matmul_fp8_gelu_backward(const Fp8Tensor<E5M2>& to, float* dinp_sums, float* scratch, const Fp8Matrix<E5M2>& dout,
                              const Fp8Matrix<E4M3>& weight, const floatX* slope, int N, int C, int OC,
                              const Execution& exec);
size_t matmul_fp8_gelu_backward_scratch(int N, int C); // floats
// dweight (OC,C) = dout^T inp, or += if accumulate | columns of dout (OC,N) and inp (C,N)
void matmul_fp8_backward_weight(float* dweight, const Fp8Matrix<E5M2>& dout, const Fp8Matrix<E4M3>& inp, int N, int C,
                                int OC, bool accumulate, const Execution& exec);

// dbias (OC) += the column sums of dout (N,OC)
void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, const Execution& exec);
size_t matmul_backward_bias_scratch(int N, int OC); // floats

// ---- Muon: train_gpt2.c explains the arithmetic ----

// Hyperparameters of one update, set by the host.
struct Muon {
    float learning_rate, momentum, weight_decay;
};

// For num matrices (rows,cols): m = momentum * m + g, and x (num,n,k) = g + momentum * m, divided by its norm, with
// g = grads * state->grad_scale. Writes nothing unless state->applied. scratch in floats
void muon_prepare(floatX* x, float* m, float* scratch, const float* grads, const StepState* state, int num, int rows,
                  int cols, float momentum, const Execution& exec);
size_t muon_prepare_scratch(int num);
// out (num,n,k): with inp (num,n,k) = U S V^T, about U V^T. inp may be the beginning of scratch, which is in values of
// floatX.
void newton_schulz(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec);
size_t newton_schulz_scratch(int num, int n, int k);
// params (num,rows,cols), and master unless it is NULL, -= learning_rate * (0.2 sqrt(max(rows,cols)) o + weight_decay *
// params), if state->applied. o (num,n,k). seed: as in adamw, for a range of parameters that begins `first` values
// before params.
void muon_apply(floatX* params, float* master, const floatX* o, const StepState* state, int num, int rows, int cols,
                float learning_rate, float weight_decay, uint32_t seed, size_t first, const Execution& exec);

// ---- generation: each operation works on the newest token of each of B texts ----

// x (B,C) = wte[tokens (B)] + wpe[positions (B)]
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, const Execution& exec);
// out (B,OC) = gelu?(layernorm?(x (B,K)) weight (OC,K)^T + bias) + residual, for few rows, bound by reading the weights. A
// NULL argument and its operation are left out. A WeightMatrix (weight_matrix.cuh) is a floatX* or is in 8 bits.
// It is read before the previous kernel has ended (launch_early), so that kernel must not write it.
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec);
// logits (B,Vp) = layernorm(x (B,C)) wte (Vp,C)^T
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec);
// The same two on Hopper's tensor cores; false, and nothing launched, elsewhere. Here for 2 to 64 texts; a residual excludes gelu and norm.
bool decode_matmul(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec);
bool decode_matmul_runs(bool norm, int B, int K, int OC);
// logits (B,Vp) = layernorm(x (B,C)) wte (Vp,C)^T, for 1 to 64 texts where their x leaves room in shared memory, else for 2 to 32, with
// weights in 8 bits for any number from 2 on. wte is read as weight is in decode_matvec().
bool decode_matmul_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                        const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec);
// out (B,C) = attention, with `scale`, of the query in qkv (B,3,C) to itself and to the positions[b] tokens before it. The key and value in
// qkv become row positions[b] of keys, values (B,capacity,C). A text with position -1 has ended and is left out.
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, float scale, const Execution& exec);
size_t decode_attention_scratch(int B, int C, int NH, int capacity);
// After a prompt: the keys and values in qkv (B,T,3,C) become rows 0 to T-1 of keys, values (B,capacity,C).
void decode_cache_fill(floatX* keys, floatX* values, const floatX* qkv, int B, int T, int C, int capacity,
                       const Execution& exec);
// Samples tokens (B) from the first V columns of logits (B,Vp), also to copy (B), which may be the host's memory;
// positions (B) += 1, except -1. tokens[b] = -1 means that no logit was finite. temperature 0: the largest logit; otherwise a draw
// with rng_state (B), by the rules of llmc/sampler.h. penalty 1: none; otherwise adds the newest tokens, in tokens, to the bits of
// seen (B, seen_words(V)), and applies sampler_penalize(). The caller zeroes scratch once, before the first call.
void decode_sample(int* tokens, int* copy, int* positions, float* scratch, float* logits, uint64_t* rng_state,
                   uint32_t* seen, float temperature, int top_k, float top_p, float min_p, float penalty, int B, int V,
                   int Vp, const Execution& exec);
size_t decode_sample_scratch(int B);
// All layers for B texts: x goes through them, and the keys and values of text b become row position[b] of its caches; a text with
// position -1 is left out. In one launch, for heads of 64 and F = 4*C: one text with a capacity of up to 1024 where C is 128, 320, 768,
// 1024, 1280 or 1600, and 2 to 16 texts where it is 128 or 768. decode_layers_runs() is false for other sizes, in fp32, on GPUs other than
// Hopper, and where not all blocks run at once. The caller checks that the model is_plain_gpt2(). packed (decode_layers_packed()): what
// decode_layers_pack() makes of the matrices, to be made again when they change; the vectors are read from `layers`. The caller zeroes
// scratch once, before the first call. Weights, packed, caches and positions are read while the kernel that was launched before may still
// run: that kernel must not write them, and must be an ordinary launch, as decode_embed's.
bool decode_layers_runs(int B, int C, int F, int NH, int capacity);
size_t decode_layers_packed(int num_layers, int C);
void decode_layers_pack(floatX* packed, const DecodeLayers& layers, const Execution& exec);
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec);
size_t decode_layers_scratch(int C, int NH);
// values (num_rows,K), scales (num_rows) | weight (num_rows,K) inout: rounded to values * scales, in floatX. Infinity
// and NaN make their row NaN.
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      const Execution& exec);

// ================================================================================================
// 2. the model
// ================================================================================================

// ---- tensors --------------------------------------------------------------------------------------

// The tensors of gpt2_params (llmc/gpt2.h) by name, in its order: weights of T = floatX, gradients of T = float.
template <class T> struct Parameters {
    T* wte;      // (Vp, C)
    T* wpe;      // (maxT, C)
    T* ln1w;     // (L, C)
    T* ln1b;     // (L, C)
    T* qkvw;     // (L, 3*C, C)
    T* qkvb;     // (L, 3*C)
    T* attprojw; // (L, C, C)
    T* attprojb; // (L, C)
    T* ln2w;     // (L, C)
    T* ln2b;     // (L, C)
    T* fcw;      // (L, F, C)
    T* fcb;      // (L, F)
    T* fcprojw;  // (L, C, F)
    T* fcprojb;  // (L, C)
    T* lnfw;     // (C)
    T* lnfb;     // (C)
    T* lmhead;   // (Vp, C); wte itself unless the head is untied
};

// Parameters is read as an array of pointers in the order of the table.
template <class T> static T** parameter_array(Parameters<T>* p) {
    static_assert(sizeof(Parameters<T>) == NUM_PARAMS * sizeof(T*), "one pointer for each entry of gpt2_params");
    return (T**)p;
}

// A range of values in an array of all parameters.
struct Span {
    size_t place, n;
};
static Span bucket(const GPT2Config* config, int b); // bucket 1 + l is layer l

// View of layer l: the pointers of per-layer tensors are moved to this layer's tensor.
template <class T> static Parameters<T> layer_parameters(Parameters<T> p, const GPT2Config* config, int l) {
    size_t offset = l * bucket(config, 1).n;
    for (int i = 0; i < NUM_PARAMS; i++) { parameter_array(&p)[i] += param_per_layer(i) ? offset : 0; }
    return p;
}

// Activations of B x T tokens, kept for the backward pass. In training, a tensor with an L exists per layer, except: [1] with
// -r 1 or 2, [2] with -r 2, all layers share one, computed again in the backward pass. From +dw of --fp8 on, all layers always share
// these, because columns in fp8 are kept instead. If allocated without training, all share every one.
struct Activations {
    int B, T;          // allocated for this many tokens
    floatX* encoded;   // (B, T, C)
    floatX* ln1;       // (L, B, T, C) [2]
    float* ln1_mean;   // (L, B, T)
    float* ln1_rstd;   // (L, B, T)
    floatX* qkv;       // (L, B, T, 3*C)
    floatX* atty;      // (L, B, T, C)
    float* lse;        // (L, B, NH, T)
    floatX* residual2; // (L, B, T, C): the residual stream after attention
    floatX* ln2;       // (L, B, T, C) [2]
    float* ln2_mean;   // (L, B, T)
    float* ln2_rstd;   // (L, B, T)
    GeluSaved fch;     // (L, B, T, F): GELU's argument, or its slope; in training only
    floatX* fch_gelu;  // (L, B, T, F) [1]
    floatX* residual3; // (L, B, T, C): the residual stream after the MLP
    floatX* projected; // (B, T, C), with --fp8: output of the MLP before the residual sum; in the memory of dbtc
    floatX* lnf;       // (B, T, C)
    float* lnf_mean;   // (B, T)
    float* lnf_rstd;   // (B, T)
    float* losses;     // (B, T)
    floatX* logits;    // (rows, Vp), or what stands for them in linear_cross_entropy_forward
    int* inputs;       // (B, T)
    int* targets;      // (B, T)
    // for the backward pass
    floatX* dresidual; // (B, T, C): gradient of the residual stream; every layer updates it, from the last to the first
    floatX* dbtc;      // (B, T, C): gradients of atty and of the layernorms' outputs, one at a time
    floatX* dqkv;      // (B, T, 3*C), in the memory of logits, whose gradients are not needed any more
    floatX* dfch;      // (B, T, F), also in the memory of logits
    // for one operation at a time; without training for the loss. Attention's terms of dbias stay at its beginning until their sum
    float* scratch;
    float *gelu_terms, *norm1_terms, *norm2_terms; // scratch for sums that wait for the end of a layer
    // 1: every layer has its own tensor; 0: all share one. keep_gelu is for those marked [1], keep_norm for [2], keep for others
    size_t keep, keep_gelu, keep_norm;
    // set by layer_activations: (B, T, C), the residual stream that enters the layer: encoded, or the previous residual3
    const floatX* residual;
};

// View of layer l in a pass over B x T tokens: every pointer to a tensor with an L is moved to this layer's tensor.
static Activations layer_activations(Activations a, const GPT2Config* config, int B, int T, int l) {
    size_t BT = (size_t)B * T, BTC = BT * config->channels, BTF = BT * config->mlp_channels;
    size_t layer_or_0 = a.keep * l, gelu = a.keep_gelu * l, norm = a.keep_norm * l; // 0: all layers share one
    a.residual = l == 0 ? a.encoded : a.residual3 + a.keep * (l - 1) * BTC;
    a.ln1 += norm * BTC, a.ln1_mean += layer_or_0 * BT, a.ln1_rstd += layer_or_0 * BT;
    a.qkv += layer_or_0 * 3 * BTC, a.atty += layer_or_0 * BTC, a.lse += layer_or_0 * BT * config->num_heads;
    a.residual2 += layer_or_0 * BTC, a.residual3 += layer_or_0 * BTC;
    a.ln2 += norm * BTC, a.ln2_mean += layer_or_0 * BT, a.ln2_rstd += layer_or_0 * BT;
    a.fch_gelu += gelu * BTF;
    if (a.fch.tensor) { a.fch.tensor += layer_or_0 * BTF; }
    return a;
}

// For generation: the keys and values of all earlier positions.
struct KeyValueCache {
    int B, capacity; // texts, and the most positions per text
    floatX* keys;    // (L, B, capacity, C)
    floatX* values;  // (L, B, capacity, C)
};

static KeyValueCache layer_cache(KeyValueCache cache, const GPT2Config* config, int l) {
    size_t offset = (size_t)l * cache.B * cache.capacity * config->channels;
    cache.keys += offset, cache.values += offset;
    return cache;
}

// ---- tensors of --fp8 -----------------------------------------------------------------------------
// Training with --fp8: which products have operands in fp8, and how the scale of each tensor follows its values. fp8.cuh
// explains the formats.
//
//     stage      products of qkv, fc and fcproj in each layer, and of the head            operands
//     forward    out = inp weight^T of the layers                                         rows of inp, rows of weight
//     +dx        dinp = dout weight of the layers                                         rows of dout, columns of weight
//     +head      out and dinp of the head                                                 likewise
//     +dw        dweight = dout^T inp of the layers and the head                          columns of dout, columns of inp
//
// dout is in e5m2, which has the range, everything else in e4m3, which has the precision. Attention and its projection, the
// residual stream, layernorm, softmax, sums and the optimizer are as without --fp8. So are validation, samples and
// checkpoints: the fp8 copies of the weights are made anew at the beginning of each step.
//
// Scales are delayed: a tensor is written with a scale that was made before its values were known, from `largest`, the largest
// absolute value of the earlier steps. The scale is a power of two, so scaling is exact. It puts `largest` at 64 to 128 of 448 in
// e4m3 and at 8192 to 16384 of 57344 in e5m2, which is 1/7 to 2/7 of the format's largest number. So values may be 3.5 times as
// large as `largest` before some saturate. After each step, also one that updates no weights, `largest` is halved, but not below the
// step's largest value. After outliers it falls faster: to four times the largest value of the step, if that is less. NaN is left out;
// a tensor with an infinity, or of zeros, keeps its `largest`. For the gradient of the logits it is always dloss, a bound. There are
// no earlier steps at the beginning, so passes over the first micro-batch, without an update,
// measure the values. `largest` is saved with a checkpoint: a resumed run has the same bits. With several GPUs all have the
// maximum of their values, and thus the same scales.
//
// Source: Micikevicius et al. 2022, arXiv:2209.05433; delayed scaling as in NVIDIA's Transformer Engine.

constexpr bool HAS_FP8 = sizeof(floatX) == 2; // FP32 builds have no kernels for fp8, and refuse --fp8

struct alignas(16) Fp8Scale {
    float inverse, scale; // what a stored 1 stands for, and 1 / inverse
};

// In device memory, for all num tensors: tensor i of layer l has number l * FP8_PER_LAYER + i.
struct Fp8Scales {
    int num;
    Fp8Scale* scales; // (num)
    float* amax;      // (num): the largest absolute values of this step so far
    float* largest;   // (num): those of the steps before, decayed
    float* unread;    // (1): takes the largest value of a tensor that is computed again
};

// A tensor (N,C): rows (N,C) and columns (C,N), of which the stages use what they need.
template <class F> struct Fp8Copies {
    F *rows, *columns;
    Fp8Scale* scale;
    float* amax;

    Fp8Tensor<F> to_rows() const { return {rows, NULL, false, &scale->scale, amax}; } // to be written
    Fp8Tensor<F> to_both(bool in_order = false) const { return {rows, columns, in_order, &scale->scale, amax}; }
    Fp8Matrix<F> as_rows() const { return {rows, &scale->inverse}; } // to be read
    Fp8Matrix<F> as_columns() const { return {columns, &scale->inverse}; }
};

// All that --fp8 keeps. Rows are needed at once only, so all layers share them. Columns of activations are for dW: each layer has
// its own, unless -r makes the backward pass compute them again. Gradients are in the memory of the logits.
struct Fp8Memory {
    int stage;                   // Fp8Stage
    bool begun;                  // the scales have been computed
    size_t keep_norm, keep_gelu; // 1: each layer has its own columns, 0: all share one
    Fp8Scales scales;
    E4M3* weights;      // (L, fp8_weights()): rows and columns of qkvw, fcw, fcprojw
    E4M3* head;         // its weight: rows (Vp,C), columns (C,Vp); from +head on
    E4M3* norm_rows;    // (B*T, C): the output of a layernorm
    E4M3* gelu_rows;    // (B*T, max(F, 2*C)); also for rows and columns of the last layernorm's output
    E4M3* ln1_columns;  // (L, C, B*T) with +dw
    E4M3* ln2_columns;  // (L, C, B*T) with +dw
    E4M3* gelu_columns; // (L, F, B*T) with +dw
    E5M2* gradients;    // (fp8_gradients()), behind dfch and dqkv in the memory of the logits
};

// The head takes so many of BT tokens at once: a quarter.
static int fp8_head_tokens(int BT) { return ceil_div(BT, 64) * 16; }

// The tensors of a layer. Without --fp8 all is 0.
struct Fp8Layer {
    int stage;                 // Fp8Stage
    bool new_weights;          // they have to be quantized
    bool keep_norm, keep_gelu; // the forward pass keeps columns of ln1 and ln2, and of gelu
    float* unread;             // of Fp8Scales
    Fp8Copies<E4M3> ln1, ln2, gelu, qkvw, fcw, fcprojw;
    Fp8Copies<E5M2> dqkv, dfch, dfcproj; // gradients of the outputs of qkv, fc and fcproj

    Fp8Tensor<E5M2> gradient(const Fp8Copies<E5M2>& copies) const { // to be written
        return stage == FP8_DW ? copies.to_both() : copies.to_rows();
    }
    // Returns the target for a tensor that the forward pass has already written: the scale is the same, and its largest value is not
    // measured again.
    Fp8Tensor<E4M3> again(const Fp8Copies<E4M3>& copies) const {
        Fp8Tensor<E4M3> to = copies.to_both();
        to.amax = unread;
        return to;
    }
};
// The tensors of the head, of fp8_head_tokens(BT) tokens at a time.
struct Fp8Head {
    Fp8Copies<E4M3> lnf, weight;
    Fp8Copies<E5M2> dlogits;
};

static Fp8Layer fp8_layer(const Fp8Memory& m, const GPT2Config* config, int BT, int l, bool new_weights);
static Fp8Head fp8_head(const Fp8Memory& m, const GPT2Config* config, int BT, floatX* logits);

// ---- the model ------------------------------------------------------------------------------------

struct GPT2Options {
    int recompute;                                         // level of -r: 0, 1 or 2
    bool saves_slope, master_weights, stochastic_rounding; // saves_slope: of GELU, for the backward pass, where it can
    uint64_t seed;                                         // for stochastic rounding
    bool muon = false;                                     // there may be updates by Muon
    bool defers_updates = false;                           // where it can
    int fp8 = FP8_OFF;                                     // Fp8Stage
};

// The matrices of a loaded model in 8 bits, for generation (--weights).
struct Weights8 {
    WeightFormat format = WEIGHTS_FULL; // then there is nothing else
    uint8_t* values = NULL;             // (model_size): the place of a weight is its place in the model's array
    float* scales = NULL;               // one for each row of a matrix: weights8_row() of its place, and on
};

struct GPT2 {
    GPT2Config config;
    GPT2Options options;
    Execution exec;          // of its operations; its own stream
    bool after_event;        // exec.after_event
    floatX* params_memory;   // (model_size) in the order of param_place
    Weights8 weights8;       // of a loaded model with --weights: its matrices in 8 bits
    float* master_memory;    // (share_size) fp32 weights; NULL when params are float, or without master weights
    float* grads_memory;     // (model_size)
    float* own_grads;        // (share_size): sums over the ranks; without ZeRO-1 the same memory as grads_memory
    float* m_memory;         // (share_size), AdamW's first moment, or Muon's momentum
    float* v_memory;         // (share_size, with Muon without matrices), AdamW's second moment
    int* deferred_done;      // how far each worker has got with the deferred update: DeferredUpdate
    bool update_is_deferred; // a deferred update is neither finished nor given to a forward pass
    DeferredUpdate update;   // the one that a forward pass has
    int muon_layers;         // layers that Muon updates at once
    Parameters<floatX> params;
    Parameters<float> grads;
    StepState* state; // in device memory
    Activations acts;
    Fp8Memory fp8;
    void* arenas[2];  // the two allocations: weights and optimizer state; activations
    size_t num_bytes; // of both arenas
};

// ---- the parts of a layer, in floatX or in fp8 ----------------------------------------------------
// With --fp8, a matmul reads operands in fp8, which the operation before it has written. The table above lists these operands for
// each stage. `q` holds those of the layer. Without --fp8, and outside of training, q.stage is FP8_OFF.

// The purpose of a pass. The first micro-batch of a step meets new weights, and overwrites gradients instead of adding to them.
enum PassKind { EVALUATE, TRAIN, TRAIN_FIRST };

// A matrix in floatX and, where it is used, in fp8.
template <class F> struct Operand {
    const floatX* values;
    Fp8Copies<F> fp8;
    Operand(const floatX* values, const Fp8Copies<F>& fp8 = {}) : values(values), fp8(fp8) {}
};

// The residual stream: value, or value + addend, which the next layernorm writes to sum. addend: only with --fp8, where the last
// product of a layer does not add to the stream.
struct ResidualStream {
    const floatX *value, *addend = NULL; // (B, T, C)
    floatX* sum = NULL;
};

// The tensors in fp8 of layer l in such a pass.
static Fp8Layer layer_in_fp8(const GPT2* model, PassKind kind, int BT, int l) {
    if (kind == EVALUATE || model->fp8.stage == FP8_OFF) { return {}; }
    return fp8_layer(model->fp8, &model->config, BT, l, kind == TRAIN_FIRST);
}

// The outputs and the parameters of a layernorm.
struct Norm {
    floatX* out;                 // (B, T, C)
    float *mean, *rstd;          // (B, T)
    const floatX *weight, *bias; // (C)
    float epsilon;               // added to the variance
};

// norm.out, or with --fp8 also or only `to`, = the layernorm of the residual stream x (N,C).
static void norm_forward(const Norm& norm, const Fp8Layer& q, const Fp8Copies<E4M3>& to, const ResidualStream& x, int N,
                         int C, const Execution& exec) {
    if (to.rows) {
        if constexpr (HAS_FP8) {
            bool dw = q.stage == FP8_DW;
            layernorm_quantize(dw && q.keep_norm ? to.to_both() : to.to_rows(), dw ? NULL : norm.out, x.sum, norm.mean,
                               norm.rstd, x.value, x.addend, norm.weight, norm.bias, N, C, norm.epsilon, exec);
        }
    } else if (x.addend) {
        fused_residual_layernorm_forward(x.sum, norm.out, norm.mean, norm.rstd, x.value, x.addend, norm.weight,
                                         norm.bias, N, C, norm.epsilon, exec);
    } else {
        layernorm_forward(norm.out, norm.mean, norm.rstd, x.value, norm.weight, norm.bias, N, C, norm.epsilon, exec);
    }
}

// Quantizes a weight (OC,C), if it is used in fp8 and new: also as columns if the backward pass uses them. dX sums over the rows of
// a weight as they come.
static void quantize_weight(const Fp8Layer& q, const Operand<E4M3>& weight, int C, int OC, const Execution& exec) {
    if constexpr (HAS_FP8) {
        if (!q.new_weights) { return; }
        quantize(q.stage >= FP8_DX ? weight.fp8.to_both(true) : weight.fp8.to_rows(), weight.values, OC, C, exec);
    }
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC)
static void linear_forward(floatX* out, const Fp8Layer& q, const Operand<E4M3>& inp, const Operand<E4M3>& weight,
                           const floatX* bias, int N, int C, int OC, const Execution& exec) {
    if (q.stage == FP8_OFF) { return matmul_forward(out, NULL, inp.values, weight.values, bias, NULL, N, C, OC, exec); }
    if constexpr (HAS_FP8) {
        quantize_weight(q, weight, C, OC, exec);
        matmul_fp8_forward(out, inp.fp8.as_rows(), weight.fp8.as_rows(), bias, N, C, OC, exec);
    }
}

// The first half of the MLP: out (N,OC) = the activation of inp (N,C) weight (OC,C)^T + bias (OC); saved: for the backward pass. GELU's
// tanh form is in the matmul's epilogue, other activations are a pass of their own.
static void linear_activation_forward(floatX* out, GeluSaved saved, Activation kind, const Fp8Layer& q,
                                      const Operand<E4M3>& inp, const Operand<E4M3>& weight, const floatX* bias, int N,
                                      int C, int OC, const Execution& exec) {
    if (q.stage == FP8_OFF && kind == ACT_GELU_TANH) {
        return matmul_forward(out, saved, inp.values, weight.values, bias, NULL, N, C, OC, exec);
    }
    if (q.stage == FP8_OFF) {
        floatX* sum = saved.tensor && !saved.is_slope ? saved.tensor : out;
        matmul_forward(sum, NULL, inp.values, weight.values, bias, NULL, N, C, OC, exec);
        return activation_forward(out, saved.is_slope ? saved.tensor : NULL, sum, (size_t)N * OC, kind, exec);
    }
    if constexpr (HAS_FP8) {
        quantize_weight(q, weight, C, OC, exec);
        Fp8Matrix<E4M3> x = inp.fp8.as_rows(), w = weight.fp8.as_rows();
        bool dw = q.stage == FP8_DW;
        if (saved.is_slope) { return matmul_fp8_gelu(q.gelu.to_both(), saved.tensor, x, w, bias, N, C, OC, exec); }
        matmul_fp8_forward(saved.tensor, x, w, bias, N, C, OC, exec);
        quantize_gelu(dw && q.keep_gelu ? q.gelu.to_both() : q.gelu.to_rows(), dw ? NULL : out, saved.tensor, N, OC,
                      exec);
    }
}

// Returns the residual stream after the MLP: residual (N,C) + inp (N,F) weight (C,F)^T + bias (C), which becomes sum. product
// (N,C) is scratch.
static ResidualStream linear_residual_forward(floatX* sum, floatX* product, const Fp8Layer& q, const Operand<E4M3>& inp,
                                              const Operand<E4M3>& weight, const floatX* bias, const floatX* residual,
                                              int N, int F, int C, const Execution& exec) {
    if (q.stage == FP8_OFF) {
        matmul_forward(sum, NULL, inp.values, weight.values, bias, residual, N, F, C, exec);
        return {sum};
    }
    linear_forward(product, q, inp, weight, bias, N, F, C, exec);
    return {residual, product, sum};
}

// Computes again what the forward pass has not kept of a layer. With +dw only the columns are read; rows are written, too.
static void recompute_forward(const Activations& a, const Fp8Layer& q, const Norm& norm1, const Norm& norm2,
                              Activation kind, int N, int C, int F, const Execution& exec) {
    if (q.stage == FP8_DW) {
        if constexpr (HAS_FP8) {
            if (!q.keep_gelu) { quantize_gelu(q.again(q.gelu), NULL, a.fch.tensor, N, F, exec); }
            if (q.keep_norm) { return; }
            layernorm_quantize(q.again(q.ln1), NULL, NULL, norm1.mean, norm1.rstd, a.residual, NULL, norm1.weight,
                               norm1.bias, N, C, norm1.epsilon, exec);
            layernorm_quantize(q.again(q.ln2), NULL, NULL, norm2.mean, norm2.rstd, a.residual2, NULL, norm2.weight,
                               norm2.bias, N, C, norm2.epsilon, exec);
        }
        return;
    }
    if (!a.keep_gelu) { activation_forward(a.fch_gelu, NULL, a.fch.tensor, (size_t)N * F, kind, exec); }
    if (a.keep_norm) { return; }
    norm_forward(norm1, q, {}, {a.residual}, N, C, exec);
    norm_forward(norm2, q, {}, {a.residual2}, N, C, exec);
}

// Quantizes the gradient dout (N,OC), if it is used in fp8.
static void quantize_gradient(const Fp8Layer& q, const Operand<E5M2>& dout, int N, int OC, const Execution& exec) {
    if constexpr (HAS_FP8) {
        if (q.stage >= FP8_DX) { quantize(q.gradient(dout.fp8), dout.values, N, OC, exec); }
    }
}

// dweight (OC,C) = dout (N,OC)^T inp (N,C), or += if accumulate
static void linear_backward_weight(float* dweight, float* scratch, const Fp8Layer& q, const Operand<E5M2>& dout,
                                   const Operand<E4M3>& inp, int N, int C, int OC, bool accumulate,
                                   const Execution& exec) {
    if (q.stage < FP8_DW || !inp.fp8.columns) {
        return matmul_backward_weight(dweight, scratch, dout.values, inp.values, N, C, OC, accumulate, exec);
    }
    if constexpr (HAS_FP8) {
        matmul_fp8_backward_weight(dweight, dout.fp8.as_columns(), inp.fp8.as_columns(), N, C, OC, accumulate, exec);
    }
}

// dinp (N,C) = dout (N,OC) weight (OC,C), and dweight
static void linear_backward(floatX* dinp, float* dweight, float* scratch, const Fp8Layer& q, const Operand<E5M2>& dout,
                            const Operand<E4M3>& inp, const Operand<E4M3>& weight, int N, int C, int OC,
                            bool accumulate, const Execution& exec) {
    linear_backward_weight(dweight, scratch, q, dout, inp, N, C, OC, accumulate, exec);
    if (q.stage < FP8_DX || !weight.fp8.columns) {
        return matmul_backward_input(dinp, NULL, scratch, dout.values, weight.values, NULL, N, C, OC, exec);
    }
    if constexpr (HAS_FP8) {
        matmul_fp8_backward_input(dinp, dout.fp8.as_rows(), weight.fp8.as_columns(), N, C, OC, exec);
    }
}

// Through the second product of the MLP, and the activation: dfch (N,F) = dout (N,C) weight (C,F) times the activation's derivative;
// dbias (F), which may be NULL, += its column sums.
static void linear_activation_backward(const Operand<E5M2>& dfch, float* dbias, float* terms, GeluSaved saved,
                                       Activation kind, const Fp8Layer& q, const Operand<E5M2>& dout,
                                       const Operand<E4M3>& weight, int N, int F, int C, const Execution& exec) {
    floatX* out = (floatX*)dfch.values;
    if (q.stage < FP8_DX && (saved.is_slope || kind == ACT_GELU_TANH)) {
        return matmul_backward_input(out, dbias, terms, dout.values, weight.values, saved, N, F, C, exec);
    }
    if (q.stage < FP8_DX) {
        matmul_backward_input(out, NULL, terms, dout.values, weight.values, NULL, N, F, C, exec);
        activation_backward(out, out, saved.tensor, (size_t)N * F, kind, exec);
        if (dbias) { matmul_backward_bias(dbias, terms, out, N, F, exec); }
        return;
    }
    if constexpr (HAS_FP8) {
        Fp8Tensor<E5M2> to = q.gradient(dfch.fp8);
        Fp8Matrix<E5M2> dy = dout.fp8.as_rows();
        Fp8Matrix<E4M3> w = weight.fp8.as_columns();
        if (saved.is_slope) { return matmul_fp8_gelu_backward(to, dbias, terms, dy, w, saved.tensor, N, F, C, exec); }
        matmul_fp8_backward_input(out, dy, w, N, F, C, exec);
        quantize_gelu_backward(to, out, out, saved.tensor, N, F, exec);
        if (dbias) { matmul_backward_bias(dbias, terms, out, N, F, exec); }
    }
}

// ---- forward --------------------------------------------------------------------------------------

// Makes exec wait until the weights of bucket b are gathered, and finishes their deferred update.
static void await_bucket(int b, const Execution& exec);
// Finishes the deferred update of all layers, if there is one, without a forward pass.
static void gpt2_finish_update(GPT2* model);

static Norm first_norm(const Activations& a, const Parameters<floatX>& w, const GPT2Config* config) {
    return {a.ln1, a.ln1_mean, a.ln1_rstd, w.ln1w, w.ln1b, config->norm_epsilon};
}
static Norm second_norm(const Activations& a, const Parameters<floatX>& w, const GPT2Config* config) {
    return {a.ln2, a.ln2_mean, a.ln2_rstd, w.ln2w, w.ln2b, config->norm_epsilon};
}
static Norm last_norm(const Activations* acts, const Parameters<floatX>& p, const GPT2Config* config) {
    return {acts->lnf, acts->lnf_mean, acts->lnf_rstd, p.lnfw, p.lnfb, config->norm_epsilon};
}

// Runs acts->inputs (B,T) through all layers and the last layernorm. All activations stay in acts, but for fch without
// training, when no backward pass follows; if cache is not NULL, keys and values are copied to it. A layer adds to the residual
// stream twice, after attention (residual2) and after the MLP (residual3).
static void gpt2_forward(GPT2* model, Activations* acts, int B, int T, PassKind kind, KeyValueCache* cache,
                         const Execution& exec) {
    require((size_t)B * T <= (size_t)acts->B * acts->T && T <= model->config.max_seq_len);
    if (!exec.update) { gpt2_finish_update(model); }
    const GPT2Config* config = &model->config;
    int L = config->num_layers, NH = config->num_heads, C = config->channels, F = config->mlp_channels, BT = B * T;
    Activation activation = (Activation)config->activation;
    ResidualStream x = {acts->encoded};

    await_bucket(0, exec);
    encoder_forward(acts->encoded, acts->inputs, model->params.wte, model->params.wpe, B, T, C, exec);
    for (int l = 0; l < L; l++) {
        Range range("layer %d", l);
        await_bucket(l + 1, exec);
        Parameters<floatX> w = layer_parameters(model->params, config, l);
        Activations a = layer_activations(*acts, config, B, T, l);
        Fp8Layer q = layer_in_fp8(model, kind, BT, l);
        // attention
        norm_forward(first_norm(a, w, config), q, q.ln1, x, BT, C, exec);
        linear_forward(a.qkv, q, {a.ln1, q.ln1}, {w.qkvw, q.qkvw}, w.qkvb, BT, C, 3 * C, exec);
        if (cache) {
            KeyValueCache c = layer_cache(*cache, config, l);
            decode_cache_fill(c.keys, c.values, a.qkv, B, T, C, c.capacity, exec);
        }
        attention_forward(a.atty, a.lse, a.qkv, B, T, C, NH, attention_scale(config, l), exec);
        matmul_forward(a.residual2, NULL, a.atty, w.attprojw, w.attprojb, a.residual, BT, C, C, exec);
        // MLP
        norm_forward(second_norm(a, w, config), q, q.ln2, {a.residual2}, BT, C, exec);
        GeluSaved saved = kind == EVALUATE ? GeluSaved::not_kept() : a.fch;
        linear_activation_forward(a.fch_gelu, saved, activation, q, {a.ln2, q.ln2}, {w.fcw, q.fcw}, w.fcb, BT, C, F,
                                  exec);
        x = linear_residual_forward(a.residual3, a.projected, q, {a.fch_gelu, q.gelu}, {w.fcprojw, q.fcprojw},
                                    w.fcprojb, a.residual2, BT, F, C, exec);
    }
    await_bucket(L + 1, exec);
    norm_forward(last_norm(acts, model->params, config), {}, {}, x, BT, C, exec);
}

// The losses with the head in fp8, and what gpt2_backward would do for the head, a quarter of the tokens at a time: dbtc becomes the
// gradient of lnf, and the gradient of the head's weight is written, or added to unless `first`.
static void head_in_fp8(GPT2* model, int BT, bool first, const Execution& exec) {
    if constexpr (HAS_FP8) {
        const GPT2Config* config = &model->config;
        Activations* acts = &model->acts;
        int V = config->vocab_size, Vp = config->padded_vocab_size, C = config->channels, most = fp8_head_tokens(BT);
        bool dw = model->fp8.stage == FP8_DW;
        const float* dloss = &model->state->dloss;
        Fp8Head q = fp8_head(model->fp8, config, BT, acts->logits);
        if (first) { quantize(q.weight.to_both(true), model->params.lmhead, Vp, C, exec); }
        for (int begin = 0; begin < BT; begin += most) {
            int n = std::min(most, BT - begin);
            bool add = !first || begin > 0;
            const floatX* inp = acts->lnf + (size_t)begin * C;
            float* losses = acts->losses + begin;
            const int* targets = acts->targets + begin;
            quantize(dw ? q.lnf.to_both() : q.lnf.to_rows(), inp, n, C, exec);
            matmul_fp8_forward(acts->logits, q.lnf.as_rows(), q.weight.as_rows(), NULL, n, C, Vp, exec);
            fused_classifier(acts->logits, losses, targets, dw ? NULL : dloss, n, V, Vp, exec);
            if (dw) {
                quantize_dlogits(q.dlogits.to_both(), acts->logits, losses, targets, dloss, n, V, Vp, exec);
                matmul_fp8_backward_weight(model->grads.lmhead, q.dlogits.as_columns(), q.lnf.as_columns(), n, C, Vp,
                                           add, exec);
            } else {
                quantize(q.dlogits.to_rows(), acts->logits, n, Vp, exec);
                matmul_backward_weight(model->grads.lmhead, acts->scratch, acts->logits, inp, n, C, Vp, add, exec);
            }
            matmul_fp8_backward_input(acts->dbtc + (size_t)begin * C, q.dlogits.as_rows(), q.weight.as_columns(), n, C,
                                      Vp, exec);
        }
    }
}

// Call after gpt2_forward. Computes the losses of all B x T tokens; state->loss += scale * sum of the losses. For training, it also
// prepares the gradient of the logits, which is scaled by state->dloss: here, by fused_classifier, or in gpt2_backward, where
// linear_cross_entropy_choice is kernel 2.
static void gpt2_loss(GPT2* model, Activations* acts, int B, int T, PassKind kind, float scale, const Execution& exec) {
    int V = model->config.vocab_size, Vp = model->config.padded_vocab_size, C = model->config.channels, BT = B * T;
    const float* dloss = kind == EVALUATE ? NULL : &model->state->dloss;
    if (kind != EVALUATE && model->fp8.stage >= FP8_HEAD) {
        head_in_fp8(model, BT, kind == TRAIN_FIRST, exec);
    } else {
        linear_cross_entropy_forward(acts->logits, acts->losses, acts->scratch, acts->lnf, model->params.lmhead,
                                     acts->targets, dloss, BT, C, V, Vp, exec);
    }
    mean_loss(&model->state->loss, acts->losses, BT, scale, exec);
}

// ---- backward -------------------------------------------------------------------------------------

// Begins the gradients of a step: zeroes those of the vectors, of wpe and, unless it is the head's weight, too, of wte, because their
// kernels only add.
// The first micro-batch overwrites those of matrices; the head's weight's by the head's product, before encoder_backward adds to wte.
static void zero_gradients(GPT2* model);

// Call after gpt2_loss, with the same kind. Computes the gradients of all parameters; TRAIN_FIRST overwrites them, otherwise they
// are added to. The gradient of a linear layer's bias is the sum of dout over all tokens: where it can, the operation that computes
// dout also sums it, from registers, to a row of partial sums for each block (elsewhere: matmul_backward_bias). These are added up at the end of the layer, in one
// launch (llmc/column_sums.cuh), so nothing may write over them before.
static void gpt2_backward(GPT2* model, int B, int T, PassKind kind, const Execution& exec) {
    const GPT2Config* config = &model->config;
    const Parameters<floatX>* p = &model->params;
    const Parameters<float>* g = &model->grads;
    Activations* acts = &model->acts;
    int L = config->num_layers, NH = config->num_heads, C = config->channels, F = config->mlp_channels, BT = B * T;
    int V = config->vocab_size, Vp = config->padded_vocab_size;
    floatX *dresidual = acts->dresidual, *dbtc = acts->dbtc; // (B,T,C)
    float* scratch = acts->scratch + attention_backward_bias_terms(B, T, C, NH);
    bool add = kind != TRAIN_FIRST;
    Activation activation = (Activation)config->activation;
    ColumnSums sums;
    Execution layer = exec;
    layer.sums = &sums;
    if (!add) { zero_gradients(model); }

    if (model->fp8.stage < FP8_HEAD) {
        linear_cross_entropy_backward(dbtc, g->lmhead, acts->scratch, acts->logits, acts->losses, acts->lnf, p->lmhead,
                                      &model->state->dloss, BT, C, Vp, add, exec);
    }
    const floatX* residual = layer_activations(*acts, config, B, T, L).residual;
    layernorm_backward(dresidual, layer_parameters(*g, config, L - 1).fcprojb, g->lnfw, g->lnfb, acts->scratch, dbtc,
                       NULL, residual, p->lnfw, acts->lnf_mean, acts->lnf_rstd, BT, C, exec);
    gradients_ready(L + 1, exec);
    for (int l = L - 1; l >= 0; l--) {
        Range range("layer %d", l);
        Parameters<floatX> w = layer_parameters(*p, config, l);
        Parameters<float> d = layer_parameters(*g, config, l);
        Activations a = layer_activations(*acts, config, B, T, l);
        Fp8Layer q = layer_in_fp8(model, kind, BT, l);
        recompute_forward(a, q, first_norm(a, w, config), second_norm(a, w, config), activation, BT, C, F, layer);
        // MLP; dresidual's sums, the gradient of fcprojb, were added by the layernorm after this layer
        Operand<E5M2> dfcproj = {dresidual, q.dfcproj}, dfch = {a.dfch, q.dfch}, dqkv = {a.dqkv, q.dqkv};
        quantize_gradient(q, dfcproj, BT, C, layer);
        linear_backward_weight(d.fcprojw, scratch, q, dfcproj, {a.fch_gelu, q.gelu}, BT, F, C, add, layer);
        linear_activation_backward(dfch, d.fcb, acts->gelu_terms, a.fch, activation, q, dfcproj, {w.fcprojw, q.fcprojw},
                                   BT, F, C, layer);
        linear_backward(dbtc, d.fcw, scratch, q, dfch, {a.ln2, q.ln2}, {w.fcw, q.fcw}, BT, C, F, add, layer);
        layernorm_backward(dresidual, d.attprojb, d.ln2w, d.ln2b, acts->norm2_terms, dbtc, dresidual, a.residual2,
                           w.ln2w, a.ln2_mean, a.ln2_rstd, BT, C, layer);
        // attention
        linear_backward(dbtc, d.attprojw, scratch, q, dresidual, a.atty, w.attprojw, BT, C, C, add, layer);
        attention_backward(a.dqkv, d.qkvb, acts->scratch, dbtc, a.qkv, a.atty, a.lse, B, T, C, NH,
                           attention_scale(config, l), layer);
        quantize_gradient(q, dqkv, BT, 3 * C, layer);
        linear_backward(dbtc, d.qkvw, scratch, q, dqkv, {a.ln1, q.ln1}, {w.qkvw, q.qkvw}, BT, C, 3 * C, add, layer);
        float* earlier_bias = l > 0 ? layer_parameters(*g, config, l - 1).fcprojb : NULL;
        layernorm_backward(dresidual, earlier_bias, d.ln1w, d.ln1b, acts->norm1_terms, dbtc, dresidual, a.residual,
                           w.ln1w, a.ln1_mean, a.ln1_rstd, BT, C, layer);
        column_sums_flush(layer);
        gradients_ready(1 + l, exec);
    }
    encoder_backward(g->wte, g->wpe, (int*)acts->scratch, dresidual, acts->inputs, B, T, C, V, exec);
    gradients_ready(0, exec);
}

// ---- parameters in memory, and how several GPUs share them ----------------------------------------
//     embeddings | layer 0 | layer 1 | ... | last layernorm, head    one array of model_size() values: weights, or gradients
//     bucket 0   | 1       | 2       | ... | L + 1                   several GPUs exchange one at a time
//     0          | 1   2   | 3   4   | ... | 2L + 1    2L + 2        pieces: of a layer the matrices, then the vectors; an untied head
//
// With ZeRO-1 each bucket is divided into equal shares, one for each rank. With Muon only bucket 0 is. The other buckets are
// dealt to the ranks as wholes: bucket 1 to rank 0, bucket 2 to rank 1 and so on.

static int num_buckets(const GPT2Config* config) { return config->num_layers + 2; }

// The kind of the bucket that tensor p is in: 0 the embeddings, 1 a layer, 2 the last layernorm and an untied head.
static int bucket_kind(int p) { return gpt2_params[p].place == PLACE_EMBEDDINGS ? 0 : param_per_layer(p) ? 1 : 2; }

// Bucket 0 is wte and wpe, bucket 1 + l is layer l, the last one is the last layernorm and an untied head. n includes padding at the end, with
// which each of several GPUs has an equal share that consists of whole 16-byte vectors.
static Span bucket(const GPT2Config* config, int b) {
    size_t sizes[3] = {0, 0, 0}; // of each kind
    size_t unit = (size_t)8 * ranks().env.num_ranks;
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (param_copies(config, p) > 0) { sizes[bucket_kind(p)] += param_layer_size(config, p); }
    }
    for (size_t& n : sizes) { n = ceil_div(n, unit) * unit; }
    return {b == 0 ? 0 : sizes[0] + (b - 1) * sizes[1], sizes[b == 0 ? 0 : b <= config->num_layers ? 1 : 2]};
}

static size_t model_size(const GPT2Config* config) { // number of parameters with padding
    Span last = bucket(config, num_buckets(config) - 1);
    return last.place + last.n;
}

// Offset of tensor p of layer l in this array, in values; l is 0 for tensors that are not per layer. In a bucket, tensors are in the
// order of their places, and those of the same place are in the order of gpt2_params.
static size_t param_place(const GPT2Config* config, int p, int l) {
    int kind = bucket_kind(p);
    size_t place = bucket(config, kind == 0 ? 0 : kind == 1 ? 1 + l : num_buckets(config) - 1).place;
    for (int q = 0; q < NUM_PARAMS; q++) {
        ParamPlace of_p = gpt2_params[p].place, of_q = gpt2_params[q].place;
        bool before = of_q < of_p || (of_q == of_p && q < p);
        if (bucket_kind(q) == kind && before && param_copies(config, q) > 0) { place += param_layer_size(config, q); }
    }
    return place;
}

// A piece is the tensors of the same place and layer, which follow one another. Piece 0 is wte and wpe, pieces 1 + 2l and 2 + 2l are
// the matrices and the vectors of layer l, piece 2L + 1 is the last layernorm, and piece 2L + 2 an untied head.
static int num_pieces(const GPT2Config* config) { return 2 * config->num_layers + 2 + config->untied_head; }
static ParamPlace piece_kind(const GPT2Config* config, int i) {
    if (i == 0) { return PLACE_EMBEDDINGS; }
    if (i > 2 * config->num_layers) { return i == 2 * config->num_layers + 1 ? PLACE_LAST_NORM : PLACE_HEAD; }
    return i % 2 == 1 ? PLACE_LAYER_MATRICES : PLACE_LAYER_VECTORS;
}

static Span parameter_piece(const GPT2Config* config, int i) {
    int l = (i - 1) / 2;
    Span piece = {SIZE_MAX, 0};
    for (int p = 0; p < NUM_PARAMS; p++) {
        if (gpt2_params[p].place != piece_kind(config, i)) { continue; }
        piece.place = std::min(piece.place, param_place(config, p, param_per_layer(p) ? l : 0));
        piece.n += param_layer_size(config, p);
    }
    return piece;
}

// Tensors that follow one another in a piece and have the same weight decay; in GPT-2, all tensors of the piece.
struct DecayRange {
    size_t place, n;
    bool decay;
};
// Returns the range of piece i that has the value at `place`.
static DecayRange decay_range(const GPT2Config* config, int i, size_t place) {
    DecayRange range = {parameter_piece(config, i).place, 0, false};
    for (int p = 0; p < NUM_PARAMS; p++) {
        const ParamInfo* info = &gpt2_params[p];
        if (info->place != piece_kind(config, i)) { continue; }
        if (range.n == 0 || info->decay != range.decay) {
            if (place < range.place + range.n) { break; }
            range = {range.place + range.n, 0, info->decay};
        }
        range.n += param_layer_size(config, p);
    }
    return range;
}

// With Muon: how many of the first l layers belong to the rank. Without ZeRO-1 it is all of them.
static size_t layers_of_rank(int l, int rank) {
    int shares = ranks().num_shares;
    return (l - rank % shares + shares - 1) / shares;
}

// With ZeRO-1 (-z 1) a rank keeps moments and master weights only of its share of each bucket, and updates only these
// weights. Its shares follow one another in memory: the share of bucket b begins at own_place there. Without ZeRO-1 a share is
// the whole bucket, and own_place equals place. n is 0 if the bucket belongs to another rank.
struct Share {
    size_t place, n, own_place;
};
static Share share_of(const GPT2Config* config, int b, int rank) {
    Span whole = bucket(config, b);
    int shares = ranks().num_shares, owner = bucket_owner(b);
    size_t n = whole.n / shares;
    if (owner < 0) { return {whole.place + (shares > 1 ? rank * n : 0), n, whole.place / shares}; }
    size_t own_place = bucket(config, 0).n / shares + layers_of_rank(b - 1, rank) * bucket(config, 1).n;
    return {whole.place, rank == owner ? whole.n : 0, own_place};
}

// This rank's share of bucket b. In a run with Muon, AdamW's second moment leaves out the matrices of the layers: for such an
// array, `matrices` is false.
static Share own_share(const GPT2Config* config, int b, bool matrices = true) {
    int L = config->num_layers;
    Share share = share_of(config, b, ranks().env.rank);
    if (matrices || b == 0) { return share; }
    size_t n = parameter_piece(config, 1).n;
    share.own_place -= layers_of_rank(b - 1, ranks().env.rank) * n;
    if (b <= L && share.n > 0) { share.place += n, share.n -= n; }
    return share;
}
static size_t share_size(const GPT2Config* config, bool matrices = true) { // values of all shares of this rank
    Share last = own_share(config, num_buckets(config) - 1, matrices);
    return last.own_place + last.n;
}

// Calls use(i, place, own_place, n, decay) for what the share of `rank` has of piece i, for each piece in bucket b: once for each range
// of the same weight decay. own_place is a place in the memory of that rank.
template <class Use> static void for_each_piece(const GPT2Config* config, int b, int rank, Use use) {
    Share share = share_of(config, b, rank);
    int first = b == 0 ? 0 : 2 * b - 1, last = b == 0 ? 0 : std::min(2 * b, num_pieces(config) - 1);
    for (int i = first; i <= last; i++) {
        Span piece = parameter_piece(config, i);
        size_t place = std::max(piece.place, share.place), end = std::min(piece.place + piece.n, share.place + share.n);
        while (place < end) {
            DecayRange range = decay_range(config, i, place);
            size_t n = std::min(range.place + range.n, end) - place;
            use(i, place, share.own_place + (place - share.place), n, range.decay);
            place += n;
        }
    }
}

// own (share_size) = this rank's shares of whole (model_size).
static void keep_shares(const GPT2Config* config, float* own, const float* whole, bool matrices,
                        const Execution& exec) {
    for (int b = 0; b < num_buckets(config); b++) {
        Share share = own_share(config, b, matrices);
        cudaCheck(cudaMemcpyAsync(own + share.own_place, whole + share.place, share.n * sizeof(float),
                                  cudaMemcpyDeviceToDevice, exec.stream));
    }
}

// whole (model_size) = own (share_size) of all ranks, and 0 for matrices that are not there. All ranks must call it.
static void join_shares(const GPT2Config* config, float* whole, const float* own, bool matrices,
                        const Execution& exec) {
    if (!matrices) { cudaCheck(cudaMemsetAsync(whole, 0, model_size(config) * sizeof(float), exec.stream)); }
    for (int b = 0; b < num_buckets(config); b++) {
        Span span = bucket(config, b);
        bool skips = !matrices && b >= 1 && b <= config->num_layers;
        size_t skipped = skips ? parameter_piece(config, 2 * b - 1).n : 0;
        float* to = whole + span.place + skipped;
        const float* from = own + own_share(config, b, matrices).own_place;
        if (ranks().num_shares > 1) {
            gather_shares(b, to, from, span.n - skipped, exec);
        } else {
            cudaCheck(
                cudaMemcpyAsync(to, from, (span.n - skipped) * sizeof(float), cudaMemcpyDeviceToDevice, exec.stream));
        }
    }
}

// Calls copy(place, offset, n) for each tensor of each layer. Its n values begin at `place` in the model's arrays, which are
// ordered by layer, and at `offset` in the arrays of a checkpoint, which are ordered by tensor.
template <class Copy> static void for_each_tensor(const GPT2Config* config, Copy copy) {
    for (int p = 0; p < NUM_PARAMS; p++) {
        size_t n = param_layer_size(config, p);
        for (int l = 0; l < param_copies(config, p); l++) {
            copy(param_place(config, p, l), param_offset(config, p) + l * n, n);
        }
    }
}

template <class T> static void point_parameters(Parameters<T>* p, T* memory, const GPT2Config* config) {
    for (int i = 0; i < NUM_PARAMS; i++) { parameter_array(p)[i] = memory + param_place(config, i, 0); }
    if (!config->untied_head) { p->lmhead = p->wte; }
}

static void zero_gradients(GPT2* model) {
    const GPT2Config* config = &model->config;
    for (int i = 0; i < num_pieces(config); i++) {
        ParamPlace kind = piece_kind(config, i);
        if (kind == PLACE_LAYER_MATRICES || kind == PLACE_HEAD) { continue; }
        Span piece = parameter_piece(config, i);
        if (kind == PLACE_EMBEDDINGS && !config->untied_head) { // only wpe, which is the last of them
            size_t wte = model->grads.wpe - model->grads.wte;
            piece.place += wte, piece.n -= wte;
        }
        float* gradients = model->grads_memory + piece.place;
        cudaCheck(cudaMemsetAsync(gradients, 0, piece.n * sizeof(float), model->exec.stream));
    }
}

// ---- the deferred update --------------------------------------------------------------------------
// AdamW updates layers while the next forward pass runs (adamw_state.cuh). In a step:
//
//     gpt2_update        updates the embeddings, the first layer and the last layernorm, and defers the other layers: defer_update
//     launch_micro_step  the first of a step gives the deferred update to its forward pass: with_deferred_update
//     await_bucket       in the forward pass, before each layer: finishes the update of that layer
//
// Other readers of the weights or of the optimizer's state, such as samples, validation and checkpoints, call
// gpt2_finish_update first.

// Whether the matrices of a layer have weight decay and its vectors have none: a DeferredUpdate knows no other case.
static bool only_matrices_decay() {
    for (const ParamInfo& info : gpt2_params) {
        if (info.place == PLACE_LAYER_MATRICES && !info.decay) { return false; }
        if (info.place == PLACE_LAYER_VECTORS && info.decay) { return false; }
    }
    return true;
}

// Whether updates are deferred. Results are bitwise identical with and without.
static bool deferred_update_on(const GPT2* model) {
    const GPT2Options* o = &model->options;
    return o->defers_updates && only_matrices_decay() && is_alone() && !o->muon && !o->fp8 && sizeof(floatX) == 2 &&
           has_sm90a();
}

// Returns the update of all layers except the first.
static DeferredUpdate make_deferred_update(const GPT2* model) {
    const GPT2Config* config = &model->config;
    Span matrices = parameter_piece(config, 1), vectors = parameter_piece(config, 2);
    size_t at = matrices.place;
    DeferredUpdate w = {};
    w.params = model->params_memory + at, w.grads = model->own_grads + at;
    w.m = model->m_memory + at, w.v = model->v_memory + at;
    if (model->master_memory) {
        w.master = model->master_memory + at;
        if (model->options.stochastic_rounding) { w.seed = (uint32_t)splitmix64(model->options.seed) | 1; }
    }
    w.state = model->state, w.matrices = (int)matrices.n, w.vectors = (int)vectors.n;
    w.num_workers = deferred_update_workers(), w.done = model->deferred_done;
    w.first = w.chunks_of_layer(), w.last = config->num_layers * w.chunks_of_layer();
    return w;
}

// Defers the update of these layers. Call after adamw_prepare.
static void defer_update(GPT2* model) {
    model->update_is_deferred = true;
    cudaCheck(cudaMemsetAsync(model->deferred_done, 0, deferred_update_workers() * sizeof(int), model->exec.stream));
}

// Returns exec, but with the deferred update, for a forward pass. The launch may be captured in a graph, so this does not depend on
// whether an update has been deferred: the kernels read that in state->is_deferred.
static Execution with_deferred_update(GPT2* model, Execution exec) {
    model->update = make_deferred_update(model);
    model->update_is_deferred = false;
    exec.update = &model->update;
    return exec;
}

static void gpt2_finish_update(GPT2* model) {
    if (!model->update_is_deferred) { return; }
    finish_deferred_update(model->config.num_layers, with_deferred_update(model, model->exec));
}

static void await_bucket(int b, const Execution& exec) {
    await_weights(b, exec);
    finish_deferred_update(b, exec);
}

// ---- memory of --fp8 ------------------------------------------------------------------------------

// The quantised tensors of a layer, and after those of all layers the head's.
enum Fp8Name {
    FP8_LN1,
    FP8_LN2,
    FP8_GELU,
    FP8_DQKV,
    FP8_DFCH,
    FP8_DFCPROJ,
    FP8_QKVW,
    FP8_FCW,
    FP8_FCPROJW,
    FP8_PER_LAYER
};
enum Fp8HeadName { FP8_LNF, FP8_DLOGITS, FP8_HEAD_WEIGHT, FP8_OF_HEAD };

static int fp8_num_tensors(const GPT2Config* config) { return config->num_layers * FP8_PER_LAYER + FP8_OF_HEAD; }

// Values of a layer's weights, as rows and columns: qkvw (3*C,C), fcw (F,C), fcprojw (C,F).
static size_t fp8_weights(const GPT2Config* config) {
    size_t C = config->channels, F = config->mlp_channels;
    return 2 * (3 * C * C + 2 * F * C);
}
// Values of the gradients dfch, dqkv, dfcproj of BT tokens, as rows and columns.
static size_t fp8_gradients(int BT, const GPT2Config* config) {
    return 2 * (size_t)BT * (config->mlp_channels + 4 * config->channels);
}

// Values of floatX that the logits' memory must have: dfch and dqkv, and the gradients in fp8; or the head's logits, and their
// gradients as rows and columns.
static size_t fp8_logits(int BT, const GPT2Config* config) {
    size_t layer = (size_t)BT * (config->mlp_channels + 3 * config->channels) + fp8_gradients(BT, config) / 2;
    return std::max(layer, (size_t)fp8_head_tokens(BT) * 2 * config->padded_vocab_size);
}

static void plan_fp8(Plan* parameters, Plan* activations, Fp8Memory* m, const GPT2Config* config, int BT, int stage,
                     int recompute) {
    size_t L = config->num_layers, C = config->channels, F = config->mlp_channels, num = fp8_num_tensors(config);
    *m = {};
    m->stage = stage;
    if (stage == FP8_OFF) { return; }
    m->scales.num = (int)num;
    m->keep_norm = recompute < 2, m->keep_gelu = recompute < 1;
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.scales, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.amax, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.largest, num);
    plan_add(parameters, PLAN_WEIGHTS, &m->scales.unread, 1);
    plan_add(parameters, PLAN_WEIGHTS, &m->weights, L * fp8_weights(config));
    if (stage >= FP8_HEAD) { plan_add(parameters, PLAN_WEIGHTS, &m->head, 2 * C * config->padded_vocab_size); }
    plan_add(activations, PLAN_ACTIVATIONS, &m->norm_rows, BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->gelu_rows, BT * std::max(F, 2 * C));
    if (stage < FP8_DW) { return; }
    plan_add(activations, PLAN_ACTIVATIONS, &m->ln1_columns, (m->keep_norm ? L : 1) * BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->ln2_columns, (m->keep_norm ? L : 1) * BT * C);
    plan_add(activations, PLAN_ACTIVATIONS, &m->gelu_columns, (m->keep_gelu ? L : 1) * BT * F);
}

template <class F> static Fp8Copies<F> fp8_copies(const Fp8Memory& m, int number, F* rows, F* columns) {
    const Fp8Scales& s = m.scales;
    return {rows, columns, s.scales + number, s.amax + number};
}

static Fp8Layer fp8_layer(const Fp8Memory& m, const GPT2Config* config, int BT, int l, bool new_weights) {
    size_t C = config->channels, F = config->mlp_channels, BTC = BT * C, BTF = BT * F;
    int first = l * FP8_PER_LAYER;
    E4M3 *w = m.weights + l * fp8_weights(config), *fcw = w + 6 * C * C, *fcprojw = fcw + 2 * F * C;
    E5M2 *dfch = m.gradients, *dqkv = dfch + 2 * BTF, *dfcproj = dqkv + 6 * BTC;
    Fp8Layer a = {m.stage, new_weights, m.keep_norm > 0, m.keep_gelu > 0, m.scales.unread};
    a.ln1 = fp8_copies(m, first + FP8_LN1, m.norm_rows, m.ln1_columns + m.keep_norm * l * BTC);
    a.ln2 = fp8_copies(m, first + FP8_LN2, m.norm_rows, m.ln2_columns + m.keep_norm * l * BTC);
    a.gelu = fp8_copies(m, first + FP8_GELU, m.gelu_rows, m.gelu_columns + m.keep_gelu * l * BTF);
    a.qkvw = fp8_copies(m, first + FP8_QKVW, w, w + 3 * C * C);
    a.fcw = fp8_copies(m, first + FP8_FCW, fcw, fcw + F * C);
    a.fcprojw = fp8_copies(m, first + FP8_FCPROJW, fcprojw, fcprojw + F * C);
    a.dfch = fp8_copies(m, first + FP8_DFCH, dfch, dfch + BTF);
    a.dqkv = fp8_copies(m, first + FP8_DQKV, dqkv, dqkv + 3 * BTC);
    a.dfcproj = fp8_copies(m, first + FP8_DFCPROJ, dfcproj, dfcproj + BTC);
    return a;
}

// Returns the tensors of the head. logits: the memory of the logits. The gradients lie in it behind the logits of these tokens.
static Fp8Head fp8_head(const Fp8Memory& m, const GPT2Config* config, int BT, floatX* logits) {
    size_t most = fp8_head_tokens(BT), C = config->channels, Vp = config->padded_vocab_size;
    int number = m.scales.num - FP8_OF_HEAD;
    E5M2* dlogits = (E5M2*)(logits + most * Vp);
    return {fp8_copies(m, number + FP8_LNF, m.gelu_rows, m.gelu_rows + most * C),
            fp8_copies(m, number + FP8_HEAD_WEIGHT, m.head, m.head + Vp * C),
            fp8_copies(m, number + FP8_DLOGITS, dlogits, dlogits + most * Vp)};
}

static size_t fp8_backward_scratch(int N, int F) {
    return std::max(matmul_fp8_gelu_backward_scratch(N, F), matmul_backward_bias_scratch(N, F));
}

// Ends the program if this program, GPU, model or batch of BT tokens cannot use fp8, with the reason.
static void check_fp8(const GPT2Config* config, int BT, int stage) {
    if (stage == FP8_OFF) { return; }
    int C = config->channels;
    if (strcmp(PRECISION_NAME, "bf16") != 0) {
        die("--fp8 goes with bf16, this program is built for %s: make PRECISION=BF16 train_gpt2cu", PRECISION_NAME);
    }
    if (!has_sm90a()) {
        die("--fp8 needs an H100 or H200, and a program with code for sm_90a; this GPU trains without --fp8");
    }
    if (C % 16 != 0 || C > 1792) { die("%d channels: --fp8 wants a multiple of 16 up to 1792", C); }
    if (config->mlp_channels % 16 != 0) {
        die("%d channels in the MLP: --fp8 wants a multiple of 16", config->mlp_channels);
    }
    if (config->activation != ACT_GELU_TANH) {
        die("--fp8 goes with the activation %s, and the model has %s", activation_name(ACT_GELU_TANH),
            activation_name(config->activation));
    }
    if (fp8_num_tensors(config) > RUN_MAX_FP8) { die("%d layers: --fp8 goes with fewer", config->num_layers); }
    if (BT % 16 != 0) { die("%d tokens in a micro-batch: --fp8 wants a multiple of 16, see -b and -t", BT); }
}

// ---- the scales of --fp8 --------------------------------------------------------------------------

// Whether tensor i is a gradient of activations, in e5m2.
__host__ __device__ static bool fp8_is_e5m2(int i, int num) {
    int in_head = i - (num - FP8_OF_HEAD), in_layer = i % FP8_PER_LAYER;
    return in_head >= 0 ? in_head == FP8_DLOGITS : in_layer >= FP8_DQKV && in_layer <= FP8_DFCPROJ;
}

// The scale of a tensor whose largest absolute value was `largest`. 0: nothing is known yet.
__host__ __device__ static Fp8Scale fp8_scale(float largest, bool is_e5m2, float dloss) {
    // a gradient that is not known yet is taken for one as large as the losses' derivatives
    if (largest == 0.0f) { largest = is_e5m2 ? dloss : 1.0f; }
    int exponent = (is_e5m2 ? 13 : 6) - ilogbf(largest); // 57344 = 1.75 * 2^15, 448 = 1.75 * 2^8
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    return {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
}

// The scales from `largest`, as it is (update = false) or after it has taken in amax, which becomes 0. *saturated = the
// number of tensors with values beyond the format's largest number, but no infinity. The gradients of the logits are bounded by dloss.
__global__ void fp8_scales_kernel(Fp8Scales s, bool update, float* saturated, const float* dloss) {
    int count = 0;
    for (int i = threadIdx.x; i < s.num; i += blockDim.x) {
        bool is_e5m2 = fp8_is_e5m2(i, s.num);
        float amax = s.amax[i], largest = s.largest[i];
        if (update && isfinite(amax)) { count += amax * s.scales[i].scale > (is_e5m2 ? 57344.0f : 448.0f); }
        if (update && isfinite(amax) && amax > 0.0f) { largest = fmaxf(amax, fminf(largest / 2, 4 * amax)); }
        if (i == s.num - FP8_OF_HEAD + FP8_DLOGITS) { largest = *dloss; }
        s.scales[i] = fp8_scale(largest, is_e5m2, *dloss);
        s.largest[i] = largest, s.amax[i] = 0.0f;
    }
    __shared__ float shared[32];
    float sum = block_sum((float)count, shared);
    if (threadIdx.x == 0) { *saturated = sum; }
}

// Makes the scales from what is known of the tensors. update: this step's values are added to that; all ranks must then call it.
static void update_fp8_scales(GPT2* model, bool update) {
    const Fp8Scales& s = model->fp8.scales;
    StepState* state = model->state;
    if (update) { maximum_of_ranks(s.amax, s.num, model->exec); }
    fp8_scales_kernel<<<1, 256, 0, model->exec.stream>>>(s, update, &state->saturated, &state->dloss);
    cudaCheck(cudaGetLastError());
}

// Call with each micro-batch on the GPU; pass() makes a forward and a backward pass over it. Only the first call does anything: it
// makes the scales, and unless a resumed run knows them (known), measures the values of all tensors in three passes. One is not
// enough: a gradient that is too small for fp8 hides those before it.
template <class Pass> static void begin_fp8(GPT2* model, bool known, Pass pass) {
    if (model->options.fp8 == FP8_OFF || model->fp8.begun) { return; }
    model->fp8.begun = true;
    update_fp8_scales(model, false); // also forgets what trials of the exchange have measured
    for (int i = 0; i < 3 && !known; i++) {
        pass();
        update_fp8_scales(model, true);
    }
    cudaCheck(cudaMemsetAsync(&model->state->loss, 0, sizeof(float), model->exec.stream));
}

// Copies what is known of the tensors, for a checkpoint. Returns how many there are, 0 without --fp8.
static int download_fp8(const GPT2* model, float* largest) {
    const Fp8Scales& s = model->fp8.scales;
    if (model->options.fp8 == FP8_OFF) { return 0; }
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(largest, s.largest, s.num * sizeof(float), cudaMemcpyDeviceToHost));
    return s.num;
}
static void upload_fp8(GPT2* model, const float* largest, int num) {
    const Fp8Scales& s = model->fp8.scales;
    if (model->options.fp8 == FP8_OFF) { return; }
    if (num != s.num) { die("the checkpoint has the scales of %d fp8 tensors, this model has %d", num, s.num); }
    cudaCheck(cudaMemcpy(s.largest, largest, num * sizeof(float), cudaMemcpyHostToDevice));
}

// ---- weights in 8 bits ----------------------------------------------------------------------------
// --weights int8 and fp8: a model's matrices in 8 bits, for generation. They are made on the GPU when the model has been
// loaded, from its weights in floatX, a row (output channel) at a time. Afterwards the weights in floatX are what the 8
// bits stand for, rounded to floatX. A prompt, an evaluation, the embedding of a token, decode_layers and more texts than
// decode_matmul takes read these, so the whole program computes with the same weights.
//
// The matrices of matmuls are in 8 bits: the head's, and qkvw, attprojw, fcw, fcprojw of each layer. The lookup of a
// token in wte stays in floatX, of which it reads a row per text and token; so do wpe and the vectors, which are small.

// The format that --weights names. Ends the program if the GPU, or the code for it, has no such numbers.
static WeightFormat weights8_format(const char* name) {
    int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    if (strcmp(name, "fp8") != 0) { return strcmp(name, "int8") == 0 ? WEIGHTS_INT8 : WEIGHTS_FULL; }
    if (10 * major + minor < 89) {
        die("--weights fp8 needs a GPU of compute capability 8.9, this one has %d.%d; --weights int8 runs here", major,
            minor);
    }
    if (compiled_arch(ptx_sm90a_kernel<0>) < 89) { // any kernel
        die("--weights fp8: this program was built for older GPUs than this one: make clean, then make train_gpt2cu "
            "GPU_COMPUTE_CAPABILITY=%d%d",
            major, minor);
    }
    return WEIGHTS_FP8;
}

// Index of the scale of the row that begins at `place` of params, where a matrix begins. Its next rows have the next indices: a row
// is at least min(C, F) long, so the rows of two matrices never share one.
static size_t weights8_row(const GPT2Config* config, size_t place) {
    return place / std::min(config->channels, config->mlp_channels);
}

static void weights8_plan(Plan* plan, Weights8* w, const GPT2Config* config) {
    if (w->format == WEIGHTS_FULL) { return; }
    plan_add(plan, PLAN_WEIGHTS, &w->values, model_size(config));
    plan_add(plan, PLAN_WEIGHTS, &w->scales, weights8_row(config, model_size(config)));
}

// Quantises the matrices of params (model_size), and rounds them to what their 8 bits stand for.
static void weights8_quantize(const Weights8* w, const GPT2Config* config, floatX* params, const Execution& exec) {
    for (int p = 0; p < NUM_PARAMS && w->format != WEIGHTS_FULL; p++) {
        const ParamInfo* info = &gpt2_params[p];
        if (info->rows == DIM_1 || info->rows == DIM_MAXT || (config->untied_head && p == 0)) { continue; }
        for (int l = 0; l < param_copies(config, p); l++) {
            size_t place = param_place(config, p, l);
            quantize_weights(w->values + place, w->scales + weights8_row(config, place), params + place, w->format,
                             param_rows(config, p), (int)param_cols(config, p), exec);
        }
    }
}

// Prints how much memory the 8-bit weights take in addition to the weights in floatX.
static void weights8_print(const Weights8* w, const GPT2Config* config) {
    if (w->format == WEIGHTS_FULL) { return; }
    double n = (double)model_size(config);
    fprintf(stderr, "[weights in %s: %.1f MB and %.1f MB of scales, beside %.1f MB in %s]\n",
            w->format == WEIGHTS_INT8 ? "int8" : "fp8", n * 1e-6,
            (double)weights8_row(config, model_size(config)) * sizeof(float) * 1e-6, n * sizeof(floatX) * 1e-6,
            PRECISION_NAME);
}

// A matrix of params (model_size) as generation reads it.
static WeightMatrix weights8_matrix(const Weights8* w, const GPT2Config* config, const floatX* params,
                                    const floatX* weight) {
    size_t place = weight - params;
    if (w->format == WEIGHTS_FULL) { return weight; }
    return WeightMatrix(w->values + place, w->scales + weights8_row(config, place), w->format);
}

// ---- update ---------------------------------------------------------------------------------------

// Queues the sums of the gradients over all GPUs, after the last micro-batch: bucket by bucket, each of which begins as soon as
// the backward pass has left it, or all together.
static void reduce_all_gradients(GPT2* model) {
    const GPT2Config* config = &model->config;
    begin_group();
    for (int b = num_buckets(config) - 1; b >= 0; b--) {
        Span whole = bucket(config, b);
        reduce_gradients(b, model->own_grads + own_share(config, b).own_place, model->grads_memory + whole.place,
                         whole.n);
    }
    end_group();
}

// Call after the last micro-batch of a step. Sums gradients and losses over all GPUs, then computes the gradients' norm. With --fp8,
// makes the scales of the next step, whether or not this one will update the weights.
static void gpt2_gradient_norm(GPT2* model) {
    const GPT2Config* config = &model->config;
    ranks_computed(model->exec);
    reduce_all_gradients(model);
    await_collectives(model->exec);
    global_norm(&model->state->scaled_norm, model->acts.scratch, model->own_grads, share_size(config), model->exec);
    combine_ranks(&model->state->loss, model->exec); // and scaled_norm, which follows it
    if (model->options.fp8) { update_fp8_scales(model, true); }
}

// Seed of stochastic rounding for the part of a piece that begins at `place`; 0 means round to nearest.
static uint32_t rounding_seed(const GPT2* model, int piece, size_t place) {
    if (!model->options.stochastic_rounding || !model->master_memory) { return 0; }
    uint32_t seed = (uint32_t)splitmix64(model->options.seed) | 1;
    seed += (uint32_t)(place - parameter_piece(&model->config, piece).place); // each call of adamw has bits of its own
    return hash_bits((uint32_t)piece, seed) | 1;
}

// Muon: one matrix is too small for a GPU, so newton_schulz takes matrices of the same shape (n,k), n <= k, of as many layers as
// the workspace has room for. There are two shapes, and a layer has these matrices of them:
//
//     (C,C)       q, k, v, attproj
//     (C,F)       fc, which is (F,C) and transposed on its way to newton_schulz and back, and fcproj; (F,C) where F < C
//
// The workspace is the memory of the logits, which an update does not need. How many layers fit does not change a result.
// With ZeRO-1 a rank updates the layers that belong to it (bucket_owner); the results are the same as without.

// A layer's matrices of one shape, which are orthogonalised together: num of them, (n,k) or (k,n), n <= k.
struct MuonShape {
    int num, n, k;
};
// Returns the shape of the two matrices of the MLP, (F,C) and (C,F), or without mlp of q, k, v and attproj, (C,C).
static MuonShape muon_shape(const GPT2Config* config, bool mlp) {
    int C = config->channels, F = config->mlp_channels;
    return mlp ? MuonShape{2, std::min(C, F), std::max(C, F)} : MuonShape{4, C, C};
}
static bool is_muon_mlp(int p) { return gpt2_params[p].rows == DIM_F || gpt2_params[p].cols == DIM_F; }

// Values of the workspace for the matrices of one shape in `layers` layers: the results, and newton_schulz's scratch.
static size_t muon_workspace(const GPT2Config* config, int layers, bool mlp) {
    MuonShape s = muon_shape(config, mlp);
    return (size_t)layers * s.num * s.n * s.k + newton_schulz_scratch(layers * s.num, s.n, s.k);
}
// The same for both shapes, one after the other.
static size_t muon_workspace(const GPT2Config* config, int layers) {
    return std::max(muon_workspace(config, layers, false), muon_workspace(config, layers, true));
}

// Calls use(l, place, own_place, index, num, rows, cols) for the tensors of one shape in this rank's layers number begin to
// end - 1, which are layers l of the model. The `num` matrices at `place` in params, and at `own_place` in the other arrays, are
// matrices index, index + 1, ... of the workspace.
template <class Use> static void for_each_muon_tensor(const GPT2Config* config, int begin, int end, bool mlp, Use use) {
    int index = 0, shares = ranks().num_shares;
    for (int i = begin; i < end; i++) {
        int l = i * shares + ranks().env.rank % shares;
        Share share = own_share(config, 1 + l);
        for (int p = 0; p < NUM_PARAMS; p++) {
            int num = param_muon_matrices(p);
            if (num == 0 || is_muon_mlp(p) != mlp) { continue; }
            int rows = (int)param_rows(config, p) / num, cols = (int)param_cols(config, p);
            size_t place = param_place(config, p, l);
            use(l, place, share.own_place + (place - share.place), index, num, rows, cols);
            index += num;
        }
    }
}

// One step of Muon on the matrices of all layers of this rank.
static void muon_update(GPT2* model, const Muon& optimizer) {
    const GPT2Config* config = &model->config;
    floatX* workspace = model->acts.logits;
    int L = (int)layers_of_rank(config->num_layers, ranks().env.rank), layers = model->muon_layers;
    for (int round = 0; round < 2 * ceil_div(L, layers); round++) {
        bool mlp = round % 2;
        MuonShape s = muon_shape(config, mlp);
        int begin = round / 2 * layers, end = std::min(begin + layers, L), num = (end - begin) * s.num;
        size_t size = (size_t)s.n * s.k; // of a matrix
        floatX *out = workspace, *x = out + num * size;
        auto prepare = [&](int, size_t, size_t own_place, int index, int n, int rows, int cols) {
            muon_prepare(x + index * size, model->m_memory + own_place, model->acts.scratch,
                         model->own_grads + own_place, model->state, n, rows, cols, optimizer.momentum, model->exec);
        };
        auto apply = [&](int l, size_t place, size_t own_place, int index, int n, int rows, int cols) {
            DecayRange range = decay_range(config, 1 + 2 * l, place);
            muon_apply(model->params_memory + place, model->master_memory ? model->master_memory + own_place : NULL,
                       out + index * size, model->state, n, rows, cols, optimizer.learning_rate,
                       range.decay ? optimizer.weight_decay : 0.0f, rounding_seed(model, 1 + 2 * l, range.place),
                       place - range.place, model->exec);
        };
        for_each_muon_tensor(config, begin, end, mlp, prepare);
        newton_schulz(out, x, x, num, s.n, s.k, model->exec);
        for_each_muon_tensor(config, begin, end, mlp, apply);
    }
}

// One step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101); if muon is not NULL, of Muon on the layers' matrices. Call
// after gpt2_gradient_norm. Weights and moments stay if loss or norm is not finite, or if skip is true. deferred: see above.
static void gpt2_update(GPT2* model, const AdamW* optimizer, bool skip, const Muon* muon = NULL,
                        bool deferred = false) {
    const GPT2Config* config = &model->config;
    require(model->options.muon == (muon != NULL) && !model->update_is_deferred);
    adamw_prepare(model->state, *optimizer, skip, deferred, model->exec);
    if (deferred) { defer_update(model); }
    for (int b = 0; b < num_buckets(config); b++) {
        if (deferred && b > 1 && b <= config->num_layers) { continue; }
        if (muon && b == 1) { muon_update(model, *muon); } // while the embeddings are gathered
        Share v = own_share(config, b, muon == NULL);
        for_each_piece(config, b, ranks().env.rank, [&](int i, size_t place, size_t own_place, size_t n, bool decay) {
            if (muon && piece_kind(config, i) == PLACE_LAYER_MATRICES) { return; }
            AdamW o = *optimizer;
            if (!decay) { o.weight_decay = 0.0f; }
            adamw(model->params_memory + place, model->master_memory ? model->master_memory + own_place : NULL,
                  model->m_memory + own_place, model->v_memory + v.own_place + (place - v.place),
                  model->own_grads + own_place, model->state, n, o, rounding_seed(model, i, place), model->exec);
        });
        Span whole = bucket(config, b);
        gather_weights(b, model->params_memory + whole.place, whole.n, model->exec);
    }
    gathering_queued(model->exec);
}

// ---- memory: a plan adds up what is needed before anything is allocated ---------------------------

// Weights; for training, with options, also gradients, moments and master weights.
static void plan_parameters(Plan* plan, GPT2* model, const GPT2Config* config, const GPT2Options* options) {
    size_t n = model_size(config), own_size = options ? share_size(config) : 0;
    plan_add(plan, PLAN_WEIGHTS, &model->params_memory, n);
    weights8_plan(plan, &model->weights8, config);
    plan_add(plan, PLAN_WEIGHTS, &model->state, 1);
    model->master_memory = nullptr;
    if (!options) { return; }
    plan_add(plan, PLAN_GRADIENTS, &model->grads_memory, n);
    if (own_size < n) { plan_add(plan, PLAN_GRADIENTS, &model->own_grads, own_size); }
    plan_add(plan, PLAN_ADAMW, &model->m_memory, own_size);
    plan_add(plan, PLAN_ADAMW, &model->v_memory, share_size(config, !options->muon));
    if (options->master_weights && sizeof(floatX) < sizeof(float)) {
        plan_add(plan, PLAN_ADAMW, &model->master_memory, own_size);
    }
    plan_add(plan, PLAN_ADAMW, &model->deferred_done, deferred_update_workers());
}

// Bytes of scratch for a backward pass: the largest need of any of its operations.
static size_t backward_scratch_bytes(const GPT2Config* config, int B, int T) {
    int C = config->channels, F = config->mlp_channels, NH = config->num_heads, N = B * T;
    int Vp = config->padded_vocab_size;
    size_t products = matmul_backward_weight_scratch(N, F, C);
    for (int OC : {C, 3 * C, F}) { products = std::max(products, matmul_backward_weight_scratch(N, C, OC)); }
    size_t floats =
        std::max({linear_cross_entropy_scratch(N, C, Vp), matmul_backward_weight_scratch(N, C, Vp),
                  attention_backward_scratch(B, T, C, NH), attention_backward_bias_terms(B, T, C, NH) + products,
                  layernorm_backward_scratch(C), global_norm_scratch(), muon_prepare_scratch(3)});
    return std::max(floats * sizeof(float), encoder_backward_scratch(B, T, config->vocab_size) * sizeof(int));
}

// logit_rows: the number of tokens whose logits are computed at once; in training at least B*T.
static void plan_activations(Plan* plan, Activations* a, const GPT2Config* config, int B, int T, int logit_rows,
                             bool training, int recompute, int fp8 = FP8_OFF) {
    size_t BT = (size_t)B * T, C = config->channels, L = config->num_layers, NH = config->num_heads;
    size_t Vp = config->padded_vocab_size, F = config->mlp_channels;
    a->B = B, a->T = T;
    bool kept_in_fp8 = fp8 == FP8_DW; // +dw keeps columns in fp8 instead: Fp8Memory
    a->keep = training;
    a->keep_gelu = training && !kept_in_fp8 && recompute < 1;
    a->keep_norm = training && !kept_in_fp8 && recompute < 2;
    size_t layers = a->keep ? L : 1, gelus = a->keep_gelu ? L : 1, norms = a->keep_norm ? L : 1;
    PlanGroup group = PLAN_ACTIVATIONS;
    plan_add(plan, group, &a->encoded, BT * C);
    plan_add(plan, group, &a->ln1, norms * BT * C);
    plan_add(plan, group, &a->ln1_mean, layers * BT);
    plan_add(plan, group, &a->ln1_rstd, layers * BT);
    plan_add(plan, group, &a->qkv, layers * BT * 3 * C);
    plan_add(plan, group, &a->atty, layers * BT * C);
    plan_add(plan, group, &a->lse, layers * BT * NH);
    plan_add(plan, group, &a->residual2, layers * BT * C);
    plan_add(plan, group, &a->ln2, norms * BT * C);
    plan_add(plan, group, &a->ln2_mean, layers * BT);
    plan_add(plan, group, &a->ln2_rstd, layers * BT);
    if (training) { plan_add(plan, group, &a->fch.tensor, layers * BT * F); }
    plan_add(plan, group, &a->fch_gelu, gelus * BT * F);
    plan_add(plan, group, &a->residual3, layers * BT * C);
    if (training) { plan_add(plan, group, &a->dbtc, BT * C); }
    plan_add(plan, group, &a->lnf, BT * C);
    plan_add(plan, group, &a->lnf_mean, BT);
    plan_add(plan, group, &a->lnf_rstd, BT);
    plan_add(plan, group, &a->losses, BT);
    plan_add(plan, group, &a->inputs, BT);
    plan_add(plan, group, &a->targets, BT);
    // dfch and dqkv share the memory of the logits
    size_t backward = fp8 ? fp8_logits(B * T, config) : training ? BT * (F + 3 * C) : 0;
    plan_add(plan, group, &a->logits, std::max((size_t)logit_rows * Vp, backward));
    if (!training) {
        plan_add(plan, group, &a->scratch, linear_cross_entropy_scratch(logit_rows, (int)C, (int)Vp));
        return;
    }
    plan_add(plan, group, &a->dresidual, BT * C);
    plan_add(plan, group, &a->gelu_terms,
             fp8_backward_scratch(B * T, (int)F)); // not less without --fp8, or by other activations
    plan_add(plan, group, &a->norm1_terms, layernorm_backward_scratch((int)C));
    plan_add(plan, group, &a->norm2_terms, layernorm_backward_scratch((int)C));
    plan_add(plan, group, &a->scratch, backward_scratch_bytes(config, B, T) / sizeof(float));
}

// Plans both arenas of a training run; nothing is allocated yet.
static void plan_training(Plan* parameters, Plan* activations, GPT2* model, const GPT2Config* config, int B, int T,
                          const GPT2Options* options) {
    memset(parameters, 0, sizeof(*parameters));
    memset(activations, 0, sizeof(*activations));
    plan_parameters(parameters, model, config, options);
    // rows of logits: with Muon so many that one layer at least fits in their memory
    size_t rows = (size_t)B * T, Vp = config->padded_vocab_size, workspace = muon_workspace(config, 1);
    if (options->muon) { rows = std::max(rows, ceil_div(workspace, Vp)); }
    model->muon_layers = (int)std::min(rows * Vp / workspace, (size_t)config->num_layers);
    plan_activations(activations, &model->acts, config, B, T, (int)rows, true, options->recompute, options->fp8);
    plan_fp8(parameters, activations, &model->fp8, config, B * T, options->fp8, options->recompute);
    model->acts.fch.is_slope = options->saves_slope && options->recompute < 1 &&
                               (options->fp8 == FP8_OFF || options->fp8 == FP8_DW) &&
                               matmul_can_save_slope(B * T, config->channels, config->mlp_channels);
}

// Allocates both arenas, and sets every pointer of the model.
static void allocate_training(GPT2* model, const Plan* parameters, const Plan* activations) {
    const GPT2Config* config = &model->config;
    Activations* a = &model->acts;
    Error err;
    model->arenas[0] = plan_allocate(parameters, "the weights and the optimizer's state", &err);
    if (model->arenas[0]) { model->arenas[1] = plan_allocate(activations, "the activations", &err); }
    if (!model->arenas[1]) { die("%s; %s, or take -r 2 or a smaller -b", err.text, OTHER_PROGRAMS); }
    model->num_bytes = parameters->total + activations->total;
    point_parameters(&model->params, model->params_memory, config);
    point_parameters(&model->grads, model->grads_memory, config);
    if (!model->own_grads) { model->own_grads = model->grads_memory; }
    a->projected = a->dbtc;
    a->dfch = a->logits;
    size_t BT = (size_t)a->B * a->T;
    a->dqkv = a->dfch + BT * config->mlp_channels;
    model->fp8.gradients = (E5M2*)(a->dqkv + BT * 3 * config->channels);
}

// Bytes outside the plan, as seen on H100s: cuBLASLt's workspace, the driver's (code, graphs, context), NCCL's communicators.
static size_t unplanned_bytes() { return CUBLASLT_WORKSPACE_BYTES + ((size_t)(is_alone() ? 512 : 1408) << 20); }

// Bytes that a training run needs.
static size_t training_bytes(const GPT2Config* config, int B, int T, const GPT2Options* options) {
    Plan parameters, activations;
    GPT2 model;
    plan_training(&parameters, &activations, &model, config, B, T, options);
    return parameters.total + activations.total + unplanned_bytes();
}

// ---- loading and saving ---------------------------------------------------------------------------

// Ends the program if the kernels do not support this model, with a message that names the reason.
static void check_config(const GPT2Config* config) {
    int C = config->channels, HS = C / config->num_heads;
    int most = sizeof(floatX) == sizeof(float) ? 6144 : 8192;
    if (C % 8 != 0 || C > most) { die("%d channels: train_gpt2cu wants a multiple of 8 up to %d", C, most); }
    if (config->mlp_channels % 8 != 0 || config->mlp_channels > 4 * most) {
        die("%d channels in the MLP: train_gpt2cu wants a multiple of 8 up to %d", config->mlp_channels, 4 * most);
    }
    if (config->vocab_size > 262144) {
        die("%d tokens in the vocabulary: train_gpt2cu wants 262144 at most", config->vocab_size);
    }
    if (HS % 8 != 0 || HS > 256) {
        die("%d channels in %d heads: a head size of %d, train_gpt2cu wants a multiple of 8 up to 256", C,
            config->num_heads, HS);
    }
}

// Sets up a model of this shape, whose operations are executed as exec says, but on a stream of its own. Its memory is not
// allocated yet.
static void gpt2_open(GPT2* model, const GPT2Config* config, const GPT2Options* options, const Execution& exec) {
    *model = {};
    check_config(config);
    model->exec = exec;
    model->exec.after_event = &model->after_event;
    model->config = *config;
    model->options = *options;
    cudaCheck(cudaStreamCreate(&model->exec.stream)); // a blocking stream: ordered with plain cudaMemcpy and cudaMemset
}

static void gpt2_free(GPT2* model) {
    for (void* arena : model->arenas) { cudaCheck(cudaFree(arena)); }
    if (model->exec.stream) { cudaCheck(cudaStreamDestroy(model->exec.stream)); }
    *model = {};
}

// Copies num_params floats from the host, in a checkpoint's order, to the device, in the model's order.
static void upload_floats(const GPT2* model, float* device, const float* host) {
    for_each_tensor(&model->config, [&](size_t place, size_t offset, size_t n) {
        cudaCheck(cudaMemcpy(device + place, host + offset, n * sizeof(float), cudaMemcpyHostToDevice));
    });
}
static bool has_matrices(const GPT2* model, const float* own) { return own != model->v_memory || !model->options.muon; }

// Where an array of shares becomes whole (model_size) between two steps: in grads_memory, if it is not whole already.
static float* whole_array(const GPT2* model, float* own) {
    return ranks().num_shares > 1 || !has_matrices(model, own) ? model->grads_memory : own;
}
static void forget_whole_array(const GPT2* model) { // zeroes that place
    size_t bytes = ranks().num_shares > 1 || model->options.muon ? model_size(&model->config) * sizeof(float) : 0;
    if (bytes > 0) { cudaCheck(cudaMemsetAsync(model->grads_memory, 0, bytes, model->exec.stream)); }
}

// Collects the shares of all ranks in whole_array(own), and returns that. All ranks must call it.
static const float* collect_shares(const GPT2* model, float* own) {
    float* whole = whole_array(model, own);
    if (whole != own) { join_shares(&model->config, whole, own, has_matrices(model, own), model->exec); }
    return whole;
}

// Copies an array of the optimizer's state from the host, in a checkpoint's order, to own (share_size).
static void upload_shares(const GPT2* model, float* own, const float* host) {
    float* whole = whole_array(model, own);
    upload_floats(model, whole, host);
    if (whole != own) { keep_shares(&model->config, own, whole, has_matrices(model, own), model->exec); }
}

// Copies weights (num_params) from the host. In a resumed run, 16-bit weights are rounded from the master weights exactly
// as update number `num_updates` had rounded them.
static void gpt2_upload(GPT2* model, const float* weights, int num_updates) {
    const GPT2Config* config = &model->config;
    if (model->master_memory) {
        const float* master = whole_array(model, model->master_memory);
        upload_shares(model, model->master_memory, weights);
        auto round = [&](int i, size_t place, size_t, size_t n, bool) {
            uint32_t seed = num_updates > 0 ? rounding_seed(model, i, place) : 0;
            adamw_round_weights(model->params_memory + place, master + place, n, seed, num_updates, model->exec);
        };
        int shares = ranks().num_shares; // each of them as it was updated
        for (int k = 0; k < num_buckets(config) * shares; k++) {
            for_each_piece(config, k / shares, k % shares, round);
        }
    } else {
        size_t largest = 0;
        for_each_tensor(config, [&](size_t, size_t, size_t n) { largest = std::max(largest, n); });
        float* staging = (float*)device_malloc_check(largest * sizeof(float), "loading the weights");
        for_each_tensor(config, [&](size_t place, size_t offset, size_t n) {
            cudaCheck(cudaMemcpy(staging, weights + offset, n * sizeof(float), cudaMemcpyHostToDevice));
            adamw_round_weights(model->params_memory + place, staging, n, 0, 0, model->exec);
        });
        cudaCheck(cudaFree(staging)); // cudaFree waits until the last kernel has read it
    }
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
}

// The fp32 weights on the device (model_size), or NULL if there are only 16-bit weights. All ranks must call it.
static const float* collect_weights(GPT2* model) {
    gpt2_finish_update(model);
    for (int b = 0; b < num_buckets(&model->config); b++) { await_weights(b, model->exec); }
    if (model->master_memory) { return collect_shares(model, model->master_memory); }
    return sizeof(floatX) == sizeof(float) ? (float*)model->params_memory : NULL;
}

// host (n) = values from `place` on of whole (model_size); NULL: of the 16-bit weights. Need not be done on return.
static void download_values(const GPT2* model, float* host, const float* whole, size_t place, size_t n) {
    if (whole) {
        cudaCheck(cudaMemcpyAsync(host, whole + place, n * sizeof(float), cudaMemcpyDeviceToHost, model->exec.stream));
        return;
    }
    std::vector<floatX> rounded(n);
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    cudaCheck(cudaMemcpy(rounded.data(), model->params_memory + place, n * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) { host[i] = (float)rounded[i]; }
}

// Copies the weights (num_params) to the host. All ranks must call it.
static void gpt2_download(GPT2* model, float* weights) {
    const float* whole = collect_weights(model);
    for_each_tensor(&model->config, [&](size_t place, size_t offset, size_t n) {
        download_values(model, weights + offset, whole, place, n);
    });
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
}

// ================================================================================================
// 3. generation
// ================================================================================================

// ---- which text is in which slot ------------------------------------------------------------------
// Many texts in few slots. A Generator continues B texts side by side, each in a slot of its key/value cache.
// The queue says which prompts begin in which slots, and takes the tokens of every step; when a text ends, its slot is free,
// and the next text of the queue begins in it.
//
//     text_queue_open(&q, B);
//     for (;;) {
//         while (text_queue_pass(&q, &sampler, V, &pass)) { ... run the pass: it gives a first token in each of its slots ... }
//         if (q.active == 0) { break; }
//         if (text_queue_goes_on(&q)) { ... the next step, for each slot b but those with text_queue_is_last(&q, b) ... }
//         for each slot b: if (text_queue_take(&q, b, token[b])) { ... its text has ended ... }
//     }
//     text_queue_close(&q);

enum {
    PROMPT_PASS_TOKENS = 1 << 16, // in one pass over several prompts; a longer prompt runs alone
    PROMPT_PASS_STEP = 64,        // later prompts are padded to a multiple, so that few shapes of matmuls occur
};

struct TextQueue {
    // what to do, see text_queue_of()
    const int* prompts; // (N, T)
    const int* lengths; // (N): number of tokens, at least 1
    int N, T;
    int num_tokens;     // a text ends after this many new tokens,
    int stop;           // before this token (-1: none),
    int max_positions;  // with the token that the last position of the model predicts,
    Continuations* out; // or before a stop string, if this is not NULL
    int* new_tokens;    // (N, num_tokens), or NULL
    int* counts;        // (N): number of new tokens
    // where it is
    int B;
    int* slot;   // (B): the text in each slot; -1: none
    int next;    // the first text that has not begun
    int active;  // number of texts that have begun and not ended
    bool failed; // some logits were not numbers
};

// A pass over the prompts of n texts, which begin in slots slot to slot + n - 1. Each is padded to T tokens; the padding at
// the end can be any token, because causal attention never looks at later positions.
struct PromptPass {
    int slot, n, T;
    int* inputs;    // (n, T)
    int* last;      // (n): the position of the prompt's last token
    int* newest;    // (n): that token
    uint64_t* rng;  // (n): the random state of the text
    uint32_t* seen; // (n, seen_words(V)): the tokens of the prompt
};

// The number of positions that a slot needs.
static int text_queue_capacity(const TextQueue* q) {
    return q->num_tokens < q->max_positions - q->T ? q->T + q->num_tokens : q->max_positions;
}

// The length of a pass over prompts of up to T tokens. The first pass is as long as they are.
static int text_queue_pass_length(const TextQueue* q, int T, bool first) {
    int padded = (T + PROMPT_PASS_STEP - 1) / PROMPT_PASS_STEP * PROMPT_PASS_STEP, capacity = text_queue_capacity(q);
    return first ? T : padded < capacity ? padded : capacity;
}

// The most tokens in a pass with B slots, padding included.
static int text_queue_pass_tokens(const TextQueue* q, int B) {
    int longest = text_queue_pass_length(q, q->T, false);
    int several = (size_t)B * q->T < PROMPT_PASS_TOKENS ? B * q->T : PROMPT_PASS_TOKENS;
    return longest > several ? longest : several;
}

// counts (N) receives the number of new tokens of each text. new_tokens and out may be NULL.
static TextQueue text_queue_of(const int* prompts, const int* lengths, int N, int T, int num_tokens, int stop,
                               int max_positions, Continuations* out, int* new_tokens, int* counts) {
    TextQueue q = {prompts,    lengths, N, T,    num_tokens, stop, max_positions, out,
                   new_tokens, counts,  0, NULL, 0,          0,    false};
    memset(counts, 0, (size_t)N * sizeof(int));
    return q;
}

static void text_queue_open(TextQueue* q, int B) {
    q->B = B;
    q->slot = (int*)malloc_check((size_t)B * sizeof(int));
    for (int b = 0; b < B; b++) { q->slot[b] = -1; }
}

static void text_queue_close(TextQueue* q) { free(q->slot); }

// Lets the next texts begin in the first free slots, as many as lie side by side and fit in one pass. Returns false if no
// slot is free or no text is waiting; then there is nothing to free.
static bool text_queue_pass(TextQueue* q, const Sampler* sampler, int vocab_size, PromptPass* p) {
    size_t words = seen_words(vocab_size), most = (size_t)text_queue_pass_tokens(q, q->B);
    memset(p, 0, sizeof(*p));
    while (p->slot < q->B && q->slot[p->slot] >= 0) { p->slot++; }
    for (int b = p->slot; b < q->B && q->slot[b] < 0 && q->next + p->n < q->N; b++) {
        int length = q->lengths[q->next + p->n];
        int T = text_queue_pass_length(q, length > p->T ? length : p->T, q->next == 0);
        if (p->n > 0 && (size_t)(p->n + 1) * T > most) { break; }
        p->T = T, p->n++;
    }
    if (p->n == 0) { return false; }
    size_t n = (size_t)p->n;
    p->inputs = (int*)calloc_check(n * p->T, sizeof(int));
    p->last = (int*)malloc_check(n * sizeof(int));
    p->newest = (int*)malloc_check(n * sizeof(int));
    p->rng = (uint64_t*)malloc_check(n * sizeof(uint64_t));
    p->seen = (uint32_t*)calloc_check(n * words, sizeof(uint32_t));
    for (size_t i = 0; i < n; i++) {
        int text = q->next++, length = q->lengths[text];
        const int* prompt = q->prompts + (size_t)text * q->T;
        memcpy(p->inputs + i * p->T, prompt, (size_t)length * sizeof(int));
        for (int t = 0; t < length; t++) { seen_add(p->seen + i * words, prompt[t]); }
        p->last[i] = length - 1, p->newest[i] = prompt[length - 1], p->rng[i] = prompts_rng(sampler, text);
        q->slot[p->slot + (int)i] = text;
        q->active++;
    }
    return true;
}

static void prompt_pass_free(PromptPass* p) {
    free(p->inputs), free(p->last), free(p->newest), free(p->rng), free(p->seen);
}

// Whether slot b has a text, and the next token that it takes is the last one that there is room for.
static bool text_queue_is_last(const TextQueue* q, int b) {
    int text = q->slot[b];
    if (text < 0) { return false; }
    int room = q->max_positions - q->lengths[text] + 1;
    return q->counts[text] + 1 == (q->num_tokens < room ? q->num_tokens : room);
}

// Whether a text has room for more than its next token.
static bool text_queue_goes_on(const TextQueue* q) {
    for (int b = 0; b < q->B; b++) {
        if (q->slot[b] >= 0 && !text_queue_is_last(q, b)) { return true; }
    }
    return false;
}

// Takes the next token of slot b, if it has a text; -1: the logits were not numbers. Returns true if the text has ended: the
// slot is then free.
static bool text_queue_take(TextQueue* q, int b, int token) {
    int text = q->slot[b];
    if (text < 0) { return false; }
    bool done = text_queue_is_last(q, b) || token < 0 || token == q->stop;
    q->failed |= token < 0;
    if (token >= 0 && token != q->stop) {
        if (q->new_tokens) { q->new_tokens[(size_t)text * q->num_tokens + q->counts[text]] = token; }
        q->counts[text]++;
        if (q->out && text_token(&q->out->texts[text], token)) { done = true; }
    }
    if (!done) { return false; }
    q->slot[b] = -1, q->active--;
    if (q->out) { continuations_end(q->out, text); }
    return true;
}

// ---- halves of many texts side by side ------------------------------------------------------------

// Whether the layers of B texts, with an MLP of width F, run as two halves side by side. Fewer and more texts than these lose by it (on
// an H200). Products by other kernels than decode_matmul share scratch memory.
static bool decode_halves(int B, int C, int F) {
    int n = ceil_div(B, 2);
    return B > 32 && B <= 64 && decode_matmul_runs(true, n, C, F) && decode_matmul_runs(false, n, F, C);
}

// Two streams for the halves of some work that is launched as part of a stream's, also where that is captured as a graph.
struct SideStreams {
    cudaStream_t streams[2];
    cudaEvent_t begun, ended[2];
};
static void side_streams_create(SideStreams* s) {
    cudaCheck(cudaEventCreateWithFlags(&s->begun, cudaEventDisableTiming));
    for (cudaStream_t& stream : s->streams) { cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    for (cudaEvent_t& event : s->ended) { cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
}
static void side_streams_free(SideStreams* s) {
    if (!s->begun) { return; }
    cudaCheck(cudaEventDestroy(s->begun));
    for (cudaEvent_t event : s->ended) { cudaCheck(cudaEventDestroy(event)); }
    for (cudaStream_t stream : s->streams) { cudaCheck(cudaStreamDestroy(stream)); }
    *s = {};
}
// Calls launch(half, exec) for halves 0 and 1, which run at the same time. What is launched on exec's stream later waits for both.
template <class Launch> static void launch_halves(const SideStreams* s, const Execution& exec, const Launch& launch) {
    cudaCheck(cudaEventRecord(s->begun, exec.stream));
    for (int half = 0; half < 2; half++) {
        cudaCheck(cudaStreamWaitEvent(s->streams[half], s->begun));
        Execution side = exec;
        side.stream = s->streams[half];
        launch(half, side);
        cudaCheck(cudaEventRecord(s->ended[half], s->streams[half]));
    }
    for (cudaEvent_t event : s->ended) { cudaCheck(cudaStreamWaitEvent(exec.stream, event)); }
}

// ---- the generator --------------------------------------------------------------------------------

enum { MAX_HEAD_TEXTS = 32 };  // without decode_matmul_head, decode_head is faster than cuBLASLt up to here
enum { MAX_MATVEC_TEXTS = 8 }; // without decode_matmul, decode_matvec is faster than cuBLASLt up to here (on an H200)
// With one slot, and all layers in one launch, a prompt of up to this many tokens runs token by token. The first batched pass over a
// prompt takes about 80 ms, most of it to load its kernels and cuBLASLt's. (Later batched passes take less time than 40 tokens.)
enum { MAX_PROMPT_STEPS = 40 };
// Continues texts side by side, each in a slot of its own. The host launches a step, from the third on as a graph, and reads its tokens
// while the GPU computes the next. When a text ends, the next one takes its slot: its prompt runs between two steps.
struct Generator {
    int B;         // number of slots
    int num_steps; // tokens per text since the first prefill
    KeyValueCache cache;
    Activations acts; // for the prompts; between them its lnf is scratch
    floatX* x;        // (B, C): the residual stream
    floatX* qkv;      // (B, 3*C)
    floatX* atty;     // (B, C)
    floatX* fch;      // (B, F)
    float* logits;    // (B, Vp)
    float* attention_scratch;
    float* sample_scratch;
    floatX* packed; // where all layers run in one launch: their matrices in its order; else NULL
    uint64_t* layers_scratch;
    int* prompt_positions; // (MAX_PROMPT_STEPS): 0, 1, 2, ...
    int* tokens;           // (B): the newest token of each text
    int* positions;        // (B): the position of the newest token
    uint64_t* rng;         // (B): random state of each text
    uint32_t* seen;        // (B, seen_words(V)): with a repetition penalty, the tokens of each text
    void* arena;           // the allocation behind all of the above
    int* host_tokens;      // (2, B) pinned: the newest tokens, too, in turn in both rows, one for the host to read
    int row;               // of host_tokens, the one that is written
    cudaEvent_t written[2];
    LaunchGraph graphs[2]; // of a step that writes row 0 or 1
    SideStreams sides; // for the halves of 33 to 64 texts: attention waits for memory while the other half multiplies
};

// Returns the bytes for B texts side by side with up to `rows` tokens in a pass over prompts; packed: with packed matrices.
static size_t generator_plan(Plan* plan, Generator* g, const GPT2Config* config, int B, int rows, int capacity,
                             bool packed = false) {
    size_t C = config->channels, cache = (size_t)config->num_layers * B * capacity * C, Vp = config->padded_vocab_size;
    PlanGroup group = PLAN_ACTIVATIONS;
    *plan = {};
    *g = {};
    g->B = g->cache.B = B, g->cache.capacity = capacity;
    plan_activations(plan, &g->acts, config, 1, std::max(rows, B), 0, false, 0);
    plan_add(plan, group, &g->cache.keys, cache);
    plan_add(plan, group, &g->cache.values, cache);
    plan_add(plan, group, &g->x, B * C);
    plan_add(plan, group, &g->qkv, B * 3 * C);
    plan_add(plan, group, &g->atty, B * C);
    plan_add(plan, group, &g->fch, B * (size_t)config->mlp_channels);
    plan_add(plan, group, &g->logits, B * std::max(Vp, C)); // also a product of C columns: generator_matmul
    plan_add(plan, group, &g->attention_scratch, decode_attention_scratch(B, (int)C, config->num_heads, capacity));
    plan_add(plan, group, &g->sample_scratch, decode_sample_scratch(B));
    if (packed) {
        plan_add(plan, group, &g->packed, decode_layers_packed(config->num_layers, (int)C));
        plan_add(plan, group, &g->layers_scratch, decode_layers_scratch((int)C, config->num_heads));
        plan_add(plan, group, &g->prompt_positions, MAX_PROMPT_STEPS);
    }
    plan_add(plan, group, &g->tokens, B);
    plan_add(plan, group, &g->positions, B);
    plan_add(plan, group, &g->rng, B);
    plan_add(plan, group, &g->seen, B * seen_words(config->vocab_size));
    return plan->total;
}

// Returns all layers as decode_layers() takes them.
static DecodeLayers generator_layers(const Generator* g, const GPT2* model) {
    const GPT2Config* config = &model->config;
    const KeyValueCache* cache = &g->cache;
    int C = config->channels;
    Parameters<floatX> w = layer_parameters(model->params, config, 0);
    DecodeLayer first = {g->x, cache->keys,       cache->values,   g->positions,
                         C,    config->num_heads, cache->capacity, config->norm_epsilon};
    first.ln1w = w.ln1w, first.ln1b = w.ln1b, first.qkvw = w.qkvw, first.qkvb = w.qkvb;
    first.attprojw = w.attprojw, first.attprojb = w.attprojb, first.ln2w = w.ln2w, first.ln2b = w.ln2b;
    first.fcw = w.fcw, first.fcb = w.fcb, first.fcprojw = w.fcprojw, first.fcprojb = w.fcprojb;
    return {first, config->num_layers, bucket(config, 1).n, (size_t)cache->B * cache->capacity * C};
}

// If there is no memory, returns false with the reason in err.
static bool generator_allocate(Generator* g, GPT2* model, int B, int rows, int capacity, Error* err = NULL,
                               bool one_launch = true) {
    const GPT2Config* config = &model->config;
    Plan plan;
    // weights that other ranks have updated may still be on their way, and from here on they are read
    gpt2_finish_update(model);
    for (int b = 0; b < num_buckets(config); b++) { await_weights(b, model->exec); }
    bool packed = one_launch && is_plain_gpt2(config) &&
                  decode_layers_runs(B, config->channels, config->mlp_channels, config->num_heads, capacity) &&
                  is_free(generator_plan(&plan, g, config, B, rows, capacity, true));
    generator_plan(&plan, g, config, B, rows, capacity, packed);
    char what[64];
    snprintf(what, sizeof(what), "%d %s of up to %d tokens", B, B == 1 ? "text" : "texts", capacity);
    g->arena = plan_allocate(&plan, what, err);
    if (!g->arena) { return false; }
    if (cudaMallocHost(&g->host_tokens, 2 * B * sizeof(int)) != cudaSuccess) { // decode_sample writes to it
        cudaGetLastError();                                                    // clears the error
        cudaCheck(cudaFree(g->arena));
        return error_set(err, "no pinned memory for %s", what);
    }
    for (cudaEvent_t& event : g->written) { cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    if (!packed && decode_halves(B, config->channels, config->mlp_channels)) { side_streams_create(&g->sides); }
    if (packed) {
        int steps[MAX_PROMPT_STEPS];
        for (int t = 0; t < MAX_PROMPT_STEPS; t++) { steps[t] = t; }
        decode_layers_pack(g->packed, generator_layers(g, model), model->exec);
        cudaCheck(
            cudaMemcpyAsync(g->prompt_positions, steps, sizeof(steps), cudaMemcpyHostToDevice, model->exec.stream));
    }
    return true;
}

static void generator_free(Generator* g) {
    for (LaunchGraph& graph : g->graphs) { graph_free(&graph); }
    for (cudaEvent_t event : g->written) { cudaCheck(cudaEventDestroy(event)); }
    side_streams_free(&g->sides);
    cudaCheck(cudaFreeHost(g->host_tokens));
    cudaCheck(cudaFree(g->arena));
    *g = {};
}

// Computes logits from the residual stream of the newest tokens of slots slot to slot + n - 1, and samples the next ones.
static void generator_sample(Generator* g, const GPT2* model, const Sampler* sampler, int slot, int n) {
    const Parameters<floatX>* p = &model->params;
    int C = model->config.channels, V = model->config.vocab_size, Vp = model->config.padded_vocab_size;
    float epsilon = model->config.norm_epsilon;
    const floatX* x = g->x + (size_t)slot * C;
    float* logits = g->logits + (size_t)slot * Vp;
    WeightMatrix head = weights8_matrix(&model->weights8, &model->config, model->params_memory, p->lmhead);
    bool done = decode_matmul_head(logits, x, p->lnfw, p->lnfb, head, n, C, Vp, epsilon, model->exec);
    if (!done && n > MAX_HEAD_TEXTS && head.format == WEIGHTS_FULL) {
        layernorm_forward(g->acts.lnf, g->acts.lnf_mean, g->acts.lnf_rstd, x, p->lnfw, p->lnfb, n, C, epsilon,
                          model->exec);
        matmul_forward_float(logits, g->acts.lnf, p->lmhead, n, C, Vp, model->exec);
    } else if (!done) {
        decode_head(logits, x, p->lnfw, p->lnfb, head, n, C, Vp, epsilon, model->exec);
    }
    int* copy = g->host_tokens + g->row * g->B + slot;
    decode_sample(g->tokens + slot, copy, g->positions + slot, g->sample_scratch, logits, g->rng + slot,
                  g->seen + slot * seen_words(V), sampler->temperature, sampler->top_k, sampler->top_p, sampler->min_p,
                  sampler->repetition_penalty, n, V, Vp, model->exec);
}

// Runs the first n tokens of acts.inputs through the model one by one. x becomes the residual stream of the last one.
static void generator_prompt_steps(Generator* g, const GPT2* model, int n) {
    DecodeLayers layers = generator_layers(g, model);
    for (int t = 0; t < n; t++) {
        const int* position = layers.first.position = g->prompt_positions + t;
        decode_embed(g->x, g->acts.inputs + t, position, model->params.wte, model->params.wpe, 1,
                     model->config.channels, model->exec);
        decode_layers(layers, 1, g->packed, g->layers_scratch, model->exec);
    }
}

// Runs the prompts of a pass, which fills their slots of the cache and no other, and samples the first new token of each.
static void generator_prefill(Generator* g, GPT2* model, const Sampler* sampler, const PromptPass* p) {
    size_t C = model->config.channels, words = seen_words(model->config.vocab_size);
    int slot = p->slot, n = p->n;
    const Execution& exec = model->exec;
    auto upload = [=](auto* to, const auto* from, size_t count) {
        cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(*to), cudaMemcpyHostToDevice, exec.stream));
    };
    upload(g->acts.inputs, p->inputs, (size_t)n * p->T);
    upload(g->rng + slot, p->rng, n);
    upload(g->positions + slot, p->last, n);
    upload(g->tokens + slot, p->newest, n);
    if (sampler->repetition_penalty != 1.0f) { upload(g->seen + slot * words, p->seen, n * words); }
    if (g->packed && g->B == 1 && p->last[0] < MAX_PROMPT_STEPS) {
        generator_prompt_steps(g, model, p->last[0] + 1);
        generator_sample(g, model, sampler, slot, n);
        return;
    }
    KeyValueCache cache = g->cache; // from this slot on
    cache.keys += (size_t)slot * cache.capacity * C, cache.values += (size_t)slot * cache.capacity * C;
    Execution untimed = exec;
    untimed.times_algorithms = false; // a prompt's shape occurs too rarely to pay for that
    gpt2_forward(model, &g->acts, n, p->T, EVALUATE, &cache, untimed);
    for (int i = 0; i < n; i++) {
        const floatX* newest = g->acts.residual3 + ((size_t)i * p->T + p->last[i]) * C;
        cudaCheck(
            cudaMemcpyAsync(g->x + (slot + i) * C, newest, C * sizeof(floatX), cudaMemcpyDeviceToDevice, exec.stream));
    }
    generator_sample(g, model, sampler, slot, n);
}

// Begins waiting texts in all free slots.
static void generator_fill(Generator* g, GPT2* model, const Sampler* sampler, TextQueue* q) {
    PromptPass pass;
    while (text_queue_pass(q, sampler, model->config.vocab_size, &pass)) {
        generator_prefill(g, model, sampler, &pass);
        prompt_pass_free(&pass);
    }
}

// out (n,OC) = gelu?(layernorm?(x) weight^T + bias) + residual for the newest token of n texts. Without a layernorm norm_weight
// and norm_bias are NULL. residual may be NULL, or the same as out; it excludes gelu and a layernorm.
static void generator_matmul(Generator* g, const GPT2* model, floatX* out, const floatX* x, const floatX* norm_weight,
                             const floatX* norm_bias, const floatX* weight, const floatX* bias, const floatX* residual,
                             bool gelu, int n, int C, int OC, const Execution& exec) {
    WeightMatrix matrix = weights8_matrix(&model->weights8, &model->config, model->params_memory, weight);
    float epsilon = model->config.norm_epsilon;
    if (decode_matmul(out, x, norm_weight, norm_bias, matrix, bias, residual, gelu, n, C, OC, epsilon, exec)) {
        return;
    }
    if (n <= MAX_MATVEC_TEXTS) {
        decode_matvec(out, x, norm_weight, norm_bias, matrix, bias, residual, gelu, n, C, OC, epsilon, exec);
        return;
    }
    if (norm_weight) {
        layernorm_forward(g->acts.lnf, g->acts.lnf_mean, g->acts.lnf_rstd, x, norm_weight, norm_bias, n, C, epsilon,
                          exec);
        x = g->acts.lnf;
    }
    if (residual) { return matmul_forward_residual(out, g->logits, x, weight, bias, residual, n, C, OC, exec); }
    matmul_forward(out, gelu ? GeluSaved::not_kept() : GeluSaved(), x, weight, bias, NULL, n, C, OC, exec);
}

// Runs the newest token of n texts, those in slots begin to begin + n - 1, through the layers, one launch after the other.
static void generator_launch_layers(Generator* g, const GPT2* model, int begin, int n, const Execution& exec) {
    int NH = model->config.num_heads, C = model->config.channels, F = model->config.mlp_channels;
    size_t at = (size_t)begin * C;
    bool gelu = model->config.activation == ACT_GELU_TANH; // is in the kernels
    floatX *x = g->x + at, *qkv = g->qkv + 3 * at, *atty = g->atty + at, *fch = g->fch + (size_t)begin * F;
    for (int l = 0; l < model->config.num_layers; l++) {
        Parameters<floatX> w = layer_parameters(model->params, &model->config, l);
        KeyValueCache c = layer_cache(g->cache, &model->config, l);
        generator_matmul(g, model, qkv, x, w.ln1w, w.ln1b, w.qkvw, w.qkvb, NULL, false, n, C, 3 * C, exec);
        decode_attention(atty, c.keys + at * c.capacity, c.values + at * c.capacity,
                         g->attention_scratch + decode_attention_scratch(begin, C, NH, c.capacity), qkv,
                         g->positions + begin, n, C, NH, c.capacity, attention_scale(&model->config, l), exec);
        generator_matmul(g, model, x, atty, NULL, NULL, w.attprojw, w.attprojb, x, false, n, C, C, exec);
        generator_matmul(g, model, fch, x, w.ln2w, w.ln2b, w.fcw, w.fcb, NULL, gelu, n, C, F, exec);
        if (!gelu) { activation_forward(fch, NULL, fch, (size_t)n * F, (Activation)model->config.activation, exec); }
        generator_matmul(g, model, x, fch, NULL, NULL, w.fcprojw, w.fcprojb, x, false, n, F, C, exec);
    }
}

// Runs the newest token of each text through the model and samples the next one.
static void generator_launch_step(Generator* g, const GPT2* model, const Sampler* sampler) {
    int B = g->B;
    const Execution& exec = model->exec;
    decode_embed(g->x, g->tokens, g->positions, model->params.wte, model->params.wpe, B, model->config.channels, exec);
    if (g->packed) {
        decode_layers(generator_layers(g, model), B, g->packed, g->layers_scratch, exec);
    } else if (!g->sides.begun) {
        generator_launch_layers(g, model, 0, B, exec);
    } else {
        launch_halves(&g->sides, exec, [&](int i, const Execution& side) {
            generator_launch_layers(g, model, B / 2 * i, i ? B - B / 2 : B / 2, side);
        });
    }
    generator_sample(g, model, sampler, 0, B);
}

// Generates one token per text.
static void generator_step(Generator* g, const GPT2* model, const Sampler* sampler) {
    g->num_steps++;
    launch_as_graph(&g->graphs[g->row], model->exec.stream, [&] { generator_launch_step(g, model, sampler); });
}

// Continues prompts (N,T) of lengths (N), at most at_once side by side; one that ends makes room for the next. A text ends
// after num_tokens tokens, before the token `stop` (-1: none) or a stop string of `out`, or at the model's last position. New
// tokens go to new_tokens (N, num_tokens) and to `out`, unless these are NULL; how many, to counts (N). The sampler's random
// state advances. Adds to *times, unless it is NULL. Returns false if the logits are not numbers. If there is no GPU memory,
// ends the program, or, if no_memory is not NULL, generates nothing and says why there. one_launch: where possible, decode_layers.
static bool generate(GPT2* model, Sampler* sampler, const int* prompts, const int* lengths, int N, int T,
                     int num_tokens, int stop, int* new_tokens, int* counts, Continuations* out = NULL,
                     GenerationTimes* times = NULL, Error* no_memory = NULL, int at_once = 64, bool one_launch = true) {
    Generator g;
    Error err;
    TextQueue q =
        text_queue_of(prompts, lengths, N, T, num_tokens, stop, model->config.max_seq_len, out, new_tokens, counts);
    int capacity = text_queue_capacity(&q);
    int B = most_that_fit(std::min(N, at_once), [&](int b) {
        Plan plan;
        return generator_plan(&plan, &g, &model->config, b, text_queue_pass_tokens(&q, b), capacity);
    });
    if (!generator_allocate(&g, model, B, text_queue_pass_tokens(&q, B), capacity, no_memory ? no_memory : &err,
                            one_launch)) {
        if (!no_memory) { die("%s; %s, or take a smaller --num-tokens or shorter prompts", err.text, OTHER_PROGRAMS); }
        return true;
    }
    auto leave = [&](int b) { cudaCheck(cudaMemsetAsync(g.positions + b, 0xFF, sizeof(int), model->exec.stream)); };
    double start = time_ms(), middle = start;
    text_queue_open(&q, B);
    generator_fill(&g, model, sampler, &q);
    for (int step = 0; q.active > 0; step++) {
        int row = g.row;
        cudaCheck(cudaEventRecord(g.written[row], model->exec.stream));
        g.row ^= 1; // what is sampled from here on goes to the other row

        for (int b = 0; b < B; b++) { // before the next step is launched, for which it has no room
            if (text_queue_is_last(&q, b)) { leave(b); }
        }
        if (text_queue_goes_on(&q)) { generator_step(&g, model, sampler); }
        cudaCheck(cudaEventSynchronize(g.written[row]));
        if (step == 0) { middle = time_ms(); }
        for (int b = 0; b < B; b++) {
            if (text_queue_take(&q, b, g.host_tokens[row * B + b])) { leave(b); }
        }
        generator_fill(&g, model, sampler, &q);
    }
    cudaCheck(cudaMemcpyAsync(&sampler->rng, g.rng, sizeof(uint64_t), cudaMemcpyDeviceToHost, model->exec.stream));
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
    if (times) {
        times->prefill_ms += middle - start, times->decode_ms += time_ms() - middle, times->steps += g.num_steps;
        times->at_once = N > B ? B : 0;
    }
    text_queue_close(&q);
    generator_free(&g);
    return !q.failed;
}

// ================================================================================================
// 4. training
// ================================================================================================

// A step in flight, and its results, which the host reads when the GPU has finished it.
struct PendingStep {
    StepReport report; // filled in as its values become known
    StepState* state;  // pinned copy of the device's state
    cudaEvent_t begin, end;
    bool judged; // the host computed the z-scores before the update (-sl, -sg)
};

struct Trainer {
    GPT2 model;
    Training job;    // data, checkpoints, logs, the shape of a batch: llmc/run.h
    int* batches[2]; // two pinned buffers (2, B, T) of inputs and targets, used alternately
    cudaEvent_t copied[2];
    int64_t num_batches; // micro-batches copied so far
    PendingStep steps[2];
    PendingStep* pending; // the step that is launched and not yet reported, or NULL
    LaunchGraph graphs[2]
                      [2]; // of a micro-step: [first of a step][last of a step, and gradients are exchanged beside it]
    RunParts parts;        // which rank saves which tensors
    float* buffer;         // this rank's parts, pinned: weights and moments, from which checkpoints are written
    EvalLoader hellaswag;  // --hellaswag
    Evaluator evaluator;
    double machine_flops; // FLOP/s at 100% MFU: from the table in llmc/mfu.h, or measured
};

// ---- a step ---------------------------------------------------------------------------------------

// Queues the copy of the next micro-batch to the GPU. Returns false if the data cannot be read.
static bool load_batch(Trainer* t, DataLoader* loader, Error* err) {
    int slot = (int)(t->num_batches++ % 2);
    size_t BT = (size_t)loader->B * loader->T;
    // until the copy of two micro-batches ago has read this buffer
    wait_for_event(t->copied[slot], "a micro-batch of step", t->job.run.step + 1);
    if (!dataloader_next(loader, t->batches[slot], t->batches[slot] + BT, err)) { return false; }
    cudaStream_t stream = t->model.exec.stream;
    Activations* acts = &t->model.acts;
    cudaCheck(cudaMemcpyAsync(acts->inputs, t->batches[slot], BT * sizeof(int), cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaMemcpyAsync(acts->targets, t->batches[slot] + BT, BT * sizeof(int), cudaMemcpyHostToDevice, stream));
    cudaCheck(cudaEventRecord(t->copied[slot], stream));
    return true;
}

// Prepares the next micro-batch. False on all ranks if one cannot read its data (err says why) or was asked to stop (err empty).
static bool next_batch(Trainer* t, Error* err) {
    int signal = run_stop_signal;
    bool loaded = !signal && load_batch(t, &t->job.train, err);
    RankNews news = ranks_agree(signal, !signal && !loaded, 0, ranks_limit_ms());
    if (news.failed) { ranks_take_reason(news.failed - 1, !signal && !loaded, err); }
    return !news.signal && !news.failed;
}

// With several GPUs and exchanges beside the computations, weights are gathered during the first forward pass of a step, and
// gradients are reduced during the last backward pass.
static void launch_micro_step(GPT2* model, const Batch* batch, bool first, bool last) {
    int B = batch->B, T = batch->T;
    float scale = 1.0f / (float)batch->total;
    Execution forward = leaving_room(model->exec, first && args->zero);
    if (first && deferred_update_on(model)) { forward = with_deferred_update(model, forward); }
    PassKind kind = first ? TRAIN_FIRST : TRAIN;
    gpt2_forward(model, &model->acts, B, T, kind, NULL, forward);
    gpt2_loss(model, &model->acts, B, T, kind, scale, model->exec); // all weights are here
    gpt2_backward(model, B, T, kind, leaving_room(model->exec, last));
}

// Forward and backward of one micro-batch.
static void micro_step(Trainer* t, bool first, bool last) {
    Range range("micro_step");
    auto launch = [&] { launch_micro_step(&t->model, &t->job.batch, first, last); };
    if (first) { t->model.update_is_deferred = false; } // the forward pass finishes it, also in a graph
    if (!args->use_graph || profile().listing) { return launch(); }
    launch_as_graph(&t->graphs[first][last && ranks().beside], t->model.exec.stream, launch);
}

// Queues the copy of the step's state to s->state.
static void read_state(Trainer* t, PendingStep* s) {
    cudaCheck(
        cudaMemcpyAsync(s->state, t->model.state, sizeof(StepState), cudaMemcpyDeviceToHost, t->model.exec.stream));
}

// With -sl or -sg the host waits for loss and norm before the update. Returns false if the step must be skipped.
static bool judge_before_update(Trainer* t, PendingStep* s) {
    read_state(t, s);
    wait_for_stream(t->model.exec.stream, "step", s->report.step);
    s->report.loss = s->state->loss;
    s->report.norm = s->state->scaled_norm / s->state->loss_scale;
    s->judged = true;
    return training_judge(&t->job, &s->report);
}

// Queues one step, which becomes t->pending until report_step. Returns false, and drops the step, if its data cannot be
// read (the reason is then in err) or if a signal requests a stop between two micro-batches (err is then empty).
static bool launch_step(Trainer* t, Error* err) {
    RunState* run = &t->job.run;
    Range range("step %lld", (long long)run->step + 1);
    GPT2* model = &t->model;
    PendingStep* s = &t->steps[run->step % 2];
    err->text[0] = '\0';
    s->judged = false;
    s->report.step = run->step + 1;
    float learning_rate = s->report.learning_rate = lr_at(&t->job.schedule, run->step);
    if (args->overfit) { dataloader_reset(&t->job.train); }
    cudaCheck(cudaEventRecord(s->begin, model->exec.stream));
    cudaCheck(cudaMemsetAsync(&model->state->loss, 0, sizeof(float), model->exec.stream));
    for (int64_t i = 0; i < t->job.batch.micro_steps; i++) {
        if (!next_batch(t, err)) { return false; }
        // before the first step of a run with --fp8: measures the tensors' largest values, unless a resumed run knows them
        begin_fp8(model, run->num_fp8 > 0, [&] { launch_micro_step(model, &t->job.batch, true, false); });
        micro_step(t, i == 0, i == t->job.batch.micro_steps - 1);
    }
    gpt2_gradient_norm(model);
    AdamW optimizer = {learning_rate, args->beta1, args->beta2, args->eps, args->weight_decay, args->clip};
    bool host_judges = args->skip_loss_z > 0 || args->skip_norm_z > 0;
    bool skip = host_judges && !judge_before_update(t, s);
    Muon muon = {lr_at(&t->job.muon_schedule, run->step), args->muon_momentum, args->weight_decay};
    gpt2_update(model, &optimizer, skip, uses_muon() ? &muon : NULL, deferred_update_on(model));
    read_state(t, s);
    cudaCheck(cudaEventRecord(s->end, model->exec.stream));
    training_step_done(&t->job);
    t->pending = s;
    return true;
}

// fp16: takes over the loss scale that the GPU chose for the next step. If the GPU lowered it, the count of consecutive
// steps that were not finite starts again at 0, because too high a loss scale may have been the only cause.
static void follow_loss_scale(Trainer* t, const PendingStep* s) {
    RunState* run = &t->job.run;
    if (s->state->loss_scale < run->loss_scale) {
        print_line(stdout, "step %lld: gradients overflow in fp16, loss scale lowered to %g", (long long)s->report.step,
                   s->state->loss_scale);
        t->job.nonfinite_in_a_row = 0;
    }
    run->loss_scale = s->state->loss_scale;
    run->loss_scale_good_steps = s->state->good_steps;
}

// Waits for a step and prints its report. Returns true if too many consecutive steps were not finite.
static bool report_step(Trainer* t, PendingStep* s) {
    StepReport* r = &s->report;
    float ms;
    wait_for_event(s->end, "step", r->step);
    ranks_progressed();
    cudaCheck(cudaEventElapsedTime(&ms, s->begin, s->end));
    r->loss = s->state->loss, r->norm = s->state->norm, r->ms = ms, r->num_saturated = s->state->saturated;
    if (!s->judged) { training_judge(&t->job, r); } // computes the z-scores for the report
    training_count(&t->job, r, s->state->applied);  // counts a skipped step and prints the reason
    follow_loss_scale(t, s);
    char extra[128], memory[32];
    snprintf(extra, sizeof(extra), " | %.1f TFLOP/s | %s%s", training_flops(&t->job, r->ms) * 1e-12,
             format_bytes(memory, sizeof(memory), (double)t->model.num_bytes), ranks_timed(s->begin).c_str());
    training_report(&t->job, r, t->machine_flops, PRECISION_NAME, extra);
    if (args->log_memory_every && r->step % args->log_memory_every == 0) {
        size_t free_bytes, all_bytes;
        cudaCheck(cudaMemGetInfo(&free_bytes, &all_bytes));
        print_line(stdout, "GPU memory: %.2f GB in use, %.2f free", (all_bytes - free_bytes) * 1e-9, free_bytes * 1e-9);
    }
    return t->job.nonfinite_in_a_row >= args->max_nonfinite;
}

// ---- checkpoints ----------------------------------------------------------------------------------

// Allocates t->buffer. If the memory cannot be pinned, the copies are slower, and the host waits for each.
static void allocate_buffer(Trainer* t) {
    Saver* s = &t->job.saver;
    if (t->buffer) { return; }
    run_parts(&t->parts, &t->model.config, run_num_ranks);
    size_t bytes = std::max(t->parts.rank_floats[run_rank], (size_t)1) * sizeof(float);
    t->buffer = (float*)malloc_check(bytes);
    advise_huge(t->buffer, bytes);
    if (cudaHostRegister(t->buffer, bytes, cudaHostRegisterDefault) != cudaSuccess) { cudaGetLastError(); }
    // a day: writing may take long, and a death is noticed
    s->ranks = {run_rank, run_num_ranks, 0, 86400e3, &ranks().died, &ranks().unheard};
    s->parts = &t->parts;
    s->buffer = t->buffer;
}

// Copies what this rank saves to t->buffer.
static void copy_parts(Trainer* t) {
    GPT2* model = &t->model;
    for (int array = 0; array < 3; array++) {
        const float* whole = array == 0   ? collect_weights(model)
                             : array == 1 ? collect_shares(model, model->m_memory)
                                          : collect_shares(model, model->v_memory);
        for (int i = 0; i < t->parts.num_parts; i++) {
            const RunPart* part = &t->parts.parts[i];
            if (part->array != array || part->rank != run_rank) { continue; }
            size_t place = param_place(&model->config, part->p, part->layer);
            download_values(model, t->buffer + part->offset, whole, place, part->floats);
        }
    }
    forget_whole_array(model);
    wait_for_stream(model->exec.stream, "collecting the checkpoint of step", t->job.run.step);
}

// All ranks call it, and each of them writes its parts of the files.
static void save_checkpoint(Trainer* t, bool last) {
    training_finish_save(&t->job);
    bool unsaved = is_rank0() && training_is_unsaved(&t->job);
    if (!ranks_agree(0, false, unsaved, 0).due) { return; }
    if (is_rank0() && run_owns(args->output, t->job.saver.lock, NULL)) {
        choices_save(t->model.exec, args->output), save_overlap(args->output);
    }
    allocate_buffer(t);
    copy_parts(t);
    t->job.run.num_fp8 = download_fp8(&t->model, t->job.run.fp8_largest);
    t->job.saver.ranks.token = ranks_token();
    training_save(&t->job, NULL, last);
    ranks_agree(0, false, 0, 0); // however long rank 0 has taken
}

// Ends a run after too many consecutive steps that were not finite.
__attribute__((noreturn)) static void give_up(Trainer* t) {
    size_t n = num_parameters(&t->model.config);
    float* weights = (float*)malloc_check(n * sizeof(float));
    gpt2_download(&t->model, weights);
    bool good = params_check(&t->model.config, weights, FLT_MAX, NULL);
    if (good && args->output) { save_checkpoint(t, true); }
    training_give_up(&t->job, good);
}

// Ends a run that cannot read its data, after saving what it has. No step is pending.
__attribute__((noreturn)) static void end_with_error(Trainer* t, const Error* reason) {
    if (args->output) { save_checkpoint(t, true); }
    training_fail(&t->job, reason);
}

// Reports the pending step, if there is one.
static void finish_report(Trainer* t) {
    PendingStep* s = t->pending;
    t->pending = nullptr;
    if (s && report_step(t, s)) { give_up(t); }
}

// Launches one step, then reports the previous one: the GPU has work while the host prints.
static void train_step(Trainer* t) {
    Error err;
    PendingStep* earlier = t->pending;
    bool launched = launch_step(t, &err);
    if (!launched) { t->pending = nullptr; }
    if (earlier && report_step(t, earlier)) {
        if (launched) { report_step(t, t->pending); } // it has run too: count it before the state is saved
        give_up(t);
    }
    if (!launched && err.text[0]) { end_with_error(t, &err); }
}

// ---- evaluation -----------------------------------------------------------------------------------

// The mean loss on the validation data.
static double validation_loss(Trainer* t) {
    Range range("validation");
    GPT2* model = &t->model;
    int B = t->job.val_B, T = t->job.batch.T;
    int64_t n = t->job.num_val_batches;
    float loss;
    Error err;
    dataloader_reset(&t->job.val);
    cudaCheck(cudaMemsetAsync(&model->state->loss, 0, sizeof(float), model->exec.stream));
    for (int64_t i = 0; i < n; i++) {
        training_show_task("the validation", i, n);
        if (load_batch(t, &t->job.val, &err)) {
        } else if (is_alone()) {
            end_with_error(t, &err);
        } else { // the other ranks cannot save now
            die("%s", err.text);
        }
        gpt2_forward(model, &model->acts, B, T, EVALUATE, NULL, model->exec);
        gpt2_loss(model, &model->acts, B, T, EVALUATE, 1.0f / ((float)B * T * n), model->exec);
        ranks_agree(0, false, 0, ranks_limit_ms()); // a rank that hangs is noticed
    }
    cudaCheck(cudaMemcpyAsync(&loss, &model->state->loss, sizeof(loss), cudaMemcpyDeviceToHost, model->exec.stream));
    wait_for_stream(model->exec.stream, "the validation after step", t->job.run.step);
    return t->job.val_ranks > 1 ? ranks_sum(loss, ranks_limit_ms()) / t->job.val_ranks : loss;
}

// Computes losses (B,T), for llmc/evaluation.h.
static void compute_losses(void* gpt2, float* losses, const int* inputs, const int* targets, int B, int T) {
    GPT2* model = (GPT2*)gpt2;
    Activations* acts = &model->acts;
    size_t BT = (size_t)B * T;
    cudaCheck(cudaMemcpyAsync(acts->inputs, inputs, BT * sizeof(int), cudaMemcpyHostToDevice, model->exec.stream));
    cudaCheck(cudaMemcpyAsync(acts->targets, targets, BT * sizeof(int), cudaMemcpyHostToDevice, model->exec.stream));
    gpt2_forward(model, acts, B, T, EVALUATE, NULL, model->exec);
    gpt2_loss(model, acts, B, T, EVALUATE, 0.0f, model->exec);
    cudaCheck(cudaMemcpyAsync(losses, acts->losses, BT * sizeof(float), cudaMemcpyDeviceToHost, model->exec.stream));
    cudaCheck(cudaStreamSynchronize(model->exec.stream));
}

// The most likely token at position i of the B x T of the last compute_losses, for llmc/evaluation.h.
static int most_likely_token(void* gpt2, size_t i) {
    GPT2* model = (GPT2*)gpt2;
    std::vector<floatX> row(model->config.vocab_size);
    const floatX* logits = model->acts.logits + i * model->config.padded_vocab_size;
    cudaCheck(cudaMemcpy(row.data(), logits, row.size() * sizeof(floatX), cudaMemcpyDeviceToHost));
    return sampler_argmax(std::vector<float>(row.begin(), row.end()).data(), model->config.vocab_size);
}

// Validation, and --hellaswag.
static void validate(Trainer* t) {
    Range range("validate");
    double start = time_ms();
    double accuracy = args->hellaswag ? evaluate_hellaswag(&t->evaluator, &t->hellaswag) : 0.0;
    if (args->hellaswag) { logger_eval(&t->job.logger, t->job.run.step, accuracy); }
    if (t->job.has_val) { training_validated(&t->job, validation_loss(t), start); }
}

static void sample_in_training(Trainer* t) {
    int length = 1, count;
    std::vector<int> tokens(args->sample_tokens);
    TrainingSample s;
    Error no_memory = {""};
    training_sample_begin(&t->job, &s);
    bool good = generate(&t->model, &s.sampler, &s.prompt, &length, 1, 1, args->sample_tokens, -1, tokens.data(),
                         &count, NULL, NULL, &no_memory);
    for (int i = 0; i < count; i++) { text_token(&s.out, tokens[i]); }
    training_sample_end(&t->job, &s, no_memory.text[0] ? no_memory.text : good ? NULL : "the logits are not numbers");
}

// Generates three tokens: CUDA loads a kernel at its first launch, when another program could have taken all memory by then.
static void load_sampling_kernels(Trainer* t) {
    Sampler sampler = sampler_make(1.0f, 0, 1.0f, 1);
    int length = 1, count, tokens[3];
    Error no_memory;
    const GPT2Config* config = &t->model.config;
    bool runs = decode_layers_runs(1, config->channels, config->mlp_channels, config->num_heads, config->max_seq_len);
    for (bool one_launch : {true, false}) { // later there may be no memory for the first
        if (!one_launch && !runs) { break; }
        generate(&t->model, &sampler, &t->job.start_token, &length, 1, 1, 3, -1, tokens, &count, NULL, NULL, &no_memory,
                 1, one_launch);
    }
}

// ---- opening and closing a run --------------------------------------------------------------------

// Prints what a training run needs, with `unplanned` bytes for the driver and the libraries; `have` bytes are free on `device`.
// num_shares: ranks that share the optimizer's state.
static void print_memory(const Plan* parameters, const Plan* activations, bool muon, int num_shares, size_t unplanned,
                         size_t have, const char* device) {
    char shared[64] = "";
    size_t need = parameters->total + activations->total + unplanned;
    if (num_shares > 1 && muon) { snprintf(shared, sizeof(shared), " (the largest of %d shares)", num_shares); }
    if (num_shares > 1 && !muon) { snprintf(shared, sizeof(shared), " (1/%d of it)", num_shares); }
    char text[6][32];
    auto bytes = [&](int i, size_t n) { return format_bytes(text[i], sizeof(text[i]), (double)n); };
    printf("memory: weights %s, gradients %s, %s %s%s, activations %s, library and driver %s: %s of the %.1f GB free "
           "on %s\n",
           bytes(0, parameters->bytes[PLAN_WEIGHTS]), bytes(1, parameters->bytes[PLAN_GRADIENTS]),
           muon ? "Muon and AdamW" : "AdamW", bytes(2, parameters->bytes[PLAN_ADAMW]), shared,
           bytes(3, activations->total), bytes(4, unplanned), bytes(5, need), (double)have * 1e-9, device);
}

// Ends the program with a message that says which flags would make the run fit. bytes_of(B, recompute): what a run needs with
// these values of -b and -r. have: bytes that are free on `device`.
template <class Bytes> __attribute__((noreturn)) static void
die_of_memory(Bytes bytes_of, int recompute, const Batch* batch, const char* device, size_t have) {
    char advice[512] = "";
    size_t need = bytes_of(batch->B, recompute), n = 0;
    for (int r = recompute + 1; r <= 2 && n == 0; r++) {
        size_t bytes = bytes_of(batch->B, r);
        if (bytes <= have) { n += snprintf(advice, sizeof(advice), "; -r %d needs %.2f", r, (double)bytes * 1e-9); }
    }
    for (int both = 0; both < 2 && (!both || n == 0); both++) { // a smaller -b; then -r 2 as well
        for (int b = batch->B / 2; b >= 1; b /= 2) {
            size_t bytes = bytes_of(b, both ? 2 : recompute);
            bool divides = batch->total % ((int64_t)b * batch->T * run_num_ranks) == 0;
            if (bytes > have || !divides) { continue; }
            n += snprintf(advice + n, sizeof(advice) - n, "; %s-b %d -d %lld needs %.2f for the same result",
                          both ? "-r 2 " : "", b, (long long)batch->total, (double)bytes * 1e-9);
            break;
        }
    }
    if (n == 0) { snprintf(advice, sizeof(advice), "; -r 2 and a smaller -b are not enough: take a smaller model"); }
    die("the run needs %.2f GB and %s has %.2f free%s%s", (double)need * 1e-9, device, (double)have * 1e-9,
        other_programs(need), advice);
}

// Prints a note if attention runs without tensor cores, which makes it several times slower.
static void print_attention(const GPT2Config* config) {
    if (attention_forward_choice(1, 1, 1, config->channels / config->num_heads) != 6) { return; }
    printf("note: attention runs on CUDA cores: tensor cores need %s\n",
           sizeof(floatX) == 4 ? "PRECISION=BF16 or FP16 when train_gpt2cu is built"
                               : "compute capability 8.0 or later");
}

// What the flags say about the model of a training run.
static GPT2Options training_options() {
    GPT2Options options = {args->recompute, args->gelu_fusion == 3, (bool)args->master_weights,
                           (bool)args->stochastic_rounding, (uint64_t)args->seed};
    options.muon = uses_muon();
    options.defers_updates = strcmp(args->overlap, "off") != 0 && !args->profile; // --overlap on one GPU
    options.fp8 = args->fp8;
    return options;
}

// The recipe's micro-batch leaves 3% of the memory free, and has at most as many tokens as occupy all of a large GPU.
constexpr double RECIPE_MEMORY = 0.97;
constexpr int RECIPE_TOKENS = 65536;

// Bytes that a training run with the flags needs.
static double bytes_by_flags(const GPT2Config* config, int B, int T) {
    GPT2Options options = training_options();
    check_config(config);
    return (double)training_bytes(config, B, T, &options);
}

// Plans a training run's memory, prints how much it needs, and allocates it.
static void open_training_model(GPT2* model, const GPT2Config* config, const Batch* batch, const Execution& exec) {
    char device[256];
    Plan parameters, activations;
    GPT2Options options = training_options();
    check_fp8(config, batch->B * batch->T, options.fp8);
    gpt2_open(model, config, &options, exec);
    size_t have = device_memory(device);
    plan_training(&parameters, &activations, model, config, batch->B, batch->T, &options);
    size_t need = parameters.total + activations.total + unplanned_bytes();
    printf("%d layers, %d heads, %d channels, %d positions, vocabulary %d: %.2f M parameters, %s\n", config->num_layers,
           config->num_heads, config->channels, config->max_seq_len, config->vocab_size,
           (double)num_parameters(config) * 1e-6, PRECISION_NAME);
    print_attention(config);
    print_memory(&parameters, &activations, options.muon, ranks().num_shares, unplanned_bytes(), have, device);
    auto bytes = [&](int B, int recompute) {
        GPT2Options other = options;
        other.recompute = recompute;
        return training_bytes(config, B, batch->T, &other);
    };
    if (need > have) { die_of_memory(bytes, options.recompute, batch, device, have); }
    allocate_training(model, &parameters, &activations);
}

// Copies weights and moments to the GPU, from the checkpoint or new ones. training_begin is the first to write to -o.
static void load_training_state(Trainer* t, ModelSource* source) {
    GPT2* model = &t->model;
    RunState* run = &t->job.run;
    size_t n = num_parameters(&source->config);
    bool resumed = t->job.checkpoint.text[0];
    float* arrays[3] = {NULL, NULL, NULL};
    for (int i = 0; i < (resumed ? 3 : 1); i++) { arrays[i] = (float*)malloc_check(n * sizeof(float)); }
    if (!resumed) { model_source_read(source, arrays[0]); }
    run->loss_scale = 65536.0;
    training_begin(&t->job, &source->config, arrays[0], arrays[1], arrays[2]);
    if (!IS_FP16) { run->loss_scale = 1.0; } // even after an fp16 run; an fp16 run goes on from a bf16 run's 1
    StepState state = {};
    state.loss_scale = (float)run->loss_scale;
    state.dloss = (float)(run->loss_scale / (double)t->job.batch.total);
    state.num_updates = (int)(run->step - run->skipped_steps);
    state.good_steps = (int)run->loss_scale_good_steps;
    ranks_check_equal("the weights", is_alone() ? 0 : crc32c(0, arrays[0], n * sizeof(float)));
    gpt2_upload(model, arrays[0], state.num_updates);
    if (run->num_fp8 > 0) { upload_fp8(model, run->fp8_largest, run->num_fp8); }
    cudaCheck(cudaMemcpy(model->state, &state, sizeof(state), cudaMemcpyHostToDevice));
    if (resumed) {
        model_source_close(source);
        upload_shares(model, model->m_memory, arrays[1]);
        upload_shares(model, model->v_memory, arrays[2]);
    }
    forget_whole_array(model);
    for (float* array : arrays) { free(array); }
}

// Queues the exchanges of a step without its computations. The weights do not change, because all ranks have the same.
static void exchange_all(GPT2* model) {
    reduce_all_gradients(model);
    for (int b = 0; b < num_buckets(&model->config); b++) {
        Span whole = bucket(&model->config, b);
        gather_weights(b, model->params_memory + whole.place, whole.n, model->exec);
    }
    gathering_queued(model->exec);
}

// Rank 0 chooses cuBLASLt's algorithms and when to exchange, and all ranks do as it does.
static void share_choices(Trainer* t) {
    const GPT2Config* config = &t->model.config;
    ExchangeTrial trial = {t->model.own_grads, t->model.grads_memory,        bucket(config, 0).n,
                           model_size(config), t->job.batch.micro_steps > 1, t->job.run.step + 1};
    auto launch = [&](bool first, bool last) { launch_micro_step(&t->model, &t->job.batch, first, last); };
    ranks_choose(trial, t->job.checkpoint.text[0] ? args->output : NULL, t->model.exec, launch,
                 [&] { exchange_all(&t->model); });
}

// Rank 0 decides from what the run resumes, and draws a seed if that was asked for.
static void ranks_find_checkpoint(Training* t) {
    struct Found {
        char checkpoint[4000]; // a longer path does not fit the exchange of the hosts
        int64_t seed;
    } found = {};
    if (is_rank0()) {
        training_find_checkpoint(t);
    } else {
        training_clear(t);
    }
    if (!is_alone() && strlen(t->checkpoint.text) >= sizeof(found.checkpoint)) {
        die("%s: the path is too long", t->checkpoint.text);
    }
    snprintf(found.checkpoint, sizeof(found.checkpoint), "%s", t->checkpoint.text);
    found.seed = drawn_seed;
    if (is_alone()) { return; }
    ranks_take_from_rank0(&found, sizeof(found));
    path_set(&t->checkpoint, "%s", found.checkpoint);
    drawn_seed = found.seed;
}

// Opens everything that a run needs, in an order that finds all mistakes of the user before anything is written.
static Trainer* trainer_open(const Execution& exec) {
    static Trainer trainer;
    Trainer* t = &trainer;
    ModelSource source;
    ranks_find_checkpoint(&t->job);
    training_open_model(&t->job, &source);
    char device[256];
    int most = std::max(RECIPE_TOKENS / sequence_length(&source.config), 1);
    choose_batch(&source.config, most, RECIPE_MEMORY * (double)device_memory(device), bytes_by_flags);
    Batch batch = t->job.batch = settle_batch(&source.config);
    open_training_model(&t->model, &source.config, &batch, exec);
    ranks_connect(num_buckets(&source.config));
    training_open_data(&t->job, &source.config);
    open_questions(&t->hellaswag, batch.B, batch.T, source.config.vocab_size);
    if (args->hellaswag) { evaluator_open(&t->evaluator, compute_losses, NULL, &t->model, batch.B, batch.T); }
    if (training_saves_asynchronously()) { allocate_buffer(t); } // now, because pinning takes longer than a copy
    for (int i = 0; i < 2; i++) {
        t->batches[i] = (int*)pinned_malloc(2 * (size_t)batch.B * batch.T * sizeof(int));
        t->steps[i].state = (StepState*)pinned_malloc(sizeof(StepState));
        cudaCheck(cudaEventCreateWithFlags(&t->copied[i], cudaEventDisableTiming));
        cudaCheck(cudaEventCreate(&t->steps[i].begin));
        cudaCheck(cudaEventCreate(&t->steps[i].end));
    }
    t->machine_flops = run_num_ranks * find_machine_flops(t->model.exec);
    load_training_state(t, &source);
    if (t->job.checkpoint.text[0]) { choices_load(t->model.exec, args->output); }
    choices_print(t->model.exec);
    if (args->sample_every > 0 && is_rank0()) { load_sampling_kernels(t); }
    if (!is_alone()) { share_choices(t); }
    output_release();
    training_next_step(&t->job);
    return t;
}

// Returns the exit code.
static int trainer_close(Trainer* t) {
    cudaCheck(cudaStreamSynchronize(t->model.exec.stream));
    int code = training_end(&t->job);
    if (t->buffer && cudaHostUnregister(t->buffer) != cudaSuccess) { cudaGetLastError(); }
    free(t->buffer);
    run_parts_free(&t->parts);
    for (int i = 0; i < 2; i++) {
        for (LaunchGraph& graph : t->graphs[i]) { graph_free(&graph); }
        pinned_free(t->batches[i]);
        pinned_free(t->steps[i].state);
        cudaCheck(cudaEventDestroy(t->copied[i]));
        cudaCheck(cudaEventDestroy(t->steps[i].begin));
        cudaCheck(cudaEventDestroy(t->steps[i].end));
    }
    if (args->hellaswag) {
        eval_close(&t->hellaswag);
        evaluator_close(&t->evaluator);
    }
    ranks_close();
    gpt2_free(&t->model);
    return code;
}

// ================================================================================================
// 5. runs
// ================================================================================================

// ---- train ----------------------------------------------------------------------------------------

// Returns what is due for any rank: a signal may have reached one of them alone. sampled: rank 0 has just generated a sample, so the
// other ranks wait for it without a limit.
static Due agreed_due(Trainer* t, bool sampled) {
    double limit_ms = ranks_limit_ms();
    int stop = ranks_agree(run_stop_signal, false, 0, sampled && !is_rank0() ? 0 : limit_ms).signal;
    if (stop && !run_stop_signal) { run_stop_signal = stop; } // training_end names it
    Due due = training_due(&t->job, stop);
    due.save = ranks_agree(0, false, due.save && is_rank0(), limit_ms).due; // rank 0 knows which saves have succeeded
    return due;
}

// -i: the training run. Returns the exit code.
static int train(const Execution& exec) {
    Trainer* t = trainer_open(exec);
    run_will_save = args->output != NULL;
    run_install_signal_handlers();
    for (;;) {
        Due due = agreed_due(t, false);
        if (due.validate || due.sample) { finish_report(t); }
        if (due.validate) { validate(t); }
        if (due.sample && is_rank0()) { sample_in_training(t); }
        // a signal may have arrived during validation or sampling
        t->job.tasks_step = t->job.run.step;
        if (due.validate || due.sample) { due = agreed_due(t, due.sample); }
        if (due.save || due.stop) { finish_report(t); }
        if (due.save) { save_checkpoint(t, due.stop); }
        if (due.stop) { break; }
        train_step(t);
    }
    return trainer_close(t);
}

// ---- profile --------------------------------------------------------------------------------------

// --profile: times every operation of some training steps, and prints a table sorted by time. Returns the exit code.
static int profile_run(const Execution& exec) {
    Trainer* t = trainer_open(exec);
    for (int i = 0; i < 3; i++) { train_step(t); } // warm-up; the first step times cuBLASLt's algorithms
    finish_report(t);
    double bandwidth = measure_copy_bandwidth(t->model.exec.stream), rate = 1e12 * cublaslt_matrix_rate(t->model.exec);
    profile_open();
    double settled = time_ms() + 1000; // the clock follows the load, within the card's limits
    for (int i = 0; i < 100 && ranks_agree(0, false, time_ms() < settled, 0).due; i++) { train_step(t); }
    profile_begin(t->model.exec.stream);
    for (int i = 0; i < PROFILE_STEPS; i++) { train_step(t); }
    finish_report(t);
    profile_end();
    profile_print(bandwidth, rate, PRECISION_NAME);
    return trainer_close(t);
}

// ---- sample ---------------------------------------------------------------------------------------

// A model without gradients: its weights on the GPU, and its vocabulary.
struct LoadedModel {
    GPT2 model;
    ModelSource source;
    Tokenizer tokenizer;
    const Tokenizer* vocabulary; // &tokenizer, or NULL if there is none
    double load_ms;
};

// Opens the model that -e names, with activations for an evaluation of `files`; NULL: none.
static void loaded_model_open(LoadedModel* m, const EvalFiles* files, const Execution& exec) {
    double start = time_ms();
    bool has_tokenizer;
    char device[256];
    Error err;
    Plan plan = {};
    GPT2Options options = {};
    GPT2* model = &m->model;
    const GPT2Config* config = &m->source.config;
    int B = files ? evaluation_rows(files) : 0; // rows of -t tokens
    model_source_open(&m->source, resolve_model_path(args->model), &has_tokenizer, &m->tokenizer);
    m->vocabulary = has_tokenizer ? &m->tokenizer : NULL;
    if (files) { eval_files_check(files, m->vocabulary); }
    if (args->prompt && args->prompt[0]) { prompt_check_vocabulary(m->vocabulary); }
    gpt2_open(model, config, &options, exec);
    model->weights8.format = weights8_format(args->weights);
    plan_parameters(&plan, model, config, NULL);
    if (B > 0) {
        Batch batch = settle_batch(config);
        plan_activations(&plan, &model->acts, config, B, batch.T, B * batch.T, false, 0);
    }
    size_t have = device_memory(device), need = plan.total + unplanned_bytes();
    if (need > have) {
        die("the model needs %.1f GB and %s has %.1f free%s%s", (double)need * 1e-9, device, (double)have * 1e-9,
            other_programs(need), B > 0 ? "; a smaller -b or -t needs less" : "");
    }
    model->arenas[0] = plan_allocate(&plan, "the model", &err);
    if (!model->arenas[0]) { die("%s; %s%s", err.text, OTHER_PROGRAMS, B > 0 ? ", or take a smaller -b or -t" : ""); }
    point_parameters(&model->params, model->params_memory, config);
    float* weights = (float*)malloc_check(num_parameters(config) * sizeof(float));
    model_source_read(&m->source, weights);
    gpt2_upload(model, weights, 0);
    weights8_quantize(&model->weights8, config, model->params_memory, model->exec);
    weights8_print(&model->weights8, config);
    free(weights);
    m->load_ms = time_ms() - start;
}

static void loaded_model_close(LoadedModel* m) {
    if (m->vocabulary) { tokenizer_free(&m->tokenizer); }
    gpt2_free(&m->model);
}

// --prompt and the like: continues texts side by side. Returns the exit code.
static int sample(const Execution& exec) {
    LoadedModel m;
    Prompts prompts;
    GenerationTimes times = {};
    Sampler sampler = flags_sampler();
    loaded_model_open(&m, NULL, exec);
    prompts_read(&prompts, m.vocabulary, &m.source);
    Continuations c = continuations_begin(&prompts, m.vocabulary, stdout);
    bool good = generate(&m.model, &sampler, prompts.tokens, prompts.lengths, prompts.B, prompts.T, args->num_tokens,
                         prompts.stop, NULL, c.counts, &c, &times, NULL, args->parallel);
    if (!good) { die("%s: its logits are not numbers", args->model); }
    prompts_print_times(&prompts, c.counts, m.model.config.max_seq_len, m.load_ms, &times);
    continuations_free(&c);
    prompts_free(&prompts);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// ---- evaluate, time ---------------------------------------------------------------------------------

// --eval, or --hellaswag without -i. Returns the exit code.
static int evaluate(const Execution& exec) {
    LoadedModel m;
    EvalFiles files = eval_files_find();
    loaded_model_open(&m, &files, exec);
    evaluate_files(&files, compute_losses, most_likely_token, &m.model, m.model.acts.B, m.model.acts.T, m.vocabulary,
                   m.model.config.vocab_size);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// --bench: times the prompt and the generation of --num-samples texts side by side. Returns the exit code.
static int bench(const Execution& exec) {
    LoadedModel m;
    loaded_model_open(&m, NULL, exec);
    Bench b = bench_begin(&m.model.config, PRECISION_NAME);
    Sampler sampler = flags_sampler();
    std::vector<int> tokens, lengths(b.B, b.prompt), made((size_t)b.B * (b.decode + 1)), counts(b.B);
    for (int text = 0; text < b.B; text++) { tokens.insert(tokens.end(), b.tokens, b.tokens + b.prompt); }
    for (int repeat = -1; repeat < BENCH_REPEATS; repeat++) { // the first one warms up
        GenerationTimes times = {};
        if (!generate(&m.model, &sampler, tokens.data(), lengths.data(), b.B, b.prompt, b.decode + 1, -1, made.data(),
                      counts.data(), NULL, &times, NULL, args->parallel)) {
            die("%s: its logits are not numbers", args->model);
        }
        bench_add(&b, repeat, &times);
    }
    bench_end(&b);
    loaded_model_close(&m);
    return EXIT_SUCCESS;
}

// ---- plan -----------------------------------------------------------------------------------------

// --plan, which needs no GPU. Returns the exit code.
static int plan() {
    char device[256];
    int num_devices = 0;
    double have = memory_flag();
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
        if (have == 0) { die("--plan: there is no GPU here: --memory 24GB, for example, says how much it has"); }
        suppose_device();
    } else if (have == 0) {
        have = (double)device_memory(device);
    }
    print_plans(have, RECIPE_MEMORY, RECIPE_TOKENS, bytes_by_flags);
    return EXIT_SUCCESS;
}

// ---- main -----------------------------------------------------------------------------------------

// Opens the GPU, and exec->library and exec->tuned. Ends the program with a message that names the remedy if there is no usable GPU.
static void open_device(Execution* exec) {
    int num_devices = 0;
    cudaError_t e = cudaGetDeviceCount(&num_devices);
    if (e != cudaSuccess || num_devices == 0) {
        die("no usable GPU: %s; ./train_gpt2 is the same program for the CPU",
            e == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one older than this program's CUDA"
            : e == cudaSuccess               ? "none is there"
                                             : cudaGetErrorString(e));
    }
    cudaCheck(cudaSetDevice(ranks_device(num_devices)));
    int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    cudaFuncAttributes attributes;
    e = cudaFuncGetAttributes(&attributes,
                              (const void*)ptx_sm90a_kernel<0>); // any kernel serves to see whether code loads
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
        die("this program was not built for this GPU (compute capability %d.%d): make clean, then make train_gpt2cu "
            "GPU_COMPUTE_CAPABILITY=%d%d",
            major, minor, major, minor);
    }
    cudaCheck(e);
#if defined(ENABLE_BF16)
    if (major < 8) { die("this GPU has no bf16: make train_gpt2cu PRECISION=FP16"); }
#endif
    cublaslt_open(*exec->library);
    exec->library->tf32 = args->tf32;
    exec->times_algorithms = args->tune != TUNE_OFF;
    if (args->tune != TUNE_OFF && is_rank0()) { choices_open_cache(*exec, args->tune == TUNE_AGAIN); }
    choices_open(*exec, args->tuned);
}

#ifndef TESTING
int main(int argc, char** argv) {
    open_standard_streams();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); // print each line at once, even to a file or a pipe
    if (argc == 1) { run_demo(argv[0]); }
    parse_flags(argc, argv,
                "GPT-2 on the GPU: trains, continues texts, evaluates, times, exports. Without flags: a demo.");
    Task task = chosen_task();
    if (task == TASK_EXPORT) { return export_model(); } // needs no GPU
    if (task == TASK_PLAN) { return plan(); }
    if (task == TASK_TRAIN) {
        run_heed_interrupt(); // before the GPU is opened, which takes a second
        choose_recipe();
        int code = ranks_start(argv);
        if (code >= 0) { return code; }
        output_begin(!args->verbose); // an error of the set-up stands alone
        print_flags();
    }
    CublasLt library;
    TunedState tuned = {};
    Execution exec;
    exec.library = &library, exec.tuned = &tuned;
    open_device(&exec);
    int code = task == TASK_SAMPLE     ? sample(exec)
               : task == TASK_EVALUATE ? evaluate(exec)
               : task == TASK_BENCH    ? bench(exec)
               : args->profile         ? profile_run(exec)
                                       : train(exec);
    cublaslt_close(library);
    return code;
}
#endif

// ================================================================================================
// 6. kernels
// ================================================================================================
// The code between each pair of "promoted" marks is a copy of the file of that name in dev/cuda, made by dev/cuda/promote.sh. Change it
// there. The ladder that it won, with slower kernels, checks and timings, is the .cu file that its head names.
// `make` compiles this file in parts, side by side: part 1 is sections 1 to 5, parts 2 to 5 are chapters of this section. Part 0 is all.
//
//     6.1 training    6.2 --fp8    6.3 Muon    6.4 attention    6.5 generation    6.6 several texts

#if PART == 0 || PART == 2
// ---- 6.1 kernels of training -------------------------------------------------------------------
//     encoder_forward           token and position embeddings
//     encoder_backward          their gradients, summed in a fixed order
//     layernorm_forward
//     fused_residual_layernorm  the last layernorm with --fp8, and the residual sum, which no matmul adds there
//     matmul_backward_bias      column sums
//     layernorm_backward
//     gelu_forward              where no matmul fuses it
//     gelu_backward
//     adamw                     and the decision whether a step is applied
//     gemm                      matmul with an epilogue, for Hopper: wgmma, TMA
//     gemm_adamw                AdamW in idle warps of gemm
//     matmul_forward            gemm or cuBLASLt
//     matmul_backward           cuBLASLt, gemm, or stream-K
//     fused_classifier          softmax, cross-entropy and gradient in place
//     linear_cross_entropy      the head and its loss
//     mean_loss
//     global_norm               of the gradients

// ==== promoted: encoder_forward ====
// ---- kernel 4: each thread reuses its vector of wpe for four sequences, with four loads of wte in flight ----

constexpr int ENCODER_FORWARD_SEQUENCES = 4; // sequences per thread, which share one load of wpe

__global__ void encoder_forward_kernel4(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T,
                                        int C) {
    constexpr int sequences = ENCODER_FORWARD_SEQUENCES;
    unsigned vectors = C / x128::size; // x128 vectors per row
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= T * vectors) { return; }
    unsigned t = i / vectors, c = i % vectors * x128::size;
    int first = blockIdx.y * sequences; // the thread's first sequence
    int ids[sequences];
    x128 token[sequences];
#pragma unroll
    for (int j = 0; j < sequences; j++) { // for a sequence past B, row 0 of wte is loaded and not used
        ids[j] = first + j < B ? inp[(size_t)(first + j) * T + t] : 0;
    }
    x128 position = load128(wpe + (size_t)t * C + c);
#pragma unroll
    for (int j = 0; j < sequences; j++) { token[j] = load128(wte + (size_t)ids[j] * C + c); }
#pragma unroll
    for (int j = 0; j < sequences; j++) {
        x128 sum;
        for (int k = 0; k < x128::size; k++) { sum[k] = (floatX)((float)token[j][k] + (float)position[k]); }
        if (first + j < B) { store128(out + ((size_t)(first + j) * T + t) * C + c, sum); }
    }
}

// out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]
// out (B,T,C) | inp (B,T), each in [0,Vp) | wte (Vp,C) | wpe (maxT,C), maxT >= T
void encoder_forward(floatX* out, const int* inp, const floatX* wte, const floatX* wpe, int B, int T, int C,
                     const Execution& exec) {
    int block_size = tuned_block_size(exec, "encoder_forward", (size_t)B * T, C, 256);
    // the bytes do not include the rows of wte that are read, because their number depends on the tokens
    Op op(exec, ((double)B * T + T) * C * sizeof(floatX) + (double)B * T * sizeof(int), 0, "encoder_forward");
    require(C % x128::size == 0);
    require((size_t)T * C < (size_t)1 << 31);
    int groups = ceil_div(B, ENCODER_FORWARD_SEQUENCES);
    require(groups <= 65535);
    dim3 grid(ceil_div(T * (C / x128::size), block_size), groups);
    launch_kernel(encoder_forward_kernel4, LaunchShape(grid, block_size), exec, out, inp, wte, wpe, B, T, C);
}
// ==== end promoted: encoder_forward ====

// ==== promoted: encoder_backward ====
// ---- kernel 6: deterministic: a run that crosses tiles leaves partial sums, which a second kernel joins in order ----
// Also, four rows of dout are in flight per warp, which has 128 columns instead of 256.

// dwpe: each thread sums its columns over the batch. dwte: a stable radix sort orders the positions (indices b*T+t) by
// token, and one warp per tile of 32 sorted positions sums the runs of equal tokens. The sum of a run that lies within
// one tile is added to its row of dwte.

// A run that crosses tiles leaves one partial sum per tile, which the join kernel adds up in order. So the order of
// every sum is fixed, and many warps share the work of a frequent token. Example with tiles of 8 positions:
//     sorted tokens   5 5 5 7 7 7 7 7 | 7 7 7 7 7 7 7 7 | 7 7 7 9 9 9 9 9
//     runs summed to  dwte  partial     partial           partial dwte
//     [tile][slot]          [0][1]      [1][0]            [2][0]
// Then tile 0's block of the join kernel adds partial [0][1], [1][0] and [2][0] to row 7 of dwte.

constexpr int ENCODER_DIGITS = 256;         // digit values of the radix sort, which sorts by 8 bits per pass
constexpr int ENCODER_SORT_BLOCK = 1024;    // threads per block of the sort, 4 per digit value
constexpr int ENCODER_SORT_MAX_BLOCKS = 64; // blocks of the sort; few, because each reads the counts of all blocks
constexpr int ENCODER_MAX_BLOCK = 512;      // threads per block at most; the rows in flight take many registers
constexpr int ENCODER_TILE = 32;            // sorted positions per tile, one per lane
constexpr int ENCODER_COLUMNS = 768;        // columns per launch at most; bounds the scratch for partial sums
constexpr int ENCODER_WARP_COLUMNS = 128;   // columns per warp, 4 per lane
static_assert(ENCODER_COLUMNS % ENCODER_WARP_COLUMNS == 0, "a slice of columns must not cross a launch");

// The layout of the launcher's scratch. partial has two slots per tile: slot 0 for the sum of a run that began in an
// earlier tile, slot 1 for the sum of a run that begins in this tile and continues in the next one.
struct EncoderScratch {
    float* partial;    // (num_tiles, 2, ENCODER_COLUMNS)
    int* positions[2]; // (N) each; the sort passes alternate between the two, and the last pass writes [0]
    int* tokens;       // (N) inp[positions[0][i]], ascending
    int* counts;       // (sort_blocks, ENCODER_DIGITS): how often each digit occurs in each block's share of the list
    size_t num_ints;   // size of scratch, in ints
};
static EncoderScratch encoder_backward_layout(int* scratch, int N) {
    size_t num_partial = (size_t)ceil_div(N, ENCODER_TILE) * 2 * ENCODER_COLUMNS;
    EncoderScratch s;
    s.partial = (float*)scratch;
    s.positions[0] = scratch + num_partial;
    s.positions[1] = s.positions[0] + N;
    s.tokens = s.positions[1] + N;
    s.counts = s.tokens + N;
    s.num_ints = num_partial + 3 * (size_t)N + (size_t)ENCODER_SORT_MAX_BLOCKS * ENCODER_DIGITS;
    return s;
}

// Each block counts the digits of `num` consecutive tokens of the list. The digit is bits shift to shift + 7 of the
// token. positions is the list as sorted so far, or NULL in the first pass, where entry i is position i.
__global__ void encoder_backward_count_kernel6(int* counts, const int* positions, const int* inp, int N, int num,
                                               int shift) {
    __shared__ int count[ENCODER_DIGITS];
    if (threadIdx.x < ENCODER_DIGITS) { count[threadIdx.x] = 0; }
    __syncthreads();
    int first = blockIdx.x * num, end = min(N, first + num);
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
        int token = inp[positions ? positions[i] : i];
        atomicAdd(&count[(token >> shift) % ENCODER_DIGITS], 1); // integer sums do not depend on the order
    }
    __syncthreads();
    if (threadIdx.x < ENCODER_DIGITS) { counts[blockIdx.x * ENCODER_DIGITS + threadIdx.x] = count[threadIdx.x]; }
}

// One stable pass of the sort: each entry of the list goes after all entries with a smaller digit, and after the
// entries with the same digit that precede it in the list.
__global__ void __launch_bounds__(ENCODER_SORT_BLOCK)
    encoder_backward_scatter_kernel6(int* sorted, int* tokens, const int* positions, const int* inp, const int* counts,
                                     int N, int num, int shift) {
    constexpr int num_warps = ENCODER_SORT_BLOCK / 32, num_parts = ENCODER_SORT_BLOCK / ENCODER_DIGITS;
    __shared__ int offset[num_warps][ENCODER_DIGITS]; // output index of each warp's first element with this digit
    // next: output index of the block's next element with this digit; scan: prefix sums of the counts of all blocks
    __shared__ int next[ENCODER_DIGITS], scan[ENCODER_DIGITS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int digit = threadIdx.x % ENCODER_DIGITS, part = threadIdx.x / ENCODER_DIGITS;

    int before = 0, total = 0; // occurrences of this digit in earlier blocks, in all blocks
#pragma unroll 8
    for (int b = part; b < gridDim.x; b += num_parts) {
        int n = counts[b * ENCODER_DIGITS + digit];
        before += b < blockIdx.x ? n : 0;
        total += n;
    }
    // offset is not needed yet, so it holds the partial sums of the num_parts threads per digit
    offset[part][digit] = before, offset[num_parts + part][digit] = total;
    __syncthreads();
    if (part == 0) {
        for (int p = 1; p < num_parts; p++) { before += offset[p][digit], total += offset[num_parts + p][digit]; }
        scan[digit] = total, next[digit] = before - total;
    }
    __syncthreads();
    for (int distance = 1; distance < ENCODER_DIGITS; distance *= 2) { // inclusive scan over digits
        int lower = part == 0 && digit >= distance ? scan[digit - distance] : 0;
        __syncthreads();
        if (part == 0) { scan[digit] += lower; }
        __syncthreads();
    }
    if (part == 0) { next[digit] += scan[digit]; } // smaller digits in all blocks + this digit in earlier blocks

    int first = blockIdx.x * num, end = min(N, first + num);
    for (int start = first; start < end; start += ENCODER_SORT_BLOCK) {
        for (int w = part; w < num_warps; w += num_parts) { offset[w][digit] = 0; }
        __syncthreads();
        int i = start + threadIdx.x;
        bool valid = i < end;
        int position = valid ? (positions ? positions[i] : i) : 0;
        int token = valid ? inp[position] : 0;
        int d = valid ? (token >> shift) % ENCODER_DIGITS : ENCODER_DIGITS;
        unsigned same = __match_any_sync(0xFFFFFFFFu, d);
        int rank = __popc(same & ((1u << lane) - 1)); // rank among the warp's elements with the same digit
        if (valid && rank == 0) { offset[warp][d] = __popc(same); }
        __syncthreads();
        if (part == 0) { // exclusive scan over the warps: turns counts into offsets
            int at = next[digit];
#pragma unroll 8
            for (int w = 0; w < num_warps; w++) {
                int n = offset[w][digit];
                offset[w][digit] = at;
                at += n;
            }
            next[digit] = at;
        }
        __syncthreads();
        if (valid) {
            sorted[offset[warp][d] + rank] = position;
            tokens[offset[warp][d] + rank] = token;
        }
        __syncthreads(); // the next round clears offset
    }
}

// Sorts the positions by token. Returns the layout of scratch, in which positions[0] and tokens are now filled.
static EncoderScratch encoder_backward_sort(int* scratch, const int* inp, int N, int V, const Execution& exec) {
    EncoderScratch s = encoder_backward_layout(scratch, N);
    int num =
        ceil_div(ceil_div(N, ENCODER_SORT_MAX_BLOCKS), ENCODER_SORT_BLOCK) * ENCODER_SORT_BLOCK; // indices per block
    int num_blocks = ceil_div(N, num), num_passes = 1;
    while (num_passes < 4 && (V - 1) >> (8 * num_passes)) { num_passes++; }
    const int* positions = NULL;
    for (int pass = 0; pass < num_passes; pass++) {
        int* sorted = s.positions[(num_passes - 1 - pass) % 2];
        launch_kernel(encoder_backward_count_kernel6, LaunchShape(num_blocks, ENCODER_SORT_BLOCK), exec, s.counts,
                      positions, inp, N, num, 8 * pass);
        launch_kernel(encoder_backward_scatter_kernel6, LaunchShape(num_blocks, ENCODER_SORT_BLOCK), exec, sorted,
                      s.tokens, positions, inp, s.counts, N, num, 8 * pass);
        positions = sorted;
    }
    return s;
}

// Each warp sums the runs of one tile over one slice of ENCODER_WARP_COLUMNS columns. The launch covers num_slices
// slices, which start at column c0.
__global__ void __launch_bounds__(ENCODER_MAX_BLOCK)
    encoder_backward_tile_kernel6(float* dwte, float* partial, const floatX* dout, const int* positions,
                                  const int* tokens, int N, int C, int c0, int num_slices) {
    int lane = threadIdx.x % 32;
    int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    int tile = warp / num_slices, slice = warp % num_slices, first = tile * ENCODER_TILE;
    if (first >= N) { return; }
    int num = min(ENCODER_TILE, N - first), column = slice * ENCODER_WARP_COLUMNS + lane * 4;
    bool active = c0 + column < C;

    int position = lane < num ? positions[first + lane] : 0, token = lane < num ? tokens[first + lane] : -1;
    int next = __shfl_down_sync(0xFFFFFFFFu, token, 1);
    // bit i: a run, or the tile, ends at sorted position first + i
    unsigned ends = __ballot_sync(0xFFFFFFFFu, lane < num && (lane == num - 1 || next != token));
    // true if the tile's first run began in an earlier tile; true if its last run continues in the next tile
    bool from_before = first > 0 && tokens[first - 1] == tokens[first];
    bool into_after = first + num < N && tokens[first + num] == tokens[first + num - 1];

    constexpr int unroll = 4; // rows of dout in flight
    f128 sum = {};
    for (int i = 0; i < num; i += unroll) {
        x4 d[unroll];
        f128 old[unroll];
        float* row[unroll]; // destination of the run's sum if a run ends at this index, else NULL
        int p[unroll], id[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) { // shuffles first, because the loop below is divergent
            p[u] = __shfl_sync(0xFFFFFFFFu, position, i + u), id[u] = __shfl_sync(0xFFFFFFFFu, token, i + u);
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            row[u] = NULL;
            if (i + u >= num || !active) { continue; }
            d[u] = *reinterpret_cast<const x4*>(dout + (size_t)p[u] * C + c0 + column);
            if (!(ends >> (i + u) & 1)) { continue; }
            bool is_first = (ends & ((1u << (i + u)) - 1)) == 0;
            int slot = is_first && from_before ? 0 : (i + u == num - 1 && into_after ? 1 : -1);
            if (slot < 0) {
                row[u] = dwte + (size_t)id[u] * C + c0 + column;
                old[u] = load128(row[u]);
            } else {
                row[u] = partial + ((size_t)tile * 2 + slot) * ENCODER_COLUMNS + column;
                old[u] = {};
            }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (i + u >= num || !active) { continue; }
            for (int k = 0; k < 4; k++) { sum[k] += (float)d[u][k]; }
            if (!row[u]) { continue; }
            for (int k = 0; k < 4; k++) { sum[k] += old[u][k]; }
            store128(row[u], sum);
            sum = {};
        }
    }
}

// Joins the runs that cross tiles. One block per tile and slice of columns: if a run of equal tokens starts in this
// tile and continues past it, the block adds up the run's partial sums.
__global__ void encoder_backward_join_kernel6(float* dwte, const float* partial, const int* tokens, int N, int C,
                                              int c0) {
    constexpr int unroll = 8, max_warps = 8; // unroll: partial sums in flight
    __shared__ f128 sums[max_warps][32];
    int tile = blockIdx.x, first = tile * ENCODER_TILE, last = first + ENCODER_TILE - 1;
    if (last + 1 >= N) { return; }
    int token = tokens[last];
    bool begins_here = first == 0 || tokens[first - 1] != token;
    if (tokens[last + 1] != token || !begins_here) { return; }

    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int num_tiles = ceil_div(N, ENCODER_TILE), column = blockIdx.y * ENCODER_WARP_COLUMNS + lane * 4;
    bool active = c0 + column < C;
    const float* slots = partial + column;
    f128 sum = {};
    if (warp == 0 && active) { sum = load128(slots + ((size_t)tile * 2 + 1) * ENCODER_COLUMNS); }
    for (int t = tile + 1 + warp * unroll;; t += num_warps * unroll) {
        // num: how many of the tiles t .. t+unroll-1 begin with this token; they are the first `num` of these tiles,
        // because the list is sorted
        bool goes_on = lane < unroll && t + lane < num_tiles && tokens[(t + lane) * ENCODER_TILE] == token;
        int num = __popc(__ballot_sync(0xFFFFFFFFu, goes_on));
        f128 x[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (u < num && active) { x[u] = load128(slots + (size_t)(t + u) * 2 * ENCODER_COLUMNS); }
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            if (u < num && active) {
                for (int k = 0; k < 4; k++) { sum[k] += x[u][k]; }
            }
        }
        if (num < unroll) { break; }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || !active) { return; }
    float* row = dwte + (size_t)token * C + c0 + column;
    f128 total = load128(row);
    for (int w = 0; w < num_warps; w++) {
        for (int k = 0; k < 4; k++) { total[k] += sums[w][lane][k]; }
    }
    store128(row, total);
}

// dwpe (maxT,C) += dout (B,T,C) summed over the batch; each thread sums one vector of one row of dwpe
__global__ void encoder_backward_positions_kernel6(float* dwpe, const floatX* dout, int B, int T, int C) {
    constexpr int unroll = 8; // vectors of dout in flight
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size, stride = (size_t)T * C;
    if (i >= stride) { return; }
    const floatX* p = dout + i;
    float sum[x128::size] = {};
    int b = 0;
    for (; b + unroll <= B; b += unroll, p += unroll * stride) {
        x128 d[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) { d[u] = load128(p + u * stride); }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            for (int k = 0; k < x128::size; k++) { sum[k] += (float)d[u][k]; }
        }
    }
    for (; b < B; b++, p += stride) {
        x128 d = load128(p);
        for (int k = 0; k < x128::size; k++) { sum[k] += (float)d[k]; }
    }
    for (int k = 0; k < x128::size; k += 4) {
        f128 old = load128(dwpe + i + k);
        for (int j = 0; j < 4; j++) { old[j] += sum[k + j]; }
        store128(dwpe + i + k, old);
    }
}
static void encoder_backward_positions(float* dwpe, const floatX* dout, int B, int T, int C, const Execution& exec,
                                       int block_size) {
    unsigned num_blocks = (unsigned)ceil_div((size_t)T * C, (size_t)block_size * x128::size);
    launch_kernel(encoder_backward_positions_kernel6, LaunchShape(num_blocks, block_size), exec, dwpe, dout, B, T, C);
}

// Number of ints in scratch.
size_t encoder_backward_scratch(int B, int T, int V) {
    (void)V; // V affects only the number of sort passes, not the size of scratch
    return encoder_backward_layout(NULL, B * T).num_ints;
}

// dwte[inp[b,t],:] += dout[b,t,:], dwpe[t,:] += dout[b,t,:]: dwte (Vp,C), dwpe (maxT,C)
// | scratch (encoder_backward_scratch(B, T, V)), aligned to 16 bytes | dout (B,T,C) | inp (B,T), each in [0,V)
void encoder_backward(float* dwte, float* dwpe, int* scratch, const floatX* dout, const int* inp, int B, int T, int C,
                      int V, const Execution& exec) {
    int block_size = tuned_block_size(exec, "encoder_backward", (size_t)B * T, C, 256);
    // the bytes do not include the rows of dwte that are read and written, because their number depends on the tokens
    Op op(exec, (double)B * T * (C * sizeof(floatX) + sizeof(int)) + (double)T * C * 2 * sizeof(float), 0,
          "encoder_backward");
    require(C % x128::size == 0);
    require((size_t)scratch % 16 == 0);
    require(block_size % 32 == 0 && block_size <= ENCODER_MAX_BLOCK);
    require(B >= 1 && T >= 1 && (size_t)B * T <= (size_t)1 << 30);
    int N = B * T, num_tiles = ceil_div(N, ENCODER_TILE);
    encoder_backward_positions(dwpe, dout, B, T, C, exec, block_size);
    EncoderScratch s = encoder_backward_sort(scratch, inp, N, V, exec);
    for (int c0 = 0; c0 < C; c0 += ENCODER_COLUMNS) {
        int num_slices = ceil_div(min(ENCODER_COLUMNS, C - c0), ENCODER_WARP_COLUMNS);
        unsigned num_blocks = (unsigned)ceil_div((size_t)num_tiles * num_slices, (size_t)block_size / 32);
        launch_kernel(encoder_backward_tile_kernel6, LaunchShape(num_blocks, block_size), exec, dwte, s.partial, dout,
                      s.positions[0], s.tokens, N, C, c0, num_slices);
        launch_kernel(encoder_backward_join_kernel6, LaunchShape(dim3(num_tiles, num_slices), 256), exec, dwte,
                      s.partial, s.tokens, N, C, c0);
    }
}
// ==== end promoted: encoder_backward ====

// ==== promoted: layernorm_forward ====
// ---- kernel 7: one or a few warps keep the row in registers; the other warps of the SM hide the latency ----

// One warp processes a row; for long rows, a block of 2, 4, 8 or 16 warps does. Each thread holds up to 8 vectors, in fp32 up to 3:
// a warp with more registers costs less than the barriers of a block.
//     vector of the row   0 .. width-1 | width .. 2*width-1 | 2*width ..      width = 32 * row_warps threads
//     held by thread      0 .. width-1 | 0 .. width-1       | 0 ..
//     as its vector       x[0]         | x[1]               | x[2]
constexpr int LAYERNORM_FORWARD_MAX_VECS = sizeof(floatX) == 2 ? 8 : 3;

// Sums x over the warps of the row; all threads get the same bits. Callers alternate between two `partial` (16)
// buffers, so one barrier per call is enough.
__device__ inline float layernorm_forward_row_sum(float x, float* partial, int row_warps) {
    x = warp_sum(x);
    if (row_warps == 1) { return x; }
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = x; }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < row_warps; i++) { sum += partial[i]; }
    return sum;
}

template <int num_vecs> __global__ void __launch_bounds__(num_vecs == 6 ? 256 : 512)
    layernorm_forward_kernel7(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, float epsilon, int row_warps) {
    __shared__ float partial[2][16];
    int width = 32 * row_warps, first = threadIdx.x % width * x128::size, stride = width * x128::size;
    int row = blockIdx.x * (blockDim.x / width) + threadIdx.x / width;
    if (row >= N) { return; } // whole warps return, and only if row_warps is 1: then there are no barriers
    bool last_valid = first + (num_vecs - 1) * stride < C; // only a thread's last vector can be past the row's end
    float inv_C = 1.0f / C;
    grid_launch_dependents();
    grid_wait_dependency();

    const floatX* inp_row = inp + (size_t)row * C + first;
    Floats128<floatX> x[num_vecs]; // zeros past the row's end
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        x[j] = to_floats(j < num_vecs - 1 || last_valid ? load128(inp_row + j * stride) : x128());
    }
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) { sum += x[j][k]; }
    }
    float m = layernorm_forward_row_sum(sum, partial[0], row_warps) * inv_C;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (j < num_vecs - 1 || last_valid) {
            for (int k = 0; k < x128::size; k++) {
                x[j][k] -= m;
                squares += x[j][k] * x[j][k];
            }
        }
    }
    float r = rsqrtf(layernorm_forward_row_sum(squares, partial[1], row_warps) * inv_C + epsilon);
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (j < num_vecs - 1 || last_valid) {
            // weight and bias are the same for all rows, so these loads hit L1
            auto w = to_floats(load128(weight + first + j * stride)), b = to_floats(load128(bias + first + j * stride));
            x128 y;
            for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(x[j][k] * r * w[k] + b[k]); }
            store128(out + (size_t)row * C + first + j * stride, y);
        }
    }
    if (first == 0) { mean[row] = m, rstd[row] = r; }
}

// out (N,C) = (inp - mean) * rstd * weight + bias; mean, rstd (N) per row | inp (N,C), weight, bias (C)
// rstd = 1 / sqrt(variance + epsilon)
void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, float epsilon, const Execution& exec) {
    int block_size = tuned_block_size(exec, "layernorm_forward", N, C, 64);
    Op op(exec, 2.0 * N * C * sizeof(floatX), 0, "layernorm_forward");
    int row_warps = 1, num_vectors = C / x128::size;
    while (num_vectors > 32 * LAYERNORM_FORWARD_MAX_VECS * row_warps) { row_warps *= 2; }
    require(N >= 1 && C >= 8 && C % 8 == 0 && row_warps <= 16);
    if (row_warps > 1) { block_size = 32 * row_warps; } // one row per block, because the barrier is block-wide
    int num_vecs = ceil_div(num_vectors, 32 * row_warps), most = num_vecs == 6 ? 256 : 512; // 6 would spill on sm_80
    if (row_warps == 1) { block_size = min(block_size, most); }
    require(block_size % 32 == 0 && block_size <= most);
    int block_rows = block_size / (32 * row_warps);
    decltype(&layernorm_forward_kernel7<1>) kernel = NULL;
    with_constant<LAYERNORM_FORWARD_MAX_VECS>(num_vecs, [&](auto n) { kernel = layernorm_forward_kernel7<n.value>; });
    launch_early(kernel, dim3(ceil_div(N, block_rows)), dim3(block_size), 0, exec, out, mean, rstd, inp, weight, bias,
                 N, C, epsilon, row_warps);
}
// ==== end promoted: layernorm_forward ====

// ==== promoted: fused_residual_layernorm ====
// ---- kernel 3: 128-bit loads, one block per row, the row stays in shared memory ---------------------------

__global__ void fused_residual_layernorm_kernel3(floatX* residual, floatX* normed, float* mean, float* rstd,
                                                 const floatX* inp1, const floatX* inp2, const floatX* weight,
                                                 const floatX* bias, int C, float epsilon) {
    __shared__ float shared[32];
    // (C) floatX; a thread reads only what it wrote: no barrier
    extern __shared__ __align__(128) int4 fused_residual_layernorm_row[];
    floatX* x = (floatX*)fused_residual_layernorm_row;
    size_t row_start = (size_t)blockIdx.x * C;
    float sum = 0.0f, squares = 0.0f;
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 a = load128(inp1 + row_start + c), b = load128(inp2 + row_start + c), xv;
        for (int k = 0; k < x128::size; k++) {
            xv[k] = (floatX)((float)a[k] + (float)b[k]);
            sum += (float)xv[k];
        }
        store128(x + c, xv);
        store128(residual + row_start + c, xv);
    }
    float m = block_sum(sum, shared) / C;
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c);
        for (int k = 0; k < x128::size; k++) {
            float centered = (float)xv[k] - m;
            squares += centered * centered;
        }
    }
    float r = rsqrtf(block_sum(squares, shared) / C + epsilon);
    for (int c = threadIdx.x * x128::size; c < C; c += blockDim.x * x128::size) {
        x128 xv = load128(x + c), w = load128(weight + c), b = load128(bias + c), y;
        for (int k = 0; k < x128::size; k++) { y[k] = (floatX)(((float)xv[k] - m) * r * (float)w[k] + (float)b[k]); }
        store128(normed + row_start + c, y);
    }
    if (threadIdx.x == 0) { mean[blockIdx.x] = m, rstd[blockIdx.x] = r; }
}

// residual (N,C) = inp1 + inp2; normed (N,C) = (residual - mean) * rstd * weight + bias; mean, rstd (N) per row
// | inp1, inp2 (N,C), weight, bias (C)
void fused_residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd, const floatX* inp1,
                                      const floatX* inp2, const floatX* weight, const floatX* bias, int N, int C,
                                      float epsilon, const Execution& exec) {
    int block_size = tuned_block_size(exec, "fused_residual_layernorm", N, C, 128);
    Op op(exec, 4.0 * N * C * sizeof(floatX), 0, "fused_residual_layernorm");
    require(N >= 1 && C >= 8 && C % 8 == 0);
    // a launch may use 48 KB of shared memory without cudaFuncSetAttribute
    require(C * sizeof(floatX) <= 48 * 1024 - 32 * sizeof(float));
    require(block_size % 32 == 0 && block_size <= 1024);
    launch_kernel(fused_residual_layernorm_kernel3, LaunchShape(N, block_size, C * sizeof(floatX)), exec, residual,
                  normed, mean, rstd, inp1, inp2, weight, bias, C, epsilon);
}
// ==== end promoted: fused_residual_layernorm ====

// ==== promoted: matmul_backward_bias ====
constexpr int MATMUL_BACKWARD_BIAS_COLUMNS = 32 * x128::size; // per block: a warp reads 512 contiguous bytes of a row

// Rows per block, so that there are at most 2048 blocks. They fill any GPU, and their partial sums take 2 MB.
static int matmul_backward_bias_rows(int N, int OC) {
    int max_num = max(1, 2048 / ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS));
    return ceil_div(ceil_div(N, max_num), 64) * 64; // a multiple of 64: 16 warps with four rows in flight each
}

// The number of floats of scratch: OC partial sums per group of rows (per blockIdx.y).
size_t matmul_backward_bias_scratch(int N, int OC) {
    return (size_t)ceil_div(N, matmul_backward_bias_rows(N, OC)) * OC;
}

// ---- kernel 7: one wave of blocks, so there are fewer partial sums to add up --------------------------------------

// partial[blockIdx.y, c] = the sum of `rows` rows of dout, for each column c of the block
__device__ inline void matmul_backward_bias_sums(float* partial, const floatX* dout, int N, int OC, int rows) {
    constexpr int columns = MATMUL_BACKWARD_BIAS_COLUMNS, unroll = 4; // rows in flight per warp
    extern __shared__ __align__(128) float matmul_backward_bias_shared[];
    float* shared = matmul_backward_bias_shared; // (warps, columns)
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int c = blockIdx.x * columns + lane * x128::size;
    float sum[x128::size] = {};
    if (c < OC) {
        int row = blockIdx.y * rows + warp, end = min(N, (int)(blockIdx.y + 1) * rows);
        size_t stride = (size_t)num_warps * OC;
        const floatX* p = dout + (size_t)row * OC + c;
        for (; row + (unroll - 1) * num_warps < end; row += unroll * num_warps, p += unroll * stride) {
            x128 x[unroll];
#pragma unroll
            for (int u = 0; u < unroll; u++) { x[u] = load128(p + u * stride); }
#pragma unroll
            for (int u = 0; u < unroll; u++) {
                for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[u][k]; }
            }
        }
        for (; row < end; row += num_warps, p += stride) {
            x128 x = load128(p);
            for (int k = 0; k < x128::size; k++) { sum[k] += (float)x[k]; }
        }
    }
    // element k of the 32 lanes is contiguous, so there are no bank conflicts
    for (int k = 0; k < x128::size; k++) { shared[warp * columns + k * 32 + lane] = sum[k]; }
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < num_warps; w++) { total += shared[w * columns + i]; }
        int column = blockIdx.x * columns + i % 32 * x128::size + i / 32;
        if (column < OC) { partial[(size_t)blockIdx.y * OC + column] = total; }
    }
}

__global__ void matmul_backward_bias_kernel7(float* partial, const floatX* dout, int N, int OC, int rows) {
    matmul_backward_bias_sums(partial, dout, N, OC, rows);
}

// dbias (OC) += dout summed over its rows | scratch (matmul_backward_bias_scratch(N, OC)) | dout (N,OC)
// It launches one wave: as many blocks as can run at once, which share the rows equally. So there are few partial sums.
void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, const Execution& exec) {
    int block_size = tuned_block_size(exec, "matmul_backward_bias", N, OC, 512);
    Op op(exec, (double)N * OC * sizeof(floatX), 0, "matmul_backward_bias");
    require(N >= 1 && OC % x128::size == 0);
    size_t shared = (size_t)block_size / 32 * MATMUL_BACKWARD_BIAS_COLUMNS * sizeof(float);
    int per_sm, tiles = ceil_div(OC, MATMUL_BACKWARD_BIAS_COLUMNS);
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, matmul_backward_bias_kernel7, block_size, shared));
    int room = ceil_div(N, matmul_backward_bias_rows(N, OC)); // rows of partial sums that fit in scratch
    int rows = ceil_div(N, min(room, max(1, exec.free_sms() * per_sm / tiles)));
    int num = ceil_div(N, rows);
    launch_kernel(matmul_backward_bias_kernel7, LaunchShape(dim3(tiles, num), block_size, shared), exec, scratch, dout,
                  N, OC, rows);
    column_sums<32>(dbias, NULL, NULL, scratch, num, OC, exec);
}
// ==== end promoted: matmul_backward_bias ====

// ==== promoted: layernorm_backward ====
// ---- kernel 11: 5 with the next rows copied ahead by cp.async ----

constexpr int LAYERNORM_BACKWARD_BLOCK_SIZE = 256;  // the largest; two blocks leave 128 registers per thread
constexpr int LAYERNORM_BACKWARD_BLOCKS_PER_SM = 4; // at most; bounds the number of partial sums
constexpr int LAYERNORM_BACKWARD_STAGES = 2;
// A thread of at most so many vectors has a ring. For 4 vectors, the block needs 96 KB: from 8.0 on, it may have 99 KB or
// more. Before 8.0, there is no cp.async.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int LAYERNORM_BACKWARD_RING_VECS = 0;
#else
constexpr int LAYERNORM_BACKWARD_RING_VECS = 4;
#endif

// A block processes `rows` rows at a time; thread t holds the vectors t, t + blockDim.x ... of each row. It has the same
// columns in every row, so it sums dweight and dbias in registers. column_sums() adds the partial sums of all blocks.
// While the sums of these rows are computed, cp.async copies the rows of the next turns into a ring in shared memory. A
// thread reads only what it copied itself, so the only barrier is that of the row sums. dy, x and dx are read from the
// ring a second time for dinp: that costs less than the registers that would hold them.
//                before the loop    1st turn          2nd turn          3rd turn
//     stage 0    copy turn 0        read 0, copy 2    (2 in flight)     read 2, copy 4
//     stage 1    copy turn 1        (1 in flight)     read 1, copy 3    (3 in flight)
// Without a ring, the vectors are read from global memory both times, the second time from the caches. num_sums: 2, or 3
// to also sum the columns of dinp.
template <int num_vecs, int num_sums>
__global__ void __launch_bounds__(LAYERNORM_BACKWARD_BLOCK_SIZE, num_vecs == 1 && LAYERNORM_BACKWARD_RING_VECS ? 2 : 1)
    layernorm_backward_kernel11(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                                int C) {
    constexpr int rows = num_vecs < 4 ? 4 / num_vecs : 1;
    constexpr bool has_ring = num_vecs <= LAYERNORM_BACKWARD_RING_VECS;
    extern __shared__ __align__(128) int4 layernorm_backward_ring11[]; // (stages, rows, num_vecs, 3, blockDim.x)
    // [stage][warp]: sum and dot of each row. The stages alternate, so one barrier per turn is enough
    __shared__ float shared[LAYERNORM_BACKWARD_STAGES][LAYERNORM_BACKWARD_BLOCK_SIZE / 32][8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    int first = threadIdx.x * x128::size, stride = blockDim.x * x128::size, row_step = gridDim.x * rows, stage = 0;
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {}, dx_sum[num_vecs][x128::size] = {};
    float inv_C = 1.0f / C, next_mean[rows], next_rstd[rows];
    grid_launch_dependents();
    grid_wait_dependency();
    x128 w[num_vecs] = {};
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (first + j * stride < C) { w[j] = load128(weight + first + j * stride); }
    }
    // rows of 4 or more vectors per thread leave no registers for the weights, which are then reread from L1
    auto vector_of_weight = [&](int j) {
        if (num_vecs < 4) { return to_floats(w[j]); }
        return to_floats(first + j * stride < C ? load128(weight + first + j * stride) : x128());
    };
    auto slots = [&](int of_stage) {
        return layernorm_backward_ring11 + of_stage * rows * num_vecs * 3 * blockDim.x + threadIdx.x;
    };
    // what is past the end of a row, or of all rows, becomes 0 and adds nothing
    auto fetch = [&](int start, int to_stage) {
        if constexpr (!has_ring) { return; }
        size_t at = (size_t)start * C + first;
        const floatX *from_dout = dout + at, *from_inp = inp + at,
                     *from_dresidual = (dresidual ? dresidual : dout) + at;
        int4* to = slots(to_stage);
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                bool valid = start + i < N && first + j * stride < C;
                int offset = i * C + j * stride;
                int4* slot = to + (i * num_vecs + j) * 3 * blockDim.x;
                cp_async_16(slot, from_dout + offset, valid);
                cp_async_16(slot + blockDim.x, from_inp + offset, valid);
                cp_async_16(slot + 2 * blockDim.x, from_dresidual + offset, valid && dresidual);
            }
        }
        cp_async_commit();
    };
    auto fetch_statistics = [&](int start) {
#pragma unroll
        for (int i = 0; i < rows; i++) {
            next_mean[i] = start + i < N ? mean[start + i] : 0.0f;
            next_rstd[i] = start + i < N ? rstd[start + i] : 0.0f;
        }
    };
    int start = blockIdx.x * rows;
    for (int i = 0; i < LAYERNORM_BACKWARD_STAGES; i++) { fetch(start + i * row_step, i); }
    fetch_statistics(start);
    for (; start < N; start += row_step) {
        float m[rows], r[rows], sums[8] = {};
#pragma unroll
        for (int i = 0; i < rows; i++) { m[i] = next_mean[i], r[i] = next_rstd[i]; }
        fetch_statistics(start + row_step);
        if constexpr (has_ring) { cp_async_wait<LAYERNORM_BACKWARD_STAGES - 1>(); }
        const int4* own = slots(stage);
        auto vector = [=](int i, int j, int which) { // 0: dout, 1: inp, 2: dresidual
            if constexpr (has_ring) {
                return to_floats(vec128_from_bits<floatX>(own[((i * num_vecs + j) * 3 + which) * blockDim.x]));
            }
            const floatX* tensor = which == 0 ? dout : which == 1 ? inp : dresidual;
            bool valid = tensor && start + i < N && first + j * stride < C;
            return to_floats(valid ? load128(tensor + (size_t)(start + i) * C + first + j * stride) : x128());
        };
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                auto dy = vector(i, j, 0), x = vector(i, j, 1), scale = vector_of_weight(j);
                for (int k = 0; k < x128::size; k++) {
                    float centered = x[k] - m[i], dnorm = dy[k] * scale[k];
                    sums[2 * i] += dnorm;
                    sums[2 * i + 1] += dnorm * centered;
                    dw[j][k] += dy[k] * r[i] * centered;
                    db[j][k] += dy[k];
                }
            }
            sums[2 * i + 1] *= r[i];
        }
        float warp_total = warp_sums<8>(sums);
        if (lane % 4 == 0) { shared[stage][warp][lane / 4] = warp_total; }
        __syncthreads();
        static_assert(LAYERNORM_BACKWARD_BLOCK_SIZE <= 8 * 32); // this lane: sum lane % 8 of two of the warps
        float total = lane / 8 < num_warps ? shared[stage][lane / 8][lane % 8] : 0.0f;
        if (lane / 8 + 4 < num_warps) { total += shared[stage][lane / 8 + 4][lane % 8]; }
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 8);
        total += __shfl_xor_sync(0xFFFFFFFFu, total, 16);
        total *= inv_C;
        // dinp = dresidual + rstd * (dnorm - sum - norm * dot) is a sum of dresidual, dnorm and inp with factors of the row
#pragma unroll
        for (int i = 0; i < rows; i++) {
            float sum = __shfl_sync(0xFFFFFFFFu, total, 2 * i), dot = __shfl_sync(0xFFFFFFFFu, total, 2 * i + 1);
            float of_inp = -r[i] * r[i] * dot, constant = -r[i] * sum - of_inp * m[i];
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                auto dy = vector(i, j, 0), x = vector(i, j, 1), dx = vector(i, j, 2), scale = vector_of_weight(j);
                x128 result;
                for (int k = 0; k < x128::size; k++) {
                    float y = dx[k] + constant + r[i] * (dy[k] * scale[k]) + of_inp * x[k];
                    if (num_sums == 3) { dx_sum[j][k] += y; }
                    result[k] = (floatX)y;
                }
                int c = first + j * stride;
                if (start + i < N && c < C) { store128(dinp + (size_t)(start + i) * C + c, result); }
            }
        }
        fetch(start + LAYERNORM_BACKWARD_STAGES * row_step, stage); // this thread has read what is in this stage
        stage = (stage + 1) % LAYERNORM_BACKWARD_STAGES;
    }
    if constexpr (has_ring) { cp_async_wait<0>(); }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        int c = first + j * stride;
#pragma unroll
        for (int k = 0; k < x128::size && c < C; k += f128::size) {
#pragma unroll
            for (int which = 0; which < num_sums; which++) {
                f128 sum;
                for (int i = 0; i < f128::size; i++) {
                    sum[i] = which == 0 ? dw[j][k + i] : which == 1 ? db[j][k + i] : dx_sum[j][k + i];
                }
                store128(partials + ((size_t)blockIdx.x * num_sums + which) * C + c + k, sum);
            }
        }
    }
}

// Number of floats in scratch: the partial sums of dweight, dbias and the columns of dinp of every block.
size_t layernorm_backward_scratch(int C) {
    return (size_t)num_multiprocessors() * LAYERNORM_BACKWARD_BLOCKS_PER_SM * 3 * C;
}

// dinp (N,C) = dresidual + gradient of inp; dweight, dbias (C) += their gradients | dinp_sums (C) += the sums of dinp's
// columns, the gradient of a bias that was added to inp; may be NULL
// | scratch (layernorm_backward_scratch(C)) | dout (N,C); dresidual (N,C), may be NULL (then 0) or dinp; inp (N,C);
// weight (C); mean, rstd (N)
void layernorm_backward(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                        const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                        const float* mean, const float* rstd, int N, int C, const Execution& exec) {
    Op op(exec, (dresidual ? 4.0 : 3.0) * N * C * sizeof(floatX), 0, "layernorm_backward");
    require(N >= 1 && C >= 8 && C % 8 == 0 && C <= (sizeof(floatX) == 4 ? 6144 : 8192));
    int num_vectors = C / x128::size, i = 0, resident;
    constexpr int vecs[] = {1, 2, 4, 6}; // per thread; 6 only in fp32
    while (num_vectors > vecs[i] * LAYERNORM_BACKWARD_BLOCK_SIZE) { i++; }
    int block_size = 32 * ceil_div(num_vectors, 32 * vecs[i]), rows = max(4 / vecs[i], 1);
    auto kernel = layernorm_backward_kernel11<1, 2>;
    with_constant<sizeof(floatX) == 4 ? 4 : 3>(i + 1, [&](auto n) {
        constexpr int num_vecs = vecs[n.value - 1];
        kernel = dinp_sums ? layernorm_backward_kernel11<num_vecs, 3> : layernorm_backward_kernel11<num_vecs, 2>;
    });
    bool has_ring = vecs[i] <= LAYERNORM_BACKWARD_RING_VECS && compiled_arch(kernel) >= 80;
    size_t ring_bytes =
        has_ring ? (size_t)LAYERNORM_BACKWARD_STAGES * rows * vecs[i] * 3 * block_size * sizeof(x128) : 0;
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)ring_bytes));
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, ring_bytes));
    // what is measured is the number of threads of the blocks that run side by side on an SM
    int threads_per_sm = tuned_block_size(exec, "layernorm_backward", N, C, 0);
    int blocks_per_sm = threads_per_sm ? max(threads_per_sm / block_size, 1)
                        : !has_ring    ? LAYERNORM_BACKWARD_BLOCKS_PER_SM
                                       : (block_size < LAYERNORM_BACKWARD_BLOCK_SIZE ? 2 : 1);
    blocks_per_sm = min(min(resident, blocks_per_sm), LAYERNORM_BACKWARD_BLOCKS_PER_SM);
    int grid_size = min(exec.free_sms() * blocks_per_sm, ceil_div(N, rows));
    launch_early(kernel, dim3(grid_size), dim3(block_size), ring_bytes, exec, dinp, scratch, dout, dresidual, inp,
                 weight, mean, rstd, N, C);
    column_sums<16>(dweight, dbias, dinp_sums, scratch, grid_size, C, exec);
}
// ==== end promoted: layernorm_backward ====

// ==== promoted: gelu_forward ====
// ---- kernel 2: one 128-bit vector per thread --------------------------------------------------

__device__ inline x128 gelu_forward_vector(const x128& x) {
    x128 y;
    for (int k = 0; k < x128::size; k++) { y[k] = (floatX)gelu((float)x[k]); }
    return y;
}

__global__ void gelu_forward_kernel2(floatX* out, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < n) { store128(out + i, gelu_forward_vector(load128(inp + i))); }
}

template <Activation kind>
__global__ void activation_forward_kernel2(floatX* out, floatX* slope, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= n) { return; }
    x128 x = load128(inp + i), y, slopes;
    for (int k = 0; k < x128::size; k++) {
        float s;
        y[k] = (floatX)activate_and_slope<kind>((float)x[k], &s);
        slopes[k] = (floatX)s;
    }
    store128(out + i, y);
    if (slope) { store128(slope + i, slopes); }
}

// out (n) = the activation of inp (n), and slope (n), which may be NULL, its derivative there; out or slope may be inp
void activation_forward(floatX* out, floatX* slope, const floatX* inp, size_t n, Activation kind,
                        const Execution& exec) {
    bool is_gelu = kind == ACT_GELU_TANH && !slope;
    int block_size = tuned_block_size(exec, "gelu_forward", n, 1, 128);
    Op op(exec, (slope ? 3.0 : 2.0) * n * sizeof(floatX), 0, "%s_forward", is_gelu ? "gelu" : "activation");
    require(n % x128::size == 0);
    LaunchShape shape(ceil_div(n, (size_t)x128::size * block_size), block_size);
    if (is_gelu) { return launch_kernel(gelu_forward_kernel2, shape, exec, out, inp, n); }
    with_activation(
        kind, [&](auto k) { launch_kernel(activation_forward_kernel2<k.value>, shape, exec, out, slope, inp, n); });
}
// out (n) = gelu(inp (n)); out may be inp
void gelu_forward(floatX* out, const floatX* inp, size_t n, const Execution& exec) {
    activation_forward(out, NULL, inp, n, ACT_GELU_TANH, exec);
}
// ==== end promoted: gelu_forward ====

// ==== promoted: gelu_backward ====
// ---- kernel 2: one 128-bit vector per thread --------------------------------------------------

template <Activation kind> __device__ x128 activation_backward_vector(const x128& dout, const x128& inp) {
    x128 dinp;
    for (int k = 0; k < x128::size; k++) { dinp[k] = (floatX)((float)dout[k] * activation_slope<kind>((float)inp[k])); }
    return dinp;
}
__device__ inline x128 gelu_backward_vector(const x128& dout, const x128& inp) {
    return activation_backward_vector<ACT_GELU_TANH>(dout, inp);
}

// no __restrict__, because dinp may be dout; that is safe, because each thread writes only elements that it has read
template <Activation kind>
__global__ void activation_backward_kernel2(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i < n) { store128(dinp + i, activation_backward_vector<kind>(load128(dout + i), load128(inp + i))); }
}

// dinp (n) = dout (n) times the derivative of the activation at inp (n); dinp may be dout
void activation_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, Activation kind,
                         const Execution& exec) {
    int block_size = tuned_block_size(exec, "gelu_backward", n, 1, 256);
    Op op(exec, 3.0 * n * sizeof(floatX), 0, "%s_backward", kind == ACT_GELU_TANH ? "gelu" : "activation");
    require(n % x128::size == 0);
    size_t num_blocks = ceil_div(n, (size_t)x128::size * block_size);
    with_activation(kind, [&](auto k) {
        launch_kernel(activation_backward_kernel2<k.value>, LaunchShape(num_blocks, block_size), exec, dinp, dout, inp,
                      n);
    });
}
// dinp (n) = dout (n) * gelu'(inp (n)); dinp may be dout
void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, const Execution& exec) {
    activation_backward(dinp, dout, inp, n, ACT_GELU_TANH, exec);
}
// ==== end promoted: gelu_backward ====

// ==== promoted: adamw ====
// In fp16 only: halves the loss scale after an overflow, doubles it after LOSS_SCALE_STEPS finite steps. If the loss
// itself is not finite, or the scale is already 1, the scale is not the cause of the overflow and is not halved.
__device__ inline void adamw_adapt_loss_scale(StepState* s) {
    constexpr int LOSS_SCALE_STEPS = 2000;
    constexpr float LARGEST_LOSS_SCALE = 65536.0f;
    float factor = 1.0f;
    if (isfinite(s->loss) && isfinite(s->scaled_norm)) {
        s->good_steps++;
        if (s->good_steps >= LOSS_SCALE_STEPS && s->loss_scale < LARGEST_LOSS_SCALE) { factor = 2.0f; }
    } else if (isfinite(s->loss) && s->loss_scale > 1.0f) {
        factor = 0.5f;
    }
    if (factor == 1.0f) { return; }
    s->loss_scale *= factor, s->dloss *= factor;
    s->good_steps = 0;
}

__global__ void adamw_prepare_kernel(StepState* s, AdamW o, bool skip, bool deferred) {
    s->optimizer = o, s->is_deferred = deferred;
    float unscale = __frcp_rn(s->loss_scale); // exact, because the scale is a power of two
    s->norm = s->scaled_norm * unscale;
    s->applied = isfinite(s->loss) && isfinite(s->scaled_norm) && !skip;
    int t = s->num_updates += s->applied;
    s->grad_scale = unscale * (o.clip > 0.0f && s->norm > o.clip ? o.clip / s->norm : 1.0f);
    s->inverse_bias1 = (float)(1.0 / (1.0 - pow((double)o.beta1, (double)t)));
    s->inverse_bias2 = (float)(1.0 / (1.0 - pow((double)o.beta2, (double)t)));
    if (IS_FP16) { adamw_adapt_loss_scale(s); }
}

// state (1) is in device memory and already holds loss and scaled_norm. Sets norm, the verdict `applied`, num_updates,
// grad_scale and the bias corrections; in fp16 also the loss scale of the next step. If skip is true, the update is
// skipped even if loss and norm are finite. deferred: layers are updated during the next forward pass.
void adamw_prepare(StepState* state, const AdamW& optimizer, bool skip, bool deferred, const Execution& exec) {
    Op op(exec, sizeof(StepState), 0, "step verdict");
    launch_kernel(adamw_prepare_kernel, LaunchShape(1, 1), exec, state, optimizer, skip, deferred);
}

// Returns the new parameter; updates m and v.
__device__ inline float adamw_update(float p, float& m, float& v, float grad, const StepState& s, const AdamW& o) {
    float g = grad * s.grad_scale;
    m = o.beta1 * m + (1.0f - o.beta1) * g;
    v = o.beta2 * v + (1.0f - o.beta2) * g * g;
    float direction = m * s.inverse_bias1 / (sqrtf(v * s.inverse_bias2) + o.eps);
    return p - o.learning_rate * (direction + o.weight_decay * p);
}

// The rounding seed of this update, from the seed of this range of parameters. Seed 0 means round to nearest and stays
// 0; `| 1` keeps any other seed from becoming 0.
__device__ inline uint32_t adamw_seed(uint32_t seed, int update) {
    return seed == 0 ? 0 : hash_bits((uint32_t)update, seed) | 1;
}

__device__ inline floatX adamw_round(float p, size_t i, uint32_t seed) {
    return seed == 0 ? (floatX)p : stochastic_round(p, hash_bits((uint32_t)i, seed));
}

__device__ inline void adamw_scalar(floatX* params, float* master, float* m, float* v, const float* grads,
                                    const StepState& s, const AdamW& o, size_t i, uint32_t seed) {
    float p = adamw_update(master ? master[i] : (float)params[i], m[i], v[i], grads[i], s, o);
    if (master) { master[i] = p; }
    params[i] = adamw_round(p, i, seed);
}

// Holds four neighbouring values of each array, starting at element `at`.
struct AdamWVector {
    f128 p, m, v, g;

    __device__ void load(const floatX* params, const float* master, const float* all_m, const float* all_v,
                         const float* grads, size_t at) {
        m = load128(all_m + at), v = load128(all_v + at), g = load128(grads + at);
        if (master) {
            p = load128(master + at);
        } else {
            x4 old = *reinterpret_cast<const x4*>(params + at);
            for (int k = 0; k < 4; k++) { p[k] = (float)old[k]; }
        }
    }
    // Updates and stores the values. i: the number of the first value, for its random bits
    __device__ void update(floatX* params, float* master, float* all_m, float* all_v, const StepState& s,
                           const AdamW& o, size_t at, size_t i, uint32_t seed) {
        x4 rounded;
        for (int k = 0; k < 4; k++) { p[k] = adamw_update(p[k], m[k], v[k], g[k], s, o); }
        for (int k = 0; k < 4; k++) { rounded[k] = adamw_round(p[k], i + k, seed); } // apart: rounding has branches
        store128(all_m + at, m), store128(all_v + at, v);
        if (master) { store128(master + at, p); }
        *reinterpret_cast<x4*>(params + at) = rounded;
    }
};

// ---- kernel 4: two groups of four elements per thread, all of their loads in flight at once ----

__global__ void __launch_bounds__(128)
    adamw_kernel4(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state,
                  size_t n, AdamW o, uint32_t seed) {
    size_t first = ((size_t)blockIdx.x * 2 * blockDim.x + threadIdx.x) * 4, stride = (size_t)blockDim.x * 4;
    AdamWVector x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 <= n) { x[j].load(params, master, m, v, grads, i); }
    }
    StepState s = *state;
    if (!s.applied) { return; }
    seed = adamw_seed(seed, s.num_updates);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        size_t i = first + j * stride;
        if (i + 4 <= n) {
            x[j].update(params, master, m, v, s, o, i, i, seed);
        } else {
            for (; i < n; i++) { adamw_scalar(params, master, m, v, grads, s, o, i, seed); }
        }
    }
}

// params (n) floatX; master (n) float, or NULL if params is the only copy of the weights; m, v (n) | grads (n);
// state (1), filled in by adamw_prepare. seed 0: round params to nearest; otherwise stochastically, with new random
// bits in every update.
void adamw(floatX* params, float* master, float* m, float* v, const float* grads, const StepState* state, size_t n,
           const AdamW& optimizer, uint32_t seed, const Execution& exec) {
    int block_size = tuned_block_size(exec, "adamw", n, 1, 128);
    // Bytes per element: 20 because m and v are read and written and grads are read. With master, master is read and
    // written and params are written; without master, params are read and written.
    double bytes = 20 + (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX));
    Op op(exec, bytes * n, 0, "adamw");
    require(((size_t)params | (size_t)master | (size_t)m | (size_t)v | (size_t)grads) % 16 == 0);
    require(block_size <= 128);
    size_t num_blocks = ceil_div(n, 8 * (size_t)block_size);
    launch_kernel(adamw_kernel4, LaunchShape(num_blocks, block_size), exec, params, master, m, v, grads, state, n,
                  optimizer, seed);
}

__global__ void adamw_round_kernel(floatX* params, const float* master, size_t n, uint32_t seed, int update) {
    seed = adamw_seed(seed, update);
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { params[i] = adamw_round(master[i], i, seed); }
}

// Recomputes params (n) as they were after update number `update`, from the master weights (n) after that update.
void adamw_round_weights(floatX* params, const float* master, size_t n, uint32_t seed, int update,
                         const Execution& exec) {
    launch_kernel(adamw_round_kernel, LaunchShape(ceil_div(n, (size_t)256), 256), exec, params, master, n, seed,
                  update);
}
// ==== end promoted: adamw ====

// ==== promoted: gemm ====
#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers

// out (M,N) = finish(inp (M,K) weight (N,K)^T). One persistent block per SM, of three warpgroups. Warpgroup 0 is the
// producer: it fills a ring of stages by TMA, each with 64 columns of both operands. Warpgroups 1 and 2 are the
// consumers: they multiply by wgmma and alternate (ping-pong), each on a tile of its own:
//
//     consumer 0   | products, tile 0 | epilogue, tile 0 | products, tile 2 | epilogue, tile 2 |
//     consumer 1                      | products, tile 1 | epilogue, tile 1 | products, tile 3 | epilogue, tile 3 |
//
// The epilogue of a tile is hidden behind the products of the next tile, which pays where K is short. The epilogue
// works on the accumulators in registers. Its results go through shared memory to TMA stores, which skip elements
// outside the matrix, so M and N need not be multiples of the tile.

// ---- epilogues ----

// Extras of an epilogue, flags combined by |. They say what the epilogue does in addition to computing its value y.
enum {
    GEMM_GELU = 1,                        // out = gelu(y), otherwise out = y
    GEMM_SECOND = 2,                      // y is also stored, to the matrix `second`
    GEMM_SLOPE = 128,                     // with GEMM_GELU and GEMM_SECOND: gelu'(y) is stored there instead of y
    GEMM_THIRD = 4,                       // `third` is read; the next three flags include this and say what for
    GEMM_ADD = GEMM_THIRD,                // out = y + third
    GEMM_MULTIPLY = GEMM_THIRD | 256,     // out = y * third
    GEMM_GELU_BACKWARD = GEMM_THIRD | 16, // out = y * gelu'(third)
    GEMM_NO_BIAS = 32,                    // bias is NULL: y is the accumulator
    GEMM_SUMS = 64,                       // the columns of each tile of out are also summed, unrounded: GemmBiasSums
    // The rows of each tile of out are also summed, unrounded. For each row, one lane calls store_row_sum(row, column tile, sum).
    // pair() is also called for columns past the end, where value() must be 0.
    GEMM_ROW_SUMS = 512,
    GEMM_MIRRORED = 2048 // with GEMM_THIRD: store_mirrored() also receives all results of the tile, as fragments
};

// The epilogue y = accumulator + bias. Every epilogue has three types for its other inputs: Row is the data of one row,
// Pair the data of two neighbouring columns as loaded from memory (the first column is even), Column the unpacked data
// of one column.
template <int extras> struct GemmBias {
    static constexpr int EXTRAS = extras;
    const floatX* bias; // (N), or NULL for no bias

    struct Row {};
    typedef uint32_t Pair;
    typedef float Column;
    __device__ Row row(int) const { return {}; }
    __device__ Pair pair(int column) const {
        return bias ? __ldg(reinterpret_cast<const uint32_t*>(bias + column)) : 0;
    }
    __device__ void columns(Column (&c)[2], const Pair& pair) const {
        float2 x = unpack_16x2(pair, floatX());
        c[0] = x.x, c[1] = x.y;
    }
    __device__ float value(float sum, const Row&, const Column& c) const { return sum + c; }
    // With GEMM_THIRD: returns whether `third` is read. If not, its elements count as zeros.
    __device__ bool reads_third() const { return true; }
    // With GEMM_THIRD: returns the result for y and an element of `third`.
    __device__ float combined(float y, float third) const {
        if ((extras & GEMM_GELU_BACKWARD) == GEMM_GELU_BACKWARD) { return y * gelu_slope(third); }
        return (extras & GEMM_MULTIPLY) == GEMM_MULTIPLY ? y * third : y + third;
    }
};

// GemmBias that also sums the columns of out.
template <int extras> struct GemmBiasSums : GemmBias<extras> {
    static constexpr int EXTRAS = extras | GEMM_SUMS;
    float* sums; // (row tiles, N): row i has the sums over the rows of tile row i
    int N;
};

// Returns the pair that lane `lane` of this warp holds.
__device__ inline uint32_t gemm_shuffle(uint32_t pair, int lane) { return __shfl_sync(0xFFFFFFFFu, pair, lane); }

// ---- the form: cluster, tile, shared memory ----

// The first row and column of a tile of out, and how its boxes are copied: a box has its first element in row y and column x.
struct GemmTile {
    int row, column;

    __device__ void load(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_2d(box, &map, x, y, full);
    }
    __device__ void load_once(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_2d_once(box, &map, x, y, full);
    }
    __device__ void store(const CUtensorMap& map, const void* box, int x, int y) const {
        tma_store_2d(&map, box, x, y);
    }
};

// The tile scheduler: returns tile number `index` of a fixed list. With clusters, index counts pairs of tiles, and rank
// selects the tile of the pair. The list goes through groups of 16 rows of tiles, and through each group column by
// column. Blocks that run at the same time then share tiles of inp and of the weight in L2, however many columns out
// has.
template <class G> __device__ inline GemmTile gemm_tile(int index, int M, int N, int rank) {
    const int group = 16 / G::CLUSTER;
    int num_rows = ceil_div(M, G::ROWS * G::CLUSTER), num_columns = ceil_div(N, G::COLUMNS);
    int first = index / (group * num_columns) * group, within = index % (group * num_columns);
    int height = min(group, num_rows - first);
    return {((first + within % height) * G::CLUSTER + rank) * G::ROWS, within / height * G::COLUMNS};
}

// The blocks of a cluster, one or two, from which a form inherits. Two blocks compute two tiles of out, one below the other, so
// both need the same tile of the weight: each loads half of it and multicasts it to both. A stage is empty when the consumers
// of both blocks have read it.
template <int cluster> struct GemmCluster {
    static constexpr int CLUSTER = cluster;
    static constexpr bool IS_KM = false, IS_KN = false; // whether inp is stored as (K,M), the weight as (K,N)
    static __device__ int rank() { return cluster == 1 ? 0 : cluster_rank(); }
    static __device__ void sync() { cluster == 1 ? __syncthreads() : cluster_sync(); }
    // Called by a warp that has read a stage: lane r arrives at the empty barrier of block r.
    static __device__ void release(uint64_t* empty) {
        int lane = threadIdx.x % 32;
        if (lane < cluster) { cluster == 1 ? mbarrier_arrive(empty) : mbarrier_arrive_cluster(empty, lane); }
    }
    template <class G> static __device__ GemmTile tile(int index, int M, int N, int rank) {
        return gemm_tile<G>(index, M, N, rank);
    }
};
typedef GemmCluster<1> GemmSingle;
typedef GemmCluster<2> GemmPair;

// An operand, stored as (rows,K), or as (K,rows) if by_k, as a backward pass has it. A stage has a tile of it: 64 columns (k) of
// `size` rows, which wgmma takes as they are. If by_k, these are boxes of 64 columns and 64 rows (k), which wgmma transposes.
// Each of num_blocks blocks of a cluster loads a part of the tile for all of them.
template <int num_blocks, int size, bool by_k> struct GemmOperand {
    static constexpr int BOX_ROWS = (by_k ? 64 : size) / num_blocks;
    static constexpr int STEP = by_k ? 128 : 2; // 16 of k, in the units of wgmma's descriptors, which are 16 bytes
    static CUtensorMap map(const floatX* matrix, int rows, int K) {
        return by_k ? tensor_map(matrix, {rows, K}, {64, BOX_ROWS}) : tensor_map(matrix, {K, rows}, {64, BOX_ROWS});
    }
    // Loads the part of block `rank`. row, k: where the tile begins in the matrix
    template <class Tile> static __device__ void load(floatX* to, const CUtensorMap& map, const Tile& tile, int row,
                                                      int k, int rank, uint64_t* full) {
        for (int i = 0; i < (by_k ? size / 64 : 1); i++) {
            floatX* box = to + (i * 64 + rank * BOX_ROWS) * 64;
            int x = by_k ? row + 64 * i : k, y = (by_k ? k : row) + rank * BOX_ROWS;
            num_blocks == 1 ? tile.load(box, map, x, y, full) : tma_load_2d_multicast(box, &map, x, y, full, 3);
        }
    }
    static __device__ uint64_t descriptor(const floatX* tile) {
        return by_k ? wgmma_descriptor_transposed(tile, 64 * 64 * sizeof(floatX)) : wgmma_descriptor(tile);
    }
};
template <class G> using GemmInp = GemmOperand<1, G::ROWS, G::IS_KM>;
template <class G> using GemmWeight = GemmOperand<G::CLUSTER, G::COLUMNS, G::IS_KN>;

// The trainer's form. 192 divides 768 and 3072, and the accumulators of a 128x192 tile fit in one warpgroup's registers.
template <class Cluster, bool kn = false> struct GemmPingPong192 : Cluster {
    static constexpr bool IS_KN = kn;
    static constexpr int ROWS = 128, COLUMNS = 192; // size of a tile of out
    static constexpr int PARTS = ROWS / 64;         // a wgmma covers 64 rows, so a consumer has this many accumulators
    static constexpr int READERS = 4; // warps per block that read a stage: 4 of one consumer, or 8 of both
    static constexpr int RING = 4;    // stages in the ring
    static constexpr int BOXES = 4;   // boxes of 16x64 results per consumer warp, in shared memory
    static __device__ void wgmma(float (&sum)[96], uint64_t inp, uint64_t weight, bool accumulate) {
        kn ? wgmma_64x192x16_transposed_b(sum, inp, weight, accumulate, floatX())
           : wgmma_64x192x16(sum, inp, weight, accumulate, floatX());
    }
};
typedef GemmPingPong192<GemmPair> GemmPingPong192Pairs;

// Returns whether a form is ping-pong. In other forms, both consumers compute every tile together, half of its rows each.
template <class G> constexpr bool gemm_is_ping_pong = G::READERS == 4;

template <class G> struct GemmStage { // 64 columns of both operands, swizzled as TMA writes them
    floatX inp[G::ROWS * 64], weight[G::COLUMNS * 64];
    static_assert(G::ROWS % 8 == 0 && G::COLUMNS % 8 == 0, "every tile is aligned to 1024 bytes, as the swizzle wants");
};

// The ring over time, here with 4 stages and 3 steps of 64 columns per tile. Step i uses stage i % 4. L4 is the TMA
// load of step 4: it starts when P0 is done and empty[0] completes. P4 are the products of step 4: they start when L4
// has arrived and full[0] completes. Dots are loads in flight or full stages that wait for a consumer.
//
//     time      0       1       2       3       4       5       6       7
//     stage 0 | L0    | P0    | L4 ...................| P4    | L8 ..........
//     stage 1 | L1 ...........| P1    | L5 ...................| P5    | L9 ..
//     stage 2 | L2 ...................| P2    | L6 ...................| P6
//     stage 3 | L3 ...........................| P3    | L7 ..................
//     products        | tile 0, consumer 0    | tile 1, consumer 1    | tile 2
template <class G> struct GemmSMem {
    static constexpr int RING = G::RING;
    GemmStage<G> stages[RING];
    floatX boxes[8][G::BOXES][16 * 64]; // per consumer warp: results to be stored, or `third`
    TmaRing<RING> ring;
    uint64_t box_full[8][G::BOXES]; // TMA loads complete them, consumers wait
    uint64_t turn[2]; // consumer c waits for turn[c]; the other consumer arrives when it has issued its products
    uint64_t loaded;  // for work in idle warps: the producer arrives when it has loaded the last stage
};

// All threads call this first. It initialises the barriers and waits for earlier kernels, whose results may be read
// afterwards.
template <class G> __device__ inline void gemm_init(GemmSMem<G>& smem) {
    if (threadIdx.x == 0) {
        smem.ring.init(G::READERS * G::CLUSTER);
        for (int i = 0; i < 8 * G::BOXES; i++) { mbarrier_init(&smem.box_full[0][0] + i, 1); }
        for (int i = 0; i < 2; i++) { mbarrier_init(&smem.turn[i], 4); }
        mbarrier_init_fence();
    }
    G::sync();
    grid_launch_dependents(); // the next kernel's blocks may start as this grid's blocks end
    grid_wait_dependency();
}

// ---- the producer: one thread per block ----

// Three warps of the producer are idle. They can run work of another operation that is bound by memory, and so costs little
// while tensor cores multiply. A struct for such work has the members of this one. Each of the warps, number 0 to 2 of the
// block, calls `run`, which must return within a few microseconds when phase 0 of `loaded` has completed.
struct GemmNoIdleWork {
    static constexpr bool WORKS = false;
    static constexpr int REGISTERS = 24; // per thread of the producer
    __device__ void run(int, uint64_t*) const {}
};

// Tensor maps. A box of inp or weight is what a block loads per step; boxes of out, second and third are 16x64.
struct GemmMaps {
    CUtensorMap inp, weight, out, second, third;
};

// Loads 64 columns of a tile's operands, from 64 * step on. i is the number of steps loaded so far, over all tiles. In this and
// gemm_multiply, SMem is any struct with the members `stages` and `ring`.
template <class G, class SMem, class Tile>
__device__ inline void gemm_load(SMem& smem, const CUtensorMap& inp_map, const CUtensorMap& weight_map,
                                 const Tile& tile, int step, int rank, int i) {
    auto& stage = smem.stages[i % G::RING];
    uint64_t* full = smem.ring.acquire(i, sizeof(stage));
    GemmInp<G>::load(stage.inp, inp_map, tile, tile.row, step * 64, 0, full);
    GemmWeight<G>::load(stage.weight, weight_map, tile, tile.column, step * 64, rank, full);
}

// ---- the consumers: warpgroups 1 and 2 ----

// sum = 0. The first wgmma of a tile could overwrite it instead; but then the compiler takes the accumulators for in use all
// the time, and leaves the epilogue only the other registers, too few to compute several numbers side by side. An epilogue
// that needs all accumulators to its end fits better without (clears = false).
template <class G> __device__ inline void gemm_clear(float (&sum)[G::PARTS][G::COLUMNS / 2]) {
#pragma unroll
    for (int i = 0; i < G::PARTS * (G::COLUMNS / 2); i++) { sum[i / (G::COLUMNS / 2)][i % (G::COLUMNS / 2)] = 0.0f; }
}

// The main loop of a consumer: the products of one tile, whose first step is step i of the ring. number: how many
// tiles this consumer had before. sum[m] is the accumulator of rows 64m to 64m + 63 of the consumer's rows; its elements
// 4j to 4j + 3 are this lane's part of the 16x8 fragment at columns 8j (see wgmma_64x128x16).
template <class G, bool clears = true, class SMem> __device__ inline void
gemm_multiply(float (&sum)[G::PARTS][G::COLUMNS / 2], SMem& smem, int num_steps, int number, int& i) {
    int consumer = threadIdx.x / 128 - 1, first_row = gemm_is_ping_pong<G> ? 0 : 64 * warp_uniform(consumer);
    if (clears) { gemm_clear<G>(sum); }
    // Ping-pong: wait until the other consumer has issued the products of the previous tile. A barrier's parity is one
    // bit, so a consumer more than a round of the ring ahead would take an earlier tile's stage for its own.
    if constexpr (gemm_is_ping_pong<G>) { mbarrier_wait(&smem.turn[consumer], (number + 1 + consumer) % 2); }
#pragma unroll 1
    for (int step = 0; step < num_steps; step++, i++) {
        auto& stage = smem.stages[i % G::RING];
        uint64_t inp = GemmInp<G>::descriptor(stage.inp + first_row * 64);
        smem.ring.wait(i);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 columns per iteration; 64 rows of inp are 512 units of 16 bytes
#pragma unroll
            for (int m = 0; m < G::PARTS; m++) {
                G::wgmma(sum[m], inp + 512 * m + GemmInp<G>::STEP * k,
                         GemmWeight<G>::descriptor(stage.weight) + GemmWeight<G>::STEP * k,
                         clears || step > 0 || k > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>(); // the previous step's products are done
        if (step > 0) { G::release(&smem.ring.empty[(i - 1) % G::RING]); }
    }
    if constexpr (gemm_is_ping_pong<G>) {
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.turn[1 - consumer]); }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < G::PARTS; m++) { wgmma_hold(sum[m]); }
    G::release(&smem.ring.empty[(i - 1) % G::RING]);
}

// The epilogue's column data for a tile, loaded while the products run. Each lane holds one pair per 64 columns, and
// threads get the pairs that they need by shuffles: one load per use would take longer than the rest of the epilogue.
template <class G, class Epilogue> struct GemmColumns { typename Epilogue::Pair pairs[G::COLUMNS / 64]; };
template <class G, class Epilogue> __device__ inline void
gemm_load_columns(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, int column, int N) {
#pragma unroll
    for (int q = 0; q < G::COLUMNS / 64; q++) {
        int at = column + 64 * q + (int)threadIdx.x % 32 * 2;
        columns.pairs[q] = epilogue.pair(Epilogue::EXTRAS & GEMM_ROW_SUMS ? at : min(at, N - 2));
    }
}

// A consumer warp stores its rows of a tile in boxes of 16x64, from left to right, then downwards. A warp's boxes are
// numbered consecutively over all its tiles, and use its G::BOXES slots in shared memory round robin. In the functions
// below, `box` is the number of the tile's first box, SMem is any struct with the members `boxes` and `box_full`, and `tile`
// begins with the warp's first row.

// Starts to load box n of `third` for this tile. Called by one lane.
template <class G, class SMem, class Tile>
__device__ inline void gemm_load_box(SMem& smem, const CUtensorMap& third_map, const Tile& tile, int n, int box) {
    const int columns = G::COLUMNS / 64;
    int warp = threadIdx.x / 32 - 4, slot = (box + n) % G::BOXES;
    mbarrier_arrive_expect(&smem.box_full[warp][slot], sizeof(smem.boxes[0][0]));
    tile.load_once(smem.boxes[warp][slot], third_map, tile.column + n % columns * 64, tile.row + n / columns * 64,
                   &smem.box_full[warp][slot]);
}

// The prologue of a tile, before its products: starts the loads that its epilogue needs. Arguments as for gemm_store.
template <class G, class Epilogue, class SMem, class Tile>
__device__ inline void gemm_prepare(GemmColumns<G, Epilogue>& columns, const Epilogue& epilogue, SMem& smem,
                                    const CUtensorMap& third_map, const Tile& tile, int N, int box) {
    const int num_boxes = G::PARTS * (G::COLUMNS / 64);
    if constexpr (!(Epilogue::EXTRAS & GEMM_NO_BIAS)) { gemm_load_columns(columns, epilogue, tile.column, N); }
    if constexpr (Epilogue::EXTRAS & GEMM_THIRD) {
        if (threadIdx.x % 32 == 0) {
            tma_store_wait<0>(); // TMA has read the previous results, so `third` may overwrite them
            for (int n = 0; epilogue.reads_third() && n < min(num_boxes, G::BOXES); n++) {
                gemm_load_box<G>(smem, third_map, tile, n, box);
            }
        }
        if (Epilogue::EXTRAS & GEMM_MIRRORED) { __syncwarp(); } // the other lanes may have no load to wait for
    }
}

// Waits for the four warps of this consumer.
__device__ inline void gemm_consumer_sync() {
    threadIdx.x < 256 ? named_barrier_sync(1, 128) : named_barrier_sync(2, 128);
}

// The end of the epilogue with GEMM_SUMS: adds up what the four warps of the consumer have summed of the tile's columns,
// always in the same order, and stores it to row `row` / G::ROWS of `to` (row tiles, N). sums: this lane's, see
// fragment_column_sums. The warps meet in the memory of the boxes.
template <class G, class SMem> __device__ inline void gemm_store_sums(float (&sums)[G::COLUMNS / 64][16], float* to,
                                                                      SMem& smem, int row, int column, int M, int N) {
    static_assert(G::READERS == 4 && G::COLUMNS <= 256,
                  "the rows of a tile are one consumer's, a thread has two columns");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, thread = threadIdx.x % 128;
    auto sums_of = [&](int w) { return reinterpret_cast<float2*>(smem.boxes[w][0]); };
    if (lane == 0) { tma_store_wait<0>(); } // TMA has read the boxes
    __syncwarp();
#pragma unroll
    for (int q = 0; q < G::COLUMNS / 64; q++) { sums_of(warp)[32 * q + lane] = fragment_column_sums(sums[q]); }
    tma_store_fence(); // these writes come before what TMA loads into the boxes for the next tile
    gemm_consumer_sync();
    // the second tile of the last pair may be past the end
    if (thread < G::COLUMNS / 2 && row / G::ROWS * G::ROWS < M) {
        float2 sum = sums_of(warp / 4 * 4)[thread];
        for (int w = 1; w < 4; w++) {
            float2 x = sums_of(warp / 4 * 4 + w)[thread];
            sum.x += x.x, sum.y += x.y;
        }
        column += 2 * thread;
        if (column < N) { *reinterpret_cast<float2*>(to + (size_t)(row / G::ROWS) * N + column) = sum; }
    }
    gemm_consumer_sync(); // all have read: the boxes may be used again
}

// Packs two rows of two columns into two registers of a fragment.
__device__ inline void gemm_pack(uint32_t* pairs, const float (&v)[4]) {
    pairs[0] = pack_16x2(v[0], v[1], floatX()), pairs[1] = pack_16x2(v[2], v[3], floatX());
}

// The epilogue of one warp for a tile: computes the results and stores them by TMA. The last stores may still be in flight on
// return; lane 0 issued them and has to wait for them.
template <class G, class Epilogue, class SMem, class Tile>
__device__ inline void gemm_store(float (&sum)[G::PARTS][G::COLUMNS / 2], const Epilogue& epilogue,
                                  const GemmColumns<G, Epilogue>& columns, SMem& smem, const CUtensorMap& out_map,
                                  const CUtensorMap& second_map, const CUtensorMap& third_map, const Tile& tile, int M,
                                  int& box) {
    constexpr bool has_second = Epilogue::EXTRAS & GEMM_SECOND, has_third = Epilogue::EXTRAS & GEMM_THIRD;
    bool reads_third = false;
    if constexpr (has_third) { reads_third = epilogue.reads_third(); }
    static_assert(!has_second || !has_third, "they share the boxes");
    constexpr bool has_sums = Epilogue::EXTRAS & GEMM_SUMS, has_bias = !(Epilogue::EXTRAS & GEMM_NO_BIAS);
    constexpr bool has_row_sums = Epilogue::EXTRAS & GEMM_ROW_SUMS, mirrored = Epilogue::EXTRAS & GEMM_MIRRORED;
    static_assert(!mirrored || has_third, "gemm_prepare() waits for the stores of the mirrored tile");
    constexpr int num_columns = G::COLUMNS / 64, num_boxes = G::PARTS * num_columns, ahead = G::BOXES / 2;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box;
    float sums[num_columns]
              [16];    // with GEMM_SUMS only: the columns summed over this lane's rows, see fragment_column_sums
    float row_sums[2]; // with GEMM_ROW_SUMS only: two rows, 8 apart, summed over this lane's columns
    // this lane's 16 bytes in a box, for stmatrix on columns 0 to 15: row lane % 16, chunk lane / 16. The swizzle XORs
    // the row into the chunk, so 16 * p columns further is the address ^ p << 5.
    uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    typename Epilogue::Row rows[2];
    uint32_t results[mirrored ? num_boxes : 1][16];
#pragma unroll
    for (int n = 0; n < num_boxes; n++) {
        const int m = n / num_columns, q = n % num_columns;
        int box_row = tile.row + 64 * m, box_column = tile.column + 64 * q;
        for (int half = 0; q == 0 && half < 2; half++) {
            rows[half] = epilogue.row(min(box_row + 8 * half + lane / 4, M - 1));
            row_sums[half] = 0.0f;
        }
        int slot = box % G::BOXES, second_slot = (box + 1) % G::BOXES;
        if (reads_third) {
            // load box n + ahead of `third` into the slot that box n + ahead - BOXES used
            if (n + ahead >= G::BOXES && n + ahead < num_boxes && lane == 0) {
                tma_store_wait<G::BOXES - ahead - 1>();
                gemm_load_box<G>(smem, third_map, tile, n + ahead, first_box);
            }
            mbarrier_wait(&smem.box_full[warp][slot], box / G::BOXES % 2);
        } else if (!has_third) {
            if (lane == 0) { tma_store_wait<has_second ? G::BOXES / 2 - 1 : G::BOXES - 1>(); }
            __syncwarp();
        }
        uint32_t at = shared_address(smem.boxes[warp][slot]) + lane_at;
        uint32_t second_at = shared_address(smem.boxes[warp][second_slot]) + lane_at;
#pragma unroll
        for (int p = 0; p < 4; p++) { // 16 columns per iteration
            uint32_t *out = &results[mirrored ? n : 0][4 * p], second[4], third[4] = {};
            if (reads_third) { ldmatrix_x4(third, at ^ p << 5); }
#pragma unroll
            for (int j = 0; j < 2; j++) { // 8 columns per iteration
                typename Epilogue::Column two[2];
                if constexpr (has_bias) {
                    epilogue.columns(two, gemm_shuffle(columns.pairs[q], 8 * p + 4 * j + lane % 4));
                }
                const int k = 32 * q + 8 * p + 4 * j;
                float v[4]; // two rows, 8 apart, of two columns
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[i] = has_bias ? epilogue.value(sum[m][k + i], rows[i / 2], two[i % 2]) : sum[m][k + i];
                }
                if constexpr (Epilogue::EXTRAS & GEMM_SLOPE) {
                    float slopes[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) { v[i] = gelu_and_slope(v[i], &slopes[i]); }
                    gemm_pack(second + 2 * j, slopes);
                } else {
                    if constexpr (has_second) { gemm_pack(second + 2 * j, v); }
                    for (int i = 0; Epilogue::EXTRAS & GEMM_GELU && i < 4; i++) { v[i] = gelu(v[i]); }
                }
                if constexpr (has_third) {
                    float2 upper = unpack_16x2(third[2 * j], floatX());
                    float2 lower = unpack_16x2(third[2 * j + 1], floatX());
                    float w[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
                    for (int i = 0; i < 4; i++) { v[i] = epilogue.combined(v[i], w[i]); }
                }
                if constexpr (has_sums) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float x = v[e] + v[e + 2], &total = sums[q][4 * p + 2 * j + e];
                        total = m == 0 ? x : total + x;
                    }
                }
                if constexpr (has_row_sums) {
#pragma unroll
                    for (int i = 0; i < 4; i++) { row_sums[i / 2] += v[i]; }
                }
                gemm_pack(out + 2 * j, v);
            }
            stmatrix_x4(at ^ p << 5, out);
            if (has_second) { stmatrix_x4(second_at ^ p << 5, second); }
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tile.store(out_map, smem.boxes[warp][slot], box_column, box_row);
            if (has_second) { tile.store(second_map, smem.boxes[warp][second_slot], box_column, box_row); }
            tma_store_commit();
        }
        box += has_second ? 2 : 1;
        if constexpr (has_row_sums) {
            for (int half = 0; q == num_columns - 1 && half < 2; half++) { // a row is spread over four lanes
                float sum = quad_sum(row_sums[half]);
                int at_row = box_row + 8 * half + lane / 4;
                if (lane % 4 == 0 && at_row < M) { epilogue.store_row_sum(at_row, tile.column / G::COLUMNS, sum); }
            }
        }
    }
    if constexpr (has_sums) { gemm_store_sums<G>(sums, epilogue.sums, smem, tile.row, tile.column, M, epilogue.N); }
    if constexpr (mirrored) { epilogue.store_mirrored(results, smem, second_map, tile); }
}

// The consumers call this last: shared memory must stay allocated until the stores have read it and the other block of
// the cluster no longer writes to it.
template <class G> __device__ inline void gemm_end() {
    if (threadIdx.x % 32 == 0) { tma_store_wait<0>(); }
    if (G::CLUSTER > 1) { G::sync(); }
}

// ---- the kernel ----

// The beginning of a kernel. One thread of warpgroup 0 loads the operands of the block's tiles; the clusters take the tiles of
// the list in turn. Returns the number of the warp: 0 to 3 in warpgroup 0, whose work is then done.
template <class G, class IdleWork = GemmNoIdleWork>
__device__ inline int gemm_begin(GemmSMem<G>& smem, const GemmMaps& maps, int M, int N, int K, int num_tiles,
                                 const IdleWork& idle_work = {}) {
    if (IdleWork::WORKS && threadIdx.x == 0) { mbarrier_init(&smem.loaded, 1); }
    if (threadIdx.x == 0) { tma_prefetch_map(&maps.inp), tma_prefetch_map(&maps.weight), tma_prefetch_map(&maps.out); }
    gemm_init(smem);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    if (warp < 4) {
        warpgroup_fewer_registers<IdleWork::REGISTERS>();
        if (IdleWork::WORKS && threadIdx.x >= 32) {
            idle_work.run(warp_uniform(threadIdx.x / 32) - 1, &smem.loaded);
            return warp;
        }
        if (threadIdx.x != 0) { return warp; }
        int i = 0, rank = G::rank(), num_steps = ceil_div(K, 64);
#pragma unroll 1
        for (int index = blockIdx.x / G::CLUSTER; index < num_tiles; index += gridDim.x / G::CLUSTER) {
            auto tile = G::template tile<G>(index, M, N, rank);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++, i++) {
                gemm_load<G>(smem, maps.inp, maps.weight, tile, step, rank, i);
            }
        }
        if (IdleWork::WORKS) { mbarrier_arrive(&smem.loaded); }
    } else {
        warpgroup_more_registers<(504 - IdleWork::REGISTERS) / 2>(); // the three warpgroups have 3 * 168 per thread
    }
    return warp;
}

// A consumer's tiles, one after the other. store(sum, columns, tile, box) is the epilogue of one warp, see gemm_store.
template <class G, class Epilogue, class Store>
__device__ inline void gemm_consume(GemmSMem<G>& smem, int warp, const GemmMaps& maps, const Epilogue& epilogue, int M,
                                    int N, int K, int num_tiles, const Store& store) {
    constexpr bool ping_pong = gemm_is_ping_pong<G>;
    int consumer = warp / 4 - 1, rank = G::rank(), num_steps = ceil_div(K, 64), box = 0, number = 0;
    // ping-pong: the block's tiles go to consumers 0, 1, 0, ...; their steps go through the ring in that order
    int turns = ping_pong ? 2 : 1, turn = ping_pong ? consumer : 0, i = turn * num_steps;
    int first = blockIdx.x / G::CLUSTER, stride = gridDim.x / G::CLUSTER;
#pragma unroll 1
    for (int index = first + turn * stride; index < num_tiles; index += turns * stride, number++) {
        float sum[G::PARTS][G::COLUMNS / 2];
        auto tile = G::template tile<G>(index, M, N, rank);
        tile.row += warp % 4 * 16 + (ping_pong ? 0 : 64 * consumer); // the warp's
        GemmColumns<G, Epilogue> columns = {};                       // stay zeros with GEMM_NO_BIAS
        gemm_prepare(columns, epilogue, smem, maps.third, tile, N, box);
        gemm_multiply<G>(sum, smem, num_steps, number, i);
        i += (turns - 1) * num_steps; // skips the other consumer's tile
        store(sum, columns, tile, box);
    }
}

// Kernel 21 of matmul_forward.cu. Its idle warps run `idle_work`.
template <class G, class Epilogue, class IdleWork = GemmNoIdleWork> __global__ void __launch_bounds__(384, 1)
    gemm_sm90_kernel9(const __grid_constant__ GemmMaps maps, Epilogue epilogue, int M, int N, int K, int num_tiles,
                      const __grid_constant__ IdleWork idle_work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<GemmSMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles, idle_work);
    if (warp < 4) { return; }
    gemm_consume(smem, warp, maps, epilogue, M, N, K, num_tiles, [&](auto& sum, auto& columns, auto& tile, int& box) {
        gemm_store<G>(sum, epilogue, columns, smem, maps.out, maps.second, maps.third, tile, M, box);
    });
    gemm_end<G>();
#endif
}

// ---- launch ----

struct GemmArgs {
    floatX *out, *second; // (M,N); second is NULL unless GEMM_SECOND is set
    const floatX* inp;    // (M,K)
    const floatX* weight; // (N,K), or (K,N) with a form that is KN
    const floatX* third;  // (M,N), NULL unless GEMM_THIRD is set; may be the same memory as out
    int M, N, K;
};

// The tensor map of a matrix (M,N) in boxes of 16x64, as results are stored.
inline CUtensorMap gemm_box_map(const floatX* matrix, int M, int N) { return tensor_map(matrix, {N, M}, {64, 16}); }

// A matrix that is NULL gets inp's map, which is then not used.
template <class G> GemmMaps gemm_maps(const GemmArgs& g) {
    GemmMaps maps;
    maps.inp = GemmInp<G>::map(g.inp, g.M, g.K), maps.weight = GemmWeight<G>::map(g.weight, g.N, g.K);
    maps.out = g.out ? gemm_box_map(g.out, g.M, g.N) : maps.inp;
    maps.second = g.second ? gemm_box_map(g.second, g.M, g.N) : maps.inp;
    maps.third = g.third ? gemm_box_map(g.third, g.M, g.N) : maps.inp;
    return maps;
}

// The number of tiles of out, or of pairs of tiles if a cluster has two blocks.
template <class G> int gemm_num_tiles(int M, int N, int K) {
    require(M > 0 && N > 0 && K > 0 && N % 8 == 0 && K % 8 == 0);
    size_t num_tiles = ceil_div((size_t)M, (size_t)G::ROWS * G::CLUSTER) * ceil_div((size_t)N, (size_t)G::COLUMNS);
    require(num_tiles * ceil_div(K, 64) <= INT_MAX / 2); // steps are counted in an int
    return (int)num_tiles;
}

// Launches a kernel of the form G for num_tiles tiles, or pairs of tiles: a block per SM, or fewer if there are fewer tiles.
// early: see LaunchShape. The kernel has its dynamic shared memory, an SMem, from shared_aligned_1024().
template <class G, class SMem = GemmSMem<G>, class... Parameters, class... Arguments>
void gemm_start(void (*kernel)(Parameters...), int num_tiles, bool early, const Execution& exec,
                const Arguments&... arguments) {
    const int bytes = sizeof(SMem) + 1024;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    int num_blocks = min(num_tiles, exec.free_sms() / G::CLUSTER) * G::CLUSTER;
    launch_kernel(kernel, LaunchShape(num_blocks, 384, bytes, G::CLUSTER, early), exec, arguments...);
}

// out = finish(inp weight^T), and idle warps run `idle_work`. Requires has_sm90a(), K % 8 == 0, N % 8 == 0, and all
// pointers aligned to 16 bytes.
template <class G = GemmPingPong192Pairs, class Epilogue, class IdleWork = GemmNoIdleWork>
void gemm(const GemmArgs& g, const Epilogue& epilogue, const Execution& exec, const IdleWork& idle_work = {}) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require((g.second != NULL) == ((Epilogue::EXTRAS & GEMM_SECOND) != 0));
    require((g.third != NULL) == ((Epilogue::EXTRAS & GEMM_THIRD) != 0));
    int num_tiles = gemm_num_tiles<G>(g.M, g.N, g.K);
    gemm_start<G>(gemm_sm90_kernel9<G, Epilogue, IdleWork>, num_tiles, true, exec, gemm_maps<G>(g), epilogue, g.M, g.N,
                  g.K, num_tiles, idle_work);
}
#endif
// ==== end promoted: gemm ====

// ==== promoted: gemm_adamw ====
// ---- the update during the next forward pass, in chunks, by idle warps of its matrix products: kernel 3 of matmul_adamw.cu ----

// One chunk of a DeferredUpdate, as a warp needs it.
struct AdamWChunk {
    size_t place; // of its piece in the arrays
    int begin, end;
    uint32_t seed;
    AdamW optimizer; // without decay for vectors
    __device__ AdamWChunk(const DeferredUpdate& w, const StepState& s, int chunk) : optimizer(s.optimizer) {
        int of_layer = w.chunks_of_layer(), of_matrices = w.chunks_of(w.matrices);
        int layer = chunk / of_layer, i = chunk % of_layer;
        bool decays = i < of_matrices;
        if (!decays) { optimizer.weight_decay = 0.0f; }
        place = layer * ((size_t)w.matrices + w.vectors) + (decays ? 0 : w.matrices);
        begin = (decays ? i : i - of_matrices) * DeferredUpdate::CHUNK;
        end = min(begin + DeferredUpdate::CHUNK, decays ? w.matrices : w.vectors);
        // pieces are numbered as in section 2 of train_gpt2.cu
        seed = w.seed == 0 ? 0 : adamw_seed(hash_bits(1 + 2 * layer + !decays, w.seed) | 1, s.num_updates);
    }
    // Updates four values, i to i + 3 of the piece.
    __device__ void update(const DeferredUpdate& w, const StepState& s, int i) const {
        size_t at = place + i;
        AdamWVector x;
        x.load(w.params, w.master, w.m, w.v, w.grads, at);
        x.update(w.params, w.master, w.m, w.v, s, optimizer, at, i, seed);
    }
};

// The work of a worker, until it has no chunk left or stop() is true for lane 0. All lanes of the warp call it.
template <class Stop>
__device__ inline void deferred_update_work(const DeferredUpdate& w, int worker, const Stop& stop) {
    const StepState s = *w.state;
    if (!s.is_deferred || !s.applied || worker >= w.num_workers) { return; }
    int lane = threadIdx.x % 32;
    int chunk = max(w.done[worker], ceil_div(w.first - worker, w.num_workers) * w.num_workers + worker);
#pragma unroll 1
    while (chunk < w.last && !__shfl_sync(0xFFFFFFFFu, stop(), 0)) {
        AdamWChunk c(w, s, chunk);
        chunk += w.num_workers;
        if (chunk < w.last && lane < 4) { // the next one's values
            AdamWChunk next(w, s, chunk);
            const float* from = lane == 0 ? w.m : lane == 1 ? w.v : lane == 2 ? w.grads : w.master;
            if (from) { bulk_prefetch(from + next.place + next.begin, (next.end - next.begin) * (int)sizeof(float)); }
        }
#pragma unroll 2 // 1% faster for product and update
        for (int i = c.begin + 4 * lane; i < c.end; i += 128) { c.update(w, s, i); }
    }
    __syncwarp();
    if (lane == 0) { w.done[worker] = chunk; }
}

// The deferred update as work for idle warps of gemm.cuh.
struct DeferredUpdateWork : DeferredUpdate {
    static constexpr bool WORKS = true;
    static constexpr int REGISTERS = 56; // nothing spills, neither here nor in the consumers, which then have 224
    __device__ void run(int warp, uint64_t* loaded) const {
        deferred_update_work(*this, blockIdx.x * 3 + warp,
                             [=] { return threadIdx.x % 32 == 0 && mbarrier_has_completed(loaded, 0); });
    }
};

// Updates the chunks that idle warps have not updated. A warp per chunk.
__global__ void __launch_bounds__(256) finish_deferred_update_kernel(const __grid_constant__ DeferredUpdate w) {
    int chunk = w.first + blockIdx.x * 8 + threadIdx.x / 32;
    grid_launch_dependents();
    grid_wait_dependency();
    const StepState s = *w.state;
    if (!s.is_deferred || !s.applied || chunk >= w.last || chunk < w.done[chunk % w.num_workers]) { return; }
    AdamWChunk c(w, s, chunk);
#pragma unroll
    for (int k = 0; k < DeferredUpdate::CHUNK / 128; k++) {
        int i = c.begin + 4 * (threadIdx.x % 32) + 128 * k;
        if (i < c.end) { c.update(w, s, i); }
    }
}

// Finishes the deferred update of the layers before `layer`, if exec has one: afterwards their weights may be read.
void finish_deferred_update(int layer, const Execution& exec) {
    if (!exec.update) { return; }
    DeferredUpdate w = *exec.update;
    w.last = std::min(w.last, layer * w.chunks_of_layer());
    if (!w.is_pending()) { return; }
    Op op(exec, 0, 0, "adamw, rest"); // idle warps may have updated most of the values, or all
    launch_early(finish_deferred_update_kernel, dim3(ceil_div(w.last - w.first, 8)), dim3(256), 0, exec, w);
    exec.update->first = w.last;
    if (!exec.update->is_pending()) { cudaCheck(cudaMemsetAsync(&w.state->is_deferred, 0, sizeof(int), exec.stream)); }
}
// ==== end promoted: gemm_adamw ====

// ==== promoted: matmul_forward ====
// ---- products in float, which kernel 25 uses, too: cuBLASLt without an epilogue ----

// out (N,OC) float = inp (N,C) weight (OC,C)^T, by cuBLASLt: for logits, which are not rounded to 16 bits
void matmul_forward_float(float* out, const floatX* inp, const floatX* weight, int N, int C, int OC,
                          const Execution& exec) {
    Op op(exec, ((double)N * C + (double)OC * C) * sizeof(floatX) + (double)N * OC * sizeof(float), 2.0 * N * C * OC,
          "matmul_forward %d -> %d, in float", C, OC);
    MatmulCall call;
    call.out = out, call.out_is_float = true;
    call.a = inp, call.b = weight, call.b_transposed = true;
    call.M = N, call.N = OC, call.K = C;
    require(cublaslt_matmul(call, exec));
}

// out (N,OC) = product (N,OC) + bias (OC) + residual (N,OC). A thread per vector.
__global__ void matmul_forward_add_kernel25(floatX* out, const float* product, const floatX* bias,
                                            const floatX* residual, int N, int OC) {
    grid_launch_dependents();
    grid_wait_dependency();
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size;
    if (i >= (size_t)N * OC) { return; }
    auto b = to_floats(load128(bias + i % OC)), r = to_floats(load128(residual + i));
    x128 y;
#pragma unroll
    for (int k = 0; k < x128::size; k += 4) {
        f128 part = load128cs(product + i + k);
        for (int j = 0; j < 4; j++) { y[k + j] = (floatX)(part[j] + b[k + j] + r[k + j]); }
    }
    store128(out + i, y);
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC) + residual (N,OC), rounded once, where cuBLASLt rounds the product to floatX
// before it adds the residual. product (N,OC) is scratch; residual may be out.
void matmul_forward_residual(floatX* out, float* product, const floatX* inp, const floatX* weight, const floatX* bias,
                             const floatX* residual, int N, int C, int OC, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    require(OC % 8 == 0);
    matmul_forward_float(product, inp, weight, N, C, OC, exec);
    unsigned num_blocks = (unsigned)ceil_div((size_t)N * OC, (size_t)block_size * x128::size);
    Op op(exec, (double)N * OC * (sizeof(float) + 2 * sizeof(floatX)), 0, "add_residual %d", OC);
    launch_early(matmul_forward_add_kernel25, num_blocks, block_size, 0, exec, out, (const float*)product, bias,
                 residual, N, OC);
}

// ---- kernel 26: cuBLASLt, everything in the epilogue, algorithms timed once per shape ----

// Arguments as for matmul_forward.
void matmul_forward26(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                      const floatX* residual, int N, int C, int OC, const Execution& exec) {
    require(!saved.is_slope);
    MatmulCall call;
    call.out = out;
    call.a = inp, call.b = weight, call.b_transposed = true;
    call.M = N, call.N = OC, call.K = C;
    call.bias = bias;
    call.add = residual;
    if (saved.has_gelu() && sizeof(floatX) == 2) { // in fp32 the library's GELU would dominate the error
        call.epilogue = saved.tensor ? MATMUL_GELU_AUX : MATMUL_GELU;
        call.aux = saved.tensor;
        if (cublaslt_matmul(call, exec)) { return; }
    }
    call.epilogue = MATMUL_PLAIN;
    call.aux = NULL;
    floatX* sum = saved.tensor ? saved.tensor : out;
    call.out = sum;
    require(cublaslt_matmul(call, exec));
    if (saved.has_gelu()) { gelu_forward(out, sum, (size_t)N * OC, exec); }
}
// ---- kernel 27: gemm.cuh: kernel 24 with the bias loaded while the products run, and four boxes per warp ----
// The form is a type, so that other ops can have kernels of their own. matmul_forward() uses it where it is faster than
// kernel 26. gemm_sm90_kernel9 has its name from a shorter ladder.

#if !defined(ENABLE_FP32)
// Runs gemm, and in its idle warps the deferred update, if exec has one.
template <class Epilogue> void matmul_forward_gemm(const GemmArgs& g, const Epilogue& epilogue, const Execution& exec) {
    if (exec.update && exec.update->is_pending()) { return gemm(g, epilogue, exec, DeferredUpdateWork{*exec.update}); }
    gemm(g, epilogue, exec);
}
void matmul_forward27(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                      const floatX* residual, int N, int C, int OC, const Execution& exec) {
    GemmArgs g = {out, saved.tensor, inp, weight, residual, N, OC, C};
    if (saved.is_slope) { return matmul_forward_gemm(g, GemmBias<GEMM_GELU | GEMM_SECOND | GEMM_SLOPE>{bias}, exec); }
    if (saved.tensor) { return matmul_forward_gemm(g, GemmBias<GEMM_GELU | GEMM_SECOND>{bias}, exec); }
    // no backward pass will follow, so no update is pending
    if (saved.has_gelu()) { return gemm(g, GemmBias<GEMM_GELU>{bias}, exec); }
    if (residual) { return matmul_forward_gemm(g, GemmBias<GEMM_ADD>{bias}, exec); }
    matmul_forward_gemm(g, GemmBias<0>{bias}, exec);
}
#endif

// The number of the kernel to use for this device, binary and shape. Kernel 27 hides the epilogue of a tile behind the
// products of the next tile. This pays where C, the length of the sums, is not large, and where each block has two
// tiles or more.
inline int matmul_forward_choice(int N, int C, int OC) {
#if defined(ENABLE_FP32)
    (void)N, (void)C, (void)OC;
    return 26;
#else
    bool many = ceil_div((size_t)N, (size_t)128) * ceil_div(OC, 192) >= 2 * (size_t)num_multiprocessors();
    return C <= 2048 && many && has_sm90a() ? 27 : 26;
#endif
}

// out (N,OC) = gelu?(inp (N,C) weight (OC,C)^T + bias (OC)) + residual (N,OC), with GELU if saved.has_gelu(). saved.tensor (N,OC),
// which may be NULL, receives GELU's argument, or its slope, which needs kernel 27. bias and residual may be NULL. residual
// may be the same memory as out.
void matmul_forward(floatX* out, GeluSaved saved, const floatX* inp, const floatX* weight, const floatX* bias,
                    const floatX* residual, int N, int C, int OC, const Execution& exec) {
    double outputs = (1.0 + (saved.tensor != NULL) + (residual != NULL)) * N * OC;
    const char* then = residual ? ", sum" : "";
    if (saved.has_gelu()) { then = ", gelu"; }
    Op op(exec, ((double)N * C + (double)OC * C + outputs) * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_forward %d -> %d%s", C, OC, then);
    require(C % 8 == 0 && OC % 8 == 0);
    require(!saved.has_gelu() || (bias && !residual));
#if !defined(ENABLE_FP32)
    if (matmul_forward_choice(N, C, OC) == 27) {
        return matmul_forward27(out, saved, inp, weight, bias, residual, N, C, OC, exec);
    }
#endif
    matmul_forward26(out, saved, inp, weight, bias, residual, N, C, OC, exec);
}
// ==== end promoted: matmul_forward ====

// ==== promoted: matmul_backward ====
// ---- kernel 6: cuBLASLt, algorithms timed once per shape ----

// Arguments as for matmul_backward_input.
void matmul_backward_input6(floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre_gelu, int N,
                            int C, int OC, const Execution& exec) {
    MatmulCall call;
    call.out = dinp;
    call.a = dout, call.b = weight;
    call.M = N, call.N = C, call.K = OC;
    if (pre_gelu && sizeof(floatX) == 2) { // in fp32 the library's gelu' would dominate the error
        call.epilogue = MATMUL_DGELU;
        call.aux = (void*)pre_gelu; // the library only reads it
        if (cublaslt_matmul(call, exec)) { return; }
    }
    call.epilogue = MATMUL_PLAIN;
    call.aux = NULL;
    require(cublaslt_matmul(call, exec));
    if (pre_gelu) { gelu_backward(dinp, dinp, pre_gelu, (size_t)N * C, exec); }
}

// Arguments as for matmul_backward_weight.
void matmul_backward_weight6(float* dweight, const floatX* dout, const floatX* inp, int N, int C, int OC,
                             bool accumulate, const Execution& exec) {
    require(C % 8 == 0 && OC % 8 == 0);
    MatmulCall call;
    call.out = dweight, call.out_is_float = true;
    call.a = dout, call.a_transposed = true;
    call.b = inp;
    call.M = OC, call.N = C, call.K = N;
    call.add = accumulate ? dweight : NULL;
    require(cublaslt_matmul(call, exec));
}

// ---- kernel 8: gemm.cuh for dinp with gelu' on the accumulators in registers, hidden behind the next tile's products ----
// matmul_backward_input() uses it where it is faster than kernel 6.

#if !defined(ENABLE_FP32)
// Like matmul_backward_input, with gelu'. If dinp_sums is not NULL, the epilogue also sums the columns of dinp: partials receives
// a row of C sums for each 128 rows.
template <int extras>
static void matmul_backward_launch8(const GemmArgs& g, float* dinp_sums, float* partials, const Execution& exec) {
    typedef GemmPingPong192<GemmPair, true> G;
    if (!dinp_sums) { return gemm<G>(g, GemmBias<extras>{NULL}, exec); }
    gemm<G>(g, GemmBiasSums<extras>{{NULL}, partials, g.N}, exec);
}
void matmul_backward_input8(floatX* dinp, float* dinp_sums, float* partials, const floatX* dout, const floatX* weight,
                            GeluSaved saved, int N, int C, int OC, const Execution& exec) {
    GemmArgs g = {dinp, NULL, dout, weight, saved.tensor, N, C, OC};
    auto launch = saved.is_slope ? matmul_backward_launch8<GEMM_MULTIPLY | GEMM_NO_BIAS>
                                 : matmul_backward_launch8<GEMM_GELU_BACKWARD | GEMM_NO_BIAS>;
    launch(g, dinp_sums, partials, exec);
    if (dinp_sums) { column_sums<16>(dinp_sums, NULL, NULL, partials, ceil_div(N, 128), C, exec); }
}
#endif

// The number of the kernel to use: 8 with gelu' in 16 bits, 6 otherwise and where 8 cannot run or has too few tiles.
inline int matmul_backward_input_choice(int N, int C, bool has_gelu) {
    bool many = ceil_div((size_t)N, (size_t)128) * ceil_div(C, 192) >= 2 * (size_t)num_multiprocessors();
    return sizeof(floatX) == 2 && has_gelu && many && has_sm90a() ? 8 : 6;
}

// True if the forward product (N,C) to (N,OC) can save GELU's slope, and matmul_backward_input() of the next product use it.
bool matmul_can_save_slope(int N, int C, int OC) {
    return matmul_forward_choice(N, C, OC) == 27 && matmul_backward_input_choice(N, OC, true) == 8;
}

// Number of floats in scratch, with gelu'. Without it nothing is needed.
size_t matmul_backward_input_scratch(int N, int C) {
    size_t partials = (size_t)ceil_div(N, 128) * C;
    return matmul_backward_input_choice(N, C, true) == 8 ? partials : matmul_backward_bias_scratch(N, C);
}

// dinp (N,C) = dout (N,OC) weight (OC,C), times gelu' of GELU's argument (N,C), which the forward pass has saved, or whose
// slope it has saved, if kernel 8 runs; without GELU saved.tensor is NULL. dinp must not overlap an input. dinp_sums (C) +=
// the sums of dinp's columns, the gradient of a bias that was added to GELU's argument; NULL without gelu', and where it is
// not wanted. scratch (matmul_backward_input_scratch(N, C))
void matmul_backward_input(floatX* dinp, float* dinp_sums, float* scratch, const floatX* dout, const floatX* weight,
                           GeluSaved saved, int N, int C, int OC, const Execution& exec) {
    require(C % 8 == 0 && OC % 8 == 0 && (saved.tensor || !dinp_sums));
    int kernel = matmul_backward_input_choice(N, C, saved.tensor != NULL);
    {
        double tensors = (double)N * OC + (double)OC * C + (saved.tensor ? 2.0 : 1.0) * N * C;
        Op op(exec, tensors * sizeof(floatX), 2.0 * N * C * OC, "matmul_backward_input %d <- %d%s", C, OC,
              saved.tensor ? ", gelu" : "");
        require(kernel == 8 || !saved.is_slope);
        if (kernel == 6) { matmul_backward_input6(dinp, dout, weight, saved.tensor, N, C, OC, exec); }
#if !defined(ENABLE_FP32)
        if (kernel == 8) { matmul_backward_input8(dinp, dinp_sums, scratch, dout, weight, saved, N, C, OC, exec); }
#endif
    }
    if (dinp_sums && kernel == 6) { matmul_backward_bias(dinp_sums, scratch, dinp, N, C, exec); }
}

// ---- kernel 10: the steps of all tiles are cut into equal shares for all SMs (stream-K) ----
// matmul_backward_weight() uses it where it is faster than kernel 6.

constexpr int MATMUL_BACKWARD_MAX_CLUSTERS = 128;
// one for each block of a cluster and consumer warp, see MatmulBackwardSums
constexpr int MATMUL_BACKWARD_FLAGS = MATMUL_BACKWARD_MAX_CLUSTERS * 2 * 8;
inline int matmul_backward_max_clusters() { return std::min(num_multiprocessors() / 2, MATMUL_BACKWARD_MAX_CLUSTERS); }
// The number of columns of a tile, chosen so that tiles extend past C by less.
inline int matmul_backward_columns(int C) { return ceil_div(C, 192) * 192 < ceil_div(C, 256) * 256 ? 192 : 256; }
// Number of floats in scratch: the flags, and each cluster stores one part at most.
inline size_t matmul_backward_weight_scratch10(int C) {
    return MATMUL_BACKWARD_FLAGS + (size_t)matmul_backward_max_clusters() * 256 * matmul_backward_columns(C);
}

#if !defined(ENABLE_FP32)
// dweight (OC,C) = dout (N,OC)^T inp (N,C) on Hopper. One persistent block per SM, in clusters of two that share a tile
// of inp (GemmPair). Warpgroup 0 is the producer, warpgroups 1 and 2 are the consumers. They are cooperative: a block has
// 128 rows of a tile of dweight, and each consumer 64 of them. So a cluster computes tiles of 256 rows, in steps of 64
// tokens.
//
// 100 tiles on 66 clusters would be two waves, the second one half empty. So the steps of all tiles form a line, which is
// cut into equal ranges, one per cluster. With 5 tiles and 3 clusters:
//
//     tile       |     0     |     1     |     2     |     3     |     4     |
//     cluster    |         0         |         1         |         2         |
//
// A cluster goes through its range from the end to the beginning, one part of a tile after the other. Here cluster 0
// begins with its part of tile 1: it stores its accumulators to `parts` and sets flags. Then it computes tile 0. Cluster
// 1 does the same with its part of tile 3, computes tile 2, and then its part of tile 1, to which it adds what cluster 0
// has long since stored. With fewer tiles than clusters a tile has more than two parts, and its last cluster adds all the
// others, one by one. A tree would take as long: one of its levels takes as long as to add two or three parts. The order
// of the terms is fixed, so a second run gives the same bits.
//
// A cluster waits only for clusters of lower index, whose blocks start before its own, and only for what they do first,
// before they wait themselves. So there is no deadlock, even if not all blocks fit on the GPU together.
//
// If there are two tiles or more per cluster, only the first tiles are cut. The others are computed whole afterwards, in
// full waves.
//
// Source: Osama et al. 2023, Stream-K, arXiv:2301.03598.
struct MatmulBackwardSchedule {
    int num_steps;            // per tile
    int num_tiles, num_split; // tiles 0 to num_split - 1 are cut into ranges, the others are whole
    int num_clusters;
};

// The first step of a cluster's range, counted over all split tiles. The range ends where the next cluster's begins.
__host__ __device__ inline int matmul_backward_range(const MatmulBackwardSchedule& s, int cluster) {
    int total = s.num_split * s.num_steps;
    int begin = total / s.num_clusters * cluster + min(cluster, total % s.num_clusters);
    // a part of fewer than 4 steps takes longer to store and to add than to compute, so it goes to the neighbour
    int within = begin % s.num_steps;
    if (within < 4) { return begin - within; }
    return s.num_steps - within < 4 ? begin - within + s.num_steps : begin;
}

// Steps begin to end - 1 of a tile, computed in the order first, ..., end - 1, begin, ..., first - 1.
struct MatmulBackwardPart {
    int tile, begin, end, first;
};

// The work that is left for one cluster.
struct MatmulBackwardWork {
    int done;       // steps of the range that are done
    int begin, end; // the rest of the range
    int tile;       // the next whole tile

    // Takes the next part off the work. Returns false if there is none.
    __host__ __device__ bool next(const MatmulBackwardSchedule& s, MatmulBackwardPart* part) {
        if (begin == end) {
            *part = {tile, 0, s.num_steps, 0};
            tile += s.num_clusters;
            return part->tile < s.num_tiles;
        }
        part->tile = (end - 1) / s.num_steps;
        int tile_begin = part->tile * s.num_steps, from = max(begin, tile_begin);
        part->begin = from - tile_begin, part->end = end - tile_begin;
        // Clusters that need the same tokens load them at about the same time, so that all but one find them in L2: after
        // t steps, each is at a step that equals t modulo the length of a range, or of a tile if that is shorter.
        int period = min(s.num_steps, max(1, s.num_split * s.num_steps / s.num_clusters));
        part->first = part->begin + ((done - part->begin) % period + period) % period;
        if (part->first >= part->end) { part->first = part->begin; }
        done += end - from;
        end = from;
        return true;
    }
};

// The forms, for 256 and 192 columns per tile. Both operands are stored as (K,rows).
template <int columns> struct MatmulBackwardTile : GemmPair {
    static constexpr bool IS_KM = true, IS_KN = true;
    static constexpr int ROWS = 128, COLUMNS = columns, PARTS = 1, READERS = 8, RING = columns == 256 ? 4 : 5;
    static __device__ void wgmma(float (&sum)[columns / 2], uint64_t dout, uint64_t inp, bool accumulate) {
        if constexpr (columns == 256) { wgmma_64x256x16_transposed(sum, dout, inp, accumulate, floatX()); }
        if constexpr (columns == 192) { wgmma_64x192x16_transposed(sum, dout, inp, accumulate, floatX()); }
    }
};

template <class G> struct MatmulBackwardRing {
    GemmStage<G> stages[G::RING]; // 64 tokens of dout and of inp
    TmaRing<G::RING> ring;
};

// Where a consumer warp, 0 to 7, leaves the n accumulators of a part whose tile another cluster finishes.
template <int n> struct MatmulBackwardSums {
    float4* parts; // of all warps; before them lie all flags
    int cluster, rank, warp;

    __device__ int index() const { return (cluster * 2 + rank) * 8 + warp; }
    // 1 while the accumulators wait to be added; 0 at the launch
    __device__ int* flag() const { return (int*)parts - MATMUL_BACKWARD_FLAGS + index(); }
    // sum[4j .. 4j + 3] of lane l is element 32 * j + l
    __device__ float4* sums() const { return parts + (size_t)index() * (n / 4 * 32) + threadIdx.x % 32; }
    __device__ void store(const float (&sum)[n]) const {
#pragma unroll
        for (int j = 0; j < n / 4; j++) {
            __stcg(sums() + 32 * j, make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) { store_release(flag(), 1); }
    }
    // Waits until the sums have arrived, and adds them to `sum`.
    __device__ void add_to(float (&sum)[n]) const {
        while (load_acquire(flag()) == 0) {}
#pragma unroll
        for (int first = 0; first < n; first += n / 2) { // n / 8 loads in flight
            float4 x[n / 8];
#pragma unroll
            for (int j = 0; j < n / 8; j++) { x[j] = __ldcg(sums() + 8 * first + 32 * j); }
#pragma unroll
            for (int j = 0; j < n / 8; j++) {
                float* to = sum + first + 4 * j;
                to[0] += x[j].x, to[1] += x[j].y, to[2] += x[j].z, to[3] += x[j].w;
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) { *flag() = 0; } // without this, ptxas 13.0 spills some of the sums
    }
};

// dweight = sum, or +=, for the 16 rows of one warp. row, column: the first element of the warp.
template <int n> __device__ inline void matmul_backward_store10(float (&sum)[n], float* dweight, int row, int column,
                                                                int OC, int C, bool accumulate) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) { // rows 0..7, 8..15
        int at = row + 8 * half + lane / 4;
        if (at >= OC) { continue; }
        float2* to = reinterpret_cast<float2*>(dweight + (size_t)at * C + column + lane % 4 * 2);
        if (accumulate) { // all loads before the first store, so that they overlap
#pragma unroll
            for (int j = 0; j < n / 4; j++) {
                if (column + 8 * j >= C) { continue; }
                float2 x = to[4 * j];
                sum[4 * j + 2 * half] += x.x, sum[4 * j + 2 * half + 1] += x.y;
            }
        }
#pragma unroll
        for (int j = 0; j < n / 4; j++) {
            if (column + 8 * j >= C) { continue; }
            to[4 * j] = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
        }
    }
}

template <class G> __global__ void __launch_bounds__(384, 1)
    matmul_backward_sm90_kernel10(const __grid_constant__ CUtensorMap dout_map,
                                  const __grid_constant__ CUtensorMap inp_map, float* dweight, float4* parts,
                                  MatmulBackwardSchedule s, int OC, int C, bool accumulate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef MatmulBackwardSums<G::COLUMNS / 2> Sums;
    extern __shared__ __align__(256) unsigned char dynamic_shared_weight[];
    auto& smem = shared_aligned_1024<MatmulBackwardRing<G>>(dynamic_shared_weight);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&dout_map), tma_prefetch_map(&inp_map);
        smem.ring.init(G::READERS * G::CLUSTER);
        mbarrier_init_fence();
    }
    G::sync();
    grid_launch_dependents();
    grid_wait_dependency();

    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    int rank = G::rank(), cluster = blockIdx.x / G::CLUSTER, i = 0;
    int begin = matmul_backward_range(s, cluster), end = matmul_backward_range(s, cluster + 1);
    MatmulBackwardWork work = {0, begin, end, s.num_split + cluster};
    MatmulBackwardPart part;
    if (warp < 4) { // the producer
        warpgroup_fewer_registers<40>();
        if (threadIdx.x != 0) { return; }
#pragma unroll 1
        while (work.next(s, &part)) {
            GemmTile tile = gemm_tile<G>(part.tile, OC, C, rank);
            int step = part.first;
#pragma unroll 1
            for (int n = part.end - part.begin; n > 0; n--, i++) {
                gemm_load<G>(smem, dout_map, inp_map, tile, step, rank, i);
                step = step + 1 < part.end ? step + 1 : part.begin;
            }
        }
        return;
    }
    warpgroup_more_registers<232>();
    warp -= 4;
#pragma unroll 1
    while (work.next(s, &part)) {
        float sum[1][G::COLUMNS / 2];
        gemm_multiply<G, false>(sum, smem, part.end - part.begin, 0, i);
        if (part.end < s.num_steps) {
            Sums{parts, cluster, rank, warp}.store(sum[0]);
            continue;
        }
        int tile_begin = part.tile * s.num_steps;
        if (part.begin > 0) { // lower clusters have the tile's earlier steps
#pragma unroll 1
            for (int c = cluster - 1; matmul_backward_range(s, c + 1) > tile_begin; c--) {
                Sums{parts, c, rank, warp}.add_to(sum[0]);
            }
        }
        GemmTile tile = gemm_tile<G>(part.tile, OC, C, rank);
        matmul_backward_store10(sum[0], dweight, tile.row + warp * 16, tile.column, OC, C, accumulate);
    }
    G::sync(); // a block must not exit while the other block may still write to its shared memory
#endif
}

// Decides how many clusters run, and which tiles are cut. A tile has 256 rows.
inline MatmulBackwardSchedule matmul_backward_schedule(int N, int C, int OC, int max_clusters) {
    size_t num_tiles = ceil_div((size_t)OC, (size_t)256) * ceil_div(C, matmul_backward_columns(C)),
           num_steps = ceil_div((size_t)N, (size_t)64);
    size_t total = num_tiles * num_steps;
    require(total <= INT_MAX);
    // at least 8 steps per cluster
    size_t num_clusters = std::min((size_t)max_clusters, std::max(num_tiles, total / 8)),
           rest = num_tiles % num_clusters;
    // storing and adding the partial sums of cut tiles takes as long as about 6 steps
    size_t whole = ceil_div(num_tiles, num_clusters) * num_steps, split = ceil_div(total, num_clusters) + 6;
    if (rest == 0 || whole <= split) {
        return {(int)num_steps, (int)num_tiles, 0, (int)std::min(num_clusters, num_tiles)};
    }
    // Between one and two tiles per cluster are cut, if there are so many. A tile then has two parts at most, and the
    // first one is done long before it is needed.
    return {(int)num_steps, (int)num_tiles, (int)std::min(num_tiles, rest + num_clusters), (int)num_clusters};
}

template <class G> void matmul_backward_launch10(float* dweight, float* scratch, const floatX* dout, const floatX* inp,
                                                 int N, int C, int OC, bool accumulate, const Execution& exec,
                                                 const MatmulBackwardSchedule& s) {
    float4* parts = NULL;
    if (s.num_split > 0) { // flags, then parts
        parts = (float4*)(scratch + MATMUL_BACKWARD_FLAGS);
        cudaCheck(cudaMemsetAsync(scratch, 0, MATMUL_BACKWARD_FLAGS * sizeof(int), exec.stream));
    }
    const int bytes = sizeof(MatmulBackwardRing<G>) + 1024;
    static_assert(bytes <= 227 << 10, "all that compute capability 9.0 has");
    // not launched early: it comes after gradients_ready(), see Execution::may_launch_early()
    launch_kernel(matmul_backward_sm90_kernel10<G>, LaunchShape(s.num_clusters * G::CLUSTER, 384, bytes, G::CLUSTER),
                  exec, GemmInp<G>::map(dout, OC, N), GemmWeight<G>::map(inp, C, N), dweight, parts, s, OC, C,
                  accumulate);
}

// scratch (matmul_backward_weight_scratch10(C)) is aligned to 16 bytes, and is not used if the schedule cuts no tile.
void matmul_backward_weight10(float* dweight, float* scratch, const floatX* dout, const floatX* inp, int N, int C,
                              int OC, bool accumulate, const Execution& exec, const MatmulBackwardSchedule& s) {
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(C % 8 == 0 && OC % 8 == 0);
    auto launch = matmul_backward_columns(C) == 192 ? matmul_backward_launch10<MatmulBackwardTile<192>>
                                                    : matmul_backward_launch10<MatmulBackwardTile<256>>;
    launch(dweight, scratch, dout, inp, N, C, OC, accumulate, exec, s);
}
#endif

// The number of the kernel to use. Kernel 10 pays where the library's usual tiles of 128x256 would leave many SMs idle in their
// last wave, if there are enough tiles that few of them share the tokens, and if its own tiles cover dweight exactly.
// Measured in training steps on an H200: 14% faster than the library where OC and C are 5120 and 1280, 4 to 7% where they
// are 3072 or 2304 and 768; 4 to 7% slower with fewer than 40 tiles, 8 to 30% slower where C is 1600.
inline int matmul_backward_weight_choice(int N, int C, int OC) {
    size_t num_tiles = ceil_div((size_t)OC, (size_t)128) * ceil_div(C, 256), num_sms = num_multiprocessors();
    bool exact = OC % 256 == 0 && C % matmul_backward_columns(C) == 0;
    bool idle = num_tiles < 0.8 * (double)(ceil_div(num_tiles, num_sms) * num_sms);
    return sizeof(floatX) == 2 && exact && idle && num_tiles >= 40 && N >= 16384 && has_sm90a() ? 10 : 6;
}

// Number of floats in scratch.
size_t matmul_backward_weight_scratch(int N, int C, int OC) {
    return matmul_backward_weight_choice(N, C, OC) == 10 ? matmul_backward_weight_scratch10(C) : 0;
}

// dweight (OC,C) = dout (N,OC)^T inp (N,C), or += if accumulate | scratch (matmul_backward_weight_scratch(N, C, OC))
void matmul_backward_weight(float* dweight, float* scratch, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            bool accumulate, const Execution& exec) {
    double bytes = ((double)N * OC + (double)N * C) * sizeof(floatX) + (accumulate ? 8.0 : 4.0) * OC * C;
    Op op(exec, bytes, 2.0 * N * C * OC, "matmul_backward_weight %d <- %d", C, OC);
#if !defined(ENABLE_FP32)
    if (matmul_backward_weight_choice(N, C, OC) == 10) {
        int max_clusters = std::min(matmul_backward_max_clusters(), exec.free_sms() / 2);
        return matmul_backward_weight10(dweight, scratch, dout, inp, N, C, OC, accumulate, exec,
                                        matmul_backward_schedule(N, C, OC, max_clusters));
    }
#endif
    (void)scratch;
    matmul_backward_weight6(dweight, dout, inp, N, C, OC, accumulate, exec);
}
// ==== end promoted: matmul_backward ====

// ==== promoted: fused_classifier ====
// ---- shared by kernels 3 to 8: online softmax over vectors ----

// Online softmax state of a thread: running maximum, sum of exp(x - max), and minimum of the logits it has seen.
struct FusedClassifierSums {
    float max, sum, min;
};

// Adds a vector to s. +infinity in x makes the sum NaN. -infinity shows only in min; fused_classifier_reduce tests it.
__device__ inline void fused_classifier_add(FusedClassifierSums& s, const x128& x) {
    float max = s.max;
    for (int k = 0; k < x128::size; k++) {
        max = fmaxf(max, (float)x[k]);
        s.min = fminf(s.min, (float)x[k]);
    }
    s.sum *= __expf(s.max - max);
    for (int k = 0; k < x128::size; k++) { s.sum += __expf((float)x[k] - max); }
    s.max = max;
}

// Combines the states of the block's threads into the row's maximum and sum of exp(x - max). The sum is NaN if any
// logit is NaN or infinite. shared (32) is scratch.
__device__ inline void fused_classifier_reduce(float* max, float* sum, const FusedClassifierSums& s, float* shared) {
    *max = block_max(s.max, shared);
    // exp(-inf) is 0, so the sum alone would hide a logit of -infinity
    *sum = block_sum(s.min == -INFINITY ? NAN : s.sum * __expf(s.max - *max), shared);
}

// Returns softmax(x) * dloss for one vector, without the target's -dloss. scale = dloss / sum.
__device__ inline x128 fused_classifier_gradient(const x128& x, float max, float scale) {
    x128 gradient;
    for (int k = 0; k < x128::size; k++) { gradient[k] = (floatX)(__expf((float)x[k] - max) * scale); }
    return gradient;
}

// Returns the index of the thread that writes column `target`. Thread t owns the vectors t, t + blockDim.x, ..., and
// column tail + t, where tail is the first column after the last whole vector.
__device__ inline int fused_classifier_owner(int target, int tail) {
    return target < tail ? target / x128::size % (int)blockDim.x : target - tail;
}

// ---- kernel 6: the row is read twice, the second time backwards, because its end is still in the caches ----

// Per-thread state for the tail (columns tail..V-1, after the last whole vector), of which each thread has at most one
// column, and for the target. The thread that owns the target's column writes the target's gradient and the loss.
struct FusedClassifierRow {
    int tail, target;
    bool owner;
    float x_tail, correct; // this thread's logit in the tail; the target's logit, set in the owner only
};

// Returns this thread's state, and initialises s with its logit in the tail, if it has one.
__device__ inline FusedClassifierRow fused_classifier_begin(FusedClassifierSums& s, const floatX* row, int target,
                                                            int V) {
    FusedClassifierRow r;
    r.tail = V / x128::size * x128::size, r.target = target;
    r.owner = (int)threadIdx.x == fused_classifier_owner(target, r.tail);
    r.correct = r.owner ? (float)row[target] : 0.0f;
    r.x_tail = r.tail + (int)threadIdx.x < V ? (float)row[r.tail + threadIdx.x] : 0.0f;
    s = {-INFINITY, 0.0f, INFINITY};
    if (r.tail + (int)threadIdx.x < V) { s = {r.x_tail, 1.0f, r.x_tail}; }
    return r;
}

// Writes the gradient of the tail, zeros from V to Vp, and the target's gradient.
__device__ inline void fused_classifier_finish(floatX* row, const FusedClassifierRow& r, float max, float scale,
                                               const float* dloss, int V, int Vp) {
    for (int c = r.tail + threadIdx.x; c < Vp; c += blockDim.x) {
        row[c] = (floatX)(c < V ? __expf(r.x_tail - max) * scale : 0.0f);
    }
    if (r.owner) { row[r.target] = (floatX)(__expf(r.correct - max) * scale - *dloss); }
}

__global__ void __launch_bounds__(1024)
    fused_classifier_kernel6(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    __shared__ float shared[32];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    FusedClassifierSums s;
    FusedClassifierRow r = fused_classifier_begin(s, row, targets[blockIdx.x], V);
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        fused_classifier_add(s, load128(row + i * x128::size));
    }
    float max, sum;
    fused_classifier_reduce(&max, &sum, s, shared);
    // log1pf because sum >= 1 may be close to 1, where logf() under --use_fast_math has an absolute error of 4e-7
    if (r.owner) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - r.correct); }
    if (dloss == NULL) { return; }

    // the second read goes backwards, because the end of the row is still in the caches
    float scale = *dloss / sum;
    int last = (num_vectors - 1) / (int)blockDim.x * (int)blockDim.x + (int)threadIdx.x;
    for (int i = last; i >= 0; i -= blockDim.x) {
        if (i >= num_vectors) { continue; }
        x128 x = load128(row + i * x128::size);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, scale));
    }
    fused_classifier_finish(row, r, max, scale, dloss, V, Vp);
}

// ---- kernel 7: the row is read once, by cp.async into shared memory, and summed while its rest is in flight ----

// Reads the row once, with cp.async. Dynamic shared memory: the row's V / x128::size vectors, then 32 floats of
// reduction scratch.
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel7(floatX* logits, float* losses, const int* targets, const float* dloss, int V, int Vp) {
    extern __shared__ __align__(128) int4 fused_classifier_row[];
    floatX* row = logits + (size_t)blockIdx.x * Vp;
    int num_vectors = V / x128::size;
    float* shared = reinterpret_cast<float*>(fused_classifier_row + num_vectors);
    // Four commit groups of `group` vectors each, summed below as they arrive. Each thread reads only what it copied
    // itself, so no barrier is needed.
    int group = ceil_div(num_vectors, 4 * (int)blockDim.x) * (int)blockDim.x;
    for (int j = 0; j < 4; j++) {
        int end = min((j + 1) * group, num_vectors);
        for (int i = j * group + threadIdx.x; i < end; i += blockDim.x) {
            cp_async_16(&fused_classifier_row[i], row + i * x128::size);
        }
        cp_async_commit();
    }

    FusedClassifierSums s;
    FusedClassifierRow r = fused_classifier_begin(s, row, targets[blockIdx.x], V);
    for (int j = 0; j < 4; j++) {
        if (j == 0) { cp_async_wait<3>(); }
        if (j == 1) { cp_async_wait<2>(); }
        if (j == 2) { cp_async_wait<1>(); }
        if (j == 3) { cp_async_wait<0>(); }
        int end = min((j + 1) * group, num_vectors);
        for (int i = j * group + threadIdx.x; i < end; i += blockDim.x) {
            fused_classifier_add(s, vec128_from_bits<floatX>(fused_classifier_row[i]));
        }
    }
    float max, sum;
    fused_classifier_reduce(&max, &sum, s, shared);
    if (r.owner) { losses[blockIdx.x] = log1pf(sum - 1.0f) + (max - r.correct); }
    if (dloss == NULL) { return; }

    float scale = *dloss / sum;
    for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
        x128 x = vec128_from_bits<floatX>(fused_classifier_row[i]);
        store128(row + i * x128::size, fused_classifier_gradient(x, max, scale));
    }
    fused_classifier_finish(row, r, max, scale, dloss, V, Vp);
}

// losses (N) = log(sum(exp(logits))) - logits[target] per row. The gradient overwrites logits (N,Vp) in place:
// dloss * (softmax(logits) - onehot(target)), and 0 from column V on. | targets (N), each in [0,V)
// dloss (1), or NULL: only the losses are computed, logits are not changed
void fused_classifier(floatX* logits, float* losses, const int* targets, const float* dloss, int N, int V, int Vp,
                      const Execution& exec) {
    int block_size = tuned_block_size(exec, "fused_classifier", N, V, sizeof(floatX) == 4 ? 1024 : 512);
    Op op(exec, (dloss ? 2.0 : 1.0) * N * Vp * sizeof(floatX), 0, "fused_classifier");
    require(Vp % 8 == 0 && 1 <= V && V <= Vp);
    size_t shared = (size_t)(V / x128::size) * sizeof(x128) + 32 * sizeof(float);
    // Rows too long for shared memory, and devices without cp.async, take kernel 6. An SM of an H200 holds two blocks
    // with GPT-2's rows in 16 bits, so that one row is read while the other is written. In fp32 it holds one block.
    bool fits = shared <= (size_t)device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (fits && compiled_arch(fused_classifier_kernel7) >= 80) {
        cudaCheck(cudaFuncSetAttribute(fused_classifier_kernel7, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared)); // without this, only one block fits on an SM
        launch_kernel(fused_classifier_kernel7, LaunchShape(N, block_size, shared), exec, logits, losses, targets,
                      dloss, V, Vp);
    } else {
        launch_kernel(fused_classifier_kernel6, LaunchShape(N, block_size), exec, logits, losses, targets, dloss, V,
                      Vp);
    }
}
// ==== end promoted: fused_classifier ====

// ==== promoted: linear_cross_entropy ====
// ---- kernel 1: the product, fused_classifier on the logits in memory, the products of the backward pass ----

// What both passes are given.
struct LinearCrossEntropy {
    floatX* logits;       // (N,Vp): memory for what the forward pass leaves for the backward pass
    float* losses;        // (N)
    float* scratch;       // forward: (linear_cross_entropy_scratch); backward: (matmul_backward_weight_scratch)
    floatX* inp;          // (N,C); the backward pass overwrites it
    const floatX* weight; // (Vp,C)
    const int* targets;   // (N), for the forward pass
    const float* dloss;   // (1), or NULL if no backward pass follows
    int N, C, V, Vp;
};

void linear_cross_entropy_forward1(const LinearCrossEntropy& g, const Execution& exec) {
    matmul_forward(g.logits, NULL, g.inp, g.weight, NULL, NULL, g.N, g.C, g.Vp, exec);
    fused_classifier(g.logits, g.losses, g.targets, g.dloss, g.N, g.V, g.Vp, exec);
}

// dinp = dout weight, dweight = dout^T inp, or += if accumulate, with dout (N,Vp) in the memory of the logits
void linear_cross_entropy_backward1(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    const Execution& exec) {
    matmul_backward_weight(dweight, g.scratch, g.logits, g.inp, g.N, g.C, g.Vp, accumulate, exec);
    matmul_backward_input(dinp, NULL, g.scratch, g.logits, g.weight, NULL, g.N, g.C, g.Vp, exec);
}
// ---- kernel 2: softmax begins in the product's epilogue, so no pass reads and writes the logits ----

// dlogits[i][v] = (softmax(logits)[i][v] - onehot(target)[v]) * dloss needs the sum of a row of exponentials before its first
// element is known, so a classifier reads all logits and writes them again. But the sum is one number for the row, and a factor
// of a row can wait. The product's epilogue stores
//
//     ratio[i][v] = RATIO_UNIT * exp(logits[i][v] - logits[i][target])
//
// and sums each row. Rounding a ratio to bf16 costs the same relative error as rounding dlogits. The target's column needs
// ratio - sum, which the third kernel writes once the sum is known. Then dlogits[i][v] = ratio[i][v] * dloss / sum[i]. This
// factor of row i multiplies two small tensors instead: inp, before the product for dweight, and dinp, after its product.
//
// The target's logit, computed before, stands in for the maximum that softmax usually subtracts. Its ratio is RATIO_UNIT = 2^-40,
// the largest is limited to 2^100, and below 2^-126 a ratio is 0, so that ratios, their sums and the products fit bf16's range,
// which is that of fp32. 2^140 is exp(97), 2^86 is exp(60).
#if defined(ENABLE_BF16)
constexpr float RATIO_UNIT = 0x1p-40f, RATIO_LOG2_UNIT = -40.0f, RATIO_LOG2_MAX = 100.0f;

// shifts (N) = log2(RATIO_UNIT) - log2(e) * logit of the target. A warp per row.
__global__ void linear_cross_entropy_shift_kernel2(float* shifts, const floatX* inp, const floatX* weight,
                                                   const int* targets, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    const floatX *x = inp + (size_t)row * C, *w = weight + (size_t)targets[row] * C;
    float logit = 0.0f;
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto a = to_floats(load128(x + i)), b = to_floats(load128(w + i));
        for (int e = 0; e < x128::size; e++) { logit += a[e] * b[e]; }
    }
    logit = warp_sum(logit);
    if (lane == 0) { shifts[row] = RATIO_LOG2_UNIT - LOG2E * logit; }
}

// The epilogue for gemm(): ratios, and the sum of each row in each tile of columns. A column's bias is 0, or -infinity from V on.
struct GemmRatios : GemmBias<GEMM_ROW_SUMS> {
    const float* shifts; // (N)
    float* sums;         // (tiles of columns, N)
    int N, V;

    typedef float Row;
    __device__ Row row(int i) const { return shifts[i]; } // the kernel before writes them, so not __ldg()
    __device__ Pair pair(int column) const {
        return pack_16x2(column < V ? 0.0f : -INFINITY, column + 1 < V ? 0.0f : -INFINITY, floatX());
    }
    __device__ float value(float sum, const Row& shift, const Column& c) const {
        return exp2_approx(min_or_nan(fmaf(sum, LOG2E, shift) + c, RATIO_LOG2_MAX));
    }
    __device__ void store_row_sum(int i, int tile, float sum) const { sums[(size_t)tile * N + i] = sum; }
};

// losses from the sums (num_tiles,N), which a block of 8 warps adds up for 32 rows: warp w takes every 8th tile. For a backward
// pass also the ratio at the target's column.
__global__ void __launch_bounds__(256)
    linear_cross_entropy_finish_kernel2(floatX* ratios, float* losses, const float* sums, const int* targets,
                                        int num_tiles, int N, int Vp, bool backward_follows) {
    __shared__ float shared[8][32];
    grid_launch_dependents();
    grid_wait_dependency();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (row < N) {
#pragma unroll 8
        for (int t = warp; t < num_tiles; t += 8) { sum += sums[(size_t)t * N + row]; }
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || row >= N) { return; }
    for (int w = 1; w < 8; w++) { sum += shared[w][lane]; }
    // log1pf because logf() under --use_fast_math is less exact near 1; a large sum divided by the unit would overflow
    float loss = sum < 0x1p80f ? log1pf(sum / RATIO_UNIT - 1.0f) : log1pf(sum - 1.0f) - RATIO_LOG2_UNIT / LOG2E;
    losses[row] = loss < 0.0f ? 0.0f : loss; // by rounding of the shift; NaN stays
    if (backward_follows) { ratios[(size_t)row * Vp + targets[row]] = (floatX)(RATIO_UNIT - sum); }
}

// x (N,C) *= dloss / sum of the row's ratios, which is dloss / RATIO_UNIT * exp(-loss). A warp per row.
__global__ void linear_cross_entropy_scale_kernel2(floatX* x, const float* losses, const float* dloss, int N, int C) {
    grid_launch_dependents();
    grid_wait_dependency();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= N) { return; }
    float scale = *dloss * exp2_approx(-RATIO_LOG2_UNIT - LOG2E * losses[row]);
    for (int i = lane * x128::size; i < C; i += 32 * x128::size) {
        auto v = to_floats(load128(x + (size_t)row * C + i));
        x128 y;
        for (int e = 0; e < x128::size; e++) { y[e] = (floatX)(v[e] * scale); }
        store128(x + (size_t)row * C + i, y);
    }
}
void linear_cross_entropy_scale2(floatX* x, const LinearCrossEntropy& g, const Execution& exec) {
    Op op(exec, 2.0 * g.N * g.C * sizeof(floatX), 0, "scale_rows %d", g.C);
    launch_early(linear_cross_entropy_scale_kernel2, ceil_div(g.N, 8), 256, 0, exec, x, (const float*)g.losses, g.dloss,
                 g.N, g.C);
}

inline int linear_cross_entropy_tiles(int Vp) { return ceil_div(Vp, GemmPingPong192Pairs::COLUMNS); }

void linear_cross_entropy_forward2(const LinearCrossEntropy& g, const Execution& exec) {
    float *shifts = g.scratch, *sums = g.scratch + g.N;
    int num_tiles = linear_cross_entropy_tiles(g.Vp);
    Op op(exec, ((double)g.N * (g.C + g.Vp) + (double)g.Vp * g.C) * sizeof(floatX), 2.0 * g.N * g.C * g.Vp,
          "matmul_forward %d -> %d, loss", g.C, g.Vp);
    launch_early(linear_cross_entropy_shift_kernel2, ceil_div(g.N, 8), 256, 0, exec, shifts, (const floatX*)g.inp,
                 g.weight, g.targets, g.N, g.C);
    gemm(GemmArgs{g.logits, NULL, g.inp, g.weight, NULL, g.N, g.Vp, g.C}, GemmRatios{{NULL}, shifts, sums, g.N, g.V},
         exec);
    launch_early(linear_cross_entropy_finish_kernel2, ceil_div(g.N, 32), 256, 0, exec, g.logits, g.losses,
                 (const float*)sums, g.targets, num_tiles, g.N, g.Vp, g.dloss != NULL);
}

void linear_cross_entropy_backward2(const LinearCrossEntropy& g, floatX* dinp, float* dweight, bool accumulate,
                                    const Execution& exec) {
    linear_cross_entropy_scale2(g.inp, g, exec);
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, exec);
    linear_cross_entropy_scale2(dinp, g, exec);
}

// The number of the kernel for this device, binary and shape: 2 where matmul_forward() would take gemm(), which alone has this
// epilogue; in other types 1.
inline int linear_cross_entropy_choice(int N, int C, int Vp) { return matmul_forward_choice(N, C, Vp) == 27 ? 2 : 1; }
// Floats of scratch for the forward pass.
size_t linear_cross_entropy_scratch(int N, int C, int Vp) {
    return linear_cross_entropy_choice(N, C, Vp) == 2 ? (size_t)N * (1 + linear_cross_entropy_tiles(Vp)) : 0;
}
#else
inline int linear_cross_entropy_choice(int, int, int) { return 1; }
size_t linear_cross_entropy_scratch(int, int, int) { return 0; }
#endif

// losses (N) = log(sum(exp(logits))) - logits[target] over the first V of the Vp columns of inp (N,C) weight (Vp,C)^T | targets (N),
// each in [0,V) | dloss (1), or NULL if no backward pass follows | logits (N,Vp) is filled for linear_cross_entropy_backward; if
// dloss is NULL, the first V numbers of a row are its logits (kernel 1), or ratios that increase with its logits (kernel 2)
// | scratch (linear_cross_entropy_scratch(N, C, Vp))
void linear_cross_entropy_forward(floatX* logits, float* losses, float* scratch, const floatX* inp,
                                  const floatX* weight, const int* targets, const float* dloss, int N, int C, int V,
                                  int Vp, const Execution& exec) {
    require(C % 8 == 0 && Vp % 8 == 0 && 1 <= V && V <= Vp);
    LinearCrossEntropy g = {logits, losses, scratch, (floatX*)inp, weight, targets, dloss, N, C, V, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) { return linear_cross_entropy_forward2(g, exec); }
#endif
    linear_cross_entropy_forward1(g, exec);
}

// dinp (N,C) = dlogits weight, dweight (Vp,C) = dlogits^T inp, or += if accumulate, where dlogits = (softmax(logits) -
// onehot(target)) * dloss. Call after the forward pass with dloss, whose logits, losses, inp and weight these are; inp is
// overwritten | scratch (matmul_backward_weight_scratch(N, C, Vp))
void linear_cross_entropy_backward(floatX* dinp, float* dweight, float* scratch, floatX* logits, float* losses,
                                   floatX* inp, const floatX* weight, const float* dloss, int N, int C, int Vp,
                                   bool accumulate, const Execution& exec) {
    require(dloss);
    LinearCrossEntropy g = {logits, losses, scratch, inp, weight, NULL, dloss, N, C, Vp, Vp};
#if defined(ENABLE_BF16)
    if (linear_cross_entropy_choice(N, C, Vp) == 2) {
        return linear_cross_entropy_backward2(g, dinp, dweight, accumulate, exec);
    }
#endif
    linear_cross_entropy_backward1(g, dinp, dweight, accumulate, exec);
}
// ==== end promoted: linear_cross_entropy ====

// ==== promoted: mean_loss ====
// A single block adds all losses, so that the order of the sum is fixed. It takes a few microseconds for 64 KB.
__global__ void __launch_bounds__(1024) mean_loss_kernel1(float* mean, const float* losses, int N, float scale) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N; i += blockDim.x) { sum += losses[i]; }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { *mean += sum * scale; }
}

// mean (1) += scale * sum(losses) | losses (N) | scale: 1 / the tokens of a step, on all ranks
void mean_loss(float* mean, const float* losses, int N, float scale, const Execution& exec) {
    Op op(exec, (double)N * sizeof(float), 0, "mean_loss");
    launch_kernel(mean_loss_kernel1, LaunchShape(1, 1024), exec, mean, losses, N, scale);
}
// ==== end promoted: mean_loss ====

// ==== promoted: global_norm ====
// ---- kernel 5: four loads in flight per thread; one warp adds the block sums, in double ----

// block_sums (gridDim.x) = sum of squares per block, from a grid-stride loop with four loads in flight per thread.
__global__ void __launch_bounds__(1024) global_norm_kernel5(float* block_sums, const float* grads, size_t n) {
    __shared__ float shared[32];
    size_t num_vectors = n / f128::size, stride = (size_t)gridDim.x * blockDim.x;
    size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, i = thread;
    float sums[4][f128::size] = {}; // 16 short sums have less rounding error than one
    for (; i + 3 * stride < num_vectors; i += 4 * stride) {
        f128 x[4];
        for (int j = 0; j < 4; j++) { x[j] = load128(grads + (i + j * stride) * f128::size); }
        for (int j = 0; j < 4; j++) {
            for (int k = 0; k < f128::size; k++) { sums[j][k] += x[j][k] * x[j][k]; }
        }
    }
    for (; i < num_vectors; i += stride) {
        f128 x = load128(grads + i * f128::size);
        for (int k = 0; k < f128::size; k++) { sums[0][k] += x[k] * x[k]; }
    }
    if (thread < n % f128::size) {
        float x = grads[num_vectors * f128::size + thread];
        sums[1][0] += x * x;
    }
    float sum = 0.0f;
    for (int j = 0; j < 4; j++) { sum += (sums[j][0] + sums[j][1]) + (sums[j][2] + sums[j][3]); }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { block_sums[blockIdx.x] = sum; }
}

// norm (1) = sqrt(sum of block_sums). One warp adds the block sums, so that the order of the additions is fixed.
__global__ void global_norm_finish_kernel5(float* norm, const float* block_sums, int num_blocks) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < num_blocks; i += 32) { sum += block_sums[i]; }
    sum = lanes_sum<32>(sum);
    if (threadIdx.x == 0) { *norm = (float)sqrt(sum); }
}

// Number of floats in scratch: one per block, so at most this many blocks are launched.
size_t global_norm_scratch() { return 4096; }

// norm (1) = sqrt(sum(grads^2)) | scratch (global_norm_scratch()) | grads (n), aligned to 16 bytes
void global_norm(float* norm, float* scratch, const float* grads, size_t n, const Execution& exec) {
    int block_size = tuned_block_size(exec, "global_norm", n, 1, 512);
    Op op(exec, 4.0 * n, 2.0 * n, "global_norm");
    require((size_t)grads % 16 == 0);
    int num_blocks; // first the resident blocks per SM, then the blocks that fit on the whole GPU at once
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&num_blocks, global_norm_kernel5, block_size, 0));
    num_blocks = min(num_blocks * num_multiprocessors(), (int)global_norm_scratch());
    launch_kernel(global_norm_kernel5, LaunchShape(num_blocks, block_size), exec, scratch, grads, n);
    launch_kernel(global_norm_finish_kernel5, LaunchShape(1, 32), exec, norm, scratch, num_blocks);
}
// ==== end promoted: global_norm ====

// ---- 6.2 kernels of --fp8 ----------------------------------------------------------------------
//     quantize            to e4m3 or e5m2, rows and columns
//     layernorm_quantize  layernorm with a result in e4m3
//     matmul_fp8          cuBLASLt, or a form of gemm that stores fp8

// ==== promoted: quantize ====
// ---- shared by the kernels: what is quantised, and where it goes ----

// f(inp) rounded to floatX: the vector that begins with element i.
struct QuantizeCopy {
    const floatX* inp; // (N,C)
    __device__ x128 vector(size_t i) const { return load128(inp + i); }
};
struct QuantizeGelu {
    const floatX* inp;
    __device__ x128 vector(size_t i) const { return gelu_forward_vector(load128(inp + i)); }
};
struct QuantizeGeluBackward {
    const floatX *dout, *inp;
    __device__ x128 vector(size_t i) const { return gelu_backward_vector(load128(dout + i), load128(inp + i)); }
};

// The gradients of logits whose losses are known: (softmax - onehot(target)) * dloss over the first V of C columns, else 0.
struct QuantizeDlogits {
    const floatX* logits; // (N,C)
    const float* losses;  // (N) = log(sum of exp(logits)) - logits[target]
    const int* targets;   // (N)
    const float* dloss;   // (1)
    int V;
    __device__ floatX value(floatX logit, int c, int target, float lse, float scale) const {
        float p = c < V ? expf((float)logit - lse) : 0.0f;
        return (floatX)((p - (c == target ? 1.0f : 0.0f)) * scale);
    }
};

template <class F> struct QuantizeArgs {
    Fp8Tensor<F> to;
    floatX* unquantized; // (N,C), or NULL
    int N, C;
};

// The vector at (row, column) of what is quantised.
template <class Source> __device__ x128 quantize_vector(const Source& source, int row, int column, int C) {
    return source.vector((size_t)row * C + column);
}
__device__ inline x128 quantize_vector(const QuantizeDlogits& s, int row, int column, int C) {
    const floatX* logits = s.logits + (size_t)row * C;
    int target = __ldg(s.targets + row);
    float lse = __ldg(s.losses + row) + (float)logits[target], scale = __ldg(s.dloss);
    x128 x = load128(logits + column);
#pragma unroll
    for (int k = 0; k < x128::size; k++) { x[k] = s.value(x[k], column + k, target, lse, scale); }
    return x;
}

// ---- kernel 3: persistent, as many blocks as fit on the GPU at once, so there are few atomics ----

template <class F, class Source> __global__ void quantize_kernel3(QuantizeArgs<F> q, Source source) {
    Fp8Seen<F> seen(q.to);
    size_t n = (size_t)q.N * q.C, stride = (size_t)gridDim.x * blockDim.x * x128::size;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * x128::size; i < n; i += stride) {
        x128 x = source.vector(i);
        uint32_t words[x128::size / 4];
        seen.store_vector(q.to.rows + i, words, x);
        if (q.unquantized) { store128(q.unquantized + i, x); }
    }
    seen.store(q.to);
}

template <class F, class Source>
void quantize3(const QuantizeArgs<F>& q, const Source& source, const Execution& exec, int block_size) {
    require(q.C % 16 == 0 && !q.to.columns);
    int per_sm;
    auto kernel = quantize_kernel3<F, Source>;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, block_size, 0));
    size_t most = ceil_div((size_t)q.N * q.C, (size_t)x128::size * block_size);
    int num_blocks = (int)std::min(most, (size_t)exec.free_sms() * per_sm);
    launch_kernel(kernel, LaunchShape(num_blocks, block_size), exec, q, source);
}

#if !defined(ENABLE_FP32)
// ---- kernel 5: the transposed copy by pairs of tokens: 16 bits, which ldmatrix transposes; tiles of 64x256 ----

struct QuantizeSMem {
    static constexpr int COLUMNS = 256;
    unsigned char tile[FP8_TILE_PAIRS * (2 * COLUMNS + 16) + FP8_TILE_PAIRS / 8 * 32]; // fp8_tile_bytes(COLUMNS)
};

template <class F, class Source> __global__ void __launch_bounds__(512)
    quantize_kernel5(QuantizeArgs<F> q, Source source) {
    __shared__ alignas(16) QuantizeSMem shared;
    const int columns = QuantizeSMem::COLUMNS;
    int num_columns = ceil_div(q.C, columns), first_token = blockIdx.x / num_columns * FP8_TILE_TOKENS;
    int first_column = blockIdx.x % num_columns * columns;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32, column = first_column + 8 * lane;
    Fp8Seen<F> seen(q.to);
    for (int pair = warp; pair < FP8_TILE_PAIRS; pair += num_warps) {
        int token = first_token + fp8_first_token(pair, q.to.in_order);
        uint32_t words[2][2] = {};
        if (token < q.N && column < q.C) { // both of the pair, because N % 16 == 0
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int row = token + second * fp8_pair_distance(q.to.in_order);
                size_t i = (size_t)row * q.C + column;
                x128 x = quantize_vector(source, row, column, q.C);
                seen.store_vector(q.to.rows + i, words[second], x);
                if (q.unquantized) { store128(q.unquantized + i, x); }
            }
        }
        *reinterpret_cast<uint4*>(fp8_tile_at(shared.tile, pair, 8 * lane, columns)) = fp8_pair(words[0], words[1]);
    }
    __syncthreads();
    auto* to = reinterpret_cast<__nv_fp8_storage_t*>(q.to.columns) + (size_t)first_column * q.N + first_token;
    for (int c = 8 * warp; c < columns; c += 8 * num_warps) {
        fp8_store_columns(to, shared.tile, c, columns, q.C - first_column, q.N - first_token, q.N);
    }
    seen.store(q.to);
}

template <class F, class Source>
void quantize5(const QuantizeArgs<F>& q, const Source& source, const Execution& exec, int block_size) {
    require(q.C % 16 == 0 && q.N % 16 == 0 && q.to.columns && block_size <= 512);
    size_t num_blocks =
        ceil_div((size_t)q.N, (size_t)FP8_TILE_TOKENS) * ceil_div((size_t)q.C, (size_t)QuantizeSMem::COLUMNS);
    require(num_blocks <= INT_MAX);
    auto kernel = quantize_kernel5<F, Source>;
    launch_kernel(kernel, LaunchShape(num_blocks, block_size), exec, q, source);
}

template <class F, class Source>
void quantize(const QuantizeArgs<F>& q, const Source& source, int num_inputs, const char* what, const Execution& exec) {
    size_t bytes = (num_inputs + (q.unquantized != NULL)) * sizeof(floatX) + (q.to.columns ? 2 : 1);
    Op op(exec, (double)bytes * q.N * q.C, 0, "quantize%s", what);
    q.to.columns ? quantize5(q, source, exec, 256) : quantize3(q, source, exec, 256);
}

void quantize(const Fp8Tensor<__nv_fp8_e4m3>& to, const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e4m3>{to, NULL, N, C}, QuantizeCopy{inp}, 1, "", exec);
}
void quantize(const Fp8Tensor<__nv_fp8_e5m2>& to, const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e5m2>{to, NULL, N, C}, QuantizeCopy{inp}, 1, "", exec);
}
void quantize_gelu(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* unquantized, const floatX* inp, int N, int C,
                   const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e4m3>{to, unquantized, N, C}, QuantizeGelu{inp}, 1, "_gelu", exec);
}
void quantize_gelu_backward(const Fp8Tensor<__nv_fp8_e5m2>& to, floatX* unquantized, const floatX* dout,
                            const floatX* inp, int N, int C, const Execution& exec) {
    quantize(QuantizeArgs<__nv_fp8_e5m2>{to, unquantized, N, C}, QuantizeGeluBackward{dout, inp}, 2, "_gelu_backward",
             exec);
}
void quantize_dlogits(const Fp8Tensor<__nv_fp8_e5m2>& to, const floatX* logits, const float* losses, const int* targets,
                      const float* dloss, int N, int V, int Vp, const Execution& exec) {
    require(to.columns);
    Op op(exec, (double)N * Vp * (sizeof(floatX) + 2), 0, "quantize_dlogits");
    QuantizeDlogits source = {logits, losses, targets, dloss, V};
    quantize5(QuantizeArgs<__nv_fp8_e5m2>{to, NULL, N, Vp}, source, exec, 256);
}
#endif
// ==== end promoted: quantize ====

// ==== promoted: layernorm_quantize ====
typedef __nv_fp8_e4m3 F8;

struct LayernormQuantizeArgs {
    Fp8Tensor<F8> to;
    floatX* unquantized; // (N,C), or NULL
    floatX* residual;    // (N,C) = inp + inp2, of which the layernorm is taken; or NULL: that of inp
    float *mean, *rstd;  // (N)
    const floatX *inp, *inp2, *weight, *bias;
    int N, C;
    float epsilon;
};

#if !defined(ENABLE_FP32) // a vector is 8 elements
// ---- kernel 2: one warp per row, the row in registers; quantised on the way to memory ----

// The layernorm of a row of num_vecs vectors per lane, the last of which may be past the row's end; in place.
template <int num_vecs> __device__ inline void layernorm_quantize_row(x128 (&x)[num_vecs], float* mean, float* rstd,
                                                                      const LayernormQuantizeArgs& q, int row) {
    int first = threadIdx.x % 32 * x128::size;
    auto inside = [&](int j) { return j < num_vecs - 1 || first + j * 256 < q.C; };
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        size_t i = (size_t)row * q.C + first + j * 256;
        x[j] = inside(j) ? load128(q.inp + i) : x128();
        if (!q.residual || !inside(j)) { continue; }
        x128 y = load128(q.inp2 + i);
        for (int k = 0; k < x128::size; k++) { x[j][k] = (floatX)((float)x[j][k] + (float)y[k]); }
        store128(q.residual + i, x[j]);
    }
    float2 statistics = layernorm_statistics(
        x, [&](float sum) { return sum / q.C; }, q.epsilon, inside);
    float m = statistics.x, r = statistics.y;
    if (threadIdx.x % 32 == 0) { *mean = m, *rstd = r; }
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        if (!inside(j)) { continue; }
        x128 w = load128(q.weight + first + j * 256), b = load128(q.bias + first + j * 256);
        for (int k = 0; k < x128::size; k++) {
            x[j][k] = (floatX)(((float)x[j][k] - m) * r * (float)w[k] + (float)b[k]);
        }
    }
}

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel2(LayernormQuantizeArgs q) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = threadIdx.x % 32 * x128::size;
    Fp8Seen<F8> seen(q.to);
    if (row < q.N) {
        x128 x[num_vecs];
        layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            size_t i = (size_t)row * q.C + first + j * 256;
            uint32_t words[2];
            if (first + j * 256 >= q.C) { continue; }
            seen.store_vector(q.to.rows + i, words, x[j]);
            if (q.unquantized) { store128(q.unquantized + i, x[j]); }
        }
    }
    seen.store(q.to);
}

// Calls launch(n) with the vectors per lane that a row of C needs, as a constant.
template <class Launch> static void layernorm_quantize_vectors(int C, Launch launch) {
    require(C % 16 == 0);
    with_constant<7>(ceil_div(C, 256), launch); // C <= 1792
}

static void layernorm_quantize2(const LayernormQuantizeArgs& q, const Execution& exec, int block_size) {
    require(!q.to.columns && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel2<decltype(num_vecs)::value>;
        launch_kernel(kernel, LaunchShape(ceil_div(q.N, block_size / 32), block_size), exec, q);
    });
}

// ---- kernel 3: 2 with the transposed copy: a block has 64 tokens, a warp takes pairs of them, see fp8.cuh ----

template <int num_vecs> __global__ void __launch_bounds__(512) layernorm_quantize_kernel3(LayernormQuantizeArgs q) {
    extern __shared__ __align__(128) unsigned char layernorm_quantize_tile[]; // fp8_tile_bytes(C)
    int first_token = blockIdx.x * FP8_TILE_TOKENS, first = threadIdx.x % 32 * x128::size;
    int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    Fp8Seen<F8> seen(q.to);
#pragma unroll 1
    for (int pair = warp; pair < FP8_TILE_PAIRS; pair += num_warps) {
        int token = first_token + fp8_first_token(pair, q.to.in_order);
        uint32_t words[2][num_vecs][2] = {};
        if (token < q.N) { // both of the pair, because N % 16 == 0
#pragma unroll
            for (int second = 0; second < 2; second++) {
                int row = token + second * fp8_pair_distance(q.to.in_order);
                x128 x[num_vecs];
                layernorm_quantize_row(x, q.mean + row, q.rstd + row, q, row);
#pragma unroll
                for (int j = 0; j < num_vecs; j++) {
                    if (first + j * 256 >= q.C) { continue; }
                    seen.store_vector(q.to.rows + (size_t)row * q.C + first + j * 256, words[second][j], x[j]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (first + j * 256 >= q.C) { continue; }
            *reinterpret_cast<uint4*>(fp8_tile_at(layernorm_quantize_tile, pair, first + j * 256, q.C)) =
                fp8_pair(words[0][j], words[1][j]);
        }
    }
    __syncthreads();
    auto* to = reinterpret_cast<__nv_fp8_storage_t*>(q.to.columns) + first_token;
    for (int c = 8 * warp; c < q.C; c += 8 * num_warps) {
        fp8_store_columns(to, layernorm_quantize_tile, c, q.C, q.C, q.N - first_token, q.N);
    }
    seen.store(q.to);
}

static void layernorm_quantize3(const LayernormQuantizeArgs& q, const Execution& exec, int block_size) {
    require(q.to.columns && !q.unquantized && q.N % 16 == 0 && block_size <= 512);
    layernorm_quantize_vectors(q.C, [&](auto num_vecs) {
        auto kernel = layernorm_quantize_kernel3<decltype(num_vecs)::value>;
        launch_kernel(kernel, LaunchShape(ceil_div(q.N, FP8_TILE_TOKENS), block_size, fp8_tile_bytes(q.C)), exec, q);
    });
}

void layernorm_quantize(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* unquantized, floatX* residual, float* mean,
                        float* rstd, const floatX* inp, const floatX* inp2, const floatX* weight, const floatX* bias,
                        int N, int C, float epsilon, const Execution& exec) {
    Op op(exec, (double)N * C * ((inp2 ? 3 : 1) * sizeof(floatX) + (unquantized ? 2 : 0) + (to.columns ? 2 : 1)), 0,
          "layernorm_quantize");
    LayernormQuantizeArgs q = {to, unquantized, residual, mean, rstd, inp, inp2, weight, bias, N, C, epsilon};
    to.columns ? layernorm_quantize3(q, exec, 256) : layernorm_quantize2(q, exec, 256);
}
#endif
// ==== end promoted: layernorm_quantize ====

// ==== promoted: matmul_fp8 ====
// out (M,N) = a (M,K) b (N,K)^T * a_scale * b_scale + bias: a linear layer, or one product of its backward pass, see the
// operations below.
template <class A> struct MatmulFp8Args {
    floatX* out;                // (M,N), or NULL
    float* sum;                 // (M,N), if out is NULL
    bool accumulate;            // the product is added to sum
    Fp8Matrix<A> a;             // (M,K), e4m3 or e5m2
    Fp8Matrix<__nv_fp8_e4m3> b; // (N,K)
    const floatX* bias;         // (N), or NULL
    int M, N, K;
};

#if !defined(ENABLE_FP32) // the library has no such product with a bias in fp32, gemm.cuh none in fp32
// By cuBLASLt; fast: see MatmulCall::fast_accumulation.
template <class A> void matmul_fp8_2(const MatmulFp8Args<A>& p, bool fast, const Execution& exec) {
    MatmulCall call;
    call.a = p.a.values, call.b = p.b.values, call.b_transposed = true, call.bias = p.bias;
    call.a_type = Fp8<A>::IS_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3, call.b_type = CUDA_R_8F_E4M3;
    call.a_scale = p.a.inverse, call.b_scale = p.b.inverse, call.fast_accumulation = fast;
    call.M = p.M, call.N = p.N, call.K = p.K;
    call.out = p.out;
    if (!p.out) { call.out = p.sum, call.out_is_float = true, call.add = p.accumulate ? p.sum : NULL; }
    require(cublaslt_matmul(call, exec));
}

// The form of gemm.cuh for fp8. The code addresses two elements as one floatX, so it counts pairs of elements along K. A
// stage thus holds 128 columns of K in the same number of bytes, and its products take the same number of cycles. With 2 boxes
// per warp, there is room for two tiles of both consumers.
template <class A> struct MatmulFp8Form : GemmPingPong192Pairs {
    static constexpr int BOXES = 2;
    static __device__ void wgmma(float (&sum)[96], uint64_t a, uint64_t b, bool accumulate) {
        if constexpr (Fp8<A>::IS_E5M2) {
            wgmma_64x192x32_e5m2_e4m3(sum, a, b, accumulate);
        } else {
            wgmma_64x192x32_e4m3(sum, a, b, accumulate);
        }
    }
};

// ---- kernels 7 and 8: both fp8 copies of the result in the epilogue ----

// A consumer takes its accumulators in tiles of 64x64, through shared memory, from which TMA stores them. A thread has
// columns 2t and 2t + 1 of rows g and g + 8 in each fragment of 8 columns. Quantised, they are a word:
//
//     byte                 0      1      2        3
//     row, column       g,2t  g+8,2t  g,2t+1  g+8,2t+1
//
// Its halves are pairs of tokens, so stmatrix with the transposition stores it to `columns`, in the order 0 8 1 9 ...
// For `rows`, lanes 2i and 2i + 1 exchange words, and then have 4 neighbouring columns of rows g and g + 8, one lane in
// this fragment, the other one in the next.

struct alignas(1024) MatmulFp8Tile { // rows of 64 bytes, swizzled as tensor_map() says
    unsigned char rows[64 * 64], columns[64 * 64];
};
// The byte of chunk `chunk` of 16 bytes in row `row` of such a matrix.
__device__ inline int matmul_fp8_swizzled(int row, int chunk) { return row * 64 + (chunk ^ (row / 2 % 4)) * 16; }

// rows (M,N) and columns (N,M): of floatX, as which TMA sees two fp8 elements
struct MatmulFp8Maps : GemmMaps {
    CUtensorMap rows, columns;
};

template <class G> struct MatmulFp8SMem : GemmSMem<G> { MatmulFp8Tile tiles[2][2]; };

// The epilogue's value: y = sum * scale + bias; see GemmBias.
template <int extras> struct MatmulFp8Epilogue : GemmBias<extras> {
    const float *a_scale, *b_scale; // what a stored 1 stands for
    float scale;                    // their product, set at the beginning of the kernel
    __device__ float value(float sum, float bias) const { return fmaf(sum, scale, bias); }
};

enum MatmulFp8Mode {
    MATMUL_FP8_MODE_GELU,       // x = gelu(y)
    MATMUL_FP8_MODE_SAVE_SLOPE, // the same, and GELU's slope at y is stored to maps.second
    MATMUL_FP8_MODE_TIMES_SLOPE // x = y * the matrix of maps.third
};

// x in type F, rows and columns. has_sums: the columns of x are also summed, before they are rounded.
template <class F, MatmulFp8Mode mode, bool has_sums = false> struct MatmulFp8Quantized {
    static constexpr int EXTRAS = mode == MATMUL_FP8_MODE_TIMES_SLOPE ? GEMM_THIRD | GEMM_NO_BIAS : 0;
    typedef MatmulFp8Epilogue<EXTRAS> Epilogue;
    Fp8Tensor<F> to;
    float* sums; // (row tiles, N), see GemmBiasSums; NULL unless has_sums
    __device__ Fp8Seen<F> seen() const { return Fp8Seen<F>(to); }

    // The words of 16 columns, two fragments: sum has their accumulators, column 16 * p of the box is the first.
    // slopes: the fragments of GELU's slope, read or written. column_sums: of this lane's two rows, added to them.
    template <class G> __device__ void words(uint32_t (&words)[2], uint32_t (&slopes)[4], Fp8Seen<F>& seen,
                                             const float* sum, const Epilogue& epilogue, typename Epilogue::Pair pair,
                                             int p, float* column_sums) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float two[2] = {}, v[4], slope[4];
            if constexpr (mode == MATMUL_FP8_MODE_TIMES_SLOPE) {
                float2 upper = unpack_16x2(slopes[2 * j], floatX()), lower = unpack_16x2(slopes[2 * j + 1], floatX());
                slope[0] = upper.x, slope[1] = upper.y, slope[2] = lower.x, slope[3] = lower.y;
            } else {
                epilogue.columns(two, gemm_shuffle(pair, 8 * p + 4 * j + threadIdx.x % 4));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float y = epilogue.value(sum[4 * j + i], two[i % 2]), x;
                if constexpr (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { x = y * slope[i]; }
                if constexpr (mode != MATMUL_FP8_MODE_TIMES_SLOPE) { x = gelu_and_slope_approx(y, &slope[i]); }
                v[i] = seen.scaled(x);
                if (has_sums) { column_sums[2 * j + i % 2] += x; }
            }
            if constexpr (mode == MATMUL_FP8_MODE_SAVE_SLOPE) { gemm_pack(slopes + 2 * j, slope); }
            words[j] = Fp8<F>::pack(v[0], v[2], v[1], v[3]);
        }
    }
    // Stores them to the tile's rows. at: chunk 16 * p of row g of this warp.
    __device__ void store_rows(unsigned char* at, const uint32_t (&words)[2]) const {
        bool odd = threadIdx.x & 1;
        // the rows' halves: columns 2t, 2t + 1 of row g, of row g + 8
        uint32_t first = __byte_perm(words[0], 0, 0x3120), second = __byte_perm(words[1], 0, 0x3120);
        uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
        uint32_t left = odd ? got : first, right = odd ? second : got;
        // t = 0 and 2 have columns 0-3 and 4-7 of the 16, t = 1 and 3 columns 8-11 and 12-15
        unsigned char* p = at + (odd ? 8 : 0) + threadIdx.x % 4 / 2 * 4;
        *reinterpret_cast<uint32_t*>(p) = __byte_perm(left, right, 0x5410);
        *reinterpret_cast<uint32_t*>(p + 8 * 64) = __byte_perm(left, right, 0x7632); // swizzled as row g is
    }
    // Stores a tile of the consumer. Its two tiles take turns: the barrier also says that the other one has been read.
    template <class G> __device__ void store(Fp8Seen<F>& seen, float (&sum)[G::PARTS][G::COLUMNS / 2],
                                             const Epilogue& epilogue, const GemmColumns<G, Epilogue>& columns,
                                             GemmSMem<G>& smem, MatmulFp8Tile (&tiles)[2], const MatmulFp8Maps& maps,
                                             const GemmTile& tile, int M, int N, int& box) const {
        static_assert(G::READERS == 4 && G::BOXES == 2, "a tile is one consumer's, which has two");
        const int num_columns = G::COLUMNS / 64, num_boxes = G::PARTS * num_columns;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, first_box = box, warp_row = warp % 4 * 16;
        bool stores = threadIdx.x % 128 == 1;    // lane 1, because lane 0 waits for its stores of slopes apart
        float column_sums[num_columns][16] = {}; // of this lane's rows, see fragment_column_sums
        uint32_t lane_at = lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16; // in a box of slopes, as in gemm_store
#pragma unroll
        for (int n = 0; n < num_boxes; n++, box++) {
            const int m = n / num_columns, q = n % num_columns;
            int slot = box % G::BOXES, box_row = tile.row + 64 * m, box_column = tile.column + 64 * q;
            uint32_t at = shared_address(smem.boxes[warp][slot]) + lane_at;
            MatmulFp8Tile& values = tiles[slot];
            if (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { mbarrier_wait(&smem.box_full[warp][slot], box / G::BOXES % 2); }
            if (mode == MATMUL_FP8_MODE_SAVE_SLOPE) {
                if (lane == 0) { tma_store_wait<G::BOXES - 1>(); }
                __syncwarp();
            }
#pragma unroll
            for (int p = 0; p < 4; p += 2) { // 32 columns, of which stmatrix stores 4 matrices
                uint32_t fragments[2][2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t slopes[4];
                    if (mode == MATMUL_FP8_MODE_TIMES_SLOPE) { ldmatrix_x4(slopes, at ^ (p + i) << 5); }
                    float largest = seen.amax;
                    words<G>(fragments[i], slopes, seen, sum[m] + 32 * q + 8 * (p + i), epilogue, columns.pairs[q],
                             p + i, column_sums[q] + 4 * (p + i));
                    // past the end there are biases without products; M and N are multiples of 16
                    if (mode != MATMUL_FP8_MODE_TIMES_SLOPE && (box_row >= M || box_column + 16 * (p + i) >= N)) {
                        seen.amax = largest;
                    }
                    if (mode == MATMUL_FP8_MODE_SAVE_SLOPE) { stmatrix_x4(at ^ (p + i) << 5, slopes); }
                    store_rows(values.rows + matmul_fp8_swizzled(warp_row + lane / 4, p + i), fragments[i]);
                }
                stmatrix_x4_trans(shared_address(values.columns + matmul_fp8_swizzled(16 * p + lane, warp % 4)),
                                  fragments[0]);
            }
            if (stores) { tma_store_wait<0>(); }
            tma_store_fence(); // tile and box were read, or written, by ordinary accesses
            gemm_consumer_sync();
            if (stores) {
                tma_store_2d(&maps.rows, values.rows, box_column / 2, box_row - warp_row);
                tma_store_2d(&maps.columns, values.columns, (box_row - warp_row) / 2, box_column);
                tma_store_commit();
            }
            if (mode == MATMUL_FP8_MODE_SAVE_SLOPE && lane == 0) {
                tma_store_2d(&maps.second, smem.boxes[warp][slot], box_column, box_row);
                tma_store_commit();
            }
            if (mode == MATMUL_FP8_MODE_TIMES_SLOPE && lane == 0 && n + G::BOXES < num_boxes) {
                gemm_load_box<G>(smem, maps.third, tile, n + G::BOXES, first_box);
            }
        }
        if constexpr (has_sums) { gemm_store_sums<G>(column_sums, sums, smem, tile.row, tile.column, M, N); }
    }
};

// Like gemm_sm90_kernel9, for a quantised result.
template <class G, class Result> __global__ void __launch_bounds__(384, 1)
    matmul_fp8_sm90_kernel7(const __grid_constant__ MatmulFp8Maps maps, typename Result::Epilogue epilogue,
                            Result result, int M, int N, int K, int num_tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(256) unsigned char gemm_dynamic[];
    auto& smem = shared_aligned_1024<MatmulFp8SMem<G>>(gemm_dynamic);
    int warp = gemm_begin(smem, maps, M, N, K, num_tiles);
    if (warp < 4) { return; }
    auto& tiles = smem.tiles[warp / 4 - 1];
    epilogue.scale = __ldg(epilogue.a_scale) * __ldg(epilogue.b_scale);
    auto seen = result.seen();
    gemm_consume(smem, warp, maps, epilogue, M, N, K, num_tiles, [&](auto& sum, auto& columns, auto& tile, int& box) {
        result.template store<G>(seen, sum, epilogue, columns, smem, tiles, maps, tile, M, N, box);
    });
    seen.store_warp(result.to);
    if (threadIdx.x % 128 == 1) { tma_store_wait<0>(); }
    gemm_end<G>();
#endif
}

// second, third (M,N): GELU's slope, written to second or read from third, or NULL
template <class A, class Result> static void matmul_fp8_launch7(const MatmulFp8Args<A>& p, const Result& result,
                                                                floatX* second, const floatX* third,
                                                                const Execution& exec) {
    typedef MatmulFp8Form<A> G;
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(p.M % 16 == 0 && p.N % 16 == 0 && p.K % 16 == 0);
    // gemm.cuh addresses two fp8 elements as one floatX
    GemmArgs g = {NULL, second, (const floatX*)p.a.values, (const floatX*)p.b.values, third, p.M, p.N, p.K / 2};
    typename Result::Epilogue epilogue = {{p.bias}, p.a.inverse, p.b.inverse, 0.0f};
    MatmulFp8Maps maps = {gemm_maps<G>(g), tensor_map((floatX*)result.to.rows, {p.N / 2, p.M}, {32, 64}),
                          tensor_map((floatX*)result.to.columns, {p.M / 2, p.N}, {32, 64})};
    int num_tiles = gemm_num_tiles<G>(g.M, g.N, g.K);
    gemm_start<G, MatmulFp8SMem<G>>(matmul_fp8_sm90_kernel7<G, Result>, num_tiles, true, exec, maps, epilogue, result,
                                    g.M, g.N, g.K, num_tiles);
}

// rows, columns = gelu(y); slope (M,N) = GELU's slope at y, for the backward pass
void matmul_fp8_8(const MatmulFp8Args<__nv_fp8_e4m3>& p, const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* slope,
                  const Execution& exec) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<__nv_fp8_e4m3, MATMUL_FP8_MODE_SAVE_SLOPE>{to, NULL}, slope, NULL, exec);
}

// ---- kernel 11: 10 that also sums the columns of its result, which is the gradient of a bias ----

// rows, columns = dX times the slope that kernel 8 has saved, in the type of dout; sums (N) += the sums of its columns;
// partials (ceil(M / 128), N) is scratch
template <class A> void matmul_fp8_11(const MatmulFp8Args<A>& p, const Fp8Tensor<A>& to, float* sums, float* partials,
                                      const floatX* slope, const Execution& exec) {
    matmul_fp8_launch7(p, MatmulFp8Quantized<A, MATMUL_FP8_MODE_TIMES_SLOPE, true>{to, partials}, NULL, slope, exec);
    column_sums<16>(sums, NULL, NULL, partials, ceil_div(p.M, 128), p.N, exec);
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias
void matmul_fp8_forward(floatX* out, const Fp8Matrix<__nv_fp8_e4m3>& inp, const Fp8Matrix<__nv_fp8_e4m3>& weight,
                        const floatX* bias, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * C + (double)OC * C + (double)N * OC * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_fp8_forward %d -> %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e4m3>{out, NULL, false, inp, weight, bias, N, OC, C}, true, exec);
}
void matmul_fp8_gelu(const Fp8Tensor<__nv_fp8_e4m3>& to, floatX* slope, const Fp8Matrix<__nv_fp8_e4m3>& inp,
                     const Fp8Matrix<__nv_fp8_e4m3>& weight, const floatX* bias, int N, int C, int OC,
                     const Execution& exec) {
    Op op(exec, (double)N * C + (double)OC * C + (double)N * OC * (sizeof(floatX) + 2), 2.0 * N * C * OC,
          "matmul_fp8_gelu %d -> %d", C, OC);
    matmul_fp8_8({NULL, NULL, false, inp, weight, bias, N, OC, C}, to, slope, exec);
}
void matmul_fp8_backward_input(floatX* dinp, const Fp8Matrix<__nv_fp8_e5m2>& dout,
                               const Fp8Matrix<__nv_fp8_e4m3>& weight, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * OC + (double)OC * C + (double)N * C * sizeof(floatX), 2.0 * N * C * OC,
          "matmul_fp8_backward_input %d <- %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e5m2>{dinp, NULL, false, dout, weight, NULL, N, C, OC}, false, exec);
}
void matmul_fp8_gelu_backward(const Fp8Tensor<__nv_fp8_e5m2>& to, float* dinp_sums, float* scratch,
                              const Fp8Matrix<__nv_fp8_e5m2>& dout, const Fp8Matrix<__nv_fp8_e4m3>& weight,
                              const floatX* slope, int N, int C, int OC, const Execution& exec) {
    Op op(exec, (double)N * OC + (double)OC * C + (double)N * C * (sizeof(floatX) + 2), 2.0 * N * C * OC,
          "matmul_fp8_gelu_backward %d <- %d", C, OC);
    matmul_fp8_11({NULL, NULL, false, dout, weight, NULL, N, C, OC}, to, dinp_sums, scratch, slope, exec);
}
void matmul_fp8_backward_weight(float* dweight, const Fp8Matrix<__nv_fp8_e5m2>& dout,
                                const Fp8Matrix<__nv_fp8_e4m3>& inp, int N, int C, int OC, bool accumulate,
                                const Execution& exec) {
    Op op(exec, (double)N * (C + OC) + (accumulate ? 8.0 : 4.0) * C * OC, 2.0 * N * C * OC,
          "matmul_fp8_backward_weight %d <- %d", C, OC);
    matmul_fp8_2(MatmulFp8Args<__nv_fp8_e5m2>{NULL, dweight, accumulate, dout, inp, NULL, OC, C, N}, false, exec);
}
#endif
size_t matmul_fp8_gelu_backward_scratch(int N, int C) { return (size_t)ceil_div(N, 128) * C; }
// ==== end promoted: matmul_fp8 ====

// ---- 6.3 kernels of Muon -----------------------------------------------------------------------
//     newton_schulz  orthogonalizes many matrices at once
//     muon           momentum before it, the update after it

// ==== promoted: newton_schulz ====
// The steps of Newton-Schulz on many matrices at once, see newton_schulz() below.

// One of a step's three products, for `num` matrices: out (M,N) = scale * left (M,K) right + add_scale * add (M,N),
// where right is (N,K), transposed, or (K,N). The matrices of each operand follow one another.
struct NewtonSchulzProduct {
    floatX* out;
    const floatX *left, *right, *add; // add is NULL if add_scale is 0
    float scale, add_scale;
    int M, N, K, num;
    bool right_by_k; // right is (K,N); otherwise out is symmetric
};

// Calls product() for each product of the five steps. The steps alternate between out and the first num*n*k values of
// scratch, where inp may be.
template <class Product>
void newton_schulz_steps(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, Product product) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    require(num >= 1 && num <= 65535 && n >= 1 && k >= 1);
    floatX *other = scratch, *gram = other + (size_t)num * n * k, *poly = gram + (size_t)num * n * n;
    const floatX* x = inp;
    for (int step = 0; step < 5; step++) {
        floatX* next = step % 2 == 0 ? out : other;
        product(NewtonSchulzProduct{gram, x, x, NULL, 1.0f, 0.0f, n, n, k, num, false});
        product(NewtonSchulzProduct{poly, gram, gram, gram, c, b, n, n, n, num, false}); // gram is its own transpose
        product(NewtonSchulzProduct{next, poly, x, x, 1.0f, a, n, k, n, num, true});
        x = next;
    }
}
// in values of floatX
size_t newton_schulz_scratch(int num, int n, int k) { return (size_t)num * n * ((size_t)k + 2 * (size_t)n); }

// The matrices of block blockIdx.y.
__device__ inline NewtonSchulzProduct newton_schulz_matrix(NewtonSchulzProduct p) {
    size_t matrix = blockIdx.y, M = p.M, N = p.N, K = p.K;
    p.out += matrix * M * N, p.left += matrix * M * K, p.right += matrix * N * K;
    if (p.add) { p.add += matrix * M * N; }
    return p;
}

// ---- kernel 2: 64x64 tiles in shared memory ------------------------------------------------------
// 256 threads with 4x4 results each. It needs no tensor cores: for fp32, and for GPUs before compute capability 8.0.

__global__ void __launch_bounds__(256) newton_schulz_kernel2(NewtonSchulzProduct batch) {
    __shared__ float left[16][64 + 1], right[16][64 + 1]; // [k][row or column]; + 1: against bank conflicts
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    int num_columns = ceil_div(p.N, 64), row0 = blockIdx.x / num_columns * 64, column0 = blockIdx.x % num_columns * 64;
    int x = threadIdx.x % 16, y = threadIdx.x / 16; // the thread's results: rows y + 16 i, columns x + 16 j
    float sum[4][4] = {};
    for (int k0 = 0; k0 < p.K; k0 += 16) {
        for (int i = threadIdx.x; i < 16 * 64; i += 256) { // neighbouring threads load neighbouring values
            int k = i % 16, row = i / 16;
            bool inside = k0 + k < p.K && row0 + row < p.M;
            left[k][row] = inside ? (float)p.left[(size_t)(row0 + row) * p.K + k0 + k] : 0.0f;
            int right_k = p.right_by_k ? i / 64 : k, column = p.right_by_k ? i % 64 : row;
            inside = k0 + right_k < p.K && column0 + column < p.N;
            size_t at = p.right_by_k ? (size_t)(k0 + right_k) * p.N + column0 + column
                                     : (size_t)(column0 + column) * p.K + k0 + right_k;
            right[right_k][column] = inside ? (float)p.right[at] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            float l[4], r[4];
            for (int i = 0; i < 4; i++) { l[i] = left[k][y + 16 * i], r[i] = right[k][x + 16 * i]; }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) { sum[i][j] += l[i] * r[j]; }
            }
        }
        __syncthreads(); // all have read this tile
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int row = row0 + y + i / 4 * 16, column = column0 + x + i % 4 * 16;
        if (row >= p.M || column >= p.N) { continue; }
        size_t at = (size_t)row * p.N + column;
        p.out[at] = (floatX)(p.scale * sum[i / 4][i % 4] + (p.add ? p.add_scale * (float)p.add[at] : 0.0f));
    }
}

void newton_schulz2(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        launch_kernel(newton_schulz_kernel2, LaunchShape(dim3(ceil_div(p.M, 64) * ceil_div(p.N, 64), num), 256), exec,
                      p);
    });
}

#if !defined(ENABLE_FP32) // tensor cores multiply 16-bit numbers
// ---- shared by kernels 3 and 4: a tile of 128x128 results by mma.sync, from a ring of stages -------

// A stage has 32 values of k. left and a right (N,K) are tiles (128,32), a right (K,N) is (32,128).
template <int ring> union NewtonSchulzSMem {
    struct {
        floatX left[ring][128 * 32], right[ring][128 * 32];
    };
    floatX transposed[128]
                     [128 + 8]; // kernel 4: the tile of results, [column][row]; + 8: keeps vectors aligned to 16 bytes
};

// Swizzles: the offset of chunk `chunk` (8 elements) of a row, in a tile (128,32) or (32,128). The same chunk of the 8
// neighbouring rows that ldmatrix reads at once is then in 8 different groups of 4 banks.
__device__ inline int newton_schulz_at_128x32(int row, int chunk) { return row * 32 + (chunk ^ (row / 2 % 4)) * 8; }
__device__ inline int newton_schulz_at_32x128(int row, int chunk) { return row * 128 + (chunk ^ (row % 8)) * 8; }

// Loads a tile of matrix (num_rows, num_columns) from (row0, column0) on; zeros outside of it.
template <bool is_128x32> __device__ inline void newton_schulz_load(floatX* tile, const floatX* matrix, int row0,
                                                                    int column0, int num_rows, int num_columns) {
    const int chunks = is_128x32 ? 4 : 16; // per row
    for (int v = threadIdx.x; v < 128 * 4; v += 256) {
        int row = v / chunks, chunk = v % chunks;
        bool inside = row0 + row < num_rows && column0 + chunk * 8 < num_columns;
        const floatX* from = inside ? matrix + (size_t)(row0 + row) * num_columns + column0 + chunk * 8 : matrix;
        int at = is_128x32 ? newton_schulz_at_128x32(row, chunk) : newton_schulz_at_32x128(row, chunk);
        cp_async_16(tile + at, from, inside);
    }
}

// sum = the tile of left * right at (row0, column0). Eight warps with 64x32 results each, as fragments of 16x8:
// [four groups of 16 rows][four fragments of 8 columns, 4 values per lane]
template <bool right_by_k, int ring>
__device__ inline void newton_schulz_multiply(float (&sum)[4][16], NewtonSchulzSMem<ring>& shared,
                                              const NewtonSchulzProduct& p, int row0, int column0) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    int num_steps = ceil_div(p.K, 32);
    auto load = [&](int step) {
        if (step < num_steps) {
            newton_schulz_load<true>(shared.left[step % ring], p.left, row0, step * 32, p.M, p.K);
            if (right_by_k) {
                newton_schulz_load<false>(shared.right[step % ring], p.right, step * 32, column0, p.K, p.N);
            } else {
                newton_schulz_load<true>(shared.right[step % ring], p.right, column0, step * 32, p.N, p.K);
            }
        }
        cp_async_commit(); // past the last step the group is empty: cp_async_wait counts one group per step
    };
    for (int step = 0; step < ring - 1; step++) { load(step); }
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        cp_async_wait<ring - 2>();
        __syncthreads(); // this step's stage has arrived, and all warps have read the previous step's stage
        load(step + ring - 1);
        const floatX *left = shared.left[step % ring], *right = shared.right[step % ring];
#pragma unroll
        for (int k = 0; k < 2; k++) { // 16 of the stage's 32 values of k per iteration
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ldmatrix_x4(a[i], left + newton_schulz_at_128x32(warp_row + 16 * i + lane % 16, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) { // two fragments of 8 columns each
                int column = warp_column + 16 * j;
                if (right_by_k) {
                    ldmatrix_x4_trans(b[j],
                                      right + newton_schulz_at_32x128(16 * k + lane % 16, column / 8 + lane / 16));
                } else {
                    int row = column + lane / 16 * 8 + lane % 8;
                    ldmatrix_x4(b[j], right + newton_schulz_at_128x32(row, 2 * k + lane / 8 % 2));
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma_16x8x16(sum[i] + 4 * j, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], floatX());
                }
            }
        }
    }
}

// Stores the tile: sum times scale, plus the added term. If `transposed` is not NULL, it receives the same values.
__device__ inline void newton_schulz_store(float (&sum)[4][16], floatX (*transposed)[128 + 8],
                                           const NewtonSchulzProduct& p, int row0, int column0) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 8; half++) { // rows 0..7 of the fragments, then 8..15
        const int i = half / 2, upper = half % 2;
        float v[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j][0] = sum[i][4 * j + 2 * upper];
            v[j][1] = sum[i][4 * j + 2 * upper + 1];
        }
        mma_quad_transpose(v); // now this lane has 8 neighbouring results of one row
        int row = warp / 4 * 64 + 16 * i + 8 * upper + lane / 4, column = warp % 4 * 32 + lane % 4 * 8;
        bool inside = row0 + row < p.M && column0 + column < p.N;
        size_t at = (size_t)(row0 + row) * p.N + column0 + column;
        x128 add = p.add && inside ? load128(p.add + at) : x128(), result;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            result[e] = (floatX)(p.scale * v[e / 2][e % 2] + p.add_scale * (p.add ? (float)add[e] : 0.0f));
        }
        if (inside) { store128(p.out + at, result); }
        for (int e = 0; transposed && e < 8; e++) { transposed[column + e][row] = result[e]; }
    }
}

// ---- kernel 4: of symmetric products, tiles on and above the diagonal, stored twice ----

//     tiles (row, column)      0,0  0,1  0,2          a block computes one of the numbered tiles, and stores it twice:
//     of a symmetric product    -   1,1  1,2          tile 0,1 also as tile 1,0. The tile is transposed in
//                               -    -   2,2          shared memory, so that both stores are of whole vectors.

// The row and column of tile `index` of a symmetric product. Column c has tiles 0 to c.
__device__ inline void newton_schulz_upper_tile(int index, int& row, int& column) {
    for (column = 0; index > column; column++) { index -= column + 1; }
    row = index;
}

template <bool right_by_k, int ring> __global__ void __launch_bounds__(256, 2)
    newton_schulz_kernel4(NewtonSchulzProduct batch) {
    extern __shared__ __align__(128) unsigned char newton_schulz_dynamic[];
    auto& shared = *reinterpret_cast<NewtonSchulzSMem<ring>*>(newton_schulz_dynamic);
    NewtonSchulzProduct p = newton_schulz_matrix(batch);
    int num_columns = ceil_div(p.N, 128), row = blockIdx.x / num_columns, column = blockIdx.x % num_columns;
    if (!right_by_k) { newton_schulz_upper_tile(blockIdx.x, row, column); }
    bool mirrored = !right_by_k && row < column;
    float sum[4][16] = {};
    newton_schulz_multiply<right_by_k>(sum, shared, p, row * 128, column * 128);
    cp_async_wait<0>();
    __syncthreads(); // all warps have read the last stage, in whose memory the transposed tile will be
    newton_schulz_store(sum, mirrored ? shared.transposed : NULL, p, row * 128, column * 128);
    if (!mirrored) { return; }
    __syncthreads(); // the transposed tile is complete
    for (int v = threadIdx.x; v < 128 * 16; v += 256) {
        // all columns are inside the matrix, because row < column
        int out_row = column * 128 + v / 16, out_column = row * 128 + v % 16 * 8;
        if (out_row < p.N) {
            store128(p.out + (size_t)out_row * p.N + out_column, load128(&shared.transposed[v / 16][v % 16 * 8]));
        }
    }
}

template <int ring = 4>
void newton_schulz4(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    require(n % 8 == 0 && k % 8 == 0);
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        auto kernel = p.right_by_k ? newton_schulz_kernel4<true, ring> : newton_schulz_kernel4<false, ring>;
        int rows = ceil_div(p.M, 128), tiles = p.right_by_k ? rows * ceil_div(p.N, 128) : rows * (rows + 1) / 2;
        launch_kernel(kernel, LaunchShape(dim3(tiles, num), 256, sizeof(NewtonSchulzSMem<ring>)), exec, p);
    });
}

// ---- kernel 5: as 4, by wgmma with operands by TMA, two consumers that alternate (ping-pong) -------

// The kernel is gemm_sm90_kernel9, with forms and an epilogue of its own. Tensor maps have three dimensions, (num, rows,
// columns), and a box is of one matrix: where a tile extends past the end of its matrix, zeros are loaded and nothing is
// stored. So tiles need not divide the matrices. Blocks form no clusters, which bring nothing at 128x192.

// A tile of one of the matrices.
struct NewtonSchulzTile : GemmTile {
    int matrix;

    __device__ void load(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        tma_load_3d(box, &map, x, y, matrix, full);
    }
    __device__ void load_once(void* box, const CUtensorMap& map, int x, int y, uint64_t* full) const {
        load(box, map, x, y, full);
    }
    __device__ void store(const CUtensorMap& map, const void* box, int x, int y) const {
        tma_store_3d(&map, box, x, y, matrix);
    }
};

// The tiles of one matrix that are computed.
template <class G> __host__ __device__ inline int newton_schulz_tiles_per_matrix(int M, int N) {
    int num_rows = ceil_div(M, G::ROWS);
    return G::IS_KN ? num_rows * ceil_div(N, G::COLUMNS) : num_rows * (num_rows + 1) / 2;
}

// Adds to a form that tiles belong to many matrices, which follow one another.
template <class Form> struct NewtonSchulzTiles : Form {
    template <class G> static __device__ NewtonSchulzTile tile(int index, int M, int N, int) {
        int num_tiles = newton_schulz_tiles_per_matrix<G>(M, N), num_columns = ceil_div(N, G::COLUMNS);
        int matrix = index / num_tiles, row = index % num_tiles / num_columns, column = index % num_tiles % num_columns;
        if (!G::IS_KN) { newton_schulz_upper_tile(index % num_tiles, row, column); }
        return {{row * G::ROWS, column * G::COLUMNS}, matrix};
    }
};
// poly x: 192 divides 768 and 3072.
typedef NewtonSchulzTiles<GemmPingPong192<GemmSingle, true>> NewtonSchulzTiles192;
// Symmetric products have square tiles, so that a tile is on one side of the diagonal, or on it.
struct NewtonSchulzForm128 : GemmSingle {
    static constexpr int ROWS = 128, COLUMNS = 128, PARTS = 2, READERS = 4, RING = 5, BOXES = 4;
    static __device__ void wgmma(float (&sum)[64], uint64_t left, uint64_t right, bool accumulate) {
        wgmma_64x128x16(sum, left, right, accumulate, floatX());
    }
};
typedef NewtonSchulzTiles<NewtonSchulzForm128> NewtonSchulzTiles128;

// out = scale * sum + add_scale * third; of a symmetric product, a tile above the diagonal is also stored transposed.
template <bool is_symmetric> struct NewtonSchulzEpilogue : GemmBias<GEMM_NO_BIAS> {
    static constexpr int EXTRAS = GEMM_THIRD | GEMM_NO_BIAS | (is_symmetric ? GEMM_MIRRORED : 0);
    float scale, add_scale;
    // poly x always has a term to add
    __device__ bool reads_third() const { return !is_symmetric || add_scale != 0.0f; }
    __device__ float combined(float y, float third) const { return scale * y + add_scale * third; }

    // Stores a 128x128 tile transposed. results: the warp's boxes n = 2 m + q of 16x64 results, rows 64 m + 16 warp, columns
    // 64 q, as fragments. The consumer's memory is now one box of 64x64 per warp, number 2 q + m:
    //
    //     rows of the box: 64 columns of the tile    | warp 0 | warp 1 | warp 2 | warp 3 |     16 columns of the box, the
    //     from 64 q on                               |        |        |        |        |     16 rows of each warp's fragments
    __device__ void store_mirrored(const uint32_t (&results)[4][16], GemmSMem<NewtonSchulzTiles128>& smem,
                                   const CUtensorMap& map, const NewtonSchulzTile& tile) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, consumer = warp / 4, row = tile.row - warp % 4 * 16;
        if (row >= tile.column) { return; }
        if (lane == 0) { tma_store_wait<0>(); } // TMA has read this warp's boxes
        gemm_consumer_sync();
        // this lane's 16 bytes for stmatrix: row lane % 8 of matrix lane / 8, which are rows 0..7 and 8..15 of columns 0..7,
        // then of columns 8..15; swizzled
        uint32_t lane_at = (lane / 16 * 8 + lane % 8) * 128 + ((2 * (warp % 4) + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t at = shared_address(smem.boxes[4 * consumer + n % 2 * 2 + n / 2]) + lane_at;
#pragma unroll
            for (int p = 0; p < 4; p++) { stmatrix_x4_trans(at + p * 16 * 128, &results[n][4 * p]); }
        }
        tma_store_fence();
        gemm_consumer_sync();
        if (lane == 0) { // the box in this warp's memory
            tile.store(map, smem.boxes[warp], row + warp % 2 * 64, tile.column + warp % 4 / 2 * 64);
            tma_store_commit();
        }
    }
};

template <class G> void newton_schulz_product5(const NewtonSchulzProduct& p, const Execution& exec) {
    GemmMaps maps;
    maps.inp = tensor_map(p.left, {p.K, p.M, p.num}, {64, G::ROWS, 1});
    maps.weight = G::IS_KN ? tensor_map(p.right, {p.N, p.K, p.num}, {64, 64, 1})
                           : tensor_map(p.right, {p.K, p.N, p.num}, {64, G::COLUMNS, 1});
    maps.out = tensor_map(p.out, {p.N, p.M, p.num}, {64, 16, 1});
    maps.second = tensor_map(p.out, {p.N, p.M, p.num}, {64, 64, 1}); // for mirrored tiles
    maps.third = p.add ? tensor_map(p.add, {p.N, p.M, p.num}, {64, 16, 1}) : maps.out;
    NewtonSchulzEpilogue<!G::IS_KN> epilogue = {{NULL}, p.scale, p.add_scale};
    size_t num_tiles = (size_t)p.num * newton_schulz_tiles_per_matrix<G>(p.M, p.N);
    require(num_tiles * ceil_div(p.K, 64) <= INT_MAX / 2); // steps are counted in an int
    gemm_start<G>(gemm_sm90_kernel9<G, NewtonSchulzEpilogue<!G::IS_KN>>, (int)num_tiles, true, exec, maps, epilogue,
                  p.M, p.N, p.K, (int)num_tiles, GemmNoIdleWork());
}

void newton_schulz5(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    require(has_sm90a() && n % 8 == 0 && k % 8 == 0);
    newton_schulz_steps(out, scratch, inp, num, n, k, [=](const NewtonSchulzProduct& p) {
        p.right_by_k ? newton_schulz_product5<NewtonSchulzTiles192>(p, exec)
                     : newton_schulz_product5<NewtonSchulzTiles128>(p, exec);
    });
}
#endif

// Five steps of Newton-Schulz on num matrices (n,k); n <= k is the cheaper way round.
// out (num,n,k) | scratch (newton_schulz_scratch) | inp (num,n,k), of norms up to 1; may be the beginning of scratch
void newton_schulz(floatX* out, floatX* scratch, const floatX* inp, int num, int n, int k, const Execution& exec) {
    double N = n, K = k;
    Op op(exec, 2.0 * num * N * K * sizeof(floatX), 5.0 * num * (N * (N + 1) * (N + K) + 2 * N * N * K),
          "newton_schulz");
#if !defined(ENABLE_FP32)
    if (n % 8 == 0 && k % 8 == 0) {
        if (has_sm90a()) { return newton_schulz5(out, scratch, inp, num, n, k, exec); }
        if (compiled_arch(newton_schulz_kernel4<true, 4>) >= 80) {
            return newton_schulz4(out, scratch, inp, num, n, k, exec);
        }
    }
#endif
    newton_schulz2(out, scratch, inp, num, n, k, exec);
}
// ==== end promoted: newton_schulz ====

// ==== promoted: muon ====
// The momentum of a matrix is summed up in MUON_PARTS blocks, which leave the sum of squares of their part of u.
constexpr int MUON_PARTS = 256;
// x is written, and o is read, in tiles of 64x64, so that both sides of a transposition are coalesced.
constexpr int MUON_TILE = 64;

__device__ inline float muon_lookahead(float m, float grad, float grad_scale, float momentum) {
    return grad * grad_scale + momentum * m; // Nesterov: m after the next step if its gradient were the same
}

// m (num,size), parts (num,MUON_PARTS) | grads (num,size)
__global__ void __launch_bounds__(256) muon_momentum_kernel1(float* m, float* parts, const float* grads,
                                                             const StepState* state, size_t size, float momentum) {
    __shared__ float shared[32];
    if (!state->applied) { return; }
    float sum = 0.0f, grad_scale = state->grad_scale;
    m += blockIdx.y * size, grads += blockIdx.y * size;
    for (size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 4; i < size; i += (size_t)MUON_PARTS * 256 * 4) {
        f128 m4 = load128(m + i), g4 = load128(grads + i);
        for (int k = 0; k < 4; k++) {
            m4[k] = momentum * m4[k] + g4[k] * grad_scale;
            float u = muon_lookahead(m4[k], g4[k], grad_scale, momentum);
            sum += u * u;
        }
        store128(m + i, m4);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) { parts[blockIdx.y * MUON_PARTS + blockIdx.x] = sum; }
}

// Calls use(row, column) for the thread's elements of the block's tile, if they are inside; a warp has neighbouring
// columns.
template <class Use> __device__ inline void muon_for_tile(int row0, int column0, int rows, int cols, Use use) {
    int column = threadIdx.x % MUON_TILE;
#pragma unroll 4
    for (int row = threadIdx.x / MUON_TILE; row < MUON_TILE; row += 256 / MUON_TILE) {
        if (row0 + row < rows && column0 + column < cols) { use(row, column); }
    }
}

// x (num,n,k) | m, grads (num,rows,cols) | parts (num,MUON_PARTS)
__global__ void __launch_bounds__(256)
    muon_scale_kernel1(floatX* x, const float* m, const float* grads, const float* parts, const StepState* state,
                       int rows, int cols, float momentum) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1], shared[32];
    if (!state->applied) { return; }
    int num_columns = ceil_div(cols, MUON_TILE);
    int row0 = blockIdx.x / num_columns * MUON_TILE, column0 = blockIdx.x % num_columns * MUON_TILE;
    size_t matrix = (size_t)blockIdx.y * rows * cols;
    bool tall = rows > cols;
    float grad_scale = state->grad_scale;
    static_assert(MUON_PARTS == 256, "one part per thread");
    float inverse = 1.0f / (sqrtf(block_sum(parts[blockIdx.y * MUON_PARTS + threadIdx.x], shared)) + 1e-7f);
    muon_for_tile(row0, column0, rows, cols, [&](int row, int column) {
        size_t i = matrix + (size_t)(row0 + row) * cols + column0 + column;
        float u = inverse * muon_lookahead(m[i], grads[i], grad_scale, momentum);
        if (tall) {
            tile[row][column] = u;
        } else {
            x[i] = (floatX)u;
        }
    });
    if (!tall) { return; }
    __syncthreads(); // the tile is complete
    muon_for_tile(column0, row0, cols, rows, [&](int row, int column) {
        x[matrix + (size_t)(column0 + row) * rows + row0 + column] = (floatX)tile[column][row];
    });
}

// params, master (num,rows,cols) | o (num,n,k). seed: as in adamw, for random bits that depend on the place in params
__global__ void __launch_bounds__(256)
    muon_apply_kernel1(floatX* params, float* master, const floatX* o, const StepState* state, int rows, int cols,
                       float learning_rate, float weight_decay, uint32_t seed, size_t first) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1];
    if (!state->applied) { return; }
    int num_columns = ceil_div(cols, MUON_TILE);
    int row0 = blockIdx.x / num_columns * MUON_TILE, column0 = blockIdx.x % num_columns * MUON_TILE;
    size_t matrix = (size_t)blockIdx.y * rows * cols;
    bool tall = rows > cols;
    if (tall) {
        muon_for_tile(column0, row0, cols, rows, [&](int row, int column) {
            tile[column][row] = (float)o[matrix + (size_t)(column0 + row) * rows + row0 + column];
        });
        __syncthreads(); // the tile is complete
    }
    float keep = 1.0f - learning_rate * weight_decay;
    float rate = learning_rate * 0.2f * sqrtf((float)max(rows, cols));
    seed = adamw_seed(seed, state->num_updates);
    muon_for_tile(row0, column0, rows, cols, [&](int row, int column) {
        size_t i = matrix + (size_t)(row0 + row) * cols + column0 + column;
        float direction = tall ? tile[row][column] : (float)o[i];
        float p = keep * (master ? master[i] : (float)params[i]) - rate * direction;
        if (master) { master[i] = p; }
        params[i] = adamw_round(p, first + i, seed);
    });
}

static dim3 muon_tiles(int num, int rows, int cols) {
    require(num >= 1 && num <= 65535 && rows >= 1 && cols >= 1);
    return dim3(ceil_div(rows, MUON_TILE) * ceil_div(cols, MUON_TILE), num);
}

size_t muon_prepare_scratch(int num) { return (size_t)num * MUON_PARTS; } // in floats

// x (num,n,k) = the normalised momentum; m (num,rows,cols) is updated | scratch | grads (num,rows,cols)
void muon_prepare(floatX* x, float* m, float* scratch, const float* grads, const StepState* state, int num, int rows,
                  int cols, float momentum, const Execution& exec) {
    size_t size = (size_t)rows * cols;
    Op op(exec, (12.0 + sizeof(floatX)) * num * size, 0, "muon_prepare");
    require(size % 4 == 0 && ((size_t)m | (size_t)grads) % 16 == 0);
    dim3 tiles = muon_tiles(num, rows, cols);
    launch_kernel(muon_momentum_kernel1, LaunchShape(dim3(MUON_PARTS, num), 256), exec, m, scratch, grads, state, size,
                  momentum);
    launch_kernel(muon_scale_kernel1, LaunchShape(tiles, 256), exec, x, m, grads, scratch, state, rows, cols, momentum);
}

// params, master (num,rows,cols) | o (num,n,k). seed 0: params are rounded to nearest; else stochastically, as adamw
// does for a range of parameters that begins `first` values before params.
void muon_apply(floatX* params, float* master, const floatX* o, const StepState* state, int num, int rows, int cols,
                float learning_rate, float weight_decay, uint32_t seed, size_t first, const Execution& exec) {
    double bytes = (master ? 8.0 + sizeof(floatX) : 2.0 * sizeof(floatX)) + sizeof(floatX);
    Op op(exec, bytes * num * rows * cols, 0, "muon_apply");
    launch_kernel(muon_apply_kernel1, LaunchShape(muon_tiles(num, rows, cols), 256), exec, params, master, o, state,
                  rows, cols, learning_rate, weight_decay, seed, first);
}
// ==== end promoted: muon ====
#endif

#if PART == 0 || PART == 3
// ---- 6.4 kernels of attention ------------------------------------------------------------------
//     attention_forward   three kernels: fp32 arithmetic, tensor cores, Hopper
//     attention_backward  likewise

// ==== promoted: attention_forward ====
// out = softmax(scale * q k^T, causal) v without the T x T matrix. A tile of queries stays on chip while tiles of keys
// and values stream past. The softmax is online: each row keeps its running maximum m and its sum l of P = exp(score -
// m). When m grows, l and the output accumulator o += P v are rescaled; at the end out = o / l.
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691.

// ---- shared by kernels 6 to 27: the arguments of the launchers, and which block computes which tile ----

struct AttentionForwardArgs {
    floatX* out;       // (B,T,NH,HS)
    float* lse;        // (B,NH,T) or NULL
    const floatX* qkv; // (B,T,3,NH,HS)
    int B, T, HS, NH;
    float scale; // of the scores q k^T
};

struct AttentionForwardWork {
    int head; // 0 to B*NH - 1
    int tile; // tile of queries within the head
};

// The work of this block. Blocks start in the order of their index. Heads are processed in groups whose keys and values
// fit in L2 together. Within a group the tiles with the most keys come first, so that the last blocks to start are short.
__device__ inline AttentionForwardWork attention_forward_work(int num_heads, int num_tiles, int group) {
    int first = blockIdx.x / (group * num_tiles) * group;
    int rest = blockIdx.x % (group * num_tiles);
    int heads = min(group, num_heads - first);
    return {first + rest % heads, num_tiles - 1 - rest / heads};
}

// The number of heads per group: as many as have keys and values that fit a quarter of L2 together, but at least one.
inline int attention_forward_group(int T, int HS, int num_heads) {
    size_t bytes = (size_t)2 * T * HS * sizeof(floatX); // keys and values of one head
    size_t fit = (size_t)device_attribute(cudaDevAttrL2CacheSize) / 4 / bytes;
    return (int)(fit < 1 ? 1 : fit > (size_t)num_heads ? num_heads : fit);
}

// Launches kernel 6 or 15, with tiles of `rows` queries.
template <class Kernel> void attention_forward_launch(Kernel kernel, int rows, int shared_bytes,
                                                      const AttentionForwardArgs& a, const Execution& exec) {
    int num_heads = a.B * a.NH, group = attention_forward_group(a.T, a.HS, num_heads);
    launch_kernel(kernel, LaunchShape(num_heads * ceil_div(a.T, rows), 128, shared_bytes), exec, a.out, a.lse, a.qkv,
                  a.T, a.HS, a.NH, num_heads, group, LOG2E * a.scale);
}

// ---- kernel 6: fp32 arithmetic in register tiles, 128-bit accesses, heads in groups that fit in L2; any head size ----

// Rows are padded by 4 floats, so that consecutive rows start 4 banks apart: 8 lanes that read 16 bytes each from 8
// rows have no bank conflict.
template <int max_HS, int rows, int keys> struct AttentionForwardPlainSMem {
    float q[rows][max_HS + 4];
    float kv[keys][max_HS + 4]; // first the keys of a tile, then its values
    float p[rows][keys + 4];
};

// Loads rows first..first+rows-1 of src, which are `stride` elements apart, and stores them as floats. Rows past T
// become zeros. Columns past HS stay uninitialised: they only affect output columns that are not stored.
template <int max_HS, int rows> __device__ inline void
attention_forward_plain_load(float (*tile)[max_HS + 4], const floatX* src, int first, int T, int HS, size_t stride) {
    constexpr int VECTORS = max_HS / x128::size; // per row
#pragma unroll
    for (int i = 0; i < rows * VECTORS / 128; i++) {
        int row = (i * 128 + threadIdx.x) / VECTORS, d = (i * 128 + threadIdx.x) % VECTORS * x128::size;
        if (d >= HS) { continue; }
        x128 x = {};
        if (first + row < T) { x = load128(src + (first + row) * stride + d); }
        for (int j = 0; j < x128::size; j += 4) {
            store128(&tile[row][d + j], f128{(float)x[j], (float)x[j + 1], (float)x[j + 2], (float)x[j + 3]});
        }
    }
}

// The block has four warps, each with rows / 4 queries. The two half-warps of a warp own alternate queries. For each of
// its queries a thread holds keys / 16 columns of the scores and max_HS / 16 columns of the output.
template <int max_HS, int rows, int keys> __global__ void __launch_bounds__(128)
    attention_forward_kernel6(floatX* out, float* lse, const floatX* qkv, int T, int HS, int NH, int num_heads,
                              int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardPlainSMem<max_HS, rows, keys>*>(attention_forward_shared);
    constexpr int ROWS = rows / 8, KEYS = keys / 16, VECTORS = max_HS / 64; // per thread; a vector is 4 columns
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, rows), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * rows;
    size_t C = (size_t)NH * HS, stride = 3 * C;
    const floatX* src = qkv + b * T * stride + (size_t)h * HS;
    // this thread's rows are row0, row0 + 2, ...; its columns of the scores are tx, tx + 16, ...
    int tx = threadIdx.x % 16, row0 = threadIdx.x / 32 * (rows / 4) + threadIdx.x / 16 % 2;

    // m: running row maximum, times scale_log2; l: this thread's partial row sum of P
    float o[ROWS][4 * VECTORS] = {}, m[ROWS], l[ROWS] = {};
    for (int i = 0; i < ROWS; i++) { m[i] = -INFINITY; }
    attention_forward_plain_load<max_HS, rows>(smem.q, src, q0, T, HS, stride);
    int num_keys = min(q0 + rows, T);
    for (int k0 = 0; k0 < num_keys; k0 += keys) {
        __syncthreads(); // all warps have read the values of the previous tile
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + C, k0, T, HS, stride);
        __syncthreads();
        float s[ROWS][KEYS] = {};
        for (int d = 0; d < HS; d += 4) {
            f128 k[KEYS];
            for (int j = 0; j < KEYS; j++) { k[j] = load128(&smem.kv[tx + 16 * j][d]); }
            for (int i = 0; i < ROWS; i++) {
                f128 q = load128(&smem.q[row0 + 2 * i][d]);
                for (int j = 0; j < KEYS; j++) {
                    for (int e = 0; e < 4; e++) { s[i][j] = fmaf(q[e], k[j][e], s[i][j]); }
                }
            }
        }
        for (int i = 0; i < ROWS; i++) {
            int row = row0 + 2 * i;
            float row_max = -INFINITY;
            for (int j = 0; j < KEYS; j++) {
                if (k0 + tx + 16 * j > q0 + row) { s[i][j] = -INFINITY; }
                row_max = fmaxf(row_max, s[i][j]);
            }
            // m is finite from the first tile on, because every row sees key 0
            float new_m = fmaxf(m[i], lanes_max<16>(row_max) * scale_log2), rescale = exp2_approx(m[i] - new_m);
            m[i] = new_m, l[i] *= rescale;
            for (int j = 0; j < 4 * VECTORS; j++) { o[i][j] *= rescale; }
            for (int j = 0; j < KEYS; j++) {
                float p = exp2_approx(fmaf(s[i][j], scale_log2, -new_m));
                l[i] += p;
                smem.p[row][tx + 16 * j] = p;
            }
        }
        __syncthreads(); // all warps have read the keys
        attention_forward_plain_load<max_HS, keys>(smem.kv, src + 2 * C, k0, T, HS, stride);
        __syncthreads();
        for (int key = 0; key < keys; key += 4) {
            f128 p[ROWS];
            for (int i = 0; i < ROWS; i++) { p[i] = load128(&smem.p[row0 + 2 * i][key]); }
            for (int e = 0; e < 4; e++) {
                for (int j = 0; j < VECTORS; j++) {
                    f128 v = load128(&smem.kv[key + e][64 * j + 4 * tx]); // columns past HS are not stored below
                    for (int i = 0; i < ROWS; i++) {
                        for (int c = 0; c < 4; c++) { o[i][4 * j + c] = fmaf(p[i][e], v[c], o[i][4 * j + c]); }
                    }
                }
            }
        }
    }
    for (int i = 0; i < ROWS; i++) {
        l[i] = lanes_sum<16>(l[i]);
        int t = q0 + row0 + 2 * i;
        if (t >= T) { continue; }
        float inverse = 1.0f / l[i];
        floatX* dst = out + ((size_t)b * T + t) * C + (size_t)h * HS;
        for (int j = 0; j < VECTORS; j++) {
            x4 x;
            for (int c = 0; c < 4; c++) { x[c] = (floatX)(o[i][4 * j + c] * inverse); }
            if (64 * j + 4 * tx < HS) { *reinterpret_cast<x4*>(dst + 64 * j + 4 * tx) = x; }
        }
        if (lse && tx == 0) { lse[(size_t)work.head * T + t] = (m[i] + log2f(l[i])) * LN2; }
    }
}

template <int max_HS, int rows, int keys>
void attention_forward_plain_tiles(const AttentionForwardArgs& args, const Execution& exec) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardPlainSMem<max_HS, rows, keys>);
    static_assert(SHARED_BYTES <= 64 << 10, "the limit of compute capability 7.5");
    attention_forward_launch(attention_forward_kernel6<max_HS, rows, keys>, rows, SHARED_BYTES, args, exec);
}

// HS is a multiple of 8, at most 256.
void attention_forward_plain(const AttentionForwardArgs& args, const Execution& exec) {
    require(args.HS % 8 == 0 && args.HS <= 256);
    auto tiles = args.HS <= 64    ? attention_forward_plain_tiles<64, 64, 64>
                 : args.HS <= 128 ? attention_forward_plain_tiles<128, 32, 64>
                                  : attention_forward_plain_tiles<256, 32, 16>;
    tiles(args, exec);
}

#if !defined(ENABLE_FP32)
// ---- shared by kernels 11 to 16, tiles and products also by attention_backward: swizzled tiles, filled by cp.async; mma.sync ----
// Each warp owns 16 * row_tiles queries and processes `step` keys at a time. Rescaling is lazy: o and l are rescaled
// only when P of some row of the warp would exceed 2^slack.

// A tile has room for HS columns, a multiple of 16, which is the head size or more: columns past the head's are zeros, in the tile
// only. 64 is the head size itself, which costs fewer registers. Rows are this many elements apart, a multiple of 32.
template <int HS> constexpr int ATTENTION_FORWARD_PITCH = (HS + 31) / 32 * 32;
template <int HS> constexpr int ATTENTION_FORWARD_ROW_BYTES = ATTENTION_FORWARD_PITCH<HS> * sizeof(floatX);

// 64 * row_tiles queries, and two stages of `keys` keys and their values: one stage is read while the other is filled.
template <int HS, int row_tiles, int keys = 64> struct AttentionForwardMmaSMem {
    floatX q[64 * row_tiles * ATTENTION_FORWARD_PITCH<HS>]; // at the end each warp stages its output rows here
    floatX kv[2][2][keys * ATTENTION_FORWARD_PITCH<HS>];    // per stage: keys, then values
};

// The swizzle. Returns the element offset of 16-byte chunk `chunk` of row `row` in a tile. The chunks of a row are
// permuted by the row number, so that the same chunk of 8 consecutive rows, which ldmatrix reads at once, covers all 32
// banks. Position p of row r holds chunk p ^ (r % 8), as in TMA's 128-byte swizzle. If the pitch is no multiple of 64,
// it holds chunk p ^ (r / 2 % 4). The chunks at positions 0 to 7:
//
//     HS = 64    row 0    0 1 2 3 4 5 6 7
//                row 1    1 0 3 2 5 4 7 6
//                row 2    2 3 0 1 6 7 4 5
template <int HS> __device__ inline int attention_forward_at(int row, int chunk) {
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>;
    int permuted = PITCH % 64 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return row * PITCH + permuted * 8;
}

// Given the shared-memory address of chunk 0 or 1 of a row, returns the address 16 * d columns further in the same row.
// Rows are aligned to the group of 8 or 4 chunks within which they are permuted, so the swizzle is an xor of address bits.
template <int HS> __device__ inline uint32_t attention_forward_column(uint32_t address, int d) {
    constexpr int GROUP = ATTENTION_FORWARD_PITCH<HS> % 64 == 0 ? 4 : 2; // pairs of chunks
    return (address ^ (d % GROUP * 32)) + d / GROUP * GROUP * 32;
}

// Issues cp.async for rows first..first+rows-1 of src, which are `stride` elements apart, into a tile. Rows past T and columns past
// head_size become zeros. Called by whole groups of `threads` threads.
template <int HS, int rows, int threads = 128> __device__ inline void
attention_forward_load(floatX* tile, const floatX* src, int stride, int first, int T, int head_size = HS) {
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>;
    constexpr int LANES = PITCH % 64 == 0 ? 8 : 4, ROWS = threads / LANES; // lanes per row, rows per pass
    int row = threadIdx.x % threads / LANES, lane = threadIdx.x % LANES;
    src += (size_t)(first + row) * stride + lane * 8;
#pragma unroll
    for (int i = 0; i < rows; i += ROWS) {
#pragma unroll
        for (int c = 0; c < PITCH / 8; c += LANES) {
            cp_async_16(tile + attention_forward_at<HS>(row + i, c + lane), src + c * 8,
                        first + row + i < T && (c + lane) * 8 < head_size);
        }
        src += ROWS * stride;
    }
}

// The addresses that this lane passes to ldmatrix for the first 16 keys, or values, of a tile. ldmatrix.x4 reads 16 keys
// by 16 columns as four 8x8 matrices. Their (keys, columns), in the order in which mma takes them as operand b:
//     S = Q K^T: (0-7, 0-7) (0-7, 8-15) (8-15, 0-7) (8-15, 8-15)
//     P V:       (0-7, 0-7) (8-15, 0-7) (0-7, 8-15) (8-15, 8-15), each transposed
template <int HS> __device__ inline uint32_t attention_forward_k_address(const floatX* tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile + attention_forward_at<HS>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}
template <int HS> __device__ inline uint32_t attention_forward_v_address(const floatX* tile) {
    int lane = threadIdx.x % 32;
    return shared_address(tile + attention_forward_at<HS>(lane % 16, lane / 16));
}

// sum (16*M, 8*N) += a (16*M, 16) keys (8*N, 16)^T, with columns 16 * k to 16 * k + 15 of the keys, or, if `values`, += a (16*M, 16)
// values (16, 8*N), with values 16 * k to 16 * k + 15. a: operand fragments; address: of the first 16 keys, or values, as above. They
// are `shift` bytes further: with a constant shift, tiles at equal distances share the xors of the swizzle.
template <int HS, bool values, int M, int N> __device__ inline void
attention_forward_multiply(float (&sum)[M][N][4], const uint32_t (&a)[M][4], uint32_t address, int k, int shift = 0) {
    constexpr int ROW_BYTES = ATTENTION_FORWARD_ROW_BYTES<HS>;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4]; // b[0..1]: the operand for columns 0-7 of 16 columns of the sum; b[2..3]: for columns 8-15
        if (values) {
            ldmatrix_x4_trans(b, attention_forward_column<HS>(address, n / 2) + shift + 16 * k * ROW_BYTES);
        } else {
            ldmatrix_x4(b, attention_forward_column<HS>(address, k) + shift + 8 * n * ROW_BYTES);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma_16x8x16(sum[m][n], a[m], b[0], b[1], floatX());
            mma_16x8x16(sum[m][n + 1], a[m], b[2], b[3], floatX());
        }
    }
}

// rows[r] = factor * sum[r] for a warp's rows r < num_valid, 16 bytes at a time. `tile`: a staging area in shared memory, which only
// this warp has read.
template <int HS, int M> __device__ inline void attention_forward_store_rows(floatX* rows, int stride, int num_valid,
                                                                             const float (&sum)[M][HS / 8][4],
                                                                             float factor, floatX* tile,
                                                                             int head_size = HS) {
    __syncwarp();
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                const float* pair = &sum[m][n][2 * half_row];
                floatX* to = tile + attention_forward_at<HS>(16 * m + 8 * half_row + lane / 4, n) + lane % 4 * 2;
                *reinterpret_cast<uint32_t*>(to) = pack_16x2(factor * pair[0], factor * pair[1], floatX());
            }
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * M * HS / 8; i += 32) {
        int row = i / (HS / 8), chunk = i % (HS / 8);
        if (row < num_valid && chunk * 8 < head_size) {
            // int4 instead of load128 and store128, because the compiler splits those into 4-byte copies here
            *reinterpret_cast<int4*>(rows + (size_t)row * stride + chunk * 8) =
                *reinterpret_cast<const int4*>(tile + attention_forward_at<HS>(row, chunk));
        }
    }
}

// One lane's fragments for its warp's queries. In each 16x8 accumulator tile of mma.sync, lane 4g + t holds 4 floats:
//
//     columns          0   1     2   3     4   5     6   7
//     row g            lane 4g   4g + 1    4g + 2    4g + 3      c[0], c[1]
//     row g + 8        lane 4g   4g + 1    4g + 2    4g + 3      c[2], c[3]
//
// So a lane has two rows per 16 queries, g and g + 8, and shares each of them with the other three lanes of its quad.
template <int HS, int row_tiles> struct AttentionForwardState {
    uint32_t q[HS / 16][row_tiles][4];  // operand fragments of the queries
    float o[row_tiles][HS / 8][4] = {}; // accumulators of the output, not yet divided by l
    float m[row_tiles][2];              // per row, the maximum that P, o and l are relative to, times scale_log2
    float l[row_tiles][2] = {};         // per row, this lane's partial sum of P
};

// One step of the main loop, over `step` keys. k, v: the shared-memory addresses that this lane passes to ldmatrix for
// the first 16 keys and values. key: index of the first key relative to the warp's first query; only read if masked.
template <bool masked, int step, int slack, int HS, int row_tiles> __device__ inline void
attention_forward_step(AttentionForwardState<HS, row_tiles>& state, uint32_t k, uint32_t v, int key, float scale_log2) {
    int lane = threadIdx.x % 32;
    float s[row_tiles][step / 8][4] = {};
#pragma unroll
    for (int d = 0; d < HS / 16; d++) { attention_forward_multiply<HS, false>(s, state.q[d], k, d); }
    float new_m[row_tiles][2];
    bool grew = false;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = 16 * i + 8 * half_row + lane / 4;
            float row_max = -INFINITY;
#pragma unroll
            for (int n = 0; n < step / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& score = s[i][n][2 * half_row + e];
                    if (masked && key + 8 * n + lane % 4 * 2 + e > row) { score = -INFINITY; }
                    row_max = fmaxf(row_max, score);
                }
            }
            new_m[i][half_row] = quad_max(row_max) * scale_log2;
            grew |= new_m[i][half_row] > state.m[i][half_row] + slack;
        }
    }
    // between two rescales P can grow to 2^slack; o and l carry the same factor, which cancels in o / l
    if (__any_sync(0xFFFFFFFFu, grew)) {
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int half_row = 0; half_row < 2; half_row++) {
                // m is finite from the first step on, because every row sees key 0
                float m = fmaxf(state.m[i][half_row], new_m[i][half_row]),
                      rescale = exp2_approx(state.m[i][half_row] - m);
                state.m[i][half_row] = m, state.l[i][half_row] *= rescale;
#pragma unroll
                for (int n = 0; n < HS / 8; n++) {
                    state.o[i][n][2 * half_row] *= rescale, state.o[i][n][2 * half_row + 1] *= rescale;
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < step / 16; n++) {
        uint32_t p[row_tiles][4]; // P of 16 keys: two adjacent 16x8 accumulator tiles make one 16x16 operand fragment
#pragma unroll
        for (int i = 0; i < row_tiles; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* score = &s[i][2 * n + j / 2][j % 2 * 2];
                float p0 = exp2_approx(fmaf(score[0], scale_log2, -state.m[i][j % 2]));
                float p1 = exp2_approx(fmaf(score[1], scale_log2, -state.m[i][j % 2]));
                state.l[i][j % 2] += p0 + p1;
                p[i][j] = pack_16x2(p0, p1, floatX());
            }
        }
        attention_forward_multiply<HS, true>(state.o, p, v, n);
    }
}

// Loads the operand fragments of a warp's queries, whose tile in shared memory is warp_q, and starts m.
template <int HS, int row_tiles>
__device__ inline void attention_forward_start(AttentionForwardState<HS, row_tiles>& state, const floatX* warp_q) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int d = 0; d < HS / 16; d++) {
            ldmatrix_x4(state.q[d][i], warp_q + attention_forward_at<HS>(16 * i + lane % 16, 2 * d + lane / 16));
        }
        state.m[i][0] = state.m[i][1] = -INFINITY;
    }
}

// ---- kernel 15: mma.sync, steps of 32 keys, which need few enough registers for 3 blocks of 4 warps per SM up to HS = 64 ----
// `blocks` is the number of blocks per SM, `keys` the number of keys of a tile.

// Epilogue: divides a warp's output rows by l and stores them. `tile` is the warp's own slice of smem.q.
template <int HS, int row_tiles>
__device__ inline void attention_forward_store(floatX* out, float* lse, floatX* tile,
                                               AttentionForwardState<HS, row_tiles>& state, int row0, int T, int C,
                                               int head_size = HS) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < row_tiles; i++) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            int row = row0 + 16 * i + 8 * half_row + lane / 4;
            float l = quad_sum(state.l[i][half_row]), inverse = 1.0f / l;
            if (lse && lane % 4 == 0 && row < T) { lse[row] = (state.m[i][half_row] + log2f(l)) * LN2; }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                state.o[i][n][2 * half_row] *= inverse, state.o[i][n][2 * half_row + 1] *= inverse;
            }
        }
    }
    attention_forward_store_rows<HS>(out + (size_t)row0 * C, C, T - row0, state.o, 1.0f, tile, head_size);
}

template <int HS, int row_tiles, int step, int slack, int blocks, int keys>
__global__ void __launch_bounds__(128, blocks)
    attention_forward_kernel15(floatX* out, float* lse, const floatX* qkv, int T, int head_size, int NH, int num_heads,
                               int group, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = *reinterpret_cast<AttentionForwardMmaSMem<HS, row_tiles, keys>*>(attention_forward_shared);
    constexpr int ROWS = 64 * row_tiles;
    if (HS == 64) { head_size = HS; }
    AttentionForwardWork work = attention_forward_work(num_heads, ceil_div(T, ROWS), group);
    int b = work.head / NH, h = work.head % NH, q0 = work.tile * ROWS;
    out += ((size_t)b * T * NH + h) * head_size;
    int warp_row = threadIdx.x / 32 * 16 * row_tiles; // the warp's first query is q0 + warp_row
    int C = NH * head_size;
    const floatX* src = qkv + (size_t)b * T * 3 * C + h * head_size;
    int num_tiles = ceil_div(min(q0 + ROWS, T), keys), num_unmasked = q0 / keys;

    auto load = [&](int tile) { // of keys and values
        attention_forward_load<HS, keys>(smem.kv[tile % 2][0], src + C, 3 * C, tile * keys, T, head_size);
        attention_forward_load<HS, keys>(smem.kv[tile % 2][1], src + 2 * C, 3 * C, tile * keys, T, head_size);
        cp_async_commit();
    };
    attention_forward_load<HS, ROWS>(smem.q, src, 3 * C, q0, T, head_size);
    load(0);
    cp_async_wait<0>();
    __syncthreads();

    AttentionForwardState<HS, row_tiles> state;
    constexpr int ROW_BYTES = ATTENTION_FORWARD_ROW_BYTES<HS>, STAGE_BYTES = sizeof(smem.kv[0]);
    floatX* warp_q = smem.q + warp_row * ATTENTION_FORWARD_PITCH<HS>;
    attention_forward_start(state, warp_q);
    uint32_t k_address = attention_forward_k_address<HS>(smem.kv[0][0]);
    uint32_t v_address = attention_forward_v_address<HS>(smem.kv[0][1]);
    for (int tile = 0; tile < num_tiles; tile++) {
        if (tile > 0) {
            cp_async_wait<0>();
            __syncthreads(); // this tile has landed, and all warps have read the stage that the next load overwrites
        }
        if (tile + 1 < num_tiles) { load(tile + 1); }
        uint32_t k = k_address + tile % 2 * STAGE_BYTES, v = v_address + tile % 2 * STAGE_BYTES;
        // the tile's first key, relative to the warp's first query; no query of the warp sees a key whose relative
        // index is 16 * row_tiles or more
        int key = tile * keys - q0 - warp_row;
        auto steps = [&](auto is_diagonal) {
            constexpr bool masked = decltype(is_diagonal)::value;
#pragma unroll 1
            for (int j = 0; j < keys && (!masked || key + j < 16 * row_tiles); j += step) {
                attention_forward_step<masked, step, slack>(state, k + j * ROW_BYTES, v + j * ROW_BYTES, key + j,
                                                            scale_log2);
            }
        };
        tile < num_unmasked ? steps(std::false_type()) : steps(std::true_type());
    }
    attention_forward_store(out, lse ? lse + (size_t)work.head * T : nullptr, warp_q, state, q0 + warp_row, T, C,
                            head_size);
}

// args.HS is HS or, if that is not 64, less.
template <int HS, int row_tiles, int step, int slack, int blocks, int keys = 64>
void attention_forward_mma_tiles(const AttentionForwardArgs& args, const Execution& exec) {
    constexpr int SHARED_BYTES = sizeof(AttentionForwardMmaSMem<HS, row_tiles, keys>);
    static_assert(SHARED_BYTES <= 99 << 10, "the limit of compute capability 8.6");
    attention_forward_launch(attention_forward_kernel15<HS, row_tiles, step, slack, blocks, keys>, 64 * row_tiles,
                             SHARED_BYTES, args, exec);
}

// HS is a multiple of 8, at most 256.
void attention_forward_mma(const AttentionForwardArgs& args, const Execution& exec) {
    int HS = args.HS;
    require(HS % 8 == 0 && HS <= 256);
    auto tiles = HS <= 32    ? attention_forward_mma_tiles<32, 2, 32, 8, 3>
                 : HS <= 48  ? attention_forward_mma_tiles<48, 2, 32, 8, 3>
                 : HS == 64  ? attention_forward_mma_tiles<64, 2, 32, 8, 3>
                 : HS <= 80  ? attention_forward_mma_tiles<80, 2, 32, 8, 2>
                 : HS <= 96  ? attention_forward_mma_tiles<96, 2, 32, 8, 2>
                 : HS <= 128 ? attention_forward_mma_tiles<128, 1, 64, 8, 2>
                             : attention_forward_mma_tiles<256, 1, 32, 8, 1, 32>;
    tiles(args, exec);
}

// ---- sm_90a: shared by kernels 17 to 27: wgmma products, online softmax in registers, output by TMA ----
// HS = 64; kernel 25 also accepts HS = 128. A warpgroup owns 64 queries, 16 per warp. Loops over register arrays are
// unrolled explicitly, because the compiler puts an array with a run-time index into local memory.
// Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.

constexpr int ATTENTION_FORWARD_ROW = 64; // columns of a box: 128 bytes, the width of TMA's swizzle
// elements of a box: 64 columns of 64 queries, keys or values; with HS = 128 two boxes in a row hold all 128 columns
constexpr int ATTENTION_FORWARD_BOX = 64 * ATTENTION_FORWARD_ROW;
constexpr int ATTENTION_FORWARD_BOX_UNITS = ATTENTION_FORWARD_BOX * sizeof(floatX) / 16; // in the unit of descriptors

// Issues s = q k^T for 64 queries and 64 keys, or 128 keys with HS = 64, and does not wait. q, k: wgmma descriptors. With HS = 128, q
// is in boxes of q_rows rows. The previous contents of s are overwritten, and the compiler knows that they are dead.
template <int HS = 64, int q_rows = 64, int num_s>
__device__ inline void attention_forward_sm90_scores(float (&s)[num_s], uint64_t q, uint64_t k) {
    static_assert(num_s == 32 || HS == 64, "");
    if constexpr (num_s == 32) {
        wgmma_64x64x16_new(s, q, k, floatX());
    } else {
        wgmma_64x128x16_new(s, q, k, floatX());
    }
#pragma unroll
    for (int d = 1; d < HS / 16; d++) { // 16 columns are 32 bytes, and the descriptor counts in units of 16 bytes
        uint64_t a = q + d / 4 * (q_rows / 64 * ATTENTION_FORWARD_BOX_UNITS) + d % 4 * 2;
        uint64_t b = k + d / 4 * ATTENTION_FORWARD_BOX_UNITS + d % 4 * 2;
        if constexpr (num_s == 32) {
            wgmma_64x64x16(s, a, b, 1, floatX());
        } else {
            wgmma_64x128x16(s, a, b, 1, floatX());
        }
    }
}

// Issues o += P v for 4 * n keys, and does not wait. p: P as operand fragments in registers; v: wgmma descriptor, with
// HS = 128 of two boxes (wgmma_descriptor_transposed). num_o = HS / 2.
template <int num_o, int n>
__device__ inline void attention_forward_sm90_values(float (&o)[num_o], const uint32_t (&p)[n], uint64_t v) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) { // 16 keys are 2048 bytes: 128 of the descriptor's units
        if constexpr (num_o == 32) {
            wgmma_64x64x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
        } else {
            static_assert(num_o == 64, "HS is 64 or 128");
            wgmma_64x128x16_transposed(o, p + 4 * k, v + 128 * k, 1, floatX());
        }
    }
}

// The softmax state of a thread's two rows, g and g + 8 of its warp's 16, where lane = 4g + t. The wgmma accumulators s
// and o are 16x8 tiles side by side; of tile j (columns 8j..8j+7) each lane holds elements 4j..4j+3 of its array:
//
//     columns 8j +     0   1     2   3     4   5     6   7
//     row g            lane 4g   4g + 1    4g + 2    4g + 3      elements 4j, 4j + 1 (columns 8j + 2t, 8j + 2t + 1)
//     row g + 8        lane 4g   4g + 1    4g + 2    4g + 3      elements 4j + 2, 4j + 3 (the same columns)
//
// So element i belongs to row number i / 2 % 2 of the two, and the four lanes of a quad share a row.
struct AttentionForwardRows {
    float m[2];       // the maximum that P, o and l are relative to, times scale_log2
    float l[2];       // this thread's partial row sum of P
    float rescale[2]; // the factor by which o must be multiplied if the row maximum has grown in this step
    // Correction that is added to l before the final division. P V uses P rounded to 16 bits, but l sums P unrounded.
    // The correction covers two parts of the difference: the whole diagonal block, and each later row maximum, whose P
    // is 1 after rounding but was added to l as 1 + error.
    float rounding[2];
};

// Folds the scores s of a key block after the diagonal into the running row maximum, and rescales l. Returns true if o
// must be rescaled.
template <int num_s> __device__ inline bool attention_forward_sm90_max(const float (&s)[num_s],
                                                                       AttentionForwardRows& rows, float scale_log2) {
    float row_max[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}}; // two independent chains of fmaxf per row
#pragma unroll
    for (int i = 0; i < num_s; i++) { row_max[i / 2 % 2][i % 2] = fmaxf(row_max[i / 2 % 2][i % 2], s[i]); }
    float raw_m[2], new_m[2];
    bool grew = false;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float m = quad_max(fmaxf(row_max[half_row][0], row_max[half_row][1]));
        raw_m[half_row] = m, new_m[half_row] = m * scale_log2;
        grew |= new_m[half_row] > rows.m[half_row];
    }
    grew = __any_sync(0xFFFFFFFFu, grew);
    if (grew) {
#pragma unroll
        for (int half_row = 0; half_row < 2; half_row++) {
            float m = fmaxf(rows.m[half_row], new_m[half_row]);
            rows.rescale[half_row] = exp2_approx(rows.m[half_row] - m);
            rows.l[half_row] *= rows.rescale[half_row];
            // at the row maximum the exponent raw_m * scale_log2 - m is not 0 but the rounding error of m, so P is
            // 1 + LN2 * error there; each of the quad's four lanes adds a quarter of the correction
            float error = rows.m[half_row] < m ? fmaf(raw_m[half_row], scale_log2, -m) : 0;
            rows.rounding[half_row] = fmaf(rows.rounding[half_row], rows.rescale[half_row], error * (-LN2 / 4));
            rows.m[half_row] = m;
        }
    }
    return grew;
}

// Turns the scores s[first..end-1] into P = exp2(s * scale_log2 - m) in place, and adds P to l.
template <int num_s>
__device__ inline void attention_forward_sm90_exponents(float (&s)[num_s], AttentionForwardRows& rows, float scale_log2,
                                                        int first = 0, int end = num_s) {
#pragma unroll
    for (int i = first; i < end; i++) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -rows.m[i / 2 % 2]));
        rows.l[i / 2 % 2] += s[i];
    }
}

// Like attention_forward_sm90_exponents, for the diagonal block. group: index of the group of 16 keys that has the same
// positions as the warp's 16 queries. P of later groups is 0.
template <int num_s> __device__ inline void
attention_forward_sm90_diagonal_exponents(float (&s)[num_s], AttentionForwardRows& rows, int group, float scale_log2) {
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        if (n / 8 > group) {
#pragma unroll
            for (int i = n; i < n + 8; i++) { s[i] = 0; }
        } else {
            asm volatile(""); // makes the compiler keep the branch, so that hidden groups cost nothing
            attention_forward_sm90_exponents(s, rows, scale_log2, n, n + 8);
        }
    }
}

// Softmax of a tile's first key block, the one on the diagonal. Sets m, l and rescale. The warp's own group is the 16
// keys at the positions of its 16 rows, number `group` in the block. Every row sees all groups before the own group,
// and none after it. Only the own group needs a triangular mask (g = lane / 4; columns within the group):
//
//                      columns 0-7       columns 8-15
//     row g            column <= g       hidden
//     row g + 8        visible           column - 8 <= g
//
// The mask is added (0 or -1e38), because compares run at half the rate of fmaf and a branch makes the compiler copy s.
// Side effect: an infinite or NaN score in the own group is not hidden.
template <int num_s> __device__ inline void
attention_forward_sm90_diagonal(float (&s)[num_s], AttentionForwardRows& rows, int group, float scale_log2) {
    constexpr float HIDDEN = -1e38f;
    int lane = threadIdx.x % 32;
    // opaque to the compiler, so that it recomputes the masks in every tile instead of keeping them in registers
    asm volatile("" : "+r"(lane), "+r"(group));
    float mask[2] = {lane % 4 * 2 <= lane / 4 ? 0 : HIDDEN, lane % 4 * 2 + 1 <= lane / 4 ? 0 : HIDDEN};
    float row_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < num_s; n += 8) {
        float own = n / 8 == group ? 1.0f : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n + e] = fmaf(own, mask[e], s[n + e]);
            s[n + 4 + e] = fmaf(own, HIDDEN, s[n + 4 + e]);
            s[n + 6 + e] = fmaf(own, mask[e], s[n + 6 + e]);
        }
    }
    wgmma_hold(s); // makes the compiler mask in place, in the registers of s
    // s[i], s[i + 1], s[i + 4] and s[i + 5] are this lane's four scores of one row and one group of 16 keys
#pragma unroll
    for (int i = 0; i < num_s; i += i % 8 == 0 ? 2 : 6) {
        float m = fmaxf(fmaxf(s[i], s[i + 1]), fmaxf(s[i + 4], s[i + 5]));
        row_max[i / 2 % 2] = fmaxf(row_max[i / 2 % 2], i / 8 <= group ? m : -INFINITY);
    }
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        rows.m[half_row] = quad_max(row_max[half_row]) * scale_log2, rows.l[half_row] = 0, rows.rescale[half_row] = 1;
    }
    attention_forward_sm90_diagonal_exponents(s, rows, group, scale_log2);
}

// Sets rows.rounding after the diagonal block: the sum of the rounded P (p) minus the sum of the unrounded P (l).
template <int num_p> __device__ inline void attention_forward_sm90_rounding(AttentionForwardRows& rows,
                                                                            const uint32_t (&p)[num_p], int group) {
    rows.rounding[0] = -rows.l[0], rows.rounding[1] = -rows.l[1];
#pragma unroll
    for (int n = 0; n < num_p; n += 4) { // one group of 16 keys
        if (n / 4 <= group) {
            asm volatile(""); // makes the compiler keep the branch, so that hidden groups cost nothing
#pragma unroll
            for (int j = n; j < n + 4; j++) {
                float2 pair = unpack_16x2(p[j], floatX());
                rows.rounding[j % 2] += pair.x;
                rows.rounding[j % 2] += pair.y;
            }
        }
    }
}

// Multiplies the rows of o by rows.rescale.
template <int num_o>
__device__ inline void attention_forward_sm90_rescale(float (&o)[num_o], const AttentionForwardRows& rows) {
#pragma unroll
    for (int i = 0; i < num_o; i++) { o[i] *= rows.rescale[i / 2 % 2]; }
}

// Rounds P to 16 bits, as operand fragments: the two 16x8 accumulator tiles of 16 keys become the four registers of one
// 16x16 operand.
template <int num_p>
__device__ inline void attention_forward_sm90_pack(uint32_t (&p)[num_p], const float (&s)[2 * num_p]) {
#pragma unroll
    for (int i = 0; i < num_p; i++) { p[i] = pack_16x2(s[2 * i], s[2 * i + 1], floatX()); }
}

// Stores the log-sum-exp of a thread's two rows. lse: the T values of this sequence and head, or NULL; t: the warp's
// first token.
__device__ inline void attention_forward_sm90_lse(float* lse, const float (&l)[2], const float (&m)[2], int t, int T) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        int row = t + lane / 4 + 8 * half_row;
        if (lse && lane % 4 == 0 && row >= 0 && row < T) { lse[row] = (m[half_row] + log2f(l[half_row])) * LN2; }
    }
}

// Writes operand fragment x, a warp's 16 rows and 16 columns, to columns 16 * d to 16 * d + 15 of a tile (16,64) in shared memory, in
// TMA's 128-byte swizzle. Columns from 64 on are in a second tile, ATTENTION_FORWARD_BOX elements further.
__device__ inline void attention_forward_sm90_write(floatX* tile, int d, const uint32_t* x) {
    int lane = threadIdx.x % 32;
    // stmatrix.x4 stores four 8x8 matrices: rows 0-7 and rows 8-15 of two adjacent 16-byte chunks
    uint32_t address = shared_address(tile + attention_forward_at<64>(lane % 16, lane / 16));
    stmatrix_x4(attention_forward_column<64>(address, d % 4) + d / 4 * ATTENTION_FORWARD_BOX * sizeof(floatX), x);
}

// Writes a warp's 16 rows of o, multiplied by `inverse`, to such a tile, or with HS = 128 to two of them.
template <int num_o> __device__ inline void attention_forward_sm90_to_shared(floatX* tile, const float (&o)[num_o],
                                                                             const float (&inverse)[2]) {
#pragma unroll
    for (int d = 0; d < num_o / 8; d++) { // 16 columns at a time
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            r[e] = pack_16x2(o[8 * d + 2 * e] * inverse[e % 2], o[8 * d + 2 * e + 1] * inverse[e % 2], floatX());
        }
        attention_forward_sm90_write(tile, d, r);
    }
}

// Divides a warp's 16 rows, tokens t..t+15, by their sums l and stores them by TMA. t < 0 is padding and is not stored.
// `tile` is this warp's staging area in shared memory; it must not be written again before tma_store_wait.
template <int num_o> __device__ inline void attention_forward_sm90_store(const CUtensorMap& out_map, floatX* tile,
                                                                         const float (&o)[num_o], const float (&l)[2],
                                                                         int t, int h, int b) {
    attention_forward_sm90_to_shared(tile, o, {1.0f / l[0], 1.0f / l[1]});
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && t >= 0) { // TMA rejects a box that is entirely before the tensor
#pragma unroll
        for (int j = 0; j < num_o / 32; j++) {
            tma_store_4d(&out_map, tile + j * ATTENTION_FORWARD_BOX, 0, num_o / 32 * h + j, t, b);
        }
        tma_store_commit();
    }
}

// The static tile scheduler of a persistent block. In each round every block takes one pair of tiles, a long one and a
// short one, chosen so that all pairs are equal work. With 4 tiles per head, where tile i sees the keys of tiles 0 to
// i, two heads A and B make four pairs, each of which sees 5 tiles of keys:
//
//     block      0         1         2         3
//                A3 B0     B3 A0     A2 B1     B2 A1
//
// In the last rounds every block takes single tiles, the longest first, with the order of the blocks reversed in every
// other round. Pairs alone would leave blocks idle at the end: at B = 64, T = 1024, NH = 12 they fill 11.6 rounds of
// 132 blocks.
struct AttentionForwardList {
    int num_heads, num_tiles, num_paired; // num_tiles: tiles per head; the first num_paired heads are split into pairs
    int position;                         // 2 * number of rounds done, + 1 if the second tile of a pair comes next
    int head, tile;                       // the current tile
};
// Advances to the next tile. Returns false at the end.
__device__ inline bool attention_forward_next_tile(AttentionForwardList& list) {
    list.position++;
    if (list.position % 2 == 0) {
        list.head ^= 1, list.tile = list.num_tiles - 1 - list.tile;
        return true;
    }
    int blocks = gridDim.x, block = blockIdx.x, round = list.position / 2, first = round * blocks;
    // number of pairs; a pair takes its two tiles from two heads, because num_tiles may be odd
    int paired = list.num_paired / 2 * list.num_tiles;
    if (first + block < paired) {
        int two_heads = (first + block) / list.num_tiles;
        // + two_heads, so that no block gets the same pair in every round when num_tiles divides the number of blocks
        int pair = (first + block + two_heads) % list.num_tiles;
        list.head = 2 * two_heads + pair % 2, list.tile = list.num_tiles - 1 - pair / 2;
        return true;
    }
    list.position++;
    int whole = ceil_div(paired, blocks); // the first round in which all blocks take single tiles
    bool backwards = round > whole && (round - whole) % 2 == 1;
    int single = first + (backwards ? blocks - 1 - block : block) - paired, heads = list.num_heads - list.num_paired;
    if (single >= heads * list.num_tiles) { return false; } // this block gets no tile in later rounds either
    list.head = list.num_paired + single % heads, list.tile = list.num_tiles - 1 - single / heads;
    return true;
}

// The scheduler state before the first tile, for a grid of num_blocks.
inline AttentionForwardList attention_forward_list(int num_heads, int num_tiles, int num_blocks) {
    // number of rounds of pairs; the last 2 to 3 rounds' worth of pairs become single tiles
    int rounds = max(num_heads * num_tiles / 2 / num_blocks - 2, 0);
    return {num_heads, num_tiles, rounds * num_blocks / num_tiles * 2, 0, 0, 0};
}

// ---- kernel 25: one producer, four independent consumer warpgroups, steps of 64 keys; 27: three in ping-pong, 128 keys ----
// One persistent block per SM takes tiles of 256 queries, or of 128 if there are few tiles. One producer thread fills a
// ring of keys and values by TMA. Each consumer warpgroup owns 64 queries of the tile and walks over their keys, the
// diagonal first. With HS = 128, o takes twice the registers: three consumer warpgroups take tiles of 192 queries.
// Example: the tile of queries 256..511, in steps of 64 keys (d: diagonal, s: later step, -: skipped):
//
//     key block             7  6  5  4  3  2  1  0
//     queries 448..511      d  s  s  s  s  s  s  s       warpgroup 3, in the next tile warpgroup 0
//     queries 384..447      -  d  s  s  s  s  s  s       warpgroup 2, in the next tile warpgroup 1
//     queries 320..383      -  -  d  s  s  s  s  s       warpgroup 1, in the next tile warpgroup 2
//     queries 256..319      -  -  -  d  s  s  s  s       warpgroup 0, in the next tile warpgroup 3
//
// No barrier couples the consumers of kernel 25. Within the length of the ring each runs at its own pace, so that the softmax of one
// warpgroup is hidden behind the products of the others. Step i of one warpgroup over time:
//
//     tensor cores     S = q k_i^T     o += P v_(i-1)         (free for the other warpgroups)
//     other units      wait            row maximum of S       rescale o, P = exp2(S - m), sum, pack
//
// Kernel 27 is for long sequences with HS = 64. It has three consumer warpgroups, and steps of 128 keys halve the reads of q.
// The warpgroups alternate in issuing products (ping-pong), so that one computes its softmax during the products of the others.

// A tile, as the producer announces it to the consumers. Tiles are aligned to the end of the sequence, so that
// first_group, the tile's first group of 64 queries, is negative if the tile is partial.
struct AttentionForwardTile {
    int b; // sequence; negative: there are no more tiles
    int h, first_group;
};

// `groups` is the number of groups of 64 queries per tile; each consumer warpgroup owns one group. The struct takes
// 225 KB with four groups, and with three groups of HS = 128; 200 KB in kernel 27. A full barrier is completed by the producer's loads, and the
// consumers wait for it. At an empty barrier the consumer warps arrive, and the producer waits for it.
template <int groups, int head_size = 64, int keys = 64, bool in_turn = false> struct AttentionForwardSMem {
    static_assert(head_size == 64 || (head_size == 128 && keys == 64 && !in_turn),
                  "with HS = 128, named barriers 1 to 3 guard q");
    static constexpr int GROUPS = groups, HS = head_size, KEYS = keys; // KEYS: keys per step
    static constexpr bool IN_TURN = in_turn;
    static constexpr int SIZE = HS / 64 * ATTENTION_FORWARD_BOX; // elements of 64 queries, keys or values
    static constexpr unsigned STAGES = 512 / HS * 64 / KEYS;     // of the ring; a stage has KEYS keys and their values
    // With HS = 128 there is no room for `out`: a warp stages its output in q, in place of its own queries.
    static constexpr bool STAGED_IN_Q = HS == 128;
    floatX q[2][groups * SIZE];                  // queries of this tile and the next
    floatX kv[STAGES][2][KEYS / 64 * SIZE];      // per stage: keys, then values
    floatX out[STAGED_IN_Q ? 1 : groups * SIZE]; // 16 rows per warp: staging area of its output
    AttentionForwardTile tiles[2];
    uint64_t q_full[2], q_empty[2], full[STAGES], empty[STAGES];
};

// Initialises the barriers. Called by the whole block.
template <class SMem> __device__ inline void attention_forward_sm90_init(SMem& smem) {
    constexpr int CONSUMER_WARPS = 4 * SMem::GROUPS;
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.q_empty[j], CONSUMER_WARPS);
        }
        for (unsigned j = 0; j < smem.STAGES; j++) {
            mbarrier_init(&smem.full[j], 1);
            mbarrier_init(&smem.empty[j], CONSUMER_WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

// wgmma descriptors of the keys (values) of step i; kv is the descriptor of stage 0.
template <class SMem> __device__ inline uint64_t attention_forward_sm90_key_descriptor(uint64_t kv, unsigned i) {
    return kv + i % SMem::STAGES * (sizeof(SMem::kv[0]) / 16);
}
template <class SMem> __device__ inline uint64_t attention_forward_sm90_value_descriptor(uint64_t kv, unsigned i) {
    // changes bits 16 to 29 from wgmma_descriptor's 1 to the leading offset of wgmma_descriptor_transposed
    constexpr uint64_t LEADING = SMem::HS == 64 ? 0 : (uint64_t)(ATTENTION_FORWARD_BOX_UNITS - 1) << 16;
    return attention_forward_sm90_key_descriptor<SMem>(kv, i) + (LEADING + sizeof(SMem::kv[0][0]) / 16);
}

// The producer thread. Producer and consumers keep the same two counters: n counts tiles, i counts steps over all tiles.
template <class SMem> __device__ inline void attention_forward_sm90_producer(SMem& smem, const CUtensorMap& qkv_map,
                                                                             int T, int NH, AttentionForwardList list) {
    // BOXES: boxes per 64 queries, keys or values; PARTS: groups of 64 keys in a step
    constexpr int BOXES = SMem::HS / 64, PARTS = SMem::KEYS / 64, groups = SMem::GROUPS;
    unsigned i = 0, n = 0;
#pragma unroll 1
    for (; attention_forward_next_tile(list); n++) {
        int b = list.head / NH, h = list.head % NH;
        int first_group = ceil_div(T, 64) - groups * (list.num_tiles - list.tile);
        mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
        smem.tiles[n % 2] = {b, h, first_group};
        mbarrier_arrive_expect(&smem.q_full[n % 2], sizeof(smem.q[0]));
        for (int j = 0; j < groups * BOXES; j++) {
            tma_load_4d(smem.q[n % 2] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0, h * BOXES + j % BOXES,
                        (first_group + j / BOXES) * 64, b, &smem.q_full[n % 2]);
        }
#pragma unroll 1
        for (int block = (first_group + groups - 1) / PARTS; block >= 0; block--, i++) {
            unsigned stage = i % smem.STAGES;
            mbarrier_wait(&smem.empty[stage], (i / smem.STAGES + 1) % 2);
            mbarrier_arrive_expect(&smem.full[stage], sizeof(smem.kv[0]));
#pragma unroll
            for (int j = 0; j < 2 * BOXES * PARTS; j++) {
                int box = j / PARTS, group = block * PARTS + j % PARTS;
                tma_load_4d(smem.kv[stage][0] + j * ATTENTION_FORWARD_BOX, &qkv_map, 0,
                            ((box / BOXES + 1) * NH + h) * BOXES + box % BOXES, group * 64, b, &smem.full[stage]);
            }
        }
    }
    mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
    smem.tiles[n % 2] = {-1, 0, 0}; // announces that there are no more tiles
    mbarrier_arrive(&smem.q_full[n % 2]);
}

// A consumer warpgroup's 64 queries of a tile.
struct AttentionForwardQueries {
    int b, h, group; // group: index of the 64 queries in the sequence; negative for padding, which is not stored
    int num_steps;   // number of steps that contain keys they see; 1 for padding
    floatX* tile;    // the queries
    uint64_t q;      // their wgmma descriptor
};

// Begin and end a warpgroup's turn to issue products, if SMem::IN_TURN. A warpgroup takes one turn for each step of the ring,
// also for steps that it skips, so that the barriers stay matched. The last P V of a tile is issued outside of a turn.
template <class SMem> __device__ inline void attention_forward_sm90_turn_begin(int warpgroup) {
    if (SMem::IN_TURN) { named_barrier_sync(1 + warpgroup, 256); }
}
template <class SMem> __device__ inline void attention_forward_sm90_turn_end(int warpgroup) {
    if (SMem::IN_TURN) { named_barrier_arrive(1 + (warpgroup + 1) % SMem::GROUPS, 256); }
}

// Waits for tile n, and skips the steps of the ring whose keys only other warpgroups see. Returns false if there is no
// tile n.
template <class SMem> __device__ inline bool attention_forward_sm90_next_queries(AttentionForwardQueries& queries,
                                                                                 SMem& smem, int warpgroup, unsigned n,
                                                                                 unsigned& i) {
    constexpr int PARTS = SMem::KEYS / 64, groups = SMem::GROUPS;
    mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
    AttentionForwardTile tile = smem.tiles[n % 2];
    queries.b = warp_uniform(tile.b), queries.h = warp_uniform(tile.h);
    int first_group = warp_uniform(tile.first_group);
    if (queries.b < 0) { return false; }
    // later queries see more keys, so the order of the warpgroups is reversed from tile to tile
    int place = n % 2 ? groups - 1 - warpgroup : warpgroup;
    queries.group = first_group + place;
    queries.num_steps = max(queries.group / PARTS + 1, 1); // padding before the start of a sequence costs one step
    queries.tile = smem.q[n % 2] + place * smem.SIZE;
    queries.q = wgmma_descriptor(queries.tile);
#pragma unroll 1
    for (int skip = (first_group + groups - 1) / PARTS + 1 - queries.num_steps; skip > 0; skip--, i++) {
        mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
        if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[i % smem.STAGES]); }
        attention_forward_sm90_turn_begin<SMem>(warpgroup);
        attention_forward_sm90_turn_end<SMem>(warpgroup);
    }
    return true;
}

// The first step of a tile, step i of the ring, which contains the diagonal: computes P of its keys into p.
template <class SMem, int num_s, int num_p>
__device__ inline void attention_forward_sm90_first_step(float (&s)[num_s], uint32_t (&p)[num_p],
                                                         AttentionForwardRows& rows, SMem& smem,
                                                         const AttentionForwardQueries& queries, uint64_t kv,
                                                         unsigned i, int warpgroup, float scale_log2) {
    mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
    attention_forward_sm90_turn_begin<SMem>(warpgroup);
    wgmma_fence();
    attention_forward_sm90_scores<SMem::HS>(s, queries.q, attention_forward_sm90_key_descriptor<SMem>(kv, i));
    wgmma_commit();
    attention_forward_sm90_turn_end<SMem>(warpgroup);
    wgmma_wait<0>();
    wgmma_hold(s);
    // index in the step of the 16 keys at the positions of this warp's queries; & because group is negative for padding
    int own = (queries.group & (SMem::KEYS / 64 - 1)) * 4 + threadIdx.x / 32 % 4;
    attention_forward_sm90_diagonal(s, rows, own, scale_log2);
    attention_forward_sm90_pack(p, s);
    attention_forward_sm90_rounding(rows, p, own);
}

// Step i: the scores of the next keys, and P V of step i - 1, which overlaps with the search for the new row maximum.
// The exponentials take longest. P V is waited for before they begin, so that the compiler can interleave rescaling,
// sums and packing with them.
template <class SMem, int num_s, int num_p, int num_o>
__device__ inline void attention_forward_sm90_step(float (&s)[num_s], uint32_t (&p)[num_p], float (&o)[num_o],
                                                   AttentionForwardRows& rows, SMem& smem, uint64_t q, uint64_t kv,
                                                   unsigned i, int warpgroup, float scale_log2) {
    mbarrier_wait(&smem.full[i % smem.STAGES], i / smem.STAGES % 2);
    attention_forward_sm90_turn_begin<SMem>(warpgroup);
    wgmma_fence();
    attention_forward_sm90_scores<SMem::HS>(s, q, attention_forward_sm90_key_descriptor<SMem>(kv, i));
    wgmma_commit();
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor<SMem>(kv, i - 1));
    wgmma_commit();
    attention_forward_sm90_turn_end<SMem>(warpgroup);
    wgmma_wait<1>();
    wgmma_hold(s);
    bool grew = attention_forward_sm90_max(s, rows, scale_log2);
    wgmma_wait<0>();
    wgmma_hold(o);
    wgmma_hold(p);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.empty[(i - 1) % smem.STAGES]); }
    if (grew) { attention_forward_sm90_rescale(o, rows); }
    attention_forward_sm90_exponents(s, rows, scale_log2);
    attention_forward_sm90_pack(p, s);
}

// The end of tile n: P V of its last step, i - 1, and lse. Adds rows.rounding to rows.l, which is then the divisor of
// o. t: the warp's first token. On return the warp's staging area for the output is free, and the queries have been read.
template <class SMem, int num_p, int num_o>
__device__ inline void attention_forward_sm90_last_product(float (&o)[num_o], uint32_t (&p)[num_p],
                                                           AttentionForwardRows& rows, SMem& smem,
                                                           const AttentionForwardQueries& queries, uint64_t kv,
                                                           unsigned n, unsigned i, float* lse, int t, int T, int NH) {
    int lane = threadIdx.x % 32;
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, attention_forward_sm90_value_descriptor<SMem>(kv, i - 1));
    wgmma_commit();
    quad_sums(rows.l);
    quad_sums(rows.rounding);
    attention_forward_sm90_lse(lse ? lse + ((size_t)queries.b * NH + queries.h) * T : nullptr, rows.l, rows.m, t, T);
    rows.l[0] += rows.rounding[0], rows.l[1] += rows.rounding[1];
    if (!smem.STAGED_IN_Q && lane == 0) {
        mbarrier_arrive(&smem.q_empty[n % 2]);
        tma_store_wait<0>(); // TMA has read the previous tile's output from the staging area
    }
    __syncwarp();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (lane == 0) { mbarrier_arrive(&smem.empty[(i - 1) % smem.STAGES]); }
    // PTX does not say which rows each warp reads: none overwrites its queries before all four have finished their products
    if (smem.STAGED_IN_Q) { named_barrier_sync(1 + threadIdx.x / 128, 128); }
}

// The number of this warp's consumer warpgroup, computed by warp votes, so that the compiler knows it is warp-uniform
// and keeps what depends on it in uniform registers.
__device__ inline int attention_forward_sm90_warpgroup() {
    return (__any_sync(0xFFFFFFFFu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xFFFFFFFFu, threadIdx.x & 256) ? 2 : 0);
}

// A consumer warp, over all tiles of the block.
template <class SMem> __device__ inline void
attention_forward_sm90_consumer(SMem& smem, const CUtensorMap& out_map, float* lse, int T, int NH, float scale_log2) {
    int warpgroup = attention_forward_sm90_warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (warpgroup == SMem::GROUPS - 1) {
        attention_forward_sm90_turn_end<SMem>(warpgroup);
    } // gives warpgroup 0 the first turn
    uint64_t kv = wgmma_descriptor(smem.kv[0][0]);
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        AttentionForwardQueries queries;
        if (!attention_forward_sm90_next_queries(queries, smem, warpgroup, n, i)) { break; }
        float s[SMem::KEYS / 2], o[SMem::HS / 2];
        uint32_t p[SMem::KEYS / 4];
        AttentionForwardRows rows;
        attention_forward_sm90_first_step(s, p, rows, smem, queries, kv, i, warpgroup, scale_log2);
        // this warp's staging area
        floatX* out = smem.STAGED_IN_Q ? queries.tile + warp * 16 * ATTENTION_FORWARD_ROW
                                       : smem.out + threadIdx.x / 32 * 16 * ATTENTION_FORWARD_ROW;
        if (smem.STAGED_IN_Q && lane == 0 && n > 0) {
            tma_store_wait<0>(); // TMA has read the previous tile's output from the place of its queries
            mbarrier_arrive(&smem.q_empty[(n - 1) % 2]);
        }
        int t = queries.group * 64 + warp * 16;
#pragma unroll
        for (int j = 0; j < SMem::HS / 2; j++) { o[j] = 0; }
        i++;
#pragma unroll 1
        for (int step = 1; step < queries.num_steps; step++, i++) {
            attention_forward_sm90_step(s, p, o, rows, smem, queries.q, kv, i, warpgroup, scale_log2);
        }
        attention_forward_sm90_last_product(o, p, rows, smem, queries, kv, n, i, lse, t, T, NH);
        attention_forward_sm90_store(out_map, out, o, rows.l, t, queries.h, queries.b);
    }
    if (warpgroup == 0) {
        attention_forward_sm90_turn_begin<SMem>(warpgroup);
    } // consumes the last arrival at barrier 1
    if (lane == 0) { tma_store_wait<0>(); }
}

template <class SMem> __global__ void __launch_bounds__(128 * (SMem::GROUPS + 1), 1)
    attention_forward_sm90_kernel25(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                    AttentionForwardList list, float scale_log2,
                                    const __grid_constant__ CUtensorMap out_map) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    if (threadIdx.x == 0) { tma_prefetch_map(&qkv_map), tma_prefetch_map(&out_map); }
    constexpr int groups = SMem::GROUPS;
    auto& smem = shared_aligned_1024<SMem>(attention_forward_shared);
    attention_forward_sm90_init(smem);
    grid_launch_dependents(); // programmatic dependent launch: the next kernel's blocks start as blocks of this one end
    grid_wait_dependency();   // wait for the end of the previous kernel, whose results this one reads
    if (threadIdx.x < 128 * groups) {
        // registers per thread, with four groups: 4 consumer warpgroups * 112 + 32 for the producer warpgroup is the
        // 5 * 96 that the launch allocated; with three: 3 * 160 + 32 is 4 * 128
        warpgroup_more_registers<groups == 4 ? 112 : groups == 3 ? 160 : 208>();
        attention_forward_sm90_consumer(smem, out_map, lse, T, NH, scale_log2);
    } else {
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 128 * groups) { attention_forward_sm90_producer(smem, qkv_map, T, NH, list); }
    }
}

template <int groups, int HS = 64, int keys = 64, bool in_turn = false>
void attention_forward_sm90_launch(const AttentionForwardArgs& a, const Execution& exec) {
    typedef AttentionForwardSMem<groups, HS, keys, in_turn> SMem;
    constexpr int SHARED_BYTES = sizeof(SMem) + 1024;
    static_assert(SHARED_BYTES <= 227 << 10, "the limit of compute capability 9.0");
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * a.NH * (HS / 64), 64);
    CUtensorMap out_map = tensor_map_heads(a.out, a.B, a.T, a.NH * (HS / 64), 16);
    int num_tiles = ceil_div(a.T, 64 * groups), num_blocks = min(a.B * a.NH * num_tiles, exec.free_sms());
    AttentionForwardList list = attention_forward_list(a.B * a.NH, num_tiles, num_blocks);
    launch_early(attention_forward_sm90_kernel25<SMem>, dim3(num_blocks), dim3(128 * (groups + 1)), SHARED_BYTES, exec,
                 a.lse, qkv_map, a.T, a.NH, list, LOG2E * a.scale, out_map);
}

// Groups of 64 queries per tile: as many as the registers allow, or 2 when there are fewer tiles than SMs, which shortens
// the longest tile.
inline int attention_forward_sm90_groups(int B, int T, int NH, int HS = 64) {
    int most = HS == 64 ? 4 : 3;
    return B * NH * ceil_div(T, 64 * most) < num_multiprocessors() ? 2 : most;
}

// Requires sm_90a. HS is 64 or 128.
void attention_forward_sm90(const AttentionForwardArgs& args, const Execution& exec) {
    int groups = attention_forward_sm90_groups(args.B, args.T, args.NH, args.HS);
    auto launch = groups == 4     ? attention_forward_sm90_launch<4>
                  : args.HS == 64 ? attention_forward_sm90_launch<2>
                  : groups == 3   ? attention_forward_sm90_launch<3, 128>
                                  : attention_forward_sm90_launch<2, 128>;
    launch(args, exec);
}
#endif

// The number of the kernel that attention_forward() runs; see the table below.
int attention_forward_choice(int B, int T, int NH, int HS) {
#if !defined(ENABLE_FP32)
    if ((HS == 64 || HS == 128) && has_sm90a()) {
        return HS == 64 && T >= 4096 && attention_forward_sm90_groups(B, T, NH) > 2 ? 27 : 25;
    }
    if (compiled_arch(attention_forward_kernel15<64, 2, 32, 8, 3, 64>) >= 80) { return 15; }
#endif
    (void)B, (void)T, (void)NH, (void)HS;
    return 6;
}

// out (B,T,NH,HS) | lse (B,NH,T) or NULL | qkv (B,T,3,NH,HS). C = NH * HS. All pointers are aligned to 16 bytes.
// The kernel depends on the head size, the precision, the architecture of the code that the binary has for this device,
// and the sequence length:
//
//     HS                        bf16, fp16:  sm_90a (H100)   8.0 and up (A100)   older          fp32
//     64, T >= 4096, tiles for all SMs       kernel 27       kernel 15           kernel 6       kernel 6
//     64, 128                                kernel 25       kernel 15           kernel 6       kernel 6
//     other multiples of 8, up to 256        kernel 15       kernel 15           kernel 6       kernel 6
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH, float scale,
                       const Execution& exec) {
    double bytes = (4.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
    Op op(exec, bytes, 2.0 * B * T * T * C, "attention_forward");
    require(NH > 0 && C % NH == 0);
    int HS = C / NH;
    require(HS % 8 == 0 && HS <= 256);
    require((size_t)B * NH * ceil_div(T, 16) <= INT_MAX);
    int kernel = attention_forward_choice(B, T, NH, HS);
    auto launch = attention_forward_plain; // kernel 6
#if !defined(ENABLE_FP32)
    if (kernel == 15) { launch = attention_forward_mma; }
    if (kernel == 25) { launch = attention_forward_sm90; }
    if (kernel == 27) { launch = attention_forward_sm90_launch<3, 64, 128, true>; }
#endif
    launch({out, lse, qkv, B, T, HS, NH, scale}, exec);
}
// ==== end promoted: attention_forward ====

// ==== promoted: attention_backward ====
// ---- shared by kernels 3 to 11: the arguments of the launchers, and the size of scratch, which is the same on all devices ----

struct AttentionBackwardArgs {
    floatX* dqkv;                   // (B,T,3,NH,HS)
    float* dbias;                   // (3,NH,HS) or NULL
    float* scratch;                 // attention_backward_scratch() floats; kernels 3 and 7: dsum (B,NH,T)
    const floatX *dout, *qkv, *out; // (B,T,NH,HS), (B,T,3,NH,HS), (B,T,NH,HS)
    const float* lse;               // (B,NH,T)
    int B, T, C, NH;
    float scale; // of the scores q k^T
};

inline bool attention_backward_accepts_sm90(int HS) { return sizeof(floatX) == 2 && (HS == 64 || HS == 128); }

constexpr int ATTENTION_BACKWARD_LEAST_QUERIES = 16; // per block of kernel 11's first kernel

// The sizes in floats of kernel 11's scratch and of its first part, the terms of dbias. 0 if kernel 11 does not accept HS.
size_t attention_backward_sm90_terms(int B, int T, int NH, int HS) {
    size_t tiles = (size_t)B * NH * ceil_div(T, 128);
    if (!attention_backward_accepts_sm90(HS)) { return 0; }
    return tiles * (128 / ATTENTION_BACKWARD_LEAST_QUERIES) * HS + (size_t)(B + ceil_div(T, 128) - 1) * 8 * NH * 64;
}
size_t attention_backward_sm90_scratch(int B, int T, int NH, int HS) {
    size_t tiles = (size_t)B * NH * ceil_div(T, 128);
    if (!attention_backward_accepts_sm90(HS)) { return 0; }
    return attention_backward_sm90_terms(B, T, NH, HS) + tiles * (HS / 64 * (2 * 4096 + 1) + 256) + 1;
}

// The size of the part of scratch, at its beginning, that holds the terms of dbias, in floats: until column_sums_flush() where sums
// wait for that. A multiple of 4.
size_t attention_backward_bias_terms(int B, int T, int C, int NH) {
    size_t sm90 = attention_backward_sm90_terms(B, T, NH, C / NH);
    return ceil_div(std::max(sm90, matmul_backward_bias_scratch(B * T, 3 * C)), (size_t)4) * 4;
}

// The size of scratch in floats. Without kernel 11, scratch holds dsum (B,NH,T) and, when that is no longer needed, the scratch of
// matmul_backward_bias().
size_t attention_backward_scratch(int B, int T, int C, int NH) {
    size_t sm90 = attention_backward_sm90_scratch(B, T, NH, C / NH);
    return std::max({sm90, (size_t)B * NH * T, matmul_backward_bias_scratch(B * T, 3 * C)});
}

// ---- kernel 3: fp32 arithmetic, 4x4 register tiles per thread, one writer per gradient ----

// dsum = rowsum(dout * out). Both gradient kernels need it per query row, besides lse, because with
//
//     P = exp(scale * q k^T - lse)    dS = P * (dout v^T - dsum)
//     dv = P^T dout                   dk = scale * dS^T q              dq = scale * dS k
//
// The kernel runs 8 threads per row of HS elements.
__global__ void attention_backward_dsum_kernel3(float* dsum, const floatX* dout, const floatX* out, int T, int NH,
                                                int HS, int num_rows) {
    int row = (int)(((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 8), part = threadIdx.x % 8;
    float sum = 0.0f;
    if (row < num_rows) {
        for (int i = part * x128::size; i < HS; i += 8 * x128::size) {
            x128 a = load128(dout + (size_t)row * HS + i), b = load128(out + (size_t)row * HS + i);
            for (int j = 0; j < x128::size; j++) { sum += (float)a[j] * (float)b[j]; }
        }
    }
    for (int offset = 4; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset); }
    if (row < num_rows && part == 0) { // row = (b * T + t) * NH + h
        int h = row % NH, t = row / NH % T, b = row / NH / T;
        dsum[((size_t)b * NH + h) * T + t] = sum;
    }
}

// Writes dsum to a.scratch.
void attention_backward_dsum(const AttentionBackwardArgs& a, const Execution& exec) {
    require(a.C / a.NH % 8 == 0);
    int num_rows = a.B * a.T * a.NH, block_size = 256;
    launch_kernel(attention_backward_dsum_kernel3, LaunchShape(ceil_div(num_rows, block_size / 8), block_size), exec,
                  a.scratch, a.dout, a.out, a.T, a.NH, a.C / a.NH, num_rows);
}

// Loads 4 elements as floats.
__device__ inline f128 attention_backward_load4(const floatX* p) {
    x4 x = *reinterpret_cast<const x4*>(p);
    return {{(float)x[0], (float)x[1], (float)x[2], (float)x[3]}};
}

// sum[i][j] += a[k][4 * row + i] * b[k][4 * col + j], over k
template <int K> __device__ inline void attention_backward_multiply4x4(float (&sum)[4][4], const float (*a)[64],
                                                                       const float (*b)[64], int row, int col) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        f128 x = load128(&a[k][4 * row]), y = load128(&b[k][4 * col]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) { sum[i][j] += x[i] * y[j]; }
        }
    }
}

// A block owns 64 rows of one head and walks over tiles of 64 rows of the other side. If `keys`, it owns keys, walks
// over queries, and computes dk and dv; otherwise it owns queries, walks over keys, and computes dq. Scores are
// computed as [walked][owned], the layout in which the second product reads P and dS. D groups of 64 columns hold
// the HS columns.
template <bool keys, int D> __global__ void __launch_bounds__(256)
    attention_backward_plain_kernel3(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout,
                                     const floatX* qkv, int T, int C, int NH, float scale) {
    struct SMem {
        float walked1[16][64], owned1[16][64], walked2[16][64], owned2[16][64]; // 16 columns of 64 rows, transposed
        float p[64][64], ds[64][64];
    };
    static_assert(sizeof(SMem) == 48 * 1024, "the limit without an opt-in");
    __shared__ SMem smem;
    int HS = C / NH, h = blockIdx.y % NH, b = blockIdx.y / NH;
    int tile = keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x; // the longest walks start first
    int owned = 64 * tile, row = threadIdx.x / 16, col = threadIdx.x % 16;
    const floatX *q = qkv + (size_t)b * T * 3 * C + h * HS, *d = dout + (size_t)b * T * C + h * HS;
    const floatX *walked1 = keys ? q : q + C, *walked2 = keys ? d : q + 2 * C;
    const floatX *owned1 = keys ? q + C : q, *owned2 = keys ? q + 2 * C : d;
    lse += ((size_t)b * NH + h) * T, dsum += ((size_t)b * NH + h) * T;
    size_t stride = 3 * (size_t)C, walked_stride = keys ? C : stride,
           owned_stride = keys ? stride : C; // of walked2, owned2

    float sum1[D][4][4] = {}, sum2[keys ? D : 1][4][4] = {}; // accumulators of dk and dv, or of dq
    int first = keys ? tile : 0, last = keys ? ceil_div(T, 64) - 1 : tile;
    for (int walk = first; walk <= last; walk++) {
        int walked = 64 * walk;
        float s[4][4] = {}, dp[4][4] = {};
        for (int c = 0; c < HS; c += 16) {
            int r = threadIdx.x % 64, cc = threadIdx.x / 64 * 4;
            f128 w1 = {}, w2 = {}, o1 = {}, o2 = {};
            if (c + cc < HS && walked + r < T) {
                w1 = attention_backward_load4(walked1 + (walked + r) * stride + c + cc);
                w2 = attention_backward_load4(walked2 + (walked + r) * walked_stride + c + cc);
            }
            if (c + cc < HS && owned + r < T) {
                o1 = attention_backward_load4(owned1 + (owned + r) * stride + c + cc);
                o2 = attention_backward_load4(owned2 + (owned + r) * owned_stride + c + cc);
            }
            __syncthreads(); // all threads have read the previous tiles
#pragma unroll
            for (int i = 0; i < 4; i++) {
                smem.walked1[cc + i][r] = w1[i], smem.walked2[cc + i][r] = w2[i];
                smem.owned1[cc + i][r] = o1[i], smem.owned2[cc + i][r] = o2[i];
            }
            __syncthreads();
            attention_backward_multiply4x4<16>(s, smem.walked1, smem.owned1, row, col);
            attention_backward_multiply4x4<16>(dp, smem.walked2, smem.owned2, row, col);
        }

#pragma unroll
        for (int i = 0; i < 4; i++) {
            f128 p, ds;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int w = walked + 4 * row + i, o = owned + 4 * col + j;
                int query = keys ? w : o, key = keys ? o : w;
                bool seen = key <= query && query < T;
                p[j] = seen ? expf(scale * s[i][j] - lse[query]) : 0.0f;
                ds[j] = seen ? p[j] * (dp[i][j] - dsum[query]) : 0.0f;
            }
            if (keys) { store128(&smem.p[4 * row + i][4 * col], p); }
            store128(&smem.ds[4 * row + i][4 * col], ds);
        }

        // the products with dS and P, over 16 walked rows and 64 columns at a time
#pragma unroll
        for (int part = 0; part < D; part++) {
            for (int w = 0; w < 64; w += 16) {
                int t = walked + w + row, c = 64 * part + 4 * col;
                f128 y1 = {}, y2 = {};
                if (t < T && c < HS) {
                    y1 = attention_backward_load4(walked1 + t * stride + c);
                    if (keys) { y2 = attention_backward_load4(walked2 + t * walked_stride + c); }
                }
                __syncthreads(); // all threads have read the previous tiles, and have written p and ds
                store128(&smem.walked1[row][4 * col], y1);
                if (keys) { store128(&smem.walked2[row][4 * col], y2); }
                __syncthreads();
                attention_backward_multiply4x4<16>(sum1[part], &smem.ds[w], smem.walked1, row, col);
                if (keys) { attention_backward_multiply4x4<16>(sum2[part], &smem.p[w], smem.walked2, row, col); }
            }
        }
    }

    floatX* out1 = dqkv + (size_t)b * T * 3 * C + h * HS + (keys ? C : 0);
#pragma unroll
    for (int part = 0; part < D; part++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int t = owned + 4 * row + i, c = 64 * part + 4 * col + j;
                if (t < T && c < HS) {
                    out1[t * stride + c] = (floatX)(scale * sum1[part][i][j]);
                    if (keys) { out1[t * stride + C + c] = (floatX)sum2[part][i][j]; }
                }
            }
        }
    }
}

template <int D> void attention_backward_plain_sized(const AttentionBackwardArgs& a, const Execution& exec) {
    for (auto kernel : {attention_backward_plain_kernel3<true, D>, attention_backward_plain_kernel3<false, D>}) {
        launch_kernel(kernel, LaunchShape(dim3(ceil_div(a.T, 64), a.B * a.NH), 256), exec, a.dqkv, a.lse, a.scratch,
                      a.dout, a.qkv, a.T, a.C, a.NH, a.scale);
    }
}

void attention_backward_plain(const AttentionBackwardArgs& a, const Execution& exec) {
    int HS = a.C / a.NH;
    require(HS <= 256 && a.B * a.NH <= 65535);
    attention_backward_dsum(a, exec);
    auto sized = HS <= 64    ? attention_backward_plain_sized<1>
                 : HS <= 128 ? attention_backward_plain_sized<2>
                             : attention_backward_plain_sized<4>;
    sized(a, exec);
}

#if !defined(ENABLE_FP32)
// ---- kernel 7: tensor cores by mma.sync, 32 rows per warp, one owned operand in registers, one in shared memory ----
// A block owns keys and computes dk and dv, or it owns queries and computes dq. It walks over the tokens of the other kind:
//
//              owned, 16 * M rows per warp    walked, tiles of 64 rows, 8 * N at a time
//     dk, dv   k (registers), v (shared)      q, dout
//     dq       q (registers), dout (shared)   k, v
//
// Scores are computed as [owned][walked], so that the accumulators of P and dS become operands of the second product
// without leaving the registers. In each 16x8 accumulator tile of mma.sync, lane 4g + t holds 4 floats:
//
//     walked           0   1     2   3     4   5     6   7
//     owned g          lane 4g   4g + 1    4g + 2    4g + 3      c[0], c[1]
//     owned g + 8      lane 4g   4g + 1    4g + 2    4g + 3      c[2], c[3]
//
// Tiles are laid out as in kernel 15 of attention_forward.

// What a kernel computes. With both dk and dv, the sums of wide heads do not fit in the registers.
enum { ATTENTION_BACKWARD_DQ = 0, ATTENTION_BACKWARD_DK = 1, ATTENTION_BACKWARD_DV = 2 };

// Whether one owned operand is in registers. Rows as wide as these leave too few of them for the sums: both are in shared memory.
template <int HS> constexpr bool ATTENTION_BACKWARD_IN_REGISTERS = HS <= 128;
// Its type: fragments of mma's operand a, or where they are in this warp's shared memory.
template <int HS, int M> using AttentionBackwardOperand =
    std::conditional_t<ATTENTION_BACKWARD_IN_REGISTERS<HS>, uint32_t[HS / 16][M][4], const floatX*>;

// `walked` is the number of rows of a walked tile.
template <int HS, int M, int walked = 64> struct AttentionBackwardMmaSMem {
    static constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>, OWNED = ATTENTION_BACKWARD_IN_REGISTERS<HS> ? 1 : 2;
    floatX tile1[2][walked * PITCH], tile2[2][walked * PITCH]; // two stages of walked rows: q and dout, or k and v
    floatX owned[OWNED * 64 * M * PITCH];  // the owned operands that are not in registers: v, or dout; then k, or q
    float lse[2][walked], dsum[2][walked]; // two stages for the walked queries; not used for dq
};
static_assert(sizeof(AttentionBackwardMmaSMem<128, 1>) <= 99 * 1024, "the limit of compute capability 8.6");
static_assert(sizeof(AttentionBackwardMmaSMem<256, 1, 16>) <= 99 * 1024, "the limit of compute capability 8.6");

// Loads rows row..row+16*M-1 from global memory as fragments of mma's operand a. Rows past T and columns past head_size become 0.
template <int HS, int M> __device__ inline void attention_backward_load_operand(uint32_t (&a)[HS / 16][M][4],
                                                                                const floatX* rows, size_t stride,
                                                                                int row, int T, int head_size = HS) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half_m = 0; half_m < 2; half_m++) {
            int r = row + 16 * m + 8 * half_m + lane / 4;
            const uint32_t* p = reinterpret_cast<const uint32_t*>(rows + r * stride) + lane % 4;
#pragma unroll
            for (int k = 0; k < HS / 16; k++) {
                a[k][m][half_m] = r < T && 16 * k < head_size ? p[8 * k] : 0;
                a[k][m][half_m + 2] = r < T && 16 * k + 8 < head_size ? p[8 * k + 4] : 0;
            }
        }
    }
}

// sum (16*M, 8*N) += owned (16*M, HS) rows (8*N, HS)^T. Operand a is in registers, or in this warp's shared memory. Here and below,
// rows are `shift` bytes after those with this address.
template <int HS, int M, int N>
__device__ inline void attention_backward_multiply_rows(float (&sum)[M][N][4], const uint32_t (&owned)[HS / 16][M][4],
                                                        uint32_t rows, int shift) {
#pragma unroll
    for (int d = 0; d < HS / 16; d++) { attention_forward_multiply<HS, false>(sum, owned[d], rows, d, shift); }
}
template <int HS, int M, int N> __device__ inline void
attention_backward_multiply_rows(float (&sum)[M][N][4], const floatX* owned, uint32_t rows, int shift) {
    uint32_t address = attention_forward_v_address<HS>(owned);
#pragma unroll
    for (int d = 0; d < HS / 16; d++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            ldmatrix_x4(a[m], attention_forward_column<HS>(address, d) + 16 * m * ATTENTION_FORWARD_ROW_BYTES<HS>);
        }
        attention_forward_multiply<HS, false>(sum, a, rows, d, shift);
    }
}

// sum (16*M, HS) += x (16*M, 8*N) rows (8*N, HS). x: the accumulators of P or dS, which become operand a in registers
template <int HS, int M, int N> __device__ inline void
attention_backward_multiply_columns(float (&sum)[M][HS / 8][4], const float (&x)[M][N][4], uint32_t rows, int shift) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &x[m][2 * k + i / 2][i % 2 * 2];
                a[m][i] = pack_16x2(pair[0], pair[1], floatX());
            }
        }
        attention_forward_multiply<HS, true>(sum, a, rows, k, shift);
    }
}

// Adds the terms of 8 * N walked rows to sum1 (dk or dq) and sum2 (dv). rows: these rows of q, or of k; those of dout, or of v, are
// `shift` bytes further. owned, walked: the warp's first owned row and the first of these rows, only read if masked. lse and dsum: for
// dk and dv of these rows, from this lane's first column on; for dq of this lane's owned rows, and lse is in base 2.
template <bool masked, int what, int HS, int M, int N>
__device__ inline void attention_backward_step(float (&sum1)[M][HS / 8][4], float (&sum2)[M][HS / 8][4],
                                               const AttentionBackwardOperand<HS, M>& owned1, const floatX* owned2,
                                               const floatX* rows, int shift, const float* lse, const float* dsum,
                                               int owned, int walked, float scale2) {
    constexpr bool keys = what != ATTENTION_BACKWARD_DQ;
    int lane = threadIdx.x % 32;
    uint32_t by_rows = attention_forward_k_address<HS>(rows), by_columns = attention_forward_v_address<HS>(rows);
    auto query = [](int m, int n, int i) { return keys ? 8 * n + i % 2 : 2 * m + i / 2; }; // index in lse and dsum
    float p[M][N][4] = {}, ds[M][N][4]; // ds starts at -dsum, so that adding dout v^T yields dP - dsum
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { ds[m][n][i] = -dsum[query(m, n, i)]; }
        }
    }
    attention_backward_multiply_rows<HS>(p, owned1, by_rows, 0);
    if (what != ATTENTION_BACKWARD_DV) { attention_backward_multiply_rows<HS>(ds, owned2, by_rows, shift); }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float lse2 = lse[query(m, n, i)] * (keys ? LOG2E : 1.0f);
                int o = owned + 16 * m + i / 2 * 8 + lane / 4, w = walked + 8 * n + lane % 4 * 2 + i % 2;
                p[m][n][i] = exp2_approx(p[m][n][i] * scale2 - lse2);
                if (masked && (keys ? o > w : w > o)) { p[m][n][i] = 0.0f; }
                ds[m][n][i] *= p[m][n][i];
            }
        }
    }
    if (what & ATTENTION_BACKWARD_DV) { attention_backward_multiply_columns<HS>(sum2, p, by_columns, shift); }
    if (what != ATTENTION_BACKWARD_DV) { attention_backward_multiply_columns<HS>(sum1, ds, by_columns, 0); }
}

template <int what, int HS, int M, int N, int blocks_per_sm, int walked>
__global__ void __launch_bounds__(128, blocks_per_sm)
    attention_backward_kernel7(floatX* dqkv, const float* lse, const float* dsum, const floatX* dout, const floatX* qkv,
                               int T, int C, int NH, int head_size, float scale, int group) {
    extern __shared__ __align__(128) unsigned char attention_backward_memory[];
    auto& smem = *reinterpret_cast<AttentionBackwardMmaSMem<HS, M, walked>*>(attention_backward_memory);
    constexpr bool keys = what != ATTENTION_BACKWARD_DQ, IN_REGISTERS = ATTENTION_BACKWARD_IN_REGISTERS<HS>;
    constexpr int PITCH = ATTENTION_FORWARD_PITCH<HS>, WALKS = 64 * M / walked; // WALKS: walked tiles per owned tile
    if (HS == 64) { head_size = HS; }
    int num_tiles = ceil_div(T, 64 * M);
    AttentionForwardWork work = attention_forward_work(gridDim.x / num_tiles, num_tiles, group);
    // blocks with long walks start first: all queries see the first keys, and the last query sees all keys
    int tile = keys ? num_tiles - 1 - work.tile : work.tile;
    int h = work.head % NH, b = work.head / NH, warp = threadIdx.x / 32, owned = 64 * M * tile + 16 * M * warp;
    int stride = 3 * C, stride_w = keys ? C : stride;
    const floatX *q = qkv + (size_t)b * T * stride + h * head_size, *d = dout + (size_t)b * T * C + h * head_size;
    const floatX *owned1 = keys ? q + C : q, *owned2 = keys ? q + 2 * C : d;
    lse += (size_t)work.head * T, dsum += (size_t)work.head * T;
    float scale2 = scale * LOG2E;

    int first = keys ? WALKS * tile : 0;
    int num_walks = keys ? ceil_div(T, walked) : min(WALKS * (tile + 1), ceil_div(T, walked));
    const floatX *walked1 = keys ? q : q + C, *walked2 = keys ? d : q + 2 * C;
    auto load = [&](int stage, int t) {
        attention_forward_load<HS, walked>(smem.tile1[stage], walked1, stride, t, T, head_size);
        attention_forward_load<HS, walked>(smem.tile2[stage], walked2, stride_w, t, T, head_size);
        // queries past the end add 0, because their q, dout, lse and dsum are 0
        int i = threadIdx.x % 64;
        if (keys && (walked == 64 || i < walked)) {
            cp_async_4((threadIdx.x < 64 ? smem.lse : smem.dsum)[stage] + i, (threadIdx.x < 64 ? lse : dsum) + t + i,
                       t + i < T);
        }
        cp_async_commit();
    };
    floatX* own = smem.owned + 16 * M * PITCH * warp; // this warp's; where the results are staged at the end, too
    if (what != ATTENTION_BACKWARD_DV) {
        attention_forward_load<HS, 16 * M, 32>(own, owned2, keys ? stride : C, owned, T, head_size);
    }
    AttentionBackwardOperand<HS, M> operand;
    if constexpr (!IN_REGISTERS) {
        operand = own + 64 * M * PITCH;
        attention_forward_load<HS, 16 * M, 32>(own + 64 * M * PITCH, owned1, stride, owned, T, head_size);
    }
    load(0, walked * first);
    if constexpr (IN_REGISTERS) {
        attention_backward_load_operand<HS, M>(operand, owned1, stride, owned, T, head_size);
    }
    float lse2[2 * M], own_dsum[2 * M];
#pragma unroll
    for (int i = 0; i < 2 * M && !keys; i++) {
        int t = owned + 8 * i + threadIdx.x % 32 / 4;
        lse2[i] = t < T ? lse[t] * LOG2E : 0.0f;
        own_dsum[i] = t < T ? dsum[t] : 0.0f;
    }
    float sum1[M][HS / 8][4] = {}, sum2[M][HS / 8][4] = {};
    for (int walk = first, stage = 0; walk < num_walks; walk++, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // this tile has landed for all warps, and all warps have read the previous tile
        if (walk + 1 < num_walks) { load(stage ^ 1, walked * (walk + 1)); }
        auto steps = [&](auto is_diagonal) {
            constexpr bool masked = decltype(is_diagonal)::value;
#pragma unroll 1
            for (int row = 0; row < walked; row += 8 * N) {
                int t = walked * walk + row, column = row + threadIdx.x % 4 * 2;
                if (masked && keys && t + 8 * N <= owned) { continue; } // none of these queries sees this warp's keys
                if (masked && !keys && t >= owned + 16 * M) { break; }  // no query of this warp sees these keys
                attention_backward_step<masked, what, HS, M, N>(
                    sum1, sum2, operand, own, smem.tile1[stage] + row * PITCH, sizeof(smem.tile1),
                    keys ? smem.lse[stage] + column : lse2, keys ? smem.dsum[stage] + column : own_dsum, owned, t,
                    scale2);
            }
        };
        bool diagonal = keys ? walk < first + WALKS : walk >= WALKS * tile;
        diagonal ? steps(std::true_type()) : steps(std::false_type());
    }

    floatX* rows = dqkv + ((size_t)b * T + owned) * stride + h * head_size + (keys ? C : 0);
    if (what != ATTENTION_BACKWARD_DV) {
        attention_forward_store_rows<HS>(rows, stride, T - owned, sum1, scale, own, head_size);
    }
    if (what & ATTENTION_BACKWARD_DV) {
        attention_forward_store_rows<HS>(rows + C, stride, T - owned, sum2, 1.0f, own, head_size);
    }
}

// kv_M, kv_N, kv_blocks: template arguments M, N, blocks_per_sm of the kernel for dk and dv; q_M, q_N, q_blocks: those
// of the kernel for dq. HS: see ATTENTION_FORWARD_PITCH.
template <int HS, int kv_M, int kv_N, int kv_blocks, int q_M, int q_N, int q_blocks, int walked = 64>
void attention_backward_mma_sized(const AttentionBackwardArgs& a, const Execution& exec) {
    size_t head_bytes = (size_t)4 * a.T * (a.C / a.NH) * sizeof(floatX); // q, k, v and dout of one head
    int group = (int)(((size_t)32 << 20) / head_bytes) + 1;              // 32 MB of the 40 to 50 MB of L2
    auto run = [&](auto kernel, int M, size_t bytes) {
        launch_kernel(kernel, LaunchShape(ceil_div(a.T, 64 * M) * a.B * a.NH, 128, bytes), exec, a.dqkv, a.lse,
                      a.scratch, a.dout, a.qkv, a.T, a.C, a.NH, a.C / a.NH, a.scale, group);
    };
    constexpr int DK = ATTENTION_BACKWARD_DK, DV = ATTENTION_BACKWARD_DV, FIRST = HS > 128 ? DV : DK | DV;
    size_t kv_bytes = sizeof(AttentionBackwardMmaSMem<HS, kv_M, walked>);
    run(attention_backward_kernel7<FIRST, HS, kv_M, kv_N, kv_blocks, walked>, kv_M, kv_bytes);
    if constexpr (!(FIRST & DK)) {
        run(attention_backward_kernel7<DK, HS, kv_M, kv_N, kv_blocks, walked>, kv_M, kv_bytes);
    }
    run(attention_backward_kernel7<ATTENTION_BACKWARD_DQ, HS, q_M, q_N, q_blocks, walked>, q_M,
        sizeof(AttentionBackwardMmaSMem<HS, q_M, walked>));
}

void attention_backward_mma(const AttentionBackwardArgs& a, const Execution& exec) {
    int HS = a.C / a.NH;
    require(HS % 8 == 0 && HS <= 256);
    attention_backward_dsum(a, exec);
    auto sized = HS <= 32    ? attention_backward_mma_sized<32, 2, 4, 2, 2, 4, 2>
                 : HS <= 48  ? attention_backward_mma_sized<48, 2, 4, 2, 2, 4, 2>
                 : HS == 64  ? attention_backward_mma_sized<64, 2, 2, 2, 2, 4, 2>
                 : HS <= 80  ? attention_backward_mma_sized<80, 1, 4, 2, 2, 2, 2>
                 : HS <= 96  ? attention_backward_mma_sized<96, 1, 4, 2, 1, 8, 2>
                 : HS <= 128 ? attention_backward_mma_sized<128, 1, 4, 2, 1, 4, 2>
                             : attention_backward_mma_sized<256, 1, 2, 2, 1, 2, 2, 16>;
    sized(a, exec);
}

// ---- sm_90a: shared by kernels 9 to 11: five wgmma products, tiles by TMA, dq summed in L2 in a fixed order ----
// HS = 64; kernel 11 also accepts HS = 128. A work item is a tile of 128 keys of one head, 64 keys per warpgroup. The two
// warpgroups walk over the tiles of 128 queries that see these keys. Scores are computed as
// [keys][queries], so that the accumulators of P and dS become operands in registers for dv and dk. dS is also written to
// shared memory, because dq sums over the keys of both warpgroups.
//
// dq is summed over the key tiles in one fixed order, so that it is deterministic. In most heads (kernels 9 and 10: in every head) the
// key tiles go down, and each starts its walk at the diagonal. Key tile j adds its term of query tile i in step i - j of its walk, after
// it has waited for the term of key tile j + 1:
//
//     query tile         0        1        2        3
//     key tile 3                                    step 0
//     key tile 2                           step 0   step 1
//     key tile 1                  step 0   step 1   step 2
//     key tile 0         step 0   step 1   step 2   step 3
//
// Each column, read downwards, is the order of one sum: step 0 stores the first term, key tile 0 adds the last one and
// writes dq. The work items of a head start in the order of the rows, from key tile 3 down. In kernel 11, items of several heads
// alternate, so an item starts some time after the item for which it waits.
//
// A head's longest items start last: while the last one runs, the other SMs run out of work. So in kernel 11 the key tiles of the last
// heads go up: they start from 0, walk from the last query tile to the diagonal, and add to dq in that order; the diagonal tile adds
// the last term. Of these items the later are the shorter, so the SMs finish at about the same time.
//
// With HS = 128 the query tiles have 64 queries, so that the accumulators fit in registers: two steps for each step above.
// A warpgroup then computes 64 of the 128 columns of dq, instead of 64 of the 128 queries.
//
// With tickets (kernel 11) there is no deadlock: an item waits only for items with smaller tickets, which have started; the
// oldest unfinished item never waits, however few blocks are resident. Source of computing the scores transposed, (keys,
// queries): Shah et al. 2024, FlashAttention-3, arXiv:2407.08608.
struct AttentionBackwardSm90Args {
    float4* dq_sums;   // (B*NH, query tiles, 2, 8, 128): sums of dq so far, 8 float4 per thread of the two warpgroups
    int* turns;        // (B*NH, query tiles): number of terms in each sum so far
    int* ticket;       // the number of the next work item
    float4* stats;     // (B*NH, num_tiles, 64): for each pair of queries two lse in base 2, then two dsum
    float* dq_terms;   // (B + num_tiles - 1, 512 / HS, NH, HS): sums of dq over some queries, for dbias, or NULL
    float* dout_terms; // (blocks of queries, NH, HS): sums of dout over some queries, likewise, or NULL
    int T, NH, num_heads, num_tiles;
    int num_down;   // heads 0 to num_down - 1 go down, the others up
    unsigned group; // heads that go down and whose work items alternate
    float scale;
};

constexpr int ATTENTION_BACKWARD_TILE_BYTES = 128 * 64 * sizeof(floatX);
template <int HS> static AttentionBackwardSm90Args attention_backward_sm90_args(const AttentionBackwardArgs& a) {
    require(a.C / a.NH == HS);
    require(has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    AttentionBackwardSm90Args args = {};
    args.T = a.T, args.NH = a.NH, args.num_tiles = ceil_div(a.T, 128), args.scale = a.scale;
    args.num_heads = args.num_down = a.B * a.NH;
    // q, dout and the sums of dq of a group fill a third of L2: with more heads, they would evict each other
    size_t head_bytes = (size_t)args.num_tiles * 128 * HS * (2 * sizeof(floatX) + sizeof(float));
    args.group = std::clamp((int)(device_attribute(cudaDevAttrL2CacheSize) / 3 / head_bytes), 1, args.num_heads);
    size_t tiles = (size_t)args.num_heads * args.num_tiles;
    require(tiles * 128 <= INT_MAX);
    require((size_t)a.scratch % 16 == 0); // bulk copies need this alignment
    if (a.dbias) {
        args.dout_terms = a.scratch;
        args.dq_terms = a.scratch + tiles * (128 / ATTENTION_BACKWARD_LEAST_QUERIES) * HS;
    }
    args.dq_sums = reinterpret_cast<float4*>(a.scratch + attention_backward_sm90_terms(a.B, a.T, a.NH, HS));
    args.stats = args.dq_sums + tiles * (HS / 64) * 2048;
    args.turns = reinterpret_cast<int*>(args.stats + tiles * 64);
    args.ticket = args.turns + tiles * (HS / 64);
    return args;
}

// Writes lse and dsum of every query to stats, and resets turns and ticket. Queries past the end get an infinite lse, so
// their P is 0. A block has num_queries queries and num_heads heads from blockIdx.y * num_heads on, a thread 8 elements of a
// head, of every num_slots-th query: HS / 8 neighbouring threads have a head. If args.dout_terms is not NULL, it gets the sums of
// dout over the block's queries.
template <int HS> __global__ void attention_backward_sm90_stats_kernel11(AttentionBackwardSm90Args args,
                                                                         const floatX* dout, const floatX* out,
                                                                         const float* lse, int num_queries,
                                                                         int num_heads, int num_slots) {
    extern __shared__ __align__(128) float attention_backward_terms[];   // (num_slots, num_heads * HS)
    float* dsum = attention_backward_terms + num_slots * num_heads * HS; // (num_heads, num_queries)
    constexpr int LANES = HS / 8;                                        // per head
    int width = num_heads * LANES, slot = threadIdx.x / width,
        vector = threadIdx.x % width; // `width` threads per query
    int first_head = blockIdx.y * num_heads, h = first_head + vector / LANES, length = 128 * args.num_tiles;
    size_t thread = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
    size_t num_threads = (size_t)gridDim.x * gridDim.y * blockDim.x;
    grid_launch_dependents();
    grid_wait_dependency();
    // <= instead of <, to reset ticket too, which is stored behind the last element of turns
    for (size_t i = thread; i <= (size_t)args.num_heads * args.num_tiles * (HS / 64); i += num_threads) {
        args.turns[i] = 0;
    }
    float terms[x128::size] = {};
    int b = blockIdx.x * num_queries / length, start = blockIdx.x * num_queries % length;
    int num_valid = min(num_queries, args.T - start); // may be negative
    constexpr int unroll = 4;                         // queries in flight per thread
    for (int query = slot; query < num_valid && h < args.NH; query += unroll * num_slots) {
        x128 x[unroll], y[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) { // a load behind a condition would wait for the one before
            int t = start + min(query + u * num_slots, num_valid - 1);
            size_t i = (((size_t)b * args.T + t) * args.NH + h) * HS + vector % LANES * x128::size;
            x[u] = load128(dout + i), y[u] = load128(out + i);
        }
#pragma unroll
        for (int u = 0; u < unroll; u++) {
            bool valid = query + u * num_slots < num_valid;
            float sum = 0.0f;
            for (int k = 0; k < x128::size; k++) {
                sum += (float)x[u][k] * (float)y[u][k];
                terms[k] += valid ? (float)x[u][k] : 0.0f;
            }
            unsigned group = ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES); // the lanes of this head
            for (int offset = LANES / 2; offset > 0; offset /= 2) { sum += __shfl_xor_sync(group, sum, offset); }
            if (vector % LANES == 0 && valid) { dsum[vector / LANES * num_queries + query + u * num_slots] = sum; }
        }
    }
    if (args.dout_terms) {
        for (int k = 0; k < x128::size; k++) {
            attention_backward_terms[(slot * width + vector) * x128::size + k] = terms[k];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_heads * num_queries / 2; i += blockDim.x) { // two queries of a head
        int head_of_block = i / (num_queries / 2), query = i % (num_queries / 2) * 2;
        size_t head = (size_t)b * args.NH + first_head + head_of_block;
        if (first_head + head_of_block >= args.NH) { break; }
        float2 of_lse = make_float2(INFINITY, INFINITY), of_dsum = make_float2(0.0f, 0.0f);
        const float* lse_of_query = lse + head * args.T + start + query;
        const float* dsum_of_query = dsum + head_of_block * num_queries + query;
        if (query < num_valid) { of_lse.x = lse_of_query[0] * LOG2E, of_dsum.x = dsum_of_query[0]; }
        if (query + 1 < num_valid) { of_lse.y = lse_of_query[1] * LOG2E, of_dsum.y = dsum_of_query[1]; }
        args.stats[(head * length + start + query) / 2] = make_float4(of_lse.x, of_lse.y, of_dsum.x, of_dsum.y);
    }
    for (int i = threadIdx.x; args.dout_terms && i < num_heads * HS; i += blockDim.x) {
        int column = first_head * HS + i;
        float sum = 0.0f;
        for (int k = 0; k < num_slots; k++) { sum += attention_backward_terms[k * num_heads * HS + i]; }
        if (column < args.NH * HS) { args.dout_terms[(size_t)blockIdx.x * args.NH * HS + column] = sum; }
    }
}

// Returns the number of rows of args.dout_terms, one for each block of queries: many queries, so that there are few rows, but
// not so many that SMs are idle.
template <int HS> static int attention_backward_sm90_stats(const AttentionBackwardSm90Args& args,
                                                           const AttentionBackwardArgs& a, const Execution& exec) {
    int num_groups = ceil_div(args.NH, 16), num_heads = ceil_div(args.NH, num_groups), num_slots = 32 / num_heads;
    int queries = 64, all = 128 * args.num_tiles * (args.num_heads / args.NH),
        threads = num_slots * num_heads * (HS / 8);
    while (queries > ATTENTION_BACKWARD_LEAST_QUERIES && all / queries * num_groups < 4 * num_multiprocessors()) {
        queries /= 2;
    }
    size_t shared = (threads * x128::size + num_heads * queries) * sizeof(float);
    launch_early(attention_backward_sm90_stats_kernel11<HS>, dim3(all / queries, num_groups), dim3(threads), shared,
                 exec, args, a.dout, a.out, a.lse, queries, num_heads, num_slots);
    return all / queries;
}

// A warpgroup's 64 keys of k or v as the left operand of a product. HS = 64: fragments in registers, because the bandwidth of shared
// memory would otherwise limit the kernel about as much as the tensor cores. HS = 128: a descriptor, because no registers are left.
template <int HS> using AttentionBackwardSm90Keys = std::conditional_t<HS == 64, uint32_t[4][4], uint64_t>;

// Loads or describes this operand. tile: k or v (128 keys, HS); row: the warp's first key.
__device__ inline void attention_backward_sm90_operand(uint64_t& x, const floatX* tile, int row) {
    x = wgmma_descriptor(tile + row / 64 * 64 * 64);
}
__device__ inline void attention_backward_sm90_operand(uint32_t (&x)[4][4], const floatX* tile, int row) {
    int lane_row = threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
#pragma unroll
    for (int d = 0; d < 4; d++) { // 16 columns: two chunks of 16 bytes, whose order is swizzled
        ldmatrix_x4(x[d], tile + (row + lane_row) * 64 + ((2 * d + chunk) ^ (lane_row % 8)) * 8);
    }
}

// The next four functions issue the wgmmas of a product and do not wait.
// s (64 keys, 64 queries) = x (64 keys, HS) queries (64, HS)^T; HS = 128 for a descriptor x, 64 for fragments
__device__ inline void attention_backward_sm90_scores(float (&s)[32], uint64_t x, const floatX* queries) {
    attention_forward_sm90_scores<128, 128>(s, x, wgmma_descriptor(queries));
}
__device__ inline void attention_backward_sm90_scores(float (&s)[32], const uint32_t (&x)[4][4],
                                                      const floatX* queries) {
    uint64_t b = wgmma_descriptor(queries);
    wgmma_64x64x16_new(s, x[0], b, floatX());
#pragma unroll
    for (int d = 1; d < 4; d++) { wgmma_64x64x16(s, x[d], b + 2 * d, 1, floatX()); }
}
// sum (64 keys, HS) += x (64 keys, queries) queries (queries, HS)
template <int HS, int n> __device__ inline void
attention_backward_sm90_keys(float (&sum)[HS / 2], const uint32_t (&x)[n], const floatX* queries) {
    attention_forward_sm90_values(
        sum, x, HS == 64 ? wgmma_descriptor(queries) : wgmma_descriptor_transposed(queries, 64 * 64 * sizeof(floatX)));
}
// dq (64 queries, 64) = ds (128 keys, 64 queries)^T keys (128, 64)
__device__ inline void attention_backward_sm90_queries(float (&dq)[32], const floatX* ds, const floatX* keys) {
    uint64_t a = wgmma_descriptor(ds), b = wgmma_descriptor(keys);
    wgmma_64x64x16_transposed_new(dq, a, b, floatX());
#pragma unroll
    for (int k = 1; k < 8; k++) { wgmma_64x64x16_transposed(dq, a + 128 * k, b + 128 * k, 1, floatX()); }
}

// Applies the causal mask of the diagonal tile, where key r and query r are the same token, so that query r sees the
// keys up to r. key: this thread's first key, counted from the first query of s.
template <int n> __device__ inline void attention_backward_sm90_mask(float (&s)[n], int key) {
    int ahead = key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < n; j++) {
        if (j / 4 * 8 + j % 2 - j % 4 / 2 * 8 < ahead) { s[j] = -INFINITY; }
    }
}

// Turns the scores s into P = exp2(s * scale2 - lse), in place. stats: lse (base 2) and dsum of the queries of s.
template <int n> __device__ inline void attention_backward_sm90_p(float (&s)[n], const float4* stats, float scale2) {
    stats += threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < n / 4; j++) {
        float2 lse = *reinterpret_cast<const float2*>(stats + 4 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) { s[4 * j + i] = exp2_approx(s[4 * j + i] * scale2 - (i % 2 ? lse.y : lse.x)); }
    }
}

// Packs P, which s contains, into the operand fragments p, and dS = P * (dp - dsum) into ds.
template <int n> __device__ inline void attention_backward_sm90_ds(uint32_t (&p)[n / 2], uint32_t (&ds)[n / 2],
                                                                   const float (&s)[n], const float (&dp)[n],
                                                                   const float4* stats) {
    stats += threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < n / 4; j++) {
        float2 dsum = *(reinterpret_cast<const float2*>(stats + 4 * j) + 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int k = 4 * j + 2 * i;
            p[2 * j + i] = pack_16x2(s[k], s[k + 1], floatX());
            ds[2 * j + i] = pack_16x2(s[k] * (dp[k] - dsum.x), s[k + 1] * (dp[k + 1] - dsum.y), floatX());
        }
    }
}

// Writes dS to shared memory, as matrices (128 keys, 64 queries), swizzled for wgmma. row: the warp's first key.
template <int n>
__device__ inline void attention_backward_sm90_store_ds(floatX* matrices, const uint32_t (&ds)[n], int row) {
#pragma unroll
    for (int k = 0; k < n / 4; k++) {
        attention_forward_sm90_write(matrices + k / 4 * 128 * 64 + row * 64, k % 4, ds + 4 * k);
    }
}

// Of a thread's part of dq: terms[c] (or +=, if add) = the sum of its two rows in its column number c; each element of
// `terms` is a float4, 128 apart.
__device__ inline void attention_backward_sm90_sum_rows(float4* terms, const float (&dq)[32], bool add) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float* x = dq + 8 * c;
        float4 sum = make_float4(x[0] + x[2], x[1] + x[3], x[4] + x[6], x[5] + x[7]);
        if (add) {
            float4 before = terms[128 * c];
            sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
        }
        terms[128 * c] = sum;
    }
}

// ---- shared by kernels 10 and 11: warp-specialised: one producer, two adders of dq, two consumer warpgroups ----
// One step of the consumers, from top to bottom, and the roles that run beside them:
//
//     tensor cores                      other units of a consumer warpgroup
//     s = k q^T, then dp = v dout^T     P = exp2(s - lse) as soon as s is complete
//                                       dS = P * (dp - dsum)
//     dv += P dout                      dS to shared memory
//                                       barrier of the two warpgroups: dS of all 128 keys is complete
//     dq = dS^T k                       wait
//     dk += dS q                        dq to shared memory, for the adder
//
// With HS = 64, a step takes its 128 queries in two parts, to save registers. Before the barrier:
//
//     s0, dp0, s1                       P0, dS0
//     dp1, dv += P0 dout0               dS0 to shared memory, P1, dS1
//     dv += P1 dout1                    dS1 to shared memory
//
// At the end of an item, TMA stores dk and dv from the stage of dS that is not in use. It also stores dq from there when its last
// term is added. A warp writes its own rows there. Before it writes there again, it waits for the stores.
//
//     producer (1 thread)               loads q, dout and stats of the next steps (two stages), k and v of each item
//     adders (2 threads, in turns)      wait for the turn of this key tile, add dq to dq_sums, pass the turn on;
//                                       last term: load the sums for the consumers

template <int head_size = 64> struct AttentionBackwardSMem {
    static constexpr int HS = head_size, QUERIES = HS == 64 ? 128 : 64; // queries per step
    static constexpr int BOXES = HS / 64;                               // of 64 columns
    static constexpr int STEPS = 128 / QUERIES;                         // steps per key tile
    floatX q[2][QUERIES * HS], dout[2][QUERIES * HS];                   // two stages
    floatX k[128 * HS], v[128 * HS];
    // two stages, so one barrier per step is enough; also holds what TMA writes, with HS = 128 in a third matrix, too
    floatX ds[HS == 64 ? 2 : 3][128 * QUERIES];
    float4 dq[2][8 * 128]; // per warpgroup, a tile of dq to be added to dq_sums, or (last term) the sums so far
    float4 stats[2][QUERIES / 2];
    float4 dq_terms[2][4 * 128]; // for dbias: per thread of a warpgroup, 16 sums of its rows of dq
    // full: the loads complete it, and the consumers wait for it; empty: the consumers arrive, and the producer waits
    uint64_t q_full[2], q_empty[2]; // for q and stats
    uint64_t dout_full[2], dout_empty[2];
    uint64_t k_full, k_empty, v_full, v_empty;
    // Each completes a phase in every step (dq_full[w][s] in every second), also for a last term: two phases off, a parity would be
    // misread. dq_ready[warpgroup]: an adder arrives when the next step may write dq; sums_ready[warpgroup]: when dq holds the sums so
    // far (last term); dq_full[warpgroup][step % 2]: the warpgroup's threads arrive when dq has been written, or (last term) read.
    uint64_t dq_ready[2], sums_ready[2], dq_full[2][2];
    uint64_t work_full[2], work_empty[2]; // the producer writes `work`; all other roles read it
    int work[2];                          // numbers of work items, two stages
};
static_assert(sizeof(AttentionBackwardSMem<64>) <= 227 << 10 && sizeof(AttentionBackwardSMem<128>) <= 227 << 10,
              "the limit of compute capability 9.0");

// Initialises the barriers. Called by the whole block.
template <class SMem> __device__ inline void attention_backward_sm90_init(SMem& smem) {
    if (threadIdx.x == 0) {
        mbarrier_init(&smem.k_full, 1);
        mbarrier_init(&smem.v_full, 1);
        mbarrier_init(&smem.k_empty, 8); // one arrival per consumer warp
        mbarrier_init(&smem.v_empty, 8);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&smem.q_full[i], 1);
            mbarrier_init(&smem.q_empty[i], 8 + 256); // per warp: q has been read; per thread: stats have been read
            mbarrier_init(&smem.dout_full[i], 1);
            mbarrier_init(&smem.dout_empty[i], 8);
            mbarrier_init(&smem.dq_ready[i], 1);
            mbarrier_init(&smem.sums_ready[i], 1);
            mbarrier_init(&smem.dq_full[i][0], 128);
            mbarrier_init(&smem.dq_full[i][1], 128);
            mbarrier_init(&smem.work_full[i], 1);
            mbarrier_init(&smem.work_empty[i], 256 + 2); // all consumer threads and the two adders
        }
        mbarrier_init_fence();
        for (int i = 0; i < 2; i++) { mbarrier_arrive(&smem.dq_ready[i]); } // dq may be written in step 0
    }
    __syncthreads();
}

// Issues the TMA loads of rows (num_rows, HS) of one head, tokens t..t + num_rows - 1, to a tile (HS / 64, num_rows, 64).
template <int HS, int num_rows> __device__ inline void
attention_backward_load_rows(floatX* tile, const CUtensorMap& map, int vector, int t, int b, uint64_t* full) {
    constexpr int BOXES = HS / 64, BOX_ROWS = AttentionBackwardSMem<HS>::QUERIES;
#pragma unroll
    for (int j = 0; j < BOXES * num_rows / BOX_ROWS; j++) {
        int row = j * BOX_ROWS % num_rows, box = j * BOX_ROWS / num_rows;
        tma_load_4d(tile + (box * num_rows + row) * 64, &map, 0, vector * BOXES + box, t + row, b, full);
    }
}

// A work item: a head and a tile of keys, with the order of its steps.
template <int STEPS> struct AttentionBackwardSm90Item {
    int head, j, num_steps; // key tile j; its query tiles, of 128 / STEPS queries, begin at STEPS * j, on the diagonal
    bool up;
    __device__ AttentionBackwardSm90Item(const AttentionBackwardSm90Args& args, int work)
        : head(work / args.num_tiles), j(args.num_tiles - 1 - work % args.num_tiles),
          num_steps(STEPS * (args.num_tiles - j)), up(head >= args.num_down) {}
    // the query tile of a step, counted from the diagonal
    __device__ int query_tile(int step) const { return up ? num_steps - 1 - step : step; }
    // the number of key tiles that add to dq of a query tile before this one; whether this one is the last
    __device__ int num_terms(int tile) const { return up ? j : tile / STEPS; }
    __device__ bool is_last_term(int tile) const { return up ? tile < STEPS : j == 0; }
};

// The producer's part of a work item: issues its loads. work: number of the item; n: how many items the block has done
// before; i: counts steps over all items of the block.
template <class SMem> __device__ inline void attention_backward_sm90_load_item(const AttentionBackwardSm90Args& args,
                                                                               SMem& smem, const CUtensorMap& qkv_map,
                                                                               const CUtensorMap& dout_map, int work,
                                                                               unsigned n, unsigned& i) {
    constexpr int HS = SMem::HS, QUERIES = SMem::QUERIES, STEPS = SMem::STEPS;
    constexpr int STATS_BYTES = sizeof(smem.stats[0]), KEY_BYTES = sizeof(smem.k);
    AttentionBackwardSm90Item<STEPS> item(args, work);
    int h = item.head % args.NH, b = item.head / args.NH, step = 0;
    auto load_queries = [&]() {
        int tile = STEPS * item.j + item.query_tile(step);
        mbarrier_wait(&smem.q_empty[i % 2], (i / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.q_full[i % 2], ATTENTION_BACKWARD_TILE_BYTES + STATS_BYTES);
        bulk_load(smem.stats[i % 2], args.stats + (size_t)(item.head * STEPS * args.num_tiles + tile) * (QUERIES / 2),
                  STATS_BYTES, &smem.q_full[i % 2]);
        attention_backward_load_rows<HS, QUERIES>(smem.q[i % 2], qkv_map, h, QUERIES * tile, b, &smem.q_full[i % 2]);
        mbarrier_wait(&smem.dout_empty[i % 2], (i / 2 + 1) % 2);
        mbarrier_arrive_expect(&smem.dout_full[i % 2], ATTENTION_BACKWARD_TILE_BYTES);
        attention_backward_load_rows<HS, QUERIES>(smem.dout[i % 2], dout_map, h, QUERIES * tile, b,
                                                  &smem.dout_full[i % 2]);
        i++, step++;
    };
    load_queries();
    mbarrier_wait(&smem.v_empty, (n + 1) % 2); // the consumers release v before k
    mbarrier_arrive_expect(&smem.v_full, KEY_BYTES);
    attention_backward_load_rows<HS, 128>(smem.v, qkv_map, 2 * args.NH + h, 128 * item.j, b, &smem.v_full);
    mbarrier_wait(&smem.k_empty, (n + 1) % 2);
    mbarrier_arrive_expect(&smem.k_full, KEY_BYTES);
    attention_backward_load_rows<HS, 128>(smem.k, qkv_map, args.NH + h, 128 * item.j, b, &smem.k_full);
#pragma unroll 1
    while (step < item.num_steps) { load_queries(); }
}

// An adder's part of a work item. In every second step, it adds dq to dq_sums: 16 KB per warpgroup. If the term is the last one, it
// loads the sums so far instead, and the consumers add the term in registers.
// adder: 0 or 1. i: the number of steps of the block's earlier items.
template <class SMem> __device__ inline void attention_backward_sm90_add_item(const AttentionBackwardSm90Args& args,
                                                                              SMem& smem, int adder, int work, int i) {
    constexpr int BYTES = sizeof(smem.dq[0]), STEPS = SMem::STEPS;
    AttentionBackwardSm90Item<STEPS> item(args, work);
#pragma unroll 1
    for (int step = (i + adder) % 2; step < item.num_steps; step += 2) {
        int query_tile = item.query_tile(step), num_terms = item.num_terms(query_tile); // already in the sum
        bool last = item.is_last_term(query_tile);
        int tile = (item.head * args.num_tiles + item.j) * STEPS + query_tile;
        int* turn = args.turns + tile;
        if (num_terms > 0) {
            while (load_acquire(turn) < num_terms) {} // until the terms of the key tiles before this one are in the sum
            async_proxy_fence();
        }
        unsigned n = i + step; // counts the block's steps
        float4* sums = args.dq_sums + (size_t)2 * tile * 1024;
#pragma unroll 1
        for (int w = 0; last && w < 2; w++) {
            // dq of the step before has been written or read, and its bulk copies have read it
            mbarrier_wait(&smem.dq_full[w][(n + 1) % 2], ((n + 1) / 2 + 1) % 2);
            mbarrier_wait(&smem.dq_ready[w], n % 2);
            if (num_terms == 0) {
                mbarrier_arrive(&smem.sums_ready[w]);
            } else {
                mbarrier_arrive_expect(&smem.sums_ready[w], BYTES);
                bulk_load(smem.dq[w], sums + 1024 * w, BYTES, &smem.sums_ready[w]);
            }
        }
#pragma unroll 1
        for (int w = 0; w < 2; w++) {
            mbarrier_wait(&smem.dq_full[w][n % 2], n / 2 % 2);
            mbarrier_arrive(last ? &smem.dq_ready[w] : &smem.sums_ready[w]);
            if (last) { continue; }
            mbarrier_wait(&smem.sums_ready[w], n % 2); // returns at once; synccheck requires a wait in every phase
            float *dq = reinterpret_cast<float*>(smem.dq[w]), *sum = reinterpret_cast<float*>(sums + 1024 * w);
            if (num_terms == 0) {
                bulk_store(sum, dq, BYTES);
            } else {
                bulk_add(sum, dq, BYTES);
            }
            tma_store_commit();
        }
        if (last) { continue; }
        // the consumers may overwrite dq that the bulk copies have read from shared memory
        tma_store_wait<1>();
        mbarrier_arrive(&smem.dq_ready[0]);
        tma_store_wait<0>();
        mbarrier_arrive(&smem.dq_ready[1]);
        tma_store_wait_written(); // the sums have reached global memory: the next key tile may use them
        async_proxy_fence();
        store_release(turn, num_terms + 1);
    }
}

// Adds up a warp's rows of dq and writes the scaled sums to args.dq_terms[set]. box is 0 or 1: the first or last 64 columns.
// This thread's partial sums are elements 0, 128, 256 and 384 of terms. NULL stands for zeros.
template <class SMem>
__device__ inline void attention_backward_sm90_store_dq_terms(const AttentionBackwardSm90Args& args,
                                                              const float4* terms, int set, int head, int row,
                                                              int box) {
    float scale = args.scale, sums[16];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float4 x = terms ? terms[128 * c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sums[4 * c] = scale * x.x, sums[4 * c + 1] = scale * x.y;
        sums[4 * c + 2] = scale * x.z, sums[4 * c + 3] = scale * x.w;
    }
    // a row of the set per warp, or (HS = 128) per pair of warps with the same rows
    size_t term = (size_t)set * (8 / SMem::BOXES) + row % SMem::QUERIES / 16;
    float2* to =
        reinterpret_cast<float2*>(args.dq_terms + ((term * args.NH + head % args.NH) * SMem::BOXES + box) * 64);
    to[threadIdx.x % 32] = fragment_column_sums(sums);
}

// Computes one work item, as one of the consumer warps. work: the item's index; n: how many items the block has done
// before; i: the step, counted over all items of the block; row: the warp's first row in a tile, where a row is a
// key in the key tile and a query in the query tiles.
//
// If args.dq_terms is not NULL, the items that write dq also sum its columns, for dbias.
// In the last batch element, the items that do not write dq set their rows of dq_terms to zero.
template <class SMem>
__device__ inline void attention_backward_sm90_compute_item(const AttentionBackwardSm90Args& args, SMem& smem,
                                                            const CUtensorMap& dqkv_map, int warpgroup, int row,
                                                            int work, int n, int& i) {
    constexpr int HS = SMem::HS, QUERIES = SMem::QUERIES, STEPS = SMem::STEPS, BOXES = SMem::BOXES;
    constexpr int PARTS = QUERIES / 64; // of a step, of 64 queries each: 1 or 2
    int lane = threadIdx.x % 32;
    float scale = args.scale;
    AttentionBackwardSm90Keys<HS> k, v;
    float4* dq_out = smem.dq[warpgroup] + threadIdx.x % 128;
    float4* dq_terms = smem.dq_terms[warpgroup] + threadIdx.x % 128;
    AttentionBackwardSm90Item<STEPS> item(args, work);
    // a variable for the batch element, head / args.NH, would cost 1 to 2%: ptxas then starts the exponentials later
    int head = item.head, j = item.j;
    int box = BOXES == 1 ? 0 : warpgroup; // of dq: with HS = 128 a warpgroup computes 64 columns, instead of 64 queries
    float dk[HS / 2] = {}, dv[HS / 2] = {};
    // The two matrices from which a warp's rows may be written after a step: of dS of the step before, which nobody reads
    // any more, and with HS = 128 the third matrix.
    auto staging = [&](int matrix, int step) {
        return BOXES == 2 && matrix == 1 ? smem.ds[2] : smem.ds[(step + 1) % 2] + matrix * 128 * 64;
    };
    // Starts to write factor * sum to a warp's 16 tokens, t + row to t + row + 15, of 64 columns, number `box` of dq (which = 0),
    // dk (1) or dv (2), through the warp's rows of the matrix `rows`.
    auto store = [&](int which, int box, floatX* rows, int t, const float(&sum)[32], float factor) {
        attention_forward_sm90_to_shared(rows + row * 64, sum, {factor, factor});
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            int vector = (which * args.NH + head % args.NH) * BOXES + box;
            tma_store_4d(&dqkv_map, rows + row * 64, 0, vector, t + row, head / args.NH);
            tma_store_commit();
        }
    };
    auto wait_for_stores = [&]() { // until they have read shared memory
        if (lane == 0) { tma_store_wait<0>(); }
        __syncwarp();
    };
    mbarrier_wait(&smem.k_full, n % 2);
    attention_backward_sm90_operand(k, smem.k, row);
    mbarrier_wait(&smem.v_full, n % 2);
    attention_backward_sm90_operand(v, smem.v, row);
    if (HS == 64) { // v is in registers
        __syncwarp();
        if (lane == 0) { mbarrier_arrive(&smem.v_empty); }
    }
#pragma unroll 1
    for (int step = 0; step < item.num_steps; step++, i++) {
        int query_tile = item.query_tile(step);
        bool last_term = item.is_last_term(query_tile);
        const floatX *q = smem.q[i % 2], *dout = smem.dout[i % 2];
        float s[PARTS][32], dp[PARTS][32], dq[32];
        uint32_t p[PARTS][16], ds[PARTS][16];
        mbarrier_wait(&smem.q_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_backward_sm90_scores(s[0], k, q);
        wgmma_commit();
        mbarrier_wait(&smem.dout_full[i % 2], i / 2 % 2);
        wgmma_fence();
        attention_backward_sm90_scores(dp[0], v, dout);
        wgmma_commit();
        if constexpr (PARTS == 2) {
            wgmma_fence();
            attention_backward_sm90_scores(s[1], k, q + 64 * 64);
            wgmma_commit();
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float4* stats = smem.stats[i % 2] + 32 * part;
            // in flight, the oldest first: this part's s and dp, then in part 0 of two the next s, in part 1 dv
            wgmma_wait<PARTS>();
            wgmma_hold(s[part]);
            if (query_tile < STEPS) {
                attention_backward_sm90_mask(s[part], row + lane / 4 - QUERIES * query_tile - 64 * part);
            }
            attention_backward_sm90_p(s[part], stats, scale * LOG2E);
            wgmma_wait<PARTS - 1>();
            wgmma_hold(dp[part]);
            if (PARTS == 2) { __syncwarp(); } // not for correctness: ptxas then schedules a loop that is 1% faster
            attention_backward_sm90_ds(p[part], ds[part], s[part], dp[part], stats);
            if (part + 1 < PARTS) {
                wgmma_fence();
                attention_backward_sm90_scores(dp[PARTS - 1], v, dout + 64 * 64);
                wgmma_commit();
            } else {
                if (HS == 128 && step + 1 == item.num_steps && lane == 0) { mbarrier_arrive(&smem.v_empty); }
                mbarrier_arrive(&smem.q_empty[i % 2]); // this thread has read stats
            }
            wgmma_fence();
            attention_backward_sm90_keys<HS>(dv, p[part], dout + 64 * 64 * part);
            wgmma_commit();
            if (part == 0 && (step == 0 || last_term)) { wait_for_stores(); }
            attention_backward_sm90_store_ds(smem.ds[i % 2] + 128 * 64 * part, ds[part], row);
        }
        tma_store_fence(); // wgmma reads through the async proxy
        wgmma_fence();
        named_barrier_sync(1, 256); // both warpgroups have written ds
        wgmma_fence();
        attention_backward_sm90_queries(dq, smem.ds[i % 2] + (warpgroup - box) * 128 * 64, smem.k + box * 128 * 64);
        wgmma_commit();
#pragma unroll
        for (int part = 0; part < PARTS; part++) { // dk runs while dq is written
            attention_backward_sm90_keys<HS>(dk, ds[part], q + 64 * 64 * part);
        }
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(dv);
        if (lane == 0) { mbarrier_arrive(&smem.dout_empty[i % 2]); }
        wgmma_hold(dq);
        if (step + 1 == item.num_steps && lane == 0) { mbarrier_arrive(&smem.k_empty); }

        mbarrier_wait(&smem.dq_ready[warpgroup], i % 2);
        if (!last_term) {
#pragma unroll
            for (int c = 0; c < 32; c += 4) { dq_out[32 * c] = make_float4(dq[c], dq[c + 1], dq[c + 2], dq[c + 3]); }
            tma_store_fence();
        } else {
            mbarrier_wait(&smem.sums_ready[warpgroup], i % 2);
            if (item.num_terms(query_tile) > 0) {
#pragma unroll
                for (int c = 0; c < 32; c += 4) {
                    float4 x = dq_out[32 * c];
                    dq[c] += x.x, dq[c + 1] += x.y, dq[c + 2] += x.z, dq[c + 3] += x.w;
                }
            }
            store(0, box, staging(0, i), 128 * j + QUERIES * query_tile - 64 * box, dq, scale);
            bool first = item.up ? query_tile == STEPS - 1 : step == 0;
            if (args.dq_terms) { attention_backward_sm90_sum_rows(dq_terms, dq, !first); }
        }
        mbarrier_arrive(&smem.dq_full[warpgroup][i % 2]);
        wgmma_wait<0>();
        wgmma_hold(dk);
        if (lane == 0) { mbarrier_arrive(&smem.q_empty[i % 2]); }
    }
    if (item.up || j == 0) { wait_for_stores(); } // of dq
#pragma unroll
    for (int m = 0; m < 2 * BOXES; m++) { // dk, then dv, 64 columns at a time
        const auto& sum = reinterpret_cast<const float(&)[32]>((m < BOXES ? dk : dv)[32 * (m % BOXES)]);
        if (m == 2) { wait_for_stores(); }
        store(1 + m / BOXES, m % BOXES, staging(m % 2, i - 1), 128 * j, sum, m < BOXES ? scale : 1.0f);
    }
    // all heads that go up belong to the last batch element
    if (args.dq_terms && (j == 0 || head / args.NH + 1 == args.num_heads / args.NH)) {
        attention_backward_sm90_store_dq_terms<SMem>(args, item.up || j == 0 ? dq_terms : NULL, head / args.NH + j,
                                                     head, row, box);
    }
}

// ---- kernel 11: persistent blocks that draw their work items by ticket ----

// Calls f(work, n) for the block's work items, n = 0, 1, ... All roles use it except the producer, which announces the
// items in smem.work.
template <class SMem, class F> __device__ inline void attention_backward_sm90_each(SMem& smem, int num_work, F f) {
#pragma unroll 1
    for (int n = 0;; n++) {
        mbarrier_wait(&smem.work_full[n % 2], n / 2 % 2);
        int work = smem.work[n % 2];
        mbarrier_arrive(&smem.work_empty[n % 2]);
        if (work >= num_work) { return; }
        f(work, n);
    }
}

// Returns the work item of a ticket. The heads that go down come first, group by group: key tiles from the last down, and for each all
// heads of the group. Then come the heads that go up, all together: key tiles from the first up.
__device__ inline int attention_backward_sm90_item(const AttentionBackwardSm90Args& args, unsigned ticket) {
    unsigned num_down = args.num_down;
    if (ticket >= num_down * args.num_tiles) {
        unsigned num_up = args.num_heads - num_down;
        ticket -= num_down * args.num_tiles;
        return (num_down + ticket % num_up + 1) * args.num_tiles - 1 - ticket / num_up;
    }
    unsigned first = ticket / (args.group * args.num_tiles) * args.group;
    unsigned num_heads = min(args.group, num_down - first);
    ticket -= first * args.num_tiles;
    return (first + ticket % num_heads) * args.num_tiles + ticket / num_heads;
}

// The producer thread. It draws the next ticket only after issuing all loads of the current item: a ticket drawn
// earlier would idle here while later items, which depend on it, start on other SMs.
template <class SMem> __device__ inline void attention_backward_sm90_producer(const AttentionBackwardSm90Args& args,
                                                                              SMem& smem, const CUtensorMap& qkv_map,
                                                                              const CUtensorMap& dout_map) {
    unsigned i = 0;
#pragma unroll 1
    for (unsigned n = 0;; n++) {
        int ticket = atomicAdd(args.ticket, 1), num_work = args.num_heads * args.num_tiles;
        int work = ticket < num_work ? attention_backward_sm90_item(args, ticket) : num_work;
        mbarrier_wait(&smem.work_empty[n % 2], (n / 2 + 1) % 2);
        smem.work[n % 2] = work;
        mbarrier_arrive(&smem.work_full[n % 2]);
        if (work >= num_work) { return; }
        attention_backward_sm90_load_item(args, smem, qkv_map, dout_map, work, n, i);
    }
}

template <int HS> __global__ void __launch_bounds__(384, 1)
    attention_backward_sm90_kernel11(AttentionBackwardSm90Args args, const __grid_constant__ CUtensorMap qkv_map,
                                     const __grid_constant__ CUtensorMap dout_map,
                                     const __grid_constant__ CUtensorMap dqkv_map) {
    extern __shared__ __align__(1024) unsigned char attention_backward_sm90_memory[]; // aligned for TMA's swizzle
    auto& smem = *reinterpret_cast<AttentionBackwardSMem<HS>*>(attention_backward_sm90_memory);
    if (shared_address(&smem) % 1024 != 0) { __trap(); }
    // the shuffle makes `warp` warp-uniform to the compiler
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    attention_backward_sm90_init(smem);
    grid_launch_dependents();
    grid_wait_dependency();
    if (warp < 4) {
        warpgroup_fewer_registers<40>();
        if (lane != 0) { return; }
        if (warp == 0) { attention_backward_sm90_producer(args, smem, qkv_map, dout_map); }
        if (warp == 1 || warp == 2) {
            int i = 0;
            attention_backward_sm90_each(smem, args.num_heads * args.num_tiles, [&](int work, int) {
                attention_backward_sm90_add_item(args, smem, warp - 1, work, i);
                i += AttentionBackwardSMem<HS>::STEPS * (work % args.num_tiles + 1);
            });
        }
        return;
    }
    warpgroup_more_registers<232>();
    int warpgroup = warp / 4 - 1, row = (warp - 4) * 16, i = 0;
    attention_backward_sm90_each(smem, args.num_heads * args.num_tiles, [&](int work, int n) {
        attention_backward_sm90_compute_item(args, smem, dqkv_map, warpgroup, row, work, n, i);
    });
    if (lane == 0) { tma_store_wait<0>(); }
}

// Kernel 11; if dbias is not NULL, it also sums the columns of dq and of dout. Requires sm_90a. HS is 64 or 128.
//
// Of dbias only the queries' third needs dqkv. dv of a key is the sum of P * dout over the queries, and P of a query adds up to
// 1 over the keys, so dv summed over all keys is dout summed over all queries. dk of a key is the sum of dS * q over the
// queries, and dS of a query adds up to 0 over the keys, because a number that is added to all of its scores does not change
// the softmax: dk summed over all keys is 0. The kernels' roundings are all that is left out.
template <int HS> void attention_backward_sm90(const AttentionBackwardArgs& a, const Execution& exec) {
    AttentionBackwardSm90Args args = attention_backward_sm90_args<HS>(a);
    // at most two items per SM of an H100; a constant, so that dq's bits do not depend on the GPU. They do depend on
    // whether a sequence is the last one of its batch
    args.num_down -= std::clamp(256 / args.num_tiles, 1, a.NH);
    int vectors = HS / 64 * a.NH, box_tokens = AttentionBackwardSMem<HS>::QUERIES;
    CUtensorMap qkv_map = tensor_map_heads(a.qkv, a.B, a.T, 3 * vectors, box_tokens);
    CUtensorMap dout_map = tensor_map_heads(a.dout, a.B, a.T, vectors, box_tokens);
    CUtensorMap dqkv_map = tensor_map_heads(a.dqkv, a.B, a.T, 3 * vectors, 16);
    int num_blocks_of_queries = attention_backward_sm90_stats<HS>(args, a, exec);
    int num_blocks = min(args.num_heads * args.num_tiles, exec.free_sms());
    launch_early(attention_backward_sm90_kernel11<HS>, dim3(num_blocks), dim3(384), sizeof(AttentionBackwardSMem<HS>),
                 exec, args, qkv_map, dout_map, dqkv_map);
    if (!a.dbias) { return; }
    column_sums<16>(a.dbias, NULL, NULL, args.dq_terms, 512 / HS * (a.B + args.num_tiles - 1), a.C, exec);
    column_sums<16>(a.dbias + 2 * a.C, NULL, NULL, args.dout_terms, num_blocks_of_queries, a.C, exec);
}
#endif

// The number of the kernel that attention_backward() runs; see the table below.
inline int attention_backward_choice(int HS) {
    if (attention_backward_accepts_sm90(HS) && has_sm90a()) { return 11; }
#if !defined(ENABLE_FP32)
    if (compiled_arch(attention_backward_kernel7<ATTENTION_BACKWARD_DQ, 64, 2, 4, 2, 64>) >= 80) { return 7; }
#endif
    return 3;
}

// dqkv (B,T,3,NH,HS) | dbias (3,NH,HS) += dqkv summed over all tokens, the gradient of the bias that qkv contains; may be
// NULL | scratch: attention_backward_scratch() floats | dout (B,T,NH,HS), qkv (B,T,3,NH,HS), out (B,T,NH,HS), lse
// (B,NH,T). lse is a natural logarithm. C = NH * HS. All pointers are aligned to 16 bytes.
// The kernel depends on the head size, the precision, and the architecture of the code that the binary has for this
// device:
//
//     HS                        bf16, fp16:  sm_90a (H100)   8.0 and up (A100)   older          fp32
//     64, 128                                kernel 11       kernel 7            kernel 3       kernel 3
//     other multiples of 8, up to 256        kernel 7        kernel 7            kernel 3       kernel 3
//
// Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
void attention_backward(floatX* dqkv, float* dbias, float* scratch, const floatX* dout, const floatX* qkv,
                        const floatX* out, const float* lse, int B, int T, int C, int NH, float scale,
                        const Execution& exec) {
    require(C % NH == 0 && C / NH % 8 == 0 && C / NH <= 256);
    int kernel = attention_backward_choice(C / NH);
    auto launch = attention_backward_plain; // kernel 3
#if !defined(ENABLE_FP32)
    if (kernel == 7) { launch = attention_backward_mma; }
    if (kernel == 11) { launch = C / NH == 64 ? attention_backward_sm90<64> : attention_backward_sm90<128>; }
#endif
    {
        double bytes = (8.0 * C * sizeof(floatX) + NH * sizeof(float)) * B * T;
        Op op(exec, bytes, 5.0 * B * T * T * C, "attention_backward");
        launch({dqkv, dbias, scratch, dout, qkv, out, lse, B, T, C, NH, scale}, exec);
    }
    if (dbias && kernel != 11) { matmul_backward_bias(dbias, scratch, dqkv, B * T, 3 * C, exec); }
}
// ==== end promoted: attention_backward ====
#endif

#if PART == 0 || PART == 4
// ---- 6.5 kernels of generation -----------------------------------------------------------------
//     decode_embed       embeddings of the newest tokens
//     quantize_weights   --weights int8 and fp8
//     decode_matvec      few texts: bound by reading the weights
//     decode_attention   over the cache of keys and values
//     decode_layer       all layers in one launch, for Hopper
//     decode_cache_fill  from a prompt
//     decode_sample      the next token

// ==== promoted: decode_embed ====
// Token -1 means that decode_sample found no logit to draw (all were NaN or -inf); its embedding is NaN.
__global__ void decode_embed_kernel1(floatX* x, const int* tokens, const int* positions, const floatX* wte,
                                     const floatX* wpe, int C) {
    grid_launch_dependents(); // the next kernel may start and load its weights
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * x128::size, b = blockIdx.y;
    if (c >= C) { return; }
    int token = tokens[b];
    int position = max(positions[b], 0); // -1: the text has ended, and nothing reads its x
    x128 t = load128(wte + (size_t)max(token, 0) * C + c), p = load128(wpe + (size_t)position * C + c), sum;
    for (int e = 0; e < x128::size; e++) { sum[e] = (floatX)(token < 0 ? NAN : (float)t[e] + (float)p[e]); }
    store128(x + (size_t)b * C + c, sum);
}

// x (B,C) = wte[token] + wpe[position] | tokens (B) | positions (B) | wte (Vp,C) | wpe (T,C)
// The first kernel of a step. It is launched without overlap: when it starts, the previous step has ended. The other
// kernels of the step rely on that.
void decode_embed(floatX* x, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe, int B,
                  int C, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 128;
    Op op(exec, 3.0 * B * C * sizeof(floatX), 0, "decode_embed");
    require(B > 0 && B <= 65535 && C % x128::size == 0);
    dim3 grid(ceil_div(C / x128::size, block_size), B);
    launch_kernel(decode_embed_kernel1, LaunchShape(grid, block_size), exec, x, tokens, positions, wte, wpe, C);
}
// ==== end promoted: decode_embed ====

// ==== promoted: quantize_weights ====
// One warp per row. The maximum is taken of the bits of |weight|, in whose order infinity and NaN are above all
// numbers.
template <class W>
__global__ void quantize_weights_kernel1(W* values, float* scales, floatX* weight, size_t num_rows, int K) {
    size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (row >= num_rows) { return; }
    uint32_t bits = 0;
    for (int k = lane; k < K; k += 32) { bits = max(bits, __float_as_uint((float)weight[row * K + k]) & 0x7FFFFFFFu); }
    bits = lanes_max<32>(bits);
    // a row without a weight of 2^-100 or more is a row of zeros; divisions are IEEE's, also with --use_fast_math
    float largest = __uint_as_float(bits), scale = 1.0f;
    if (!(largest < 0x1p-100f)) { scale = __fdiv_rn(largest, weight_largest(W())); }
    if (lane == 0) { scales[row] = scale; }
    for (int k = lane; k < K; k += 32) {
        size_t i = row * K + k;
        W value = weight_rounded(__fdiv_rn((float)weight[i], scale), W());
        values[i] = value;
        weight[i] = (floatX)((float)value * scale);
    }
}

// values (num_rows,K) of the format, scales (num_rows) | weight (num_rows,K) inout: rounded to values * scales. A row
// with NaN or infinity has a scale of NaN or infinity, and becomes NaN.
void quantize_weights(void* values, float* scales, floatX* weight, WeightFormat format, size_t num_rows, int K,
                      const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    double bytes = (double)num_rows * K * (2 * sizeof(floatX) + 1) + (double)num_rows * sizeof(float);
    Op op(exec, bytes, 0, "quantize_weights");
    require(format != WEIGHTS_FULL && block_size % 32 == 0);
    size_t blocks = ceil_div(num_rows, (size_t)block_size / 32);
    auto launch = [&](auto kernel, auto* to) {
        launch_kernel(kernel, LaunchShape(blocks, block_size), exec, to, scales, weight, num_rows, K);
    };
    format == WEIGHTS_INT8 ? launch(quantize_weights_kernel1<int8_t>, (int8_t*)values)
                           : launch(quantize_weights_kernel1<__nv_fp8_e4m3>, (__nv_fp8_e4m3*)values);
}
// ==== end promoted: quantize_weights ====

// ==== promoted: decode_matvec ====
// ---- kernel 6: programmatic dependent launch: loads its weights while the previous kernel still runs ----------------

constexpr int DECODE_MATVEC_AHEAD = 3; // vectors in flight per lane and row; they cover a row of 768 elements

// Resident blocks of 256 threads per SM. 4 leave 64 registers per thread, 2 leave 128, which larger batches need.
__host__ __device__ constexpr int decode_matvec_blocks_per_sm(int batch) { return batch >= 4 ? 2 : 4; }

// Writes the normalised x (batch,K) to shared memory; rows past B repeat the last row. g and s are this thread's first
// vectors of norm_weight and norm_bias, which the caller loads before grid_wait_dependency().
template <int batch> __device__ void decode_matvec_norm(x128* shared, const floatX* x, const floatX* norm_weight,
                                                        const floatX* norm_bias, int4 g, int4 s, int first_b, int B,
                                                        int K, float epsilon) {
    __shared__ float mean[batch], rstd[batch];
    int lane = threadIdx.x % 32, num_warps = blockDim.x / 32, num_vec = K / x128::size;
    for (int b = threadIdx.x / 32; b < batch; b += num_warps) {
        const floatX* from = x + (size_t)min(first_b + b, B - 1) * K;
        float sum = 0.0f, squares = 0.0f;
        for (int first = lane; first < num_vec; first += 32 * DECODE_MATVEC_AHEAD) {
            int4 value[DECODE_MATVEC_AHEAD]; // all loads in flight at once
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                value[i] = reinterpret_cast<const int4*>(from)[min(first + 32 * i, num_vec - 1)];
            }
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                if (first + 32 * i >= num_vec) { continue; }
                x128 elements = vec128_from_bits<floatX>(value[i]);
                for (int e = 0; e < x128::size; e++) { sum += (float)elements[e]; }
                shared[b * num_vec + first + 32 * i] = elements;
            }
        }
        float center = warp_sum(sum) / K;
        for (int v = lane; v < num_vec; v += 32) { // a lane reads only what it wrote: no barrier
            x128 value = shared[b * num_vec + v];
            for (int e = 0; e < x128::size; e++) { squares += ((float)value[e] - center) * ((float)value[e] - center); }
        }
        squares = warp_sum(squares);
        if (lane == 0) { mean[b] = center, rstd[b] = rsqrtf(squares / K + epsilon); }
    }
    __syncthreads();
    for (int v = threadIdx.x; v < num_vec; v += blockDim.x) {
        if (v != (int)threadIdx.x) {
            g = reinterpret_cast<const int4*>(norm_weight)[v];
            s = reinterpret_cast<const int4*>(norm_bias)[v];
        }
        x128 scale = vec128_from_bits<floatX>(g), shift = vec128_from_bits<floatX>(s);
        for (int b = 0; b < batch; b++) {
            x128 value = shared[b * num_vec + v];
            for (int e = 0; e < x128::size; e++) {
                value[e] = (floatX)(((float)value[e] - mean[b]) * rstd[b] * (float)scale[e] + (float)shift[e]);
            }
            shared[b * num_vec + v] = value;
        }
    }
    __syncthreads();
}

// Loads this lane's next vectors of the warp's `rows` rows of the weight; vectors outside the matrix are zeros.
template <int rows, class W> __device__ inline void decode_matvec_fetch(WeightBits<W> w[rows][DECODE_MATVEC_AHEAD],
                                                                        const W* weight, int row, int first, int step,
                                                                        int num_vec, int OC) {
#pragma unroll
    for (int r = 0; r < rows; r++) {
#pragma unroll
        for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
            int v = first + i * step;
            bool there = row + r < OC && v < num_vec;
            const WeightBits<W>* from =
                reinterpret_cast<const WeightBits<W>*>(weight) + (size_t)(row + r) * num_vec + v;
            w[r][i] = there ? __ldcs(from) : WeightBits<W>{};
        }
    }
}

// A block consists of groups of `split` warps. A group multiplies `rows` rows of the weight, of type W, at a time, and
// each of its warps takes a share of the columns. blockIdx.x selects `batch` sequences, blockIdx.y the rows. An example
// with split = 2:
//
//     vectors of a row    0 .. 31   32 .. 63   64 .. 95   96 .. 127  ...
//     group 0             warp 0    warp 1     warp 0     warp 1     ...     lane l of a warp loads its vector l
//     group 1             warp 2    warp 3     warp 2     warp 3     ...     (the next `rows` rows)
template <class Out, class W, int batch, int rows, bool norm>
__global__ void __launch_bounds__(256, decode_matvec_blocks_per_sm(batch))
    decode_matvec_kernel6(Out* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                          const W* weight, const float* scales, const floatX* bias, const floatX* residual,
                          bool has_gelu, int B, int K, int OC, float epsilon, int split) {
    constexpr int num_sums = rows * batch, lanes_per_sum = 32 / num_sums;
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    extern __shared__ __align__(128) int4 decode_matvec_shared[]; // (batch,K) floatX, if norm
    __shared__ float partial[8][num_sums];                        // sums of each warp over its share of the columns
    x128* normalised = reinterpret_cast<x128*>(decode_matvec_shared);
    const floatX* own_x = x + (size_t)blockIdx.x * batch * K;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, segment = warp % split;
    int num_vec = K / x128::size, first = segment * 32 + lane, step = split * 32;
    int rows_per_block = (int)blockDim.x / 32 / split * rows, first_b = blockIdx.x * batch;
    int row = blockIdx.y * rows_per_block + warp / split * rows; // the group's first row
    // the row (within the group) and the sequence of the output that this lane writes, if `writes`
    int own_row = lane / lanes_per_sum / batch, own_b = first_b + lane / lanes_per_sum % batch;
    bool writes = segment == 0 && lane % lanes_per_sum == 0 && own_b < B;

    WeightBits<W> w[rows][DECODE_MATVEC_AHEAD]; // raw bits: unpacked they would take twice the registers, or more
    int4 g = {}, s = {};
    decode_matvec_fetch<rows>(w, weight, row, first, step, num_vec, OC);
    float next_bias = writes && bias && row + own_row < OC ? (float)bias[row + own_row] : 0.0f;
    float next_scale = scaled && writes && row + own_row < OC ? scales[row + own_row] : 0.0f;
    if (norm && (int)threadIdx.x < num_vec) {
        g = reinterpret_cast<const int4*>(norm_weight)[threadIdx.x];
        s = reinterpret_cast<const int4*>(norm_bias)[threadIdx.x];
    }
    grid_launch_dependents(); // the next kernel may start; it waits for this one in its own grid_wait_dependency()
    grid_wait_dependency();   // what was read before this line is not written by earlier kernels of the step
    if (norm) { decode_matvec_norm<batch>(normalised, x, norm_weight, norm_bias, g, s, first_b, B, K, epsilon); }

    // all groups of a block take the same number of iterations, because the loop has barriers
    for (int begin = blockIdx.y * rows_per_block; begin < OC; begin += gridDim.y * rows_per_block) {
        bool writes_now = writes && row + own_row < OC;
        size_t at = (size_t)own_b * OC + row + own_row;
        float bias_now = next_bias, scale_now = next_scale;
        float residual_now = writes_now && residual ? (float)residual[at] : 0.0f;
        float sums[num_sums] = {};
        for (int chunk = first; chunk < num_vec; chunk += DECODE_MATVEC_AHEAD * step) {
            if (chunk != first) { decode_matvec_fetch<rows>(w, weight, row, chunk, step, num_vec, OC); }
#pragma unroll
            for (int i = 0; i < DECODE_MATVEC_AHEAD; i++) {
                // past the end of the row the weights are 0; v is clamped so that the loads of x need no branch and are
                // issued together
                int v = min(chunk + i * step, num_vec - 1);
                float weights[rows][x128::size];
#pragma unroll
                for (int r = 0; r < rows; r++) { weight_floats(weights[r], w[r][i], W()); }
                int at_x = v, last_x = (B - 1 - first_b) * num_vec + v;
#pragma unroll
                for (int b = 0; b < batch; b++) {
                    x128 value = norm ? normalised[b * num_vec + v] : load128(own_x + at_x * x128::size);
                    // one running offset, because an address per sequence would take registers
                    at_x = min(at_x + num_vec, last_x);
#pragma unroll
                    for (int e = 0; e < x128::size; e++) {
#pragma unroll
                        for (int r = 0; r < rows; r++) { sums[r * batch + b] += (float)value[e] * weights[r][e]; }
                    }
                }
            }
        }
        row += gridDim.y * rows_per_block;
        // the loads of the next rows are in flight during the warp sums
        decode_matvec_fetch<rows>(w, weight, row, first, step, num_vec, OC);
        next_bias = writes && bias && row + own_row < OC ? (float)bias[row + own_row] : 0.0f;
        next_scale = scaled && writes && row + own_row < OC ? scales[row + own_row] : 0.0f;

        float sum = warp_sums<num_sums>(sums);
        if (split > 1) {
            if (lane % lanes_per_sum == 0) { partial[warp][lane / lanes_per_sum] = sum; }
            __syncthreads();
            if (writes) {
                for (int s = 1; s < split; s++) { sum += partial[warp + s][lane / lanes_per_sum]; }
            }
            __syncthreads(); // now `partial` may be overwritten
        }
        sum = scaled ? sum * scale_now + bias_now : sum + bias_now;
        if (has_gelu) { sum = gelu(sum); }
        if (writes_now) { out[at] = (Out)(sum + residual_now); }
    }
}

// Warps that share a row. Rows are split over more of them while a lane cannot have its whole share in flight, or while
// there are fewer than two blocks per SM and a lane has more than one vector.
inline int decode_matvec_split(int rows, int K, int OC, int num_warps) {
    int num_vec = K / x128::size, num_sms = num_multiprocessors(), split = 1;
    while (split < num_warps && (num_vec > 32 * DECODE_MATVEC_AHEAD * split ||
                                 (num_vec > 32 * split && ceil_div(OC, num_warps / split * rows) < 2 * num_sms))) {
        split *= 2;
    }
    return split;
}

template <class Out, class W, int batch, int rows, class Run>
void decode_matvec_batch(bool norm, int B, int K, int OC, int block_size, const Run& run) {
    constexpr bool head = sizeof(Out) != sizeof(floatX); // always has a layernorm
    int num_warps = block_size / 32, split = decode_matvec_split(rows, K, OC, num_warps);
    int most = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 256 / block_size;
    int blocks = min(ceil_div(OC, num_warps / split * rows), most);
    size_t shared_bytes = norm ? (size_t)batch * K * sizeof(floatX) : 0;
    auto kernel = decode_matvec_kernel6<Out, W, batch, rows, true>;
    if constexpr (!head) { kernel = norm ? kernel : decode_matvec_kernel6<Out, W, batch, rows, false>; }
    require(norm || !head);
    run(kernel, LaunchShape(dim3(ceil_div(B, batch), blocks), block_size, shared_bytes), split);
}

// Calls run(kernel, shape, split) with kernel 6 for a product (B,K) (OC,K)^T; `split` is the kernel's last argument.
template <class Out, class W, class Run>
void decode_matvec_kernel(bool norm, int B, int K, int OC, int block_size, const Run& run) {
    const size_t shared_limit = 40 * 1024; // of the 48 KB that a launch may use without cudaFuncSetAttribute
    require(B > 0 && K > 0 && K % x128::size == 0 && OC > 0);
    require(!norm || K * sizeof(floatX) <= shared_limit);
    // at most 256 threads, because `partial` has 8 rows, one per warp
    require(block_size >= 32 && block_size <= 256 && (block_size & (block_size - 1)) == 0);

    int batch = 1; // sequences per block
    while (batch < min(B, 8) && (!norm || 2 * batch * K * sizeof(floatX) <= shared_limit)) { batch *= 2; }
    // From 4 sequences on a warp multiplies two rows of the weight at once, which share the loads and conversions of x.
    // So it does with 8 bits if it has several rows, to have as many bytes in flight as with one row of 16 bits.
    auto choose = batch == 8   ? decode_matvec_batch<Out, W, 8, 2, Run>
                  : batch == 4 ? decode_matvec_batch<Out, W, 4, 2, Run>
                  : batch == 2 ? decode_matvec_batch<Out, W, 2, 1, Run>
                               : decode_matvec_batch<Out, W, 1, 1, Run>;
    if constexpr (sizeof(W) < sizeof(floatX)) {
        int groups = num_multiprocessors() * decode_matvec_blocks_per_sm(batch) * 8 /
                     decode_matvec_split(1, K, OC, block_size / 32);
        if (batch <= 2 && OC > groups) {
            choose = batch == 2 ? decode_matvec_batch<Out, W, 2, 2, Run> : decode_matvec_batch<Out, W, 1, 2, Run>;
        }
    }
    choose(norm, B, K, OC, block_size, run);
}

// early: by programmatic dependent launch
template <class Out> void decode_matvec_run(Out* out, const floatX* x, const floatX* norm_weight,
                                            const floatX* norm_bias, const WeightMatrix& weight, const floatX* bias,
                                            const floatX* residual, bool gelu, int B, int K, int OC, float epsilon,
                                            const Execution& exec, bool early = true) {
    int block_size = exec.block_size ? exec.block_size : 256;
    require((norm_weight != NULL) == (norm_bias != NULL));
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        auto run = [&](auto kernel, LaunchShape shape, int split) {
            shape.early = early;
            launch_kernel(kernel, shape, exec, out, x, norm_weight, norm_bias, (const W*)weight.values, weight.scales,
                          bias, residual, gelu, B, K, OC, epsilon, split);
        };
        decode_matvec_kernel<Out, W>(norm_weight != NULL, B, K, OC, block_size, run);
    });
}

// out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual | x (B,K) | norm_weight, norm_bias (K) or NULL
// | weight (OC,K) | bias (OC) or NULL | residual (B,OC) or NULL, may be out itself
// Weights, their scales and biases are read while the previous kernel in the stream may still run, so no kernel of the
// step may write them.
void decode_matvec(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec) {
    double others = (double)B * (K + (residual ? 2.0 : 1.0) * OC) * sizeof(floatX);
    Op op(exec, weight.bytes(OC, K) + others, 2.0 * B * OC * K, "decode_matvec %d -> %d", K, OC);
    decode_matvec_run(out, x, norm_weight, norm_bias, weight, bias, residual, gelu, B, K, OC, epsilon, exec);
}

// logits (B,Vp) float = layernorm(x) wte^T | x (B,C) | norm_weight, norm_bias (C) | wte (Vp,C)
void decode_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                 const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec) {
    double others = (double)B * C * sizeof(floatX) + (double)B * Vp * sizeof(float);
    Op op(exec, wte.bytes(Vp, C) + others, 2.0 * B * Vp * C, "decode_matvec %d -> %d, head", C, Vp);
    require(norm_weight != NULL);
    decode_matvec_run<float>(logits, x, norm_weight, norm_bias, wte, NULL, NULL, false, B, C, Vp, epsilon, exec);
}
// ==== end promoted: decode_matvec ====

// ==== promoted: decode_attention ====
// ---- shared by kernels 2 to 5: 16-byte loads, online softmax in registers ----

constexpr int DECODE_ATTENTION_WARPS = 8;                             // per block
constexpr int DECODE_ATTENTION_THREADS = 32 * DECODE_ATTENTION_WARPS; // one per element of a head: HS <= 256
constexpr int DECODE_ATTENTION_STEP = 64;         // the keys of one part (a block's share) are a multiple of this
constexpr int DECODE_ATTENTION_AHEAD = 2;         // keys in flight per thread
constexpr float DECODE_ATTENTION_LOWEST = -1e30f; // initial maximum; finite, because -inf - -inf is NaN

struct DecodeAttentionShared {
    float sum[DECODE_ATTENTION_WARPS][DECODE_ATTENTION_THREADS];      // weighted sums of values, per warp
    float max[DECODE_ATTENTION_WARPS], total[DECODE_ATTENTION_WARPS]; // maximum score, sum of weights, per warp
    bool last;                                                        // this block is the last of its head to arrive
};

// One element of the weighted sum of values. The weights are exp2(score - max), and `total` is their sum.
struct DecodeAttentionSum {
    float sum, max, total;
};

// Combines the results of all warps, which are in shared memory, for element threadIdx.x. The order of the warps is
// fixed, so the result is deterministic.
__device__ inline DecodeAttentionSum decode_attention_join(const DecodeAttentionShared& shared) {
    DecodeAttentionSum x = {0.0f, DECODE_ATTENTION_LOWEST, 0.0f};
#pragma unroll
    for (int w = 0; w < DECODE_ATTENTION_WARPS; w++) { x.max = fmaxf(x.max, shared.max[w]); }
#pragma unroll
    for (int w = 0; w < DECODE_ATTENTION_WARPS; w++) {
        float scale = exp2f(shared.max[w] - x.max);
        x.sum += scale * shared.sum[w][threadIdx.x];
        x.total += scale * shared.total[w];
    }
    return x;
}

// Keys that a block takes in one iteration, with this many lanes per key.
__host__ __device__ constexpr int decode_attention_keys(int lanes) {
    return DECODE_ATTENTION_AHEAD * (DECODE_ATTENTION_THREADS / lanes);
}

// What a thread knows of a head: its part of the query, and of the weighted sum of the values of its keys. `lanes` lanes
// share a key and hold `depth` vectors of it each.
//
//     one iteration, lanes = 8:   warp 0, lanes 0-7    8-15    16-23    24-31    warp 1, lanes 0-7   ...   warp 7, 24-31
//     key of u = 0                row + 0              + 1     + 2      + 3      + 4                 ...   + 31
//     key of u = 1                row + 32             + 33    + 34     + 35     + 36                ...   + 63
template <int lanes, int depth> struct DecodeAttentionState {
    float q[depth][x128::size], sum[depth][x128::size], max, total;

    // qkv points to the head's query
    __device__ void start(const floatX* qkv, int HS, float scale) {
        scale *= LOG2E; // exp2(LOG2E * x) is exp(x)
        max = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int d = 0; d < depth; d++) {
            int v = threadIdx.x % lanes + d * lanes;
            x128 vec = {};
            if (v < HS / x128::size) { vec = load128(qkv + v * x128::size); }
#pragma unroll
            for (int e = 0; e < x128::size; e++) { q[d][e] = (float)vec[e] * scale, sum[d][e] = 0.0f; }
        }
    }

    // Adds the keys k and values v of the iteration that starts at `row`, up to key end - 1. Key `now` is the new token's:
    // it is read from qkv and written to the cache. keys, values and qkv point to the head's first element.
    __device__ void add(int4 k[DECODE_ATTENTION_AHEAD][depth], int4 v[DECODE_ATTENTION_AHEAD][depth], floatX* keys,
                        floatX* values, const floatX* qkv, int row, int end, int now, int C, int HS) {
        constexpr int groups = DECODE_ATTENTION_THREADS / lanes, ahead = DECODE_ATTENTION_AHEAD;
        float score[ahead], old_max = max;
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            int t = row + u * groups + (int)threadIdx.x / lanes;
            score[u] = 0.0f;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                int i = threadIdx.x % lanes + d * lanes;
                if (t == now && t < end && i < HS / x128::size) {
                    k[u][d] = reinterpret_cast<const int4*>(qkv + C)[i];
                    v[u][d] = reinterpret_cast<const int4*>(qkv + 2 * C)[i];
                    reinterpret_cast<int4*>(keys + (size_t)now * C)[i] = k[u][d];
                    reinterpret_cast<int4*>(values + (size_t)now * C)[i] = v[u][d];
                }
                x128 key = vec128_from_bits<floatX>(k[u][d]);
#pragma unroll
                for (int e = 0; e < x128::size; e++) { score[u] += q[d][e] * (float)key[e]; }
            }
            score[u] = lanes_sum<lanes>(score[u]);
            if (t >= end) { score[u] = -INFINITY; }
            max = fmaxf(max, score[u]);
        }
        float rescale = exp2f(old_max - max);
        total *= rescale;
#pragma unroll
        for (int d = 0; d < depth; d++) {
#pragma unroll
            for (int e = 0; e < x128::size; e++) { sum[d][e] *= rescale; }
        }
#pragma unroll
        for (int u = 0; u < ahead; u++) {
            float weight = exp2f(score[u] - max);
            total += weight;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                x128 value = vec128_from_bits<floatX>(v[u][d]);
#pragma unroll
                for (int e = 0; e < x128::size; e++) { sum[d][e] += weight * (float)value[e]; }
            }
        }
    }

    // The result over all threads of the block, for element threadIdx.x; in threads from HS on it is meaningless.
    __device__ DecodeAttentionSum join(DecodeAttentionShared& shared, int HS) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float warp_max = groups_max<lanes>(max); // the groups of lanes had different keys
        float rescale = exp2f(max - warp_max);
        total = groups_sum<lanes>(total * rescale);
#pragma unroll
        for (int d = 0; d < depth; d++) {
#pragma unroll
            for (int e = 0; e < x128::size; e++) {
                float x = groups_sum<lanes>(sum[d][e] * rescale);
                int i = (lane % lanes + d * lanes) * x128::size + e;
                if (lane < lanes && i < HS) { shared.sum[warp][i] = x; }
            }
        }
        if (lane == 0) { shared.max[warp] = warp_max, shared.total[warp] = total; }
        __syncthreads();
        return decode_attention_join(shared);
    }
};

// ---- shared by kernels 3 to 5: the results of the parts of a head, and how they are combined ----

// Combines num_parts partial results, each {max, total, sum (HS)}; warp w takes parts w, w + 8 ...
__device__ inline DecodeAttentionSum decode_attention_combine(DecodeAttentionShared& shared, const float* partial,
                                                              int num_parts, int HS) {
    constexpr int num_elements = DECODE_ATTENTION_THREADS / 32; // per lane
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum[num_elements] = {}, max = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll 2
    for (int p = warp; p < num_parts; p += DECODE_ATTENTION_WARPS) {
        const float* from = partial + (size_t)p * (HS + 2);
        float part_max = __ldcg(from), part_total = __ldcg(from + 1), both = fmaxf(max, part_max);
        float old_scale = exp2f(max - both), part_scale = exp2f(part_max - both);
        max = both, total = total * old_scale + part_total * part_scale;
#pragma unroll
        for (int j = 0; j < num_elements; j++) {
            float x = lane + 32 * j < HS ? __ldcg(from + 2 + lane + 32 * j) : 0.0f;
            sum[j] = sum[j] * old_scale + x * part_scale;
        }
    }
#pragma unroll
    for (int j = 0; j < num_elements; j++) { shared.sum[warp][lane + 32 * j] = sum[j]; }
    if (lane == 0) { shared.max[warp] = max, shared.total[warp] = total; }
    __syncthreads();
    return decode_attention_join(shared);
}

// The partial results of a head in scratch, which starts with one counter per head.
__device__ inline float* decode_attention_partials(float* scratch, int num_heads, int head, int num_parts, int HS) {
    return scratch + num_heads + (size_t)head * num_parts * (HS + 2);
}

// Writes a part's result x to `own`. Returns true in the last block to call this for a head; it finds all num_parts there.
__device__ inline bool decode_attention_arrive(DecodeAttentionShared& shared, int* counter, float* own,
                                               const DecodeAttentionSum& x, int num_parts, int HS) {
    int i = threadIdx.x;
    if (i < HS) { own[2 + i] = x.sum; }
    if (i == 0) { own[0] = x.max, own[1] = x.total; }
    __threadfence(); // makes the partial results visible before the count
    __syncthreads();
    if (i == 0) {
        shared.last = atomicAdd(counter, 1) == num_parts - 1;
        if (shared.last) { *counter = 0; } // reset for the next launch
        __threadfence();
    }
    __syncthreads();
    return shared.last;
}

// Size of scratch in floats: a counter per head, and room for as many partial results as there are steps. It must be zero
// before the first launch; decode_attention leaves its counters at zero.
size_t decode_attention_scratch(int B, int C, int NH, int capacity) {
    return (size_t)B * NH * (1 + (size_t)ceil_div(capacity, DECODE_ATTENTION_STEP) * (C / NH + 2));
}

// ---- kernel 5: all keys of all texts and heads in equal shares, one per resident block; loads two iterations ahead ----

// Where a block is in the list of all iterations: iteration i over the keys of head h of text b, whose position is `now`.
// The list is sorted by b, then h, then i. The number of iterations is that of whole steps; a text that has ended (position -1) has none.
template <int keys> struct DecodeAttentionCursor { // keys: of one iteration
    static constexpr int per_step = DECODE_ATTENTION_STEP / keys;
    int b, h, i, now;

    __device__ static int iterations(int position) {
        return position < 0 ? 0 : (position / DECODE_ATTENTION_STEP + 1) * per_step;
    }
    __device__ int count() const { return iterations(now); } // of each head of text b
    // of all heads and texts
    __device__ static int total(const int* positions, int B, int NH) {
        int sum = 0;
        for (int text = threadIdx.x % 32; text < B; text += 32) { sum += iterations(positions[text]); }
        return lanes_sum<32>(sum) * NH;
    }
    // Goes to place `target` of the list, which must be less than total().
    __device__ void find(int target, const int* positions, int B, int NH) {
        int lane = threadIdx.x % 32, first = 0; // first: the place where a group of 32 texts begins
        for (int text = 0;; text += 32) {
            int own = text + lane < B ? iterations(positions[text + lane]) * NH : 0, upto = own;
            for (int offset = 1; offset < 32; offset *= 2) {
                int below = __shfl_up_sync(0xFFFFFFFFu, upto, offset);
                if (lane >= offset) { upto += below; }
            }
            unsigned past = __ballot_sync(0xFFFFFFFFu, first + upto > target);
            if (past) {
                int which = __ffs(past) - 1;
                target -= first + __shfl_sync(0xFFFFFFFFu, upto - own, which);
                b = text + which;
                break;
            }
            first += __shfl_sync(0xFFFFFFFFu, upto, 31);
        }
        now = positions[b], h = target / count(), i = target % count();
    }
    // Goes to the next place, which must exist.
    __device__ void advance(const int* positions, int NH) {
        if (++i < count()) { return; }
        i = 0;
        if (++h < NH) { return; }
        h = 0;
        do { now = positions[++b]; } while (now < 0);
    }
};

// A ring in shared memory for loads in flight. Each thread reads only what it copied itself, so there are no barriers.
template <int lanes, int depth> struct DecodeAttentionRing {
    static constexpr int slots = depth == 1 ? 2 : 1; // 32 KB: with DecodeAttentionShared less than 48 KB
    int4 k[slots][DECODE_ATTENTION_AHEAD][depth][DECODE_ATTENTION_THREADS];
    int4 v[slots][DECODE_ATTENTION_AHEAD][depth][DECODE_ATTENTION_THREADS];

    // Starts this thread's copies of the iteration at `row`; zeros from row `end` on. keys and values point to the head.
    __device__ void copy(int slot, const floatX* keys, const floatX* values, int row, int end, int C, int num_vec) {
#pragma unroll
        for (int u = 0; u < DECODE_ATTENTION_AHEAD; u++) {
            int t = row + (u * DECODE_ATTENTION_THREADS + (int)threadIdx.x) / lanes;
#pragma unroll
            for (int d = 0; d < depth; d++) {
                int i = threadIdx.x % lanes + d * lanes;
                bool there = t < end && i < num_vec;
                size_t at = there ? (size_t)t * C + i * x128::size : 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 // no cp.async
                k[slot][u][d][threadIdx.x] = there ? vec128_bits(load128(keys + at)) : make_int4(0, 0, 0, 0);
                v[slot][u][d][threadIdx.x] = there ? vec128_bits(load128(values + at)) : make_int4(0, 0, 0, 0);
#else
                cp_async_16(&k[slot][u][d][threadIdx.x], keys + at, there);
                cp_async_16(&v[slot][u][d][threadIdx.x], values + at, there);
#endif
            }
        }
    }
    // Ends what copy() of one iteration has started.
    __device__ void commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        cp_async_commit();
#endif
    }
    // Waits for the oldest of `slots` committed iterations.
    __device__ void wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        cp_async_wait<slots - 1>();
#endif
    }
};

// gridDim.x blocks share the list of iterations evenly. A head that lies in the shares of several blocks is combined by the
// last of them to arrive. The share is a multiple of a step, so a head has at most as many parts as steps.
template <int lanes, int depth> __global__ void __launch_bounds__(DECODE_ATTENTION_THREADS, depth == 1 ? 3 : 2)
    decode_attention_kernel5(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                             const int* positions, int B, int NH, int HS, int capacity, float scale) {
    constexpr int ahead = DECODE_ATTENTION_AHEAD, step = decode_attention_keys(lanes);
    typedef DecodeAttentionCursor<step> Cursor;
    typedef DecodeAttentionRing<lanes, depth> Ring;
    __shared__ DecodeAttentionShared shared;
    // without this alignment a step of 64 sequences takes 10% longer: notes/decode_attention.md
    extern __shared__ __align__(128) int4 decode_attention_ring[];
    Ring& ring = *reinterpret_cast<Ring*>(decode_attention_ring);
    grid_launch_dependents(); // the next kernel may start and load its weights
    int C = NH * HS, num_vec = HS / x128::size, max_parts = ceil_div(capacity, DECODE_ATTENTION_STEP);
    int total = Cursor::total(positions, B, NH);
    int share = ceil_div(ceil_div(total, (int)gridDim.x), Cursor::per_step) * Cursor::per_step;
    int begin = blockIdx.x * share, end = min(begin + share, total);
    if (begin >= end) { return; }
    Cursor at, loads; // loads: `slots` iterations ahead of `at`
    at.find(begin, positions, B, NH);
    loads = at;
    auto copy = [&](int place) { // starts the loads of a place, if there is one
        if (place < end) {
            if (place > begin) { loads.advance(positions, NH); }
            size_t cache = (size_t)loads.b * capacity * C + loads.h * HS;
            ring.copy((place - begin) % Ring::slots, keys + cache, values + cache, loads.i * step, loads.now, C,
                      num_vec);
        }
        ring.commit();
    };
    for (int slot = 0; slot < Ring::slots; slot++) { copy(begin + slot); }
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step

#pragma unroll 1
    for (int place = begin; place < end;) { // the share's part of one head after the other
        DecodeAttentionState<lanes, depth> state;
        int head = at.b * NH + at.h, count = at.count(), head_begin = place - at.i; // the head's place in the list
        size_t cache = (size_t)at.b * capacity * C + at.h * HS;
        const floatX* head_qkv = qkv + (size_t)at.b * 3 * C + at.h * HS;
        state.start(head_qkv, HS, scale);
        for (int head_end = min(head_begin + count, end); place < head_end; place++) {
            int4 k[ahead][depth], v[ahead][depth];
            int slot = (place - begin) % Ring::slots;
            ring.wait();
#pragma unroll
            for (int u = 0; u < ahead; u++) {
#pragma unroll
                for (int d = 0; d < depth; d++) {
                    k[u][d] = ring.k[slot][u][d][threadIdx.x], v[u][d] = ring.v[slot][u][d][threadIdx.x];
                }
            }
            copy(place + Ring::slots);
            state.add(k, v, keys + cache, values + cache, head_qkv, (place - head_begin) * step, at.now + 1, at.now, C,
                      HS);
        }
        DecodeAttentionSum x = state.join(shared, HS);
        int first_block = head_begin / share, num_parts = (head_begin + count - 1) / share - first_block + 1;
        bool last = num_parts == 1;
        if (num_parts > 1) {
            float* partials = decode_attention_partials(scratch, B * NH, head, max_parts, HS);
            last = decode_attention_arrive(shared, reinterpret_cast<int*>(scratch) + head,
                                           partials + (size_t)(blockIdx.x - first_block) * (HS + 2), x, num_parts, HS);
            if (last) { x = decode_attention_combine(shared, partials, num_parts, HS); }
        }
        if (last && (int)threadIdx.x < HS) {
            out[(size_t)at.b * C + at.h * HS + threadIdx.x] = (floatX)(x.sum / x.total);
        }
        __syncthreads();  // now `shared` may be overwritten
        at.i = count - 1; // advance() goes to the next head
        if (place < end) { at.advance(positions, NH); }
    }
}

// The new token of each sequence attends over the positions[b] tokens before it and itself; its key and value become
// row positions[b] of the cache. With a position of -1, nothing is read or written for that sequence. The positions and the
// earlier rows are read while the previous kernel may still run: only kernels before this step's decode_embed write them,
// and those have ended.
// out (B,C) | keys, values (B,capacity,C) inout | scratch: decode_attention_scratch | qkv (B,3,NH,HS) | positions (B)
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, float scale, const Execution& exec,
                      int blocks_per_sm) {
    // bytes without the reads of the cache, which depend on the positions
    Op op(exec, 4.0 * B * C * sizeof(floatX), 0, "decode_attention");
    require(B > 0 && NH > 0 && C % NH == 0 && capacity > 0 && blocks_per_sm > 0);
    int HS = C / NH, num_vec = HS / x128::size;
    require(HS % 8 == 0 && HS <= DECODE_ATTENTION_THREADS);
    auto kernel = decode_attention_kernel5<8, 1>;
    if (num_vec > 8) { kernel = decode_attention_kernel5<16, 1>; }
    if (num_vec > 16) { kernel = decode_attention_kernel5<32, 1>; }
    if (num_vec > 32) { kernel = decode_attention_kernel5<32, 2>; }
    size_t bytes = sizeof(DecodeAttentionRing<8, 1>); // the same for all of them
    static_assert(sizeof(DecodeAttentionRing<8, 1>) == sizeof(DecodeAttentionRing<32, 2>), "");
    double most = (double)B * NH * ceil_div(capacity, DECODE_ATTENTION_STEP); // steps, if the cache is full
    require(most <= 1 << 28);
    int blocks = min(num_multiprocessors() * blocks_per_sm, (int)most);
    launch_early(kernel, blocks, DECODE_ATTENTION_THREADS, bytes, exec, out, keys, values, scratch, qkv, positions, B,
                 NH, HS, capacity, scale);
}
void decode_attention(floatX* out, floatX* keys, floatX* values, float* scratch, const floatX* qkv,
                      const int* positions, int B, int C, int NH, int capacity, float scale, const Execution& exec) {
    decode_attention(out, keys, values, scratch, qkv, positions, B, C, NH, capacity, scale, exec, 3);
}
// ==== end promoted: decode_attention ====

// ==== promoted: decode_layer ====
// The width of the MLP, divided by C. A head has as many times DECODE_LAYER_HS hidden units. Kernels 5 and 6 are written for 4: the 8 * 4
// hidden units of a set are a warp's lanes, and 32 stands for their number, too. For another width more changes than this constant.
constexpr int DECODE_LAYER_MLP = 4;

#if !defined(ENABLE_FP32) // 8 lanes share a head's 64 numbers, 16 bytes each

constexpr int DECODE_LAYER_HS = 64, DECODE_LAYER_THREADS = 256, DECODE_LAYER_WARPS = 8;
constexpr int DECODE_LAYER_GROUPS = 32; // of 8 lanes, each of which attends to a token

// The sum of the products of x128::size elements.
__device__ inline float decode_layer_dot(const x128& a, const float (&b)[x128::size]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < x128::size; e++) { sum += (float)a[e] * b[e]; }
    return sum;
}
// The part of n things that block `rank` of a cluster has.
struct DecodeLayerShare {
    int first, n;
};
__host__ __device__ inline int decode_layer_most(int n, int cluster) { return (n + cluster - 1) / cluster; }
__host__ __device__ inline DecodeLayerShare decode_layer_share(int n, int rank, int cluster) {
    int most = decode_layer_most(n, cluster), first = rank * most < n ? rank * most : n;
    return {first, n - first < most ? n - first : most};
}

// What a block, or a warp, knows of the attention of its tokens: the weighted sum of values, the largest score and the sum of
// the weights, 2^(score - largest).
constexpr int DECODE_LAYER_PART = DECODE_LAYER_HS + 2;

// Returns the sums of n <= 8 parts: elements i and j, the largest score, and the sum of weights.
__device__ inline float2 decode_layer_join(const float (*parts)[DECODE_LAYER_PART], int n, int i, int j, float& largest,
                                           float& total) {
    float2 sum = {};
    largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
    for (int p = 0; p < n; p++) { largest = fmaxf(largest, parts[p][DECODE_LAYER_HS]); }
#pragma unroll
    for (int p = 0; p < n; p++) {
        float scale = exp2f(parts[p][DECODE_LAYER_HS] - largest);
        sum.x += scale * parts[p][i], sum.y += scale * parts[p][j];
        total += scale * parts[p][DECODE_LAYER_HS + 1];
    }
    return sum;
}

// ---- shared by kernels 5 and 6: one launch, weights in the order in which they are read, results that carry their readiness ----
// Of the 33,000 cycles per layer of the ladder's kernel 3 (C = 768), 7,500 go to the copies of weights that its threads make,
// 7,000 to layernorms of whole vectors in every block, 6,000 to additions in global memory and barriers of all blocks, and
// 8,000 to products. Here
//
//     - a block's weights of a layer are one piece of memory, in the order of their use, made once by decode_layers_pack. One thread
//       copies them by cp.async.bulk to a ring of chunks in shared memory, as far ahead as they fit
//     - products are mma of 16 rows by 16 columns, with the vector in each of the 8 columns of the other operand. A warp takes every
//       eighth chunk of 32 columns, and normalises only these
//     - a block has C / cluster columns of the residual stream in registers. For these it adds up the parts of all heads. A part comes
//       with the number of its phase (attention or MLP of one layer), so a reader waits for the value itself, and no block for a
//       barrier of the grid
//     - the size of the model is known when the kernel is compiled, and the two halves of a layer share their code: there are fewer
//       instructions, which a block runs once per layer, and which have to be loaded as well
//
// A cluster, of `cluster` blocks, has a head. In a layer:
//
//     x of the own columns                                           -> the cluster
//     layernorm; q, k, v of the own rows                             -> the cluster
//     attention over the own tokens, which registers hold by then    -> the cluster
//     projection to the own columns                                  -> all heads: a part of x
//     x + parts of all heads, of the own columns                     -> the cluster
//     layernorm, fc and gelu of the own hidden units                 -> the cluster
//     fcproj of the head's 256 hidden units to the own columns       -> all heads: a part of x
//     x + parts of all heads

// elements: 8 rows by 32 columns; lane l of a warp reads row l / 4, 8 columns from l % 4 * 8 on
constexpr int DECODE_LAYER_FRAGMENT = 8 * 32;

// How a block's weights of a layer follow each other, in fragments.
struct DecodeLayerPacked {
    int C, cluster, sets, chunks; // sets: 8 / cluster, each of 24 rows of qkv and 32 of fc; chunks: of 32 columns of C
    int proj, fc, fcproj, end;    // where these matrices begin; qkv begins at 0
    __host__ __device__ constexpr DecodeLayerPacked(int C, int cluster)
        : C(C), cluster(cluster), sets(8 / cluster), chunks(C / 32), proj(chunks * 3 * sets),
          fc(proj + C / 16 / cluster * 4), fcproj(fc + chunks * DECODE_LAYER_MLP * sets),
          end(fcproj + C / 16 / cluster * 4 * DECODE_LAYER_MLP) {}
    // Where the 8 elements of `lane` of fragment f come from: a matrix (0 qkv, 1 attproj, 2 fc, 3 fcproj), and an offset in it.
    //     qkv, fc    (8 chunks of columns) (set) (chunk) (3 or 4 groups of 8 rows)
    //     attproj    (tile of 16 rows) (2 chunks) (2 groups of 8 rows)
    //     fcproj     (8 tiles) (4 pairs of chunks) (tile) (2 chunks) (2 groups of 8 rows)
    struct Source {
        int matrix;
        size_t offset;
    };
    __host__ __device__ Source source(int f, int lane, int head, int rank) const {
        const int HS = DECODE_LAYER_HS, MLP = DECODE_LAYER_MLP, r = lane / 4, column = lane % 4 * 8;
        int chunk = 0;
        auto rows_of = [&](int f, int groups) { // the first row of fragment f of qkv or fc, and its chunk
            int round = f / (8 * groups * sets), rest = f % (8 * groups * sets);
            int n = chunks - 8 * round < 8 ? chunks - 8 * round : 8, set = rest / (n * groups);
            chunk = 8 * round + rest % (n * groups) / groups;
            return (set * groups + rest % groups) * 8;
        };
        if (f < proj) {
            int row = rank * 24 * sets + rows_of(f, 3) + r;
            return {0, (size_t)(row / HS * C + head * HS + row % HS) * C + chunk * 32 + column};
        }
        if (f < fc) {
            f -= proj;
            int out = rank * (C / cluster) + f / 4 * 16 + f % 2 * 8 + r;
            return {1, (size_t)out * C + head * HS + f / 2 % 2 * 32 + column};
        }
        int unit = head * MLP * HS + rank * 8 * MLP * sets;
        if (f < fcproj) {
            unit += rows_of(f - fc, MLP) + r;
            return {2, (size_t)unit * C + chunk * 32 + column};
        }
        f -= fcproj;
        int begin = f / (32 * MLP) * 8, rest = f % (32 * MLP),
            n = C / 16 / cluster - begin < 8 ? C / 16 / cluster - begin : 8; // tiles
        int tile = begin + rest % (4 * n) / 4, pair = rest / (4 * n);
        int out = rank * (C / cluster) + tile * 16 + f % 2 * 8 + r;
        return {3, (size_t)out * MLP * C + head * MLP * HS + pair * 64 + f / 2 % 2 * 32 + column};
    }
};

// packed: for each block, layer and fragment, 32 vectors of 8 elements, n in all
__global__ void decode_layers_pack_kernel5(floatX* packed, const __grid_constant__ DecodeLayers layers, int cluster,
                                           size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const DecodeLayer& l = layers.first;
    DecodeLayerPacked p(l.C, cluster);
    int lane = i % 32, f = i / 32 % p.end, block = i / 32 / p.end / layers.num;
    size_t at = i / 32 / p.end % layers.num * layers.weights;
    DecodeLayerPacked::Source from = p.source(f, lane, block / cluster, block % cluster);
    const floatX* matrices[] = {l.qkvw, l.attprojw, l.fcw, l.fcprojw};
    store128(packed + i * x128::size, load128(matrices[from.matrix] + at + from.offset));
}

// In global memory. of_half: the heads' parts of the residual stream after attention and after the MLP, see part() of each kernel.
// phase: the number of phases before this launch; arrived: blocks that have finished it. B: the number of texts
struct DecodeLayerParts {
    uint4* of_half[2];
    uint32_t *phase, *arrived;
    int B;
};

template <int C, int cluster> struct DecodeLayerSizes {
    static constexpr int HS = DECODE_LAYER_HS, MLP = DECODE_LAYER_MLP, WARPS = DECODE_LAYER_WARPS, VEC = x128::size;
    static constexpr int NH = C / HS, SETS = 8 / cluster, CHUNKS = C / 32;
    static constexpr int OWN = C / cluster, TILES = OWN / 16;              // columns of a block; 16 of them are a tile
    static constexpr int ROUNDS = (CHUNKS + 7) / 8;                        // chunks of columns per warp
    static constexpr int TOGETHER = SETS == 1 && ROUNDS <= 3 ? ROUNDS : 1; // rounds that pass through the ring at once
    static constexpr int PIECE = 32 * TOGETHER;                            // fragments, at most
    // each matrix of a layer is one piece, the ring has four
    static constexpr bool RESIDENT = SETS == 1 && TOGETHER == ROUNDS && TILES <= 8;
    static constexpr int RING = RESIDENT ? 4 : 11; // pieces
    static_assert(RESIDENT || RING <= 2 * ROUNDS * SETS + (1 + MLP) * ((TILES + 7) / 8), "more pieces than a layer");
    // Pieces in flight: about 5 MB on the whole GPU, what its memory delivers in a microsecond. More would not come sooner, but
    // all else, the parts of x above all, would queue behind them: with the whole ring in flight C = 1600 took 7% longer.
    static constexpr int IN_FLIGHT = 3, GROUPS = DECODE_LAYER_GROUPS;
    static_assert(C % (16 * cluster) == 0 && OWN / 2 <= DECODE_LAYER_THREADS && 8 % cluster == 0 && C % HS == 0, "");
};

// The vectors of one half of a layer.
template <int C, int cluster> struct DecodeLayerVectors {
    floatX norm_weight[C], norm_bias[C];
    floatX bias[3 * DECODE_LAYER_HS]; // of the head's q, k and v, or of the block's hidden units
    floatX out_bias[C / cluster];     // of the block's columns of attproj or fcproj

    // Loads them for layer l, whose weights are `at` elements further. One thread calls this.
    __device__ void load(const DecodeLayer& l, size_t at, int half, int head, int rank, uint64_t* full) {
        constexpr int HS = DECODE_LAYER_HS, OWN = C / cluster, MLP = DECODE_LAYER_MLP, UNITS = 8 * MLP * 8 / cluster;
        auto vector = [&](floatX* to, const floatX* from, int n) {
            bulk_load(to, from, n * (int)sizeof(floatX), full);
        };
        mbarrier_arrive_expect(full, (2 * C + OWN + (half == 0 ? 3 * HS : UNITS)) * (int)sizeof(floatX));
        vector(norm_weight, (half == 0 ? l.ln1w : l.ln2w) + at, C);
        vector(norm_bias, (half == 0 ? l.ln1b : l.ln2b) + at, C);
        vector(out_bias, (half == 0 ? l.attprojb : l.fcprojb) + at + rank * OWN, OWN);
        for (int k = 0; half == 0 && k < 3; k++) { vector(bias + k * HS, l.qkvb + at + k * C + head * HS, HS); }
        if (half == 1) { vector(bias, l.fcb + at + head * MLP * HS + rank * UNITS, UNITS); }
    }
};

// What one thread loads to shared memory: the weights, through a ring of pieces, and the vectors.
template <int C, int cluster> struct DecodeLayerLoads : DecodeLayerSizes<C, cluster> {
    typedef DecodeLayerSizes<C, cluster> Sizes;
    using Sizes::CHUNKS, Sizes::IN_FLIGHT, Sizes::MLP, Sizes::PIECE, Sizes::RESIDENT, Sizes::RING, Sizes::SETS;
    using Sizes::TILES, Sizes::TOGETHER;
    int4 weights[(RESIDENT ? DecodeLayerPacked(C, cluster).end : RING * PIECE) * 32];
    alignas(16) DecodeLayerVectors<C, cluster> vectors[2][2]; // of half i of even layers, of odd layers
    TmaRing<RING> ring;
    uint64_t vectors_full[2][2];

    // Where a piece of the ring begins.
    __device__ int4* piece(int stage) {
        constexpr DecodeLayerPacked p(C, cluster);
        int first = !RESIDENT ? stage * PIECE : stage == 0 ? 0 : stage == 1 ? p.proj : stage == 2 ? p.fc : p.fcproj;
        return weights + first * 32;
    }
    // Loads all weights and vectors, one after the other, in the order in which they are waited for.
    __device__ void load(const DecodeLayers& layers, const floatX* packed, int rank) {
        constexpr DecodeLayerPacked p(C, cluster);
        const floatX* from = packed + (size_t)blockIdx.x * layers.num * p.end * DECODE_LAYER_FRAGMENT;
        TmaRingPlace place, arrived;
        int num_pieces = 0;
        auto load_piece = [&](int n) {
            int bytes = n * DECODE_LAYER_FRAGMENT * (int)sizeof(floatX);
            if (!RESIDENT && num_pieces++ >= IN_FLIGHT) { ring.wait(arrived), arrived.next(RING); }
            uint64_t* full = ring.acquire(place, bytes);
            bulk_load(piece(place.stage), from, bytes, full);
            from += n * DECODE_LAYER_FRAGMENT;
            place.next(RING);
        };
        auto projection = [&](int pairs) { // of attention, or of the hidden units, to the own columns
            if (RESIDENT) { load_piece(TILES * pairs * 4); }
            for (int tile = 0; !RESIDENT && tile < TILES; tile += 8) {
                for (int k = 0; k < pairs; k++) { load_piece(min(TILES - tile, 8) * 4); }
            }
        };
        auto rounds = [&](int groups) {
            for (int chunk = 0; chunk < CHUNKS; chunk += 8 * TOGETHER) {
                for (int set = 0; set < SETS; set++) { load_piece(min(CHUNKS - chunk, 8 * TOGETHER) * groups); }
            }
        };
        for (int i = 0; i < layers.num; i++) {
            // Their place is free: the ring has no more pieces than a layer, so the newest piece took the place of one that all warps
            // gave back after this half of layer i - 2.
            auto load_vectors = [&](int half) {
                vectors[half][i & 1].load(layers.first, i * layers.weights, half, blockIdx.x / cluster, rank,
                                          &vectors_full[half][i & 1]);
            };
            load_vectors(0), rounds(3), projection(1);
            load_vectors(1), rounds(MLP), projection(MLP);
        }
    }
};

// What a team shares in both kernels: the eight warps that compute one text, or up to 8 texts.
struct DecodeLayerTeam {
    // where what the blocks of the cluster send each other arrives
    uint64_t x_there, qkv_there, attention_there, hidden_there;
    float qkv[3 * DECODE_LAYER_HS];                     // of the text that the block attends for
    float warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART]; // attention of each warp
};

// Keys and values of n tokens of each 8 lanes: this lane's 16 bytes of each.
template <int n> struct DecodeLayerTokens { int4 keys[n], values[n]; };

// What 8 lanes know of the attention of a text: this lane's elements of q and of the weighted sum of values, the largest score and
// the sum of the weights, 2^(score - largest).
struct DecodeLayerSums {
    static constexpr int HS = DECODE_LAYER_HS, VEC = x128::size;
    float q[VEC], sum[VEC], largest, total;

    // Of no tokens; newest: but the first 8 lanes have the token itself. qkv (3,HS): its q, k and v
    __device__ DecodeLayerSums(const float* qkv, bool newest) {
        int lane = threadIdx.x % 32;
        qkv += lane % 8 * VEC, largest = DECODE_ATTENTION_LOWEST, total = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { q[e] = qkv[e] * (LOG2E * rsqrtf((float)HS)), sum[e] = 0.0f; }
        if (!newest) { return; }
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { dot += qkv[HS + e] * q[e]; }
        dot = lanes_sum<8>(dot);
        if (lane >= 8) { return; }
        largest = dot, total = 1.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] = qkv[2 * HS + e]; }
    }
    __device__ void rescale(float before) { // sum and total, from the largest score before
        float factor = exp2f(before - largest);
        total *= factor;
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] *= factor; }
    }
    // Adds the next tokens; only the first `left` exist.
    template <int n> __device__ void add(const DecodeLayerTokens<n>& tokens, int left) {
        float score[n], before = largest;
        int own = threadIdx.x % DECODE_LAYER_THREADS / 8;
#pragma unroll
        for (int i = 0; i < n; i++) { score[i] = decode_layer_dot(vec128_from_bits<floatX>(tokens.keys[i]), q); }
        // This is lanes_sum<8>, with the shuffles of all n side by side: ptxas runs n calls one after the other.
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) {
#pragma unroll
            for (int i = 0; i < n; i++) { score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], offset); }
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            score[i] = i * DECODE_LAYER_GROUPS + own < left ? score[i] : -INFINITY;
            largest = fmaxf(largest, score[i]);
        }
        rescale(before);
#pragma unroll
        for (int i = 0; i < n; i++) {
            float share = exp2f(score[i] - largest);
            x128 value = vec128_from_bits<floatX>(tokens.values[i]);
            total += share;
#pragma unroll
            for (int e = 0; e < VEC; e++) { sum[e] += share * (float)value[e]; }
        }
    }
    // Writes what the warp knows to `part`.
    __device__ void store(float (&part)[DECODE_LAYER_PART]) {
        int lane = threadIdx.x % 32;
        float before = largest;
        largest = groups_max<8>(largest);
        rescale(before);
        total = groups_sum<8>(total);
#pragma unroll
        for (int e = 0; e < VEC; e++) { sum[e] = groups_sum<8>(sum[e]); }
        if (lane < 8) {
#pragma unroll
            for (int e = 0; e < VEC; e++) { part[lane * VEC + e] = sum[e]; }
        }
        if (lane == 0) { part[HS] = largest, part[HS + 1] = total; }
    }
};

// A thread of a team, and what it does in both kernels. A block has NUM_TEAMS teams and NUM_LOADERS threads more, which load.
template <int C, int cluster, class Team, int NUM_TEAMS, int NUM_LOADERS> struct DecodeLayerThread
    : DecodeLayerSizes<C, cluster> {
    struct Memory : DecodeLayerLoads<C, cluster> {
        Team teams[NUM_TEAMS];
    };
    typedef DecodeLayerSizes<C, cluster> Sizes;
    using Sizes::CHUNKS, Sizes::GROUPS, Sizes::HS, Sizes::NH, Sizes::OWN, Sizes::RESIDENT, Sizes::RING, Sizes::ROUNDS;
    using Sizes::SETS, Sizes::TOGETHER, Sizes::VEC, Sizes::WARPS;
    static constexpr int TEAMS = NUM_TEAMS, LOADERS = NUM_LOADERS, THREADS = TEAMS * DECODE_LAYER_THREADS + LOADERS;
    Memory& shared;
    int team, thread, warp, lane; // thread and warp: of the team
    Team& own;                    // the team's
    int rank;
    TmaRingPlace place;

    __device__ DecodeLayerThread(Memory& s)
        : shared(s), team(TEAMS == 1 ? 0 : warp_uniform(threadIdx.x / DECODE_LAYER_THREADS)),
          thread(threadIdx.x - team * DECODE_LAYER_THREADS), warp(warp_uniform(thread / 32)), lane(threadIdx.x % 32),
          own(s.teams[TEAMS == 1 ? 0 : team % TEAMS]), rank(cluster_rank()) {}
    static LaunchShape shape() { return LaunchShape(NH * cluster, THREADS, sizeof(Memory), cluster, true); }
    __device__ int head() const { return blockIdx.x / cluster; }
    __device__ int first() const { return rank * OWN; }                                  // of the block's columns
    __device__ void sync() const { named_barrier_sync(1 + team, DECODE_LAYER_THREADS); } // of the team
    // Waits at a barrier of the cluster. Thread 0 makes it ready for the next time.
    __device__ void wait(uint64_t* barrier, int parity, int bytes) const {
        mbarrier_wait_cluster(barrier, parity);
        if (thread == 0) { mbarrier_arrive_expect(barrier, bytes); }
    }

    // ---- weights ----

    // This lane's vectors of the next piece of the ring, which is of matrix 0 to 3 of the layer.
    __device__ const int4* take(int matrix) {
        if (RESIDENT) { place.stage = matrix; }
        shared.ring.wait(place);
        return shared.piece(place.stage) + lane;
    }
    __device__ void give_back() {
        __syncwarp();
        if (RESIDENT) { return; }
        mbarrier_arrive(&shared.ring.empty[place.stage]);
        place.next(RING);
    }
    // Where a layer fits the ring, its matrices are given back after half a layer. This is early enough for the next ones, and they do not
    // delay the exchange between the heads. With two teams the other one needs the first matrix of the next layer before.
    __device__ void give_back_product(int half) const {
        if (TEAMS == 2) { mbarrier_arrive(&shared.ring.empty[2 * half]); }
    }
    __device__ void give_back_half(int half) {
        __syncwarp();
        if (!RESIDENT) { return; }
        if (TEAMS == 1) { mbarrier_arrive(&shared.ring.empty[2 * half]); }
        mbarrier_arrive(&shared.ring.empty[2 * half + 1]);
        place.parity ^= half;
    }

    // ---- products ----

    // sums += 16 rows by 32 columns times x, of which this lane has 8 columns from lane % 4 * 8 on, of text lane / 4. The two halves of sums
    // are added up later.
    __device__ static void multiply(float (&sums)[2][4], int4 upper, int4 lower, int4 x) {
        uint32_t a[4] = {(uint32_t)upper.x, (uint32_t)lower.x, (uint32_t)upper.y, (uint32_t)lower.y};
        uint32_t b[4] = {(uint32_t)upper.z, (uint32_t)lower.z, (uint32_t)upper.w, (uint32_t)lower.w};
        mma_16x8x16(sums[0], a, (uint32_t)x.x, (uint32_t)x.y, floatX());
        mma_16x8x16(sums[1], b, (uint32_t)x.z, (uint32_t)x.w, floatX());
    }
    // sums += the warp's columns of the next matrix of the ring, (8 * groups * SETS, C), groups 3 or 4, times x: this lane's text, from
    // lane % 4 * 8 on. With 3 groups the third one is also the fourth.
    __device__ void product_sums(float (&sums)[SETS][2][2][4], int groups, const floatX* x) {
#pragma unroll 1
        for (int round = 0; round < ROUNDS; round += TOGETHER) {
            int4 operand[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                int chunk = 8 * (round + j) + warp;
                operand[j] = chunk < CHUNKS ? *reinterpret_cast<const int4*>(x + chunk * 32) : make_int4(0, 0, 0, 0);
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const int4* from = take(2 * (groups - 3)) + warp * groups * 32;
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) {
                    if (8 * (round + j) + warp < CHUNKS) {
                        multiply(sums[set][0], from[0], from[32], operand[j]);
                        multiply(sums[set][1], from[64], from[groups * 32 - 32], operand[j]);
                    }
                    from += 8 * groups * 32;
                }
                give_back();
            }
        }
    }
    // The sum over the warps of element i of their products.
    template <int n> __device__ static float sum_of_warps(const float (&products)[WARPS][n], int i) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) { sum += products[w][i]; }
        return sum;
    }
    // sums += the warp's tile of n in the next matrix of the ring, (16 * n, 64 * pairs), times x, as above.
    template <int pairs> __device__ void project_sums(float (&sums)[2][4], int n, const floatX* x) {
        const int4 *from = nullptr, *operand = reinterpret_cast<const int4*>(x);
#pragma unroll(TEAMS == 1 ? pairs : 1)
        for (int k = 0; k < pairs; k++) {
            if (!RESIDENT || k == 0) { from = take(pairs == 1 ? 1 : 3) + warp * 4 * 32; }
            if (warp < n) {
                multiply(sums, from[0], from[32], operand[8 * k]);
                multiply(sums, from[64], from[96], operand[8 * k + 4]);
            }
            from += n * 4 * 32;
            if (!RESIDENT && k < pairs - 1) { give_back(); }
        }
    }

    // ---- attention ----

    // This lane's part of token `first` + thread / 8. cache: the text's and head's keys or values
    __device__ const floatX* token(const floatX* cache, int first) const {
        return hold_pointer(cache + (size_t)(first + thread / 8) * C + lane % 8 * VEC);
    }
    // Loads the tokens from `first` onward; zeros from `end` onward. keys, values: what token() returns for them
    template <int n> __device__ void load_tokens(DecodeLayerTokens<n>& to, const floatX* keys, const floatX* values,
                                                 int first, int end) const {
#pragma unroll
        for (int i = 0; i < n; i++) {
            bool there = first + thread / 8 + i * GROUPS < end;
            to.keys[i] = there ? *reinterpret_cast<const int4*>(keys + i * GROUPS * C) : make_int4(0, 0, 0, 0);
            to.values[i] = there ? *reinterpret_cast<const int4*>(values + i * GROUPS * C) : make_int4(0, 0, 0, 0);
        }
    }
    // The key and value of token `now` become a row of the cache.
    __device__ void store_token(floatX* keys, floatX* values, int now) const {
        if (thread >= 2 * HS) { return; }
        floatX* to = thread < HS ? keys : values;
        to[(size_t)now * C + thread % HS] = (floatX)own.qkv[HS + thread];
    }
};

// ---- kernel 5: one text, with the attention to its tokens spread over the blocks of a cluster ----

template <int C, int cluster> struct DecodeLayerTeam5 : DecodeLayerTeam {
    alignas(16) float x[C];
    float attended[cluster][DECODE_LAYER_PART];                      // attention over a block's tokens
    float products[2][DECODE_LAYER_WARPS][32 * 8 / cluster + 4];     // of each warp's columns: of qkv, and of fc
    alignas(16) floatX normed[C];                                    // each warp reads only what it wrote
    alignas(16) floatX operand[DECODE_LAYER_WARPS][DECODE_LAYER_HS]; // attention, for attproj: of each warp
    alignas(16) floatX hidden[DECODE_LAYER_MLP * DECODE_LAYER_HS];   // of the head, for fcproj
};

template <int C, int cluster> struct DecodeLayerText
    : DecodeLayerThread<C, cluster, DecodeLayerTeam5<C, cluster>, 1, 32> {
    typedef DecodeLayerThread<C, cluster, DecodeLayerTeam5<C, cluster>, 1, 32> Thread;
    using Thread::CHUNKS, Thread::HS, Thread::OWN, Thread::ROUNDS, Thread::SETS, Thread::TILES, Thread::VEC;
    using Thread::give_back, Thread::head, Thread::load_tokens, Thread::product_sums, Thread::store_token;
    using Thread::sum_of_warps, Thread::sync, Thread::token, Thread::wait;
    using Thread::WARPS, Thread::own, Thread::thread, Thread::warp, Thread::lane, Thread::rank, Thread::first;
    static constexpr int CAPACITY = 1024;
    typedef DecodeLayerTokens<CAPACITY / cluster / Thread::GROUPS> Cache;
    int now;                 // the text's position, -1: it has ended
    bool texts;              // whether there is one
    DecodeLayerShare tokens; // before the newest one, which the last block takes

    __device__ DecodeLayerText(typename Thread::Memory& s, const DecodeLayer& l, int)
        : Thread(s), now(*l.position), texts(now >= 0) {
        tokens = decode_layer_share(now, rank, cluster);
    }
    __device__ int num_teams() const { return texts; } // that have texts
    __device__ void init() const {}
    // What arrives at the team's barriers, per layer or half of one.
    __device__ static int bytes_x() { return sizeof(own.x); }
    __device__ static int bytes_qkv() { return sizeof(own.qkv); }
    __device__ static int bytes_attention() { return sizeof(own.attended); }
    __device__ static int bytes_hidden() { return sizeof(own.hidden); }

    // ---- products ----

    // Of two tiles of 16 rows, lane 4i + j returns the result of row i of group j: of tile j / 2, row i or i + 8. Each of the 8 columns of a
    // tile is the product.
    __device__ float result(const float (&a)[2][4], const float (&b)[2][4]) const {
        float a0 = a[0][0] + a[1][0], a1 = a[0][2] + a[1][2], b0 = b[0][0] + b[1][0], b1 = b[0][2] + b[1][2];
        float even = lane & 2 ? b0 : a0, odd = lane & 2 ? b1 : a1;
        return lane & 1 ? odd : even;
    }
    // The next matrix of the ring times the normalised vector. The parts of the warps go to own.products.
    __device__ void product(int groups) {
        float sums[SETS][2][2][4] = {};
        product_sums(sums, groups, own.normed + lane % 4 * VEC);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            float y = result(sums[set][0], sums[set][1]);
            if (lane % 4 < groups) { own.products[groups - 3][warp][(set * groups + lane % 4) * 8 + lane / 4] = y; }
        }
    }
    // Stores this head's partial sum of x: a vector of 64 elements for each pair of chunks, projected to the block's columns.
    template <int pairs> __device__ void project(const floatX* vector, uint4* parts, uint32_t phase) {
        uint64_t* to = reinterpret_cast<uint64_t*>(parts) + head() * C + first();
#pragma unroll 1
        for (int begin = 0; begin < TILES; begin += WARPS) {
            int n = min(TILES - begin, WARPS);
            float sums[2][4] = {};
            this->template project_sums<pairs>(sums, n, vector + lane % 4 * VEC);
            float y = result(sums, sums);
            if (warp < n && lane % 4 < 2) {
                store_relaxed(to + (begin + warp) * 16 + lane % 4 * 8 + lane / 4,
                              (uint64_t)phase << 32 | __float_as_uint(y));
            }
            give_back(); // after the parts, for which lanes of the same warp may wait
        }
    }

    // ---- the residual stream: a block's columns belong to its first OWN / 2 threads, two to each ----

    static constexpr int COLUMNS = 2;
    __device__ static int text() { return 0; }
    __device__ int column() const { return 2 * thread; } // of the block's
    __device__ bool has_column(int) const { return thread < OWN / 2; }
    // A part (NH,C) has for each column a float, and in the upper half the number of its phase.
    static constexpr int PART_STRIDE = C / 2; // from one head to the next
    __device__ int part() const { return (first() + column()) / 2; }
    __device__ static uint4 load_part(const uint4* from) {
        ulonglong2 x = load_relaxed_pair(reinterpret_cast<const uint64_t*>(from));
        return make_uint4((uint32_t)x.x, (uint32_t)(x.x >> 32), (uint32_t)x.y, (uint32_t)(x.y >> 32));
    }

    // Sends this thread's columns of x to all blocks of the cluster.
    __device__ void send_x(const float (&x)[2]) const {
        if (!has_column(0)) { return; }
        auto* to = reinterpret_cast<const float2*>(&own.x[first() + column()]);
#pragma unroll
        for (int r = 0; r < cluster; r++) { store_cluster_async(to, make_float2(x[0], x[1]), &own.x_there, r); }
    }
    // The layernorm of x, which has arrived, of the warp's chunks of columns.
    __device__ void normalise(const DecodeLayerVectors<C, cluster>& vectors, float epsilon) {
        constexpr int most = (C + 127) / 128;
        float sum = 0.0f, squares = 0.0f;
        float4 x[most]; // zeros past the end
#pragma unroll
        for (int i = 0; i < most; i++) {
            int c = (i * 32 + lane) * 4;
            x[i] = c < C ? *reinterpret_cast<const float4*>(own.x + c) : make_float4(0, 0, 0, 0);
            sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
        }
        float mean = warp_sum(sum) * (1.0f / C);
#pragma unroll
        for (int i = 0; i < most; i++) {
            float a = x[i].x - mean, b = x[i].y - mean, c = x[i].z - mean, d = x[i].w - mean;
            float four = (a * a + b * b) + (c * c + d * d);
            squares += C % 128 == 0 || (i * 32 + lane) * 4 < C ? four : 0.0f;
        }
        float rstd = rsqrtf(warp_sum(squares) * (1.0f / C) + epsilon);
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            int c = (8 * j + warp) * 32 + lane;
            if (CHUNKS % 8 == 0 || c < C) {
                float weight = (float)vectors.norm_weight[c], bias = (float)vectors.norm_bias[c];
                own.normed[c] = (floatX)((own.x[c] - mean) * rstd * weight + bias);
            }
        }
        __syncwarp();
    }

    // ---- attention ----

    __device__ size_t cache_begin(const DecodeLayer&) const { return head() * HS; } // of the block's text and head
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values) const {
        load_tokens(cache, token(keys, tokens.first), token(values, tokens.first), tokens.first,
                    tokens.first + tokens.n);
    }
    // Sends q, k and v of the block's rows to the cluster: warp r sends to block r.
    __device__ void send_qkv(const floatX* bias) const {
        if (warp >= cluster) { return; }
#pragma unroll
        for (int u = 0; u < SETS; u++) {
            int i = lane + 32 * u, row = rank * 24 * SETS + i;
            if (i >= 24 * SETS) { continue; }
            float value = (float)(floatX)(sum_of_warps(own.products[0], i) + (float)bias[row]);
            store_cluster_async(&own.qkv[row], value, &own.qkv_there, warp);
        }
    }
    // Returns the head's attention. The products for q, k and v have been added; `cache` has the block's tokens, keys and values are where
    // they come from.
    __device__ const floatX* attention(Cache& cache, floatX* keys, floatX* values, const floatX* bias, int i) {
        int parity = i >> 1 & 1;
        send_qkv(bias);
        wait(&own.qkv_there, parity, bytes_qkv());
        if (rank == 0) { store_token(keys, values, now); }
        DecodeLayerSums sums(own.qkv, rank == cluster - 1 && warp == 0);
        sums.add(cache, tokens.n);
        sums.store(own.warps[warp]);
        sync();
        float largest, total;
        if (warp < cluster) { // warp r adds up what all warps know, and sends it to block r
            float* to = own.attended[rank];
            float2 both = decode_layer_join(own.warps, WARPS, lane, lane + 32, largest, total);
            store_cluster_async(to + lane, both.x, &own.attention_there, warp);
            store_cluster_async(to + lane + 32, both.y, &own.attention_there, warp);
            if (lane < 2) {
                store_cluster_async(to + HS + lane, lane == 0 ? largest : total, &own.attention_there, warp);
            }
        }
        wait(&own.attention_there, parity, bytes_attention());
        float2 both = decode_layer_join(own.attended, cluster, lane, lane + 32, largest, total);
        floatX* vector = own.operand[warp];
        vector[lane] = (floatX)(both.x / total), vector[lane + 32] = (floatX)(both.y / total);
        __syncwarp();
        return vector;
    }

    // ---- the MLP ----

    // Returns the head's hidden units. Each block computes gelu of its own, 32 = 8 * DECODE_LAYER_MLP in a set, whose products have been
    // added, and sends them to the cluster: warp r sends to block r.
    __device__ const floatX* hidden(const floatX* bias, int parity) const {
#pragma unroll
        for (int i = lane; i < 32 * SETS && warp < cluster; i += 32) {
            float value = gelu(sum_of_warps(own.products[1], i) + (float)bias[i]),
                  next = __shfl_down_sync(0xFFFFFFFFu, value, 1);
            auto* to = reinterpret_cast<const uint32_t*>(&own.hidden[rank * 32 * SETS + i]);
            if (lane % 2 == 0) { store_cluster_async(to, pack_16x2(value, next, floatX()), &own.hidden_there, warp); }
        }
        wait(&own.hidden_there, parity, bytes_hidden());
        return own.hidden;
    }
};

// ---- kernel 6: 5 for up to 16 texts, each in one of the 8 columns of mma's other operand ----
// The blocks and the packed weights of kernel 5. Eight warps of a block, a team, compute 8 texts; a second team has 8 more. They share
// the weights in shared memory and nothing else, so that one computes while the other waits. Block r of a head's cluster attends for
// text r of each team, to all of its tokens, so there are no parts of a head to join. What the blocks of a cluster send each other is in
// 16 bits, as a product takes it.

constexpr int DECODE_LAYER_TEXTS = 16;

template <int C> struct DecodeLayerTeam6 : DecodeLayerTeam {
    static constexpr int OWN = C / 8, HS = DECODE_LAYER_HS, TEXTS = 8;
    static constexpr int GAP = 32; // after a text's elements: 64 bytes more than a multiple of 128, for the banks
    static constexpr int STRIDE = OWN + 4; // float2 of two texts in 8 rows have banks of their own
    // x, hidden and products are used up before attention begins: with two teams their place is its ring of keys and values
    alignas(16) floatX x[TEXTS][C + GAP];                          // the residual stream, and then its layernorm
    alignas(16) floatX hidden[TEXTS][DECODE_LAYER_MLP * HS + GAP]; // of the head
    alignas(16) float products[DECODE_LAYER_WARPS][32 * TEXTS];    // of each warp's columns
    alignas(16) floatX attention[TEXTS][HS + GAP];                 // of the head
    float projected[TEXTS][STRIDE];
};

template <int C, int NUM_TEAMS> struct DecodeLayerTexts : DecodeLayerThread<C, 8, DecodeLayerTeam6<C>, NUM_TEAMS, 128> {
    typedef DecodeLayerTeam6<C> Team;
    typedef DecodeLayerThread<C, 8, Team, NUM_TEAMS, 128> Thread;
    using Thread::first, Thread::give_back, Thread::head, Thread::load_tokens, Thread::product_sums, Thread::token;
    using Thread::GROUPS, Thread::HS, Thread::OWN, Thread::TEAMS, Thread::TILES, Thread::VEC, Thread::WARPS;
    using Thread::own, Thread::shared, Thread::team, Thread::thread, Thread::warp, Thread::lane, Thread::rank;
    using Thread::store_token, Thread::sum_of_warps, Thread::sync, Thread::wait;
    static_assert(Thread::RESIDENT && TILES <= WARPS, "");
    static constexpr int TEXTS = Team::TEXTS;
    static constexpr int TOKENS = TEAMS == 1 ? 4 : 1;     // that 8 lanes attend to at once
    static constexpr int SLOT = 2 * DECODE_LAYER_THREADS; // vectors of the ring: a key's and a value's of each thread
    static constexpr int RING_BYTES = sizeof(Team::x) + sizeof(Team::hidden) + sizeof(Team::products);
    static constexpr int RING = TEAMS == 1 ? 0 : RING_BYTES / (SLOT * (int)sizeof(int4)); // slots
    unsigned texts, all_texts; // a bit for each text that has not ended: of the team, and of both
    int now;                   // position of the text that the block attends for, -1: there is none

    __device__ DecodeLayerTexts(typename Thread::Memory& s, const DecodeLayer& l, int B) : Thread(s) {
        all_texts = __ballot_sync(0xFFFFFFFFu, lane < B && l.position[lane] >= 0);
        texts = all_texts >> (TEXTS * team) & 0xFF;
        now = TEXTS * team + rank < B ? l.position[TEXTS * team + rank] : -1;
    }
    __device__ int num_teams() const { return ((all_texts & 0xFF) != 0) + (all_texts >> 8 != 0); } // that have texts
    // The columns of texts that have ended are 0 until attention needs their place, and attention's stay 0. A text is a column of its
    // own in all products, so what is there reaches no other text.
    __device__ void init() const {
        for (int i = thread; i < TEXTS * C; i += DECODE_LAYER_THREADS) {
            int text = i / C, c = i % C;
            if (texts >> text & 1) { continue; }
            own.x[text][c] = (floatX)0.0f;
            if (c < HS) { own.attention[text][c] = (floatX)0.0f; }
        }
    }
    // What arrives at the team's barriers, per layer or half of one.
    __device__ int bytes_x() const { return __popc(texts) * (C - OWN) * (int)sizeof(floatX); }
    __device__ static int bytes_qkv() { return sizeof(own.qkv); }
    __device__ int bytes_attention() const { return __popc(texts) * HS * (int)sizeof(floatX); }
    __device__ static int bytes_hidden() { return TEXTS * 7 * 8 * DECODE_LAYER_MLP * (int)sizeof(floatX); }

    // ---- products ----

    // Of a tile, lane 4i + j has rows i and i + 8 of texts 2j and 2j + 1: put(row, values).
    template <class Put> __device__ void results(const float (&sums)[2][4], Put put) const {
        put(lane / 4, make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]));
        put(lane / 4 + 8, make_float2(sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]));
    }
    // The next matrix of the ring, (8 * groups,C), times the normalised texts. The parts of the warps go to own.products.
    __device__ void product(int groups) {
        float sums[1][2][2][4] = {};
        product_sums(sums, groups, own.x[lane / 4] + lane % 4 * VEC);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            results(sums[0][tile], [&](int row, float2 y) {
                row += 16 * tile;
                float* to = &own.products[warp][row * TEXTS + lane % 4 * 2];
                if (row < 8 * groups) { *reinterpret_cast<float2*>(to) = y; }
            });
        }
    }
    // Stores this head's partial sums of x: the vectors of the team's sequences, 64 * pairs elements each with GAP after them,
    // projected to the block's columns.
    template <int pairs> __device__ void project(const floatX* vectors, uint4* parts, uint32_t phase) {
        float sums[2][4] = {};
        const floatX* vector = vectors + lane / 4 * (64 * pairs + Team::GAP) + lane % 4 * VEC;
        this->template project_sums<pairs>(sums, TILES, vector);
        if (warp < TILES) {
            results(sums, [&](int row, float2 y) {
                int text = lane % 4 * 2;
                own.projected[text][16 * warp + row] = y.x, own.projected[text + 1][16 * warp + row] = y.y;
            });
        }
        sync();
        if (has_column(0)) {
            const float* projected = &own.projected[warp][column()];
            auto y = [&](int k) { return has_column(k) ? __float_as_uint(projected[k]) : 0u; };
            store_relaxed_16(parts + part() + head() * PART_STRIDE, make_uint4(y(0), y(1), y(2), phase));
        }
        give_back(); // after the parts, for which lanes of the same warp may wait
    }

    // ---- the residual stream: between the products, warp w of a team handles text w of the team, if there is one ----

    // Of a block's columns, lane l of a warp has the three from 3 * l on; the last one may have fewer.
    static constexpr int COLUMNS = 3, TRIPLES = (OWN + 2) / 3;
    __device__ int text() const { return TEXTS * team + warp; }
    __device__ int column() const { return 3 * lane; } // of the block's
    __device__ bool is_text() const { return texts >> warp & 1; }
    __device__ bool has_column(int k) const { return is_text() && (OWN == 96 || column() + k < OWN); }
    // A part (NH,texts,8,TRIPLES) has three floats and the number of its phase.
    static constexpr int PART_STRIDE = TEAMS * TEXTS * 8 * TRIPLES; // from one head to the next
    __device__ int part() const { return (text() * 8 + rank) * TRIPLES + lane; }
    __device__ static uint4 load_part(const uint4* from) { return load_relaxed_16(from); }

    // Sends x to all blocks of the cluster, 16 bytes at a time.
    __device__ void send_x(const float (&x)[3]) {
        constexpr int pieces = OWN / VEC;
        if (!is_text()) { return; }
        floatX* to = &own.x[warp][first()];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            if (has_column(k)) { to[column() + k] = (floatX)x[k]; }
        }
        __syncwarp();
        const int4* from = reinterpret_cast<const int4*>(to);
#pragma unroll
        for (int begin = 0; begin < 8 * pieces; begin += 32) {
            int i = begin + lane, block = i / pieces;
            bool sends = (8 * pieces % 32 == 0 || i < 8 * pieces) && block != rank;
            if (sends) { store_cluster_async(from + i % pieces, from[i % pieces], &own.x_there, block); }
        }
    }
    // The layernorm of the team's texts, in place; x has arrived.
    __device__ void normalise(const DecodeLayerVectors<C, 8>& vectors, float epsilon) {
        constexpr int most = (C / VEC + 31) / 32;
        auto load = [&](const floatX* from, int i) { return load128(from + (i * 32 + lane) * VEC); };
        auto is = [&](int i) { return C / VEC % 32 == 0 || i * 32 + lane < C / VEC; };
        Floats128<floatX> x[most] = {};
        floatX* row = own.x[warp];
        if (is_text()) {
#pragma unroll
            for (int i = 0; i < most; i++) {
                if (is(i)) { x[i] = to_floats(load(row, i)); }
            }
            float2 statistics = layernorm_statistics(
                x, [](float sum) { return sum * (1.0f / C); }, epsilon, is);
            float mean = statistics.x, rstd = statistics.y;
#pragma unroll
            for (int i = 0; i < most; i++) {
                if (!is(i)) { continue; }
                x128 weight = load(vectors.norm_weight, i), bias = load(vectors.norm_bias, i), normed;
#pragma unroll
                for (int e = 0; e < VEC; e++) {
                    normed[e] = (floatX)((x[i][e] - mean) * rstd * (float)weight[e] + (float)bias[e]);
                }
                store128(row + (i * 32 + lane) * VEC, normed);
            }
        }
        sync();
    }

    // ---- attention ----

    // What is loaded ahead: two rounds of tokens in registers, and with two teams a token of each 8 lanes in each slot of the ring. All
    // loads to registers share one of the warp's scoreboards, so a wait is for the newest of them; copies to shared memory end in order.
    struct Cache {
        DecodeLayerTokens<TOKENS> rounds[2];
    };
    static constexpr int ROUND = TOKENS * GROUPS, ALL = 2 * ROUND + RING * GROUPS; // tokens: of a round, of all
    __device__ size_t cache_begin(const DecodeLayer& l) const {                    // of the block's text and head
        return (size_t)(TEXTS * team + rank) * l.capacity * C + head() * HS;
    }
    // Each lane reads what it has copied itself.
    __device__ int4* ring(int slot) const { return reinterpret_cast<int4*>(&own.x) + slot * SLOT + thread; }
    __device__ void load_ring(int slot, const floatX* keys, const floatX* values, int begin) const {
        bool there = begin + thread / 8 < now;
        size_t at = there ? (size_t)(begin + thread / 8) * C + lane % 8 * VEC : 0;
        cp_async_16(ring(slot), keys + at, there);
        cp_async_16(ring(slot) + DECODE_LAYER_THREADS, values + at, there);
        cp_async_commit();
    }
    // The first tokens.
    __device__ void load_cache(Cache& cache, const floatX* keys, const floatX* values) const {
        const floatX *key = token(keys, 0), *value = token(values, 0);
        load_tokens(cache.rounds[0], key, value, 0, now);
        load_tokens(cache.rounds[1], key + ROUND * C, value + ROUND * C, ROUND, now);
#pragma unroll
        for (int i = 0; i < RING; i++) { load_ring(i, keys, values, 2 * ROUND + i * GROUPS); }
    }
    // Sends q, k and v of the block's rows, each sequence's to the block that attends for it. The products have been added.
    __device__ void send_qkv(const floatX* bias) {
        int row = thread / 8, to = thread % 8;
        if (row >= 24 || !(texts >> to & 1)) { return; }
        float value = (float)(floatX)(sum_of_warps(own.products, row * TEXTS + to) + (float)bias[rank * 24 + row]);
        store_cluster_async(&own.qkv[rank * 24 + row], value, &own.qkv_there, to);
    }
    // Computes attention for this block's sequence and sends it to the cluster. Its q, k and v have arrived; the first tokens
    // are in `cache`.
    __device__ void attend(Cache& cache, floatX* keys, floatX* values) {
        store_token(keys, values, now);
        DecodeLayerSums sums(own.qkv, warp == 0);
        const floatX *key = token(keys, ALL), *value = token(values, ALL);
#pragma unroll 1
        for (int begin = 0; begin < now; begin += ALL) { // the next tokens are on their way meanwhile
            sums.add(cache.rounds[0], now - begin);
            load_tokens(cache.rounds[0], key, value, begin + ALL, now);
            if (begin + ROUND < now) { sums.add(cache.rounds[1], now - begin - ROUND); }
            load_tokens(cache.rounds[1], key + ROUND * C, value + ROUND * C, begin + ALL + ROUND, now);
            key += ALL * C, value += ALL * C;
#pragma unroll
            for (int i = 0; i < RING; i++) {
                int at = begin + 2 * ROUND + i * GROUPS;
                cp_async_wait<(RING > 0 ? RING - 1 : 0)>();
                if (at < now) {
                    DecodeLayerTokens<1> token = {{*ring(i)}, {ring(i)[DECODE_LAYER_THREADS]}};
                    sums.add(token, now - at);
                }
                load_ring(i, keys, values, at + ALL);
            }
        }
        if (RING > 0) { cp_async_wait<0>(); }
        sums.store(own.warps[warp]);
        sync();
        // warp r adds up what all warps know, and sends it to block r
        float largest, total;
        float2 sum = decode_layer_join(own.warps, WARPS, 2 * lane, 2 * lane + 1, largest, total);
        auto* out = reinterpret_cast<const uint32_t*>(&own.attention[rank][2 * lane]);
        store_cluster_async(out, pack_16x2(sum.x / total, sum.y / total, floatX()), &own.attention_there, warp);
    }
    // Returns the attention of the team's texts. The products for q, k and v have been added. i: of the half of a layer
    __device__ const floatX* attention(Cache& cache, floatX* keys, floatX* values, const floatX* bias, int i) {
        int parity = i >> 1 & 1;
        send_qkv(bias);
        if (TEAMS == 2) { sync(); } // before the ring takes the place of `products`
        if (now >= 0) {
            wait(&own.qkv_there, parity, bytes_qkv());
            // the teams attend in turn: while one reads the cache, the other one multiplies
            if (TEAMS == 2 && num_teams() == 2 && (team == 1 || i > 0)) {
                mbarrier_wait_cluster(&shared.teams[team ^ 1].attention_there, parity ^ team ^ 1);
            }
            // not earlier: what two teams have in flight would delay what they exchange by more than that saves
            if (TEAMS == 2) { load_cache(cache, keys, values); }
            attend(cache, keys, values);
        }
        wait(&own.attention_there, parity, bytes_attention());
        return own.attention[0];
    }

    // ---- the MLP ----

    // Returns the hidden units of the team's texts. Each block computes gelu of its own, 32 = 8 * DECODE_LAYER_MLP, and sends them to the
    // cluster, 16 bytes at a time.
    __device__ const floatX* hidden(const floatX* bias, int parity) {
        int unit = thread / 8, text = thread % 8;
        own.hidden[text][rank * 32 + unit] =
            (floatX)gelu(sum_of_warps(own.products, unit * TEXTS + text) + (float)bias[unit]);
        sync();
        if (warp != rank) { // warp r sends to block r
            const int4* from = reinterpret_cast<const int4*>(&own.hidden[lane / 4][rank * 32]) + lane % 4;
            store_cluster_async(from, *from, &own.hidden_there, warp);
        }
        wait(&own.hidden_there, parity, bytes_hidden());
        return own.hidden[0];
    }
};

// ---- shared by kernels 5 and 6: the sums of all heads; the kernel ----

// Adds every head's part to this thread's columns of x. Waits until each has arrived.
template <class Block> __device__ inline void decode_layer_add_up(float (&x)[Block::COLUMNS], const Block& block,
                                                                  const uint4* parts, uint32_t phase,
                                                                  const floatX* bias) {
    constexpr int NH = Block::NH, COLUMNS = Block::COLUMNS;
    // loads in flight, as many as there are registers for
    constexpr int together = NH <= 16 && Block::TEAMS == 1 ? NH : (NH + 1) / 2;
    if (!block.has_column(0)) { return; }
    const uint4* from = hold_pointer(parts + block.part());
    float sum[COLUMNS] = {};
#pragma unroll 1
    for (int begin = 0; begin < NH; begin += together) {
        uint4 part[together];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int h = 0; h < together; h++) {
                bool is = NH % together == 0 || begin + h < NH;
                part[h] = make_uint4(0, phase, 0, phase);
                if (is) { part[h] = Block::load_part(from + (begin + h) * Block::PART_STRIDE); }
            }
            // Testing all parts at once is faster if one batch holds all heads (C = 768, 12 layers: 94 us, not 99). With two
            // batches, stopping at the first missing part is faster (C = 1600: 274 us, not 321).
#pragma unroll
            for (int h = 0; h < together; h++) {
                if (together < NH) {
                    there = there && (COLUMNS == 3 || part[h].y == phase) && part[h].w == phase;
                } else {
                    there &= (COLUMNS == 3 || part[h].y == phase) & (part[h].w == phase);
                }
            }
        } while (!there);
#pragma unroll
        for (int h = 0; h < together; h++) {
            const uint32_t words[] = {part[h].x, COLUMNS == 3 ? part[h].y : part[h].z, part[h].z};
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) { sum[k] += __uint_as_float(words[k]); }
        }
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.has_column(k)) { x[k] = (float)(floatX)(x[k] + (float)bias[block.column() + k] + sum[k]); }
    }
}

// Kernels 5 and 6. Block: DecodeLayerText or DecodeLayerTexts
template <class Block> __device__ inline void decode_layers_run(const DecodeLayers& layers, const floatX* packed,
                                                                const DecodeLayerParts& parts) {
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    auto& shared = *reinterpret_cast<typename Block::Memory*>(decode_layer_dynamic);
    static_assert(sizeof(shared) <= 227 << 10, "more than a block can have");
    constexpr int TEAMS = Block::TEAMS, COLUMNS = Block::COLUMNS;
    const DecodeLayer& l = layers.first;
    Block block(shared, l, parts.B);
    const int num_teams = block.num_teams();
    if (num_teams == 0) { return; } // all texts have ended
    auto& own = block.own;
    const int loader =
        (block.team - TEAMS) * Block::WARPS + block.warp; // of the warps that load; below 0: this one computes
    if (threadIdx.x == 0) {
        shared.ring.init(num_teams * DECODE_LAYER_THREADS);
        for (int i = 0; i < 4; i++) { mbarrier_init(&shared.vectors_full[i / 2][i % 2], 1); }
    }
    if (loader < 0) {
        if (block.thread == 0) {
            for (uint64_t* there : {&own.x_there, &own.qkv_there, &own.attention_there, &own.hidden_there}) {
                mbarrier_init(there, 1);
            }
            mbarrier_init_fence();
            mbarrier_arrive_expect(&own.x_there, block.bytes_x());
            mbarrier_arrive_expect(&own.hidden_there, block.bytes_hidden());
            mbarrier_arrive_expect(&own.qkv_there, block.bytes_qkv());
            mbarrier_arrive_expect(&own.attention_there, block.bytes_attention());
        }
        block.init();
    }
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    if (loader >= 0) {
        if constexpr (Block::LOADERS == 128) { warpgroup_fewer_registers<24>(); }
        if (loader == 0 && block.lane == 0) { shared.load(layers, packed, block.rank); }
        return;
    }
    if constexpr (Block::LOADERS == 128) { warpgroup_more_registers<TEAMS == 1 ? 240 : 112>(); }
    if (!block.texts) { return; } // the other team goes on
    typename Block::Cache cache;
    size_t cache_at = block.cache_begin(l);
    // One team loads the first tokens of a layer ahead.
    if (TEAMS == 1) { block.load_cache(cache, l.keys + cache_at, l.values + cache_at); }
    grid_wait_dependency();

    uint32_t phase = *parts.phase;
    float x[COLUMNS] = {};
    floatX* row = l.x + block.text() * l.C + block.first() + block.column();
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.has_column(k)) { x[k] = (float)row[k]; }
    }
    const int num_halves = 2 * layers.num;
#pragma unroll 1
    for (int i = 0; i < num_halves; i++) {
        int half = i & 1, parity = i >> 1 & 1;
        uint4* to = parts.of_half[half];
        auto& vectors = shared.vectors[half][parity];
        phase++;
        block.send_x(x);
        mbarrier_wait(&shared.vectors_full[half][parity], i >> 2 & 1);
        block.wait(&own.x_there, half, block.bytes_x());
        block.normalise(vectors, l.epsilon);
        block.product(3 + half); // 3 for q, k and v; 4, DECODE_LAYER_MLP, for fc
        block.sync();
        block.give_back_product(half);
        if (half == 0) {
            const floatX* attention = block.attention(cache, l.keys + cache_at, l.values + cache_at, vectors.bias, i);
            block.template project<1>(attention, to, phase);
        } else {
            cache_at += layers.cache;
            if (TEAMS == 1 && i + 1 < num_halves) { block.load_cache(cache, l.keys + cache_at, l.values + cache_at); }
            block.template project<DECODE_LAYER_MLP>(block.hidden(vectors.bias, parity), to, phase);
            if (i + 1 == num_halves && block.head() != 0) { break; }
        }
        decode_layer_add_up(x, block, to, phase, vectors.out_bias);
        block.give_back_half(half);
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        if (block.head() == 0 && block.has_column(k)) { row[k] = (floatX)x[k]; }
    }
    if (block.thread == 0) { // all have read the phase before they arrive
        if (atomicAdd(parts.arrived, 1u) == num_teams * gridDim.x - 1) { *parts.arrived = 0, *parts.phase = phase; }
    }
}

template <int C, int cluster> __global__ void __launch_bounds__(DecodeLayerText<C, cluster>::THREADS, 1)
    decode_layer_sm90_kernel5(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    decode_layers_run<DecodeLayerText<C, cluster>>(layers, packed, parts);
}
template <int C, int TEAMS> __global__ void __launch_bounds__(DecodeLayerTexts<C, TEAMS>::THREADS, 1)
    decode_layer_sm90_kernel6(const __grid_constant__ DecodeLayers layers, const floatX* packed,
                              const __grid_constant__ DecodeLayerParts parts) {
    decode_layers_run<DecodeLayerTexts<C, TEAMS>>(layers, packed, parts);
}

// Blocks of a cluster, which computes a head, in the kernels for C. 0: there are none.
constexpr int decode_layer_blocks(int C) {
    return C == 128 || C == 768 ? 8 : C == 320 || C == 1024 || C == 1280 || C == 1600 ? 4 : 0;
}
// Calls run(kernel, shape) with kernel 5 or 6 for B texts and the shape of its launch. Returns false if there is none.
template <class Run> bool decode_layers_kernel(int number, int B, int C, const Run& run) {
    auto with = [&](auto channels) {
        constexpr int c = channels.value, cluster = decode_layer_blocks(c);
        if (C != c) { return false; }
        if (number == 5) { run(decode_layer_sm90_kernel5<c, cluster>, DecodeLayerText<c, cluster>::shape()); }
        if constexpr (cluster == 8) {
            if (number == 6 && B <= 8) { run(decode_layer_sm90_kernel6<c, 1>, DecodeLayerTexts<c, 1>::shape()); }
            if (number == 6 && B > 8) { run(decode_layer_sm90_kernel6<c, 2>, DecodeLayerTexts<c, 2>::shape()); }
        }
        return number == 5 || cluster == 8;
    };
    if (B < 1 || B > (number == 5 ? 1 : DECODE_LAYER_TEXTS)) { return false; }
    return with(std::integral_constant<int, 128>()) || with(std::integral_constant<int, 320>()) ||
           with(std::integral_constant<int, 768>()) || with(std::integral_constant<int, 1024>()) ||
           with(std::integral_constant<int, 1280>()) || with(std::integral_constant<int, 1600>());
}

#endif

// Whether decode_layers() runs B texts through such a model here. F: width of the MLP
bool decode_layers_runs(int B, int C, int F, int NH, int capacity) {
    bool fits = false;
#if !defined(ENABLE_FP32)
    if (C != NH * DECODE_LAYER_HS || F != DECODE_LAYER_MLP * C || !has_sm90a()) { return false; }
    if (B == 1 && capacity > DecodeLayerText<768, 8>::CAPACITY) { return false; }
    decode_layers_kernel(B == 1 ? 5 : 6, B, C, [&](auto kernel, const LaunchShape& shape) {
        int num_clusters = 0; // all blocks must run at once
        LaunchConfig config(kernel, shape, NULL);
        cudaCheck(cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config));
        fits = num_clusters >= (int)shape.grid.x / shape.cluster;
    });
#else
    (void)B, (void)C, (void)F, (void)NH, (void)capacity;
#endif
    return fits;
}

// The number of elements of packed.
size_t decode_layers_packed(int num_layers, int C) { return (size_t)num_layers * (4 + 2 * DECODE_LAYER_MLP) * C * C; }

// packed: the matrices of all layers in the order in which the blocks of decode_layers() read them
void decode_layers_pack(floatX* packed, const DecodeLayers& layers, const Execution& exec) {
    int C = layers.first.C;
    size_t n = decode_layers_packed(layers.num, C);
    Op op(exec, 2.0 * n * sizeof(floatX), 0, "decode_layers_pack");
#if !defined(ENABLE_FP32)
    require(decode_layer_blocks(C) > 0);
    unsigned blocks = (unsigned)ceil_div(n / x128::size, (size_t)256);
    launch_kernel(decode_layers_pack_kernel5, LaunchShape(blocks, 256), exec, packed, layers, decode_layer_blocks(C),
                  n / x128::size);
#else
    (void)packed;
#endif
}

// Parts of x for 16 texts, of 16 bytes each.
static size_t decode_layers_triples(int C, int NH) { return (size_t)NH * 16 * 8 * ((C / 8 + 2) / 3); }

// All layers for the newest tokens of B texts: x (B,C) of layers goes through them, and the keys and values of text b become row
// position[b] of its cache (B,capacity,C). A text with position -1 is left out. packed: of decode_layers_pack(). scratch:
// decode_layers_scratch(), zero before the first call. Only where decode_layers_runs(). Weights and the cache are read while the
// previous kernel may still run.
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec,
                   int kernel) {
    int C = layers.first.C;
    double weights = 12.0 * layers.num * C * C;
    // without the caches, which depend on the positions
    Op op(exec, weights * sizeof(floatX), 2 * weights * B, "decode_layers");
#if !defined(ENABLE_FP32)
    int NH = layers.first.NH;
    size_t n = (size_t)NH * C / 2, n6 = decode_layers_triples(C, NH); // of kernel 5, of kernel 6
    uint4 *parts5 = reinterpret_cast<uint4*>(scratch), *parts6 = parts5 + 2 * n;
    uint32_t* counters = reinterpret_cast<uint32_t*>(parts6 + 2 * n6);
    DecodeLayerParts parts = {{parts5, parts5 + n}, counters, counters + 1, B};
    if (kernel == 6) { parts.of_half[0] = parts6, parts.of_half[1] = parts6 + n6; }
    bool done = decode_layers_kernel(kernel, B, C, [&](auto kernel, const LaunchShape& shape) {
        launch_kernel(kernel, shape, exec, layers, packed, parts);
    });
    require(done);
#else
    (void)packed, (void)scratch, (void)kernel;
#endif
}
void decode_layers(const DecodeLayers& layers, int B, const floatX* packed, uint64_t* scratch, const Execution& exec) {
    decode_layers(layers, B, packed, scratch, exec, B == 1 ? 5 : 6);
}
// Size of scratch, in values of 8 bytes: two sets of parts of x for one text and for several, and the counters.
size_t decode_layers_scratch(int C, int NH) { return 2 * (size_t)NH * C + 4 * decode_layers_triples(C, NH) + 1; }
// ==== end promoted: decode_layer ====

// ==== promoted: decode_cache_fill ====
__global__ void decode_cache_fill_kernel1(floatX* keys, floatX* values, const floatX* qkv, int T, int num_vec,
                                          int capacity, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    int v = i % num_vec, t = i / num_vec % T, b = i / num_vec / T;
    const floatX* from = qkv + (((size_t)b * T + t) * 3 * num_vec + v) * x128::size;
    size_t to = (((size_t)b * capacity + t) * num_vec + v) * x128::size;
    store128(keys + to, load128(from + (size_t)num_vec * x128::size));
    store128(values + to, load128(from + (size_t)2 * num_vec * x128::size));
}

// Copies the prompt's keys and values to the cache: rows 0 .. T-1 of keys, values (B,capacity,C) | qkv (B,T,3,C)
void decode_cache_fill(floatX* keys, floatX* values, const floatX* qkv, int B, int T, int C, int capacity,
                       const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    Op op(exec, 4.0 * B * T * C * sizeof(floatX), 0, "decode_cache_fill");
    require(B > 0 && T > 0 && T <= capacity && C % x128::size == 0);
    int num_vec = C / x128::size;
    size_t n = (size_t)B * T * num_vec;
    launch_kernel(decode_cache_fill_kernel1, LaunchShape(ceil_div(n, (size_t)block_size), block_size), exec, keys,
                  values, qkv, T, num_vec, capacity, n);
}
// ==== end promoted: decode_cache_fill ====

// ==== promoted: decode_sample ====
// ---- kernel 3: largest logit, many blocks per sequence; the last block to arrive writes the token -------------------

// The 64-bit key of a token. A larger logit has a larger key; among equal logits the lower id has the larger key. Key 0
// means that the token is never drawn (NaN, -inf).
__device__ inline uint64_t decode_sample_key(float logit, int id) {
    if (!(logit > -INFINITY)) { return 0; } // also true for NaN
    uint32_t bits = __float_as_uint(logit);
    if (bits == 0x80000000u) { bits = 0; } // -0 equals 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}
__device__ inline int decode_sample_id(uint64_t key) { return key ? (int)~(uint32_t)key : -1; }
__device__ inline float decode_sample_logit(uint64_t key) {
    uint32_t bits = key >> 32;
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits);
}

// inclusive prefix sum over the lanes
__device__ inline uint64_t decode_sample_warp_scan(uint64_t x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        uint64_t below = __shfl_up_sync(0xFFFFFFFFu, x, offset);
        if ((int)threadIdx.x % 32 >= offset) { x += below; }
    }
    return x;
}
// The maximum and the sum over the block: see block_reduce. 0 is neutral for both.
__device__ inline uint64_t decode_sample_max(uint64_t x, uint64_t* shared) {
    return block_reduce<lanes_max<32, uint64_t>>(x, shared, {});
}
__device__ inline uint64_t decode_sample_sum(uint64_t x, uint64_t* shared) {
    return block_reduce<lanes_sum<32, uint64_t>>(x, shared, {});
}

// The token sampled for text b. Its position moves on, unless the text has ended (-1).
__device__ inline void decode_sample_end(int b, int token, int* tokens, int* copy, int* positions) {
    tokens[b] = token;
    copy[b] = token;
    if (positions[b] >= 0) { positions[b] += 1; }
}

// tokens (B): the id of the largest logit of each sequence. best (B), arrived (B): scratch, zero before and after the
// launch.
__global__ void decode_sample_greedy_kernel3(int* tokens, int* copy, int* positions, uint64_t* best, int* arrived,
                                             const float* logits, int V, int Vp) {
    __shared__ uint64_t shared[32];
    int b = blockIdx.y, step = gridDim.x * blockDim.x;
    const float4* row = reinterpret_cast<const float4*>(logits + (size_t)b * Vp);
    grid_wait_dependency();
    uint64_t key = 0;
#pragma unroll 2
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i * 4 < V; i += step) {
        float4 x = row[i];
        key = max(key, decode_sample_key(x.x, 4 * i));
        if (4 * i + 1 < V) { key = max(key, decode_sample_key(x.y, 4 * i + 1)); }
        if (4 * i + 2 < V) { key = max(key, decode_sample_key(x.z, 4 * i + 2)); }
        if (4 * i + 3 < V) { key = max(key, decode_sample_key(x.w, 4 * i + 3)); }
    }
    key = decode_sample_max(key, shared);
    if (threadIdx.x != 0) { return; }
    unsigned long long* top = reinterpret_cast<unsigned long long*>(best + b);
    atomicMax(top, (unsigned long long)key); // the result does not depend on the order
    __threadfence();
    if (atomicAdd(arrived + b, 1) != (int)gridDim.x - 1) { return; }
    decode_sample_end(b, decode_sample_id(atomicExch(top, 0ull)), tokens, copy, positions);
    arrived[b] = 0;
}

// Launches kernel 3 with `blocks` blocks per sequence.
inline void decode_sample_greedy(int* tokens, int* copy, int* positions, float* scratch, const float* logits, int B,
                                 int V, int Vp, int blocks, const Execution& exec, int block_size) {
    uint64_t* best = reinterpret_cast<uint64_t*>(scratch);
    launch_early(decode_sample_greedy_kernel3, dim3(blocks, B), block_size, 0, exec, tokens, copy, positions, best,
                 reinterpret_cast<int*>(best + B), logits, V, Vp);
}
// ---- shared by kernels 4 and 5: a block per sequence; bisection finds the lowest key that top-k or top-p admits ------

constexpr int DECODE_SAMPLE_ROOM = 4096;    // candidates whose keys fit in shared memory: 32 KB
constexpr int DECODE_SAMPLE_THREADS = 1024; // of a block: 32 warps

struct DecodeSampleShared {
    uint64_t list[DECODE_SAMPLE_ROOM]; // keys of the candidates, unordered
    uint64_t reduce[32];
    int list_size;
};

// The candidates of a sequence: the `count` keys >= `floor`, among all n logits or, if `listed`, among the n keys of
// DecodeSampleShared's list.
struct DecodeSampleRow {
    const float* logits; // aligned to 16 bytes, and so is its end
    int n;
    bool listed;
    uint64_t best, floor, count; // best: the largest key
    float scale;                 // log2(e) / temperature
    uint64_t least;              // the smallest share that min-p admits
};

// The weight of a token in the draw: its probability relative to the most likely token, times 2^44. It is an integer,
// because the sum of integers does not depend on the order of summation.
__device__ inline uint64_t decode_sample_share(const DecodeSampleRow& row, uint64_t key) {
    float logit = decode_sample_logit(key), best = decode_sample_logit(row.best);
    float distance = logit == best ? 0.0f : (logit - best) * row.scale; // 0 also if both are inf: inf - inf is NaN
    return (uint64_t)(exp2f(distance) * 17592186044416.0f);
}
// The share of a token; 0 if top-k, top-p or min-p has removed it.
__device__ inline uint64_t decode_sample_admitted(const DecodeSampleRow& row, uint64_t key) {
    if (key < row.floor) { return 0; }
    uint64_t share = decode_sample_share(row, key);
    return share >= row.least ? share : 0;
}

// Calls visit(key) for the tokens `begin` to `end` - 1: thread `index` of `num_threads` takes every num_threads-th vector of
// 4 logits. begin is a multiple of 4.
template <class Visit> __device__ inline void decode_sample_visit(const DecodeSampleRow& row, int begin, int end,
                                                                  int index, int num_threads, Visit visit) {
#pragma unroll 4
    for (int i = begin + 4 * index; i < end; i += 4 * num_threads) {
        float4 x = *reinterpret_cast<const float4*>(row.logits + i);
        visit(decode_sample_key(x.x, i));
        if (i + 1 < end) { visit(decode_sample_key(x.y, i + 1)); }
        if (i + 2 < end) { visit(decode_sample_key(x.z, i + 2)); }
        if (i + 3 < end) { visit(decode_sample_key(x.w, i + 3)); }
    }
}
// Calls visit(key) for this thread's share of the block's candidates, and for keys that are none.
template <class Visit> __device__ inline void decode_sample_visit_all(const DecodeSampleShared& shared,
                                                                      const DecodeSampleRow& row, Visit visit) {
    if (row.listed) {
        for (int i = threadIdx.x; i < row.n; i += blockDim.x) { visit(shared.list[i]); }
    } else {
        decode_sample_visit(row, 0, row.n, threadIdx.x, blockDim.x, visit);
    }
}

// The n logits of a sequence, all of which are candidates but NaN and -inf.
__device__ DecodeSampleRow decode_sample_row(DecodeSampleShared& shared, const float* logits, int n, float temperature,
                                             float min_p) {
    uint64_t least = (uint64_t)(min_p * 17592186044416.0f); // the most likely token has a share of 2^44
    DecodeSampleRow row = {logits, n, false, 0, 0, 0, LOG2E / temperature, least};
    uint64_t best = 0, lowest = ~0ull, count = 0;
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        best = max(best, key);
        if (key) { lowest = min(lowest, key), count++; }
    });
    row.best = decode_sample_max(best, shared.reduce);
    row.floor = ~decode_sample_max(~lowest, shared.reduce);
    row.count = decode_sample_sum(count, shared.reduce);
    return row;
}

// Counts the candidates with keys >= `floor`. Returns the sum of their shares or, if `shares` is false, their count.
__device__ uint64_t decode_sample_weight(DecodeSampleShared& shared, const DecodeSampleRow& row, uint64_t floor,
                                         bool shares, uint64_t* count) {
    uint64_t weight = 0, number = 0;
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        if (key < floor) { return; }
        number++;
        if (shares) { weight += decode_sample_share(row, key); }
    });
    *count = decode_sample_sum(number, shared.reduce);
    return shares ? decode_sample_sum(weight, shared.reduce) : *count;
}

// Copies the keys of the candidates, at most DECODE_SAMPLE_ROOM, to the list.
__device__ void decode_sample_make_list(DecodeSampleShared& shared, DecodeSampleRow& row) {
    if (threadIdx.x == 0) { shared.list_size = 0; }
    __syncthreads();
    decode_sample_visit_all(shared, row, [&](uint64_t key) {
        if (key >= row.floor) { shared.list[atomicAdd(&shared.list_size, 1)] = key; }
    });
    __syncthreads();
    row.listed = true, row.n = (int)row.count;
}

// Raises row.floor by bisection, so that as few candidates as possible are left whose total weight reaches `target`:
// those with the largest keys. The weight of all candidates must reach `target`.
__device__ void decode_sample_select(DecodeSampleShared& shared, DecodeSampleRow& row, uint64_t target, bool shares) {
    uint64_t end = row.best + 1, end_count = 0; // the keys >= `end` weigh less than the target
    while (row.count - end_count > 1 && end - row.floor > 1) {
        if (!row.listed && row.count <= DECODE_SAMPLE_ROOM) { decode_sample_make_list(shared, row); }
        uint64_t middle = row.floor + (end - row.floor) / 2, count;
        if (decode_sample_weight(shared, row, middle, shares, &count) >= target) {
            row.floor = middle, row.count = count;
        } else {
            end = middle, end_count = count;
        }
    }
}

// Leaves of the candidates those that top-k (0: all) and then top-p (1: all) admit.
__device__ void decode_sample_restrict(DecodeSampleShared& shared, DecodeSampleRow& row, int top_k, float top_p) {
    if (top_k > 0 && (uint64_t)top_k < row.count) { decode_sample_select(shared, row, top_k, false); }
    if (top_p < 1.0f) {
        uint64_t count;
        double mass = top_p * (double)decode_sample_weight(shared, row, row.floor, true, &count);
        decode_sample_select(shared, row, max((uint64_t)ceil(mass), (uint64_t)1), true);
    }
}

// Advances *state and returns a number of 0 to 1, without 1: random_f64() of llmc/rand.h.
__device__ inline double decode_sample_random(uint64_t* state) {
    uint64_t x = *state ? *state : 0x9e3779b97f4a7c15ull;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return (double)((x * 0x2545f4914f6cdd1dull) >> 11) * (1.0 / 9007199254740992.0);
}

// ---- kernel 5: draw by two divisions into 32 parts, a warp per part --------------------------------------------------

// Each warp adds up the candidates' shares in one of 32 parts, of `size` tokens each, of the tokens `begin` to `end` - 1.
// Returns the running sum of the parts up to number `lane`, this one included. begin and size are multiples of 4; `sums` (32)
// is scratch.
__device__ inline uint64_t decode_sample_parts(uint64_t* sums, const DecodeSampleRow& row, int begin, int end,
                                               int size) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first = begin + warp * size;
    uint64_t sum = 0;
    decode_sample_visit(row, first, min(first + size, end), lane, 32,
                        [&](uint64_t key) { sum += decode_sample_admitted(row, key); });
    sum = lanes_sum<32>(sum);
    if (lane == 0) { sums[warp] = sum; }
    __syncthreads();
    return decode_sample_warp_scan(sums[lane]);
}
// Returns the first lane whose running sum `upto` exceeds *point, and subtracts from *point the sum before that lane.
__device__ inline int decode_sample_find(uint64_t upto, uint64_t* point) {
    int found = __ffs(__ballot_sync(0xFFFFFFFFu, upto > *point)) - 1;
    uint64_t before = __shfl_sync(0xFFFFFFFFu, upto, max(found - 1, 0));
    *point -= found > 0 ? before : 0;
    return found;
}

// Inverse transform sampling: returns the first token, in the order of ids, at which the running sum of the candidates'
// shares exceeds `random` (0 to 1) times their total. There must be a candidate. `sums` (2,32): scratch.
__device__ int decode_sample_draw(uint64_t* sums, const DecodeSampleRow& row, int V, double random) {
    int lane = threadIdx.x % 32;
    // the parts of the vocabulary
    int size = ceil_div(V, 32 * 128) * 128; // tokens per part: 4 per lane in each step of its warp
    uint64_t upto = decode_sample_parts(sums, row, 0, V, size);
    uint64_t sum = __shfl_sync(0xFFFFFFFFu, upto, 31);
    uint64_t point = min((uint64_t)(random * (double)sum), sum - 1);
    int begin = decode_sample_find(upto, &point) * size, end = min(begin + size, V);
    // the parts of that part
    size = ceil_div(size, 32 * 128) * 128;
    begin += decode_sample_find(decode_sample_parts(sums + 32, row, begin, end, size), &point) * size;
    // the lanes' tokens in that one, then the token
    int own = size / 32, first = begin + lane * own;
    uint64_t share = 0;
    auto add = [&](uint64_t key) { share += decode_sample_admitted(row, key); };
    decode_sample_visit(row, first, min(first + own, V), 0, 1, add);
    int token = begin + decode_sample_find(decode_sample_warp_scan(share), &point) * own;
    for (share = 0;; token++) {
        add(decode_sample_key(row.logits[token], token));
        if (share > point) { return token; }
    }
}

__global__ void __launch_bounds__(DECODE_SAMPLE_THREADS, 1)
    decode_sample_kernel5(int* tokens, int* copy, int* positions, const float* logits, uint64_t* rng_state,
                          float temperature, int top_k, float top_p, float min_p, int V, int Vp) {
    __shared__ DecodeSampleShared shared;
    __shared__ uint64_t sums[2 * 32];
    int b = blockIdx.x, token = -1; // the result if nothing can be drawn
    grid_wait_dependency();
    DecodeSampleRow row = decode_sample_row(shared, logits + (size_t)b * Vp, V, temperature, min_p);
    if (row.count > 0) {
        decode_sample_restrict(shared, row, top_k, top_p);
        uint64_t state = rng_state[b];
        token = decode_sample_draw(sums, row, V, decode_sample_random(&state));
        if (threadIdx.x == 0) { rng_state[b] = state; } // all threads have read it: the draw has barriers
    }
    if (threadIdx.x == 0) { decode_sample_end(b, token, tokens, copy, positions); }
}
// ---- kernel 6: repetition penalty, in front of kernel 3 or 5; one thread per 32 tokens of the vocabulary -------------

// Adds the newest token of each text to its set, and penalizes the logits of all tokens in the set.
__global__ void decode_sample_penalize_kernel6(uint32_t* seen, float* logits, const int* tokens, float penalty, int V,
                                               int Vp) {
    int b = blockIdx.y, num_words = ceil_div(V, 32), i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_words) { return; }
    grid_wait_dependency();
    uint32_t* word = seen + (size_t)b * num_words + i;
    uint32_t bits = *word;
    int token = tokens[b];
    if (token >= 0 && token / 32 == i) { *word = bits |= 1u << (token % 32); }
    for (; bits != 0; bits &= bits - 1) {
        float* logit = logits + (size_t)b * Vp + 32 * i + __ffs(bits) - 1;
        *logit = *logit > 0.0f ? __fdiv_rn(*logit, penalty) : *logit * penalty;
    }
}

// Size of scratch in floats. scratch must be aligned to 8 bytes and zero before the first launch; decode_sample leaves
// it zero.
size_t decode_sample_scratch(int B) { return (size_t)3 * B; }

// tokens (B), copy (B) the same tokens, may be the host's memory, positions (B) += 1 where they are not -1
// | scratch (decode_sample_scratch(B)) | logits (B,Vp), the first V of a row are used | rng_state (B) inout
// | seen (B, ceil(V/32)) inout
// temperature 0: takes the largest logit; rng_state may be NULL. Otherwise draws from softmax(logits / temperature),
// limited to the top_k largest logits (0: all), of these to the fewest most likely tokens whose share of the
// probability reaches top_p (1: all), and of these to the tokens at least min_p times as likely as the most likely one.
// NaN and -inf are never drawn; if a sequence has nothing else, its token is -1.
// penalty 1: seen may be NULL. Otherwise seen has the tokens of each text but for the newest one, which is in tokens; it is
// added. A positive logit of a token in the set is divided by the penalty, another one is multiplied with it.
void decode_sample(int* tokens, int* copy, int* positions, float* scratch, float* logits, uint64_t* rng_state,
                   uint32_t* seen, float temperature, int top_k, float top_p, float min_p, float penalty, int B, int V,
                   int Vp, const Execution& exec) {
    int block_size = exec.block_size ? exec.block_size : 256;
    Op op(exec, (double)B * V * sizeof(float), 0, "decode_sample");
    require(B > 0 && B <= 65535 && V > 0 && V <= Vp && V <= 1 << 18 && Vp % 4 == 0);
    require(temperature >= 0.0f && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f && min_p >= 0.0f && min_p <= 1.0f);
    if (penalty != 1.0f) {
        require(seen != NULL && penalty > 0.0f);
        launch_early(decode_sample_penalize_kernel6, dim3(ceil_div(ceil_div(V, 32), 256), B), 256, 0, exec, seen,
                     logits, (const int*)tokens, penalty, V, Vp);
    }
    if (temperature == 0.0f) {
        int blocks = ceil_div(V, 2 * 4 * block_size); // two vectors per thread
        decode_sample_greedy(tokens, copy, positions, scratch, logits, B, V, Vp, blocks, exec, block_size);
        return;
    }
    require(rng_state != NULL);
    launch_early(decode_sample_kernel5, dim3(B), DECODE_SAMPLE_THREADS, 0, exec, tokens, copy, positions,
                 (const float*)logits, rng_state, temperature, top_k, top_p, min_p, V, Vp);
}
// ==== end promoted: decode_sample ====
#endif

#if PART == 0 || PART == 5
// ---- 6.6 kernels of generation for several texts -----------------------------------------------
//     decode_matmul  on tensor cores

// ==== promoted: decode_matmul ====
#if !defined(ENABLE_FP32)

// decode_matmul() takes this many texts. One text needs no tensor cores; for more than 64, blocks for 64 texts each would
// read the weights twice. To compare, with -B: ./decode_matvec 6, ./decode_matmul 0 (cuBLASLt) and ./decode_matmul 5.
constexpr int DECODE_MATMUL_MIN_TEXTS = 2, DECODE_MATMUL_MAX_TEXTS = 64;
constexpr int DECODE_MATMUL_WARPS = 8; // per block
constexpr int DECODE_MATMUL_THREADS = 32 * DECODE_MATMUL_WARPS;
constexpr int DECODE_MATMUL_CHUNK = 32; // columns of a chunk: two steps of mma, 16 bytes per lane and row
constexpr int DECODE_MATMUL_MAX_CLUSTER = 8;
constexpr int DECODE_MATMUL_PAIRS = 2; // pairs of results that a thread stores, at most, if it adds up partial sums

// Chunks in flight per warp: 6 are 48 KB per block. Of weights in 8 bits these are 12, or as many as there are registers for.
__host__ __device__ constexpr int decode_matmul_ahead(bool scaled, int texts, bool norm) {
    if (!scaled) { return 6; }
    return texts == 64 ? (norm ? 5 : 10) : texts == 16 && norm ? 10 : 12;
}

struct DecodeMatmulArguments {
    const floatX *x, *norm_weight, *norm_bias;
    WeightMatrix weight;
    const floatX *bias, *residual;
    int B, K, OC;
    bool gelu;
    float epsilon;   // of the layernorm
    int log_rows;    // log2 of the rows of the weight per tile: 16 per group of warps
    int log_cluster; // log2 of the blocks per cluster
    int stride;      // of the rows of x in shared memory, in elements
};

// The columns that a block multiplies: chunks begin .. end - 1. A cluster splits all chunks evenly over its blocks.
struct DecodeMatmulSlice {
    int begin, end;
    __device__ DecodeMatmulSlice(const DecodeMatmulArguments& a, int rank) {
        int num_chunks = ceil_div(a.K, DECODE_MATMUL_CHUNK);
        begin = num_chunks * rank >> a.log_cluster, end = num_chunks * (rank + 1) >> a.log_cluster;
    }
    // vectors of 8 columns that exist; the last chunk of a row may be incomplete
    __device__ int num_vec(int K) const {
        return (min(end * DECODE_MATMUL_CHUNK, K) - begin * DECODE_MATMUL_CHUNK) / x128::size;
    }
};

// This lane's vectors of a chunk of the warp's 16 rows of the weight, which start at `row`: those of rows lane / 4 and
// lane / 4 + 8. Outside of the matrix, and if not `there`, they are zeros.
template <class W> struct DecodeMatmulRows {
    const WeightBits<W>* upper;
    bool has_upper, has_lower;
    __device__ DecodeMatmulRows(const WeightMatrix& weight, int row, int K, int OC) {
        int r = row + threadIdx.x % 32 / 4;
        const W* values = reinterpret_cast<const W*>(weight.values);
        upper = reinterpret_cast<const WeightBits<W>*>(values + (size_t)r * K) + threadIdx.x % 4;
        has_upper = r < OC, has_lower = r + 8 < OC;
    }
    __device__ void fetch(WeightBits<W> w[2], int chunk, bool there, int K) const {
        const WeightBits<W>* from = upper + chunk * 4;
        there = there && (chunk * 4 + (int)threadIdx.x % 4) * x128::size < K;
        w[0] = there && has_upper ? __ldcs(from) : WeightBits<W>{};
        w[1] = there && has_lower ? __ldcs(from + K) : WeightBits<W>{}; // 8 rows are K vectors
    }
};

// A chunk of 16 rows of the weight as the operands of two steps of mma: pairs of columns of rows lane / 4 and lane / 4 + 8.
struct DecodeMatmulPairs {
    uint32_t first[4], second[4];

    // arranged: w is in the order of the operands already, which arrange() has brought it to
    template <class W> __device__ DecodeMatmulPairs(const WeightBits<W> w[2], W, bool arranged) {
        uint32_t upper[4], lower[4];
        weight_pairs(upper, w[0], W()), weight_pairs(lower, w[1], W());
#pragma unroll
        for (int i = 0; i < 2; i++) {
            first[2 * i] = upper[i], first[2 * i + 1] = lower[i];
            second[2 * i] = upper[2 + i], second[2 * i + 1] = lower[2 + i];
        }
        if (!arranged) { return; }
#pragma unroll
        for (int i = 0; i < 4; i++) { first[i] = upper[i], second[i] = lower[i]; }
    }
    // Writes the operands back to w. Weights in 8 bits stay as they are: as operands they would take twice the registers.
    __device__ void arrange(int4 w[2]) const {
        w[0] = make_int4(first[0], first[1], first[2], first[3]);
        w[1] = make_int4(second[0], second[1], second[2], second[3]);
    }
    template <class Bits> __device__ void arrange(Bits*) const {}
};

// sums += a chunk of 16 rows of the weight times `texts` rows of x; `x` is this lane's vector of text lane / 4. A vector
// goes to two steps of mma. What mma takes for columns 2t, 2t + 1, 2t + 8 and 2t + 9 of a step are other columns in
// memory, but the same ones for both operands, and a sum does not depend on the order of its terms:
//
//     vector of lane t of a quad:   columns 8t + 0, 1   8t + 2, 3   8t + 4, 5   8t + 6, 7
//     is, in a step of mma:         first: 2t, 2t+1     2t+8, 2t+9  second: 2t, 2t+1  2t+8, 2t+9
// An mma waits for an earlier one that adds to the same sums. So n groups of 8 texts are multiplied in turn; 8 texts, a group alone, have a
// second accumulator.
template <int texts, int n> __device__ inline void
decode_matmul_multiply(float sums[2][texts / 8][4], const DecodeMatmulPairs& w, const floatX* x, int stride) {
#pragma unroll
    for (int begin = 0; begin < texts / 8; begin += n) {
        int4 v[n];
#pragma unroll
        for (int j = 0; j < n; j++) { v[j] = *reinterpret_cast<const int4*>(x + (begin + j) * 8 * stride); }
#pragma unroll
        for (int j = 0; j < n; j++) { mma_16x8x16(sums[0][begin + j], w.first, v[j].x, v[j].y, floatX()); }
#pragma unroll
        for (int j = 0; j < n; j++) {
            mma_16x8x16(sums[texts == 8 ? 1 : 0][begin + j], w.second, v[j].z, v[j].w, floatX());
        }
    }
}

__device__ inline int4 decode_matmul_normalise(int4 bits, const x128& scale, const x128& shift, float mean,
                                               float rstd) {
    x128 v = vec128_from_bits<floatX>(bits);
#pragma unroll
    for (int e = 0; e < x128::size; e++) {
        v[e] = (floatX)(((float)v[e] - mean) * rstd * (float)scale[e] + (float)shift[e]);
    }
    return vec128_bits(v);
}

// Writes the block's columns of the normalised x to shared_x (texts,stride); rows past B repeat the last row. shared_norm
// (2,num_columns) holds the block's columns of norm_weight and of norm_bias, which cp.async may still be writing. In a
// cluster, moments (cluster,texts) receive the mean and the sum of squared differences of each block's columns; their
// bytes arrive at `barrier`.
template <int texts> __device__ void decode_matmul_norm(floatX* shared_x, const x128* shared_norm, float2* moments,
                                                        uint64_t* barrier, const DecodeMatmulArguments& a, int first_b,
                                                        int num_columns, int rank) {
    constexpr int lanes = DECODE_MATMUL_THREADS / texts; // per text
    constexpr int ahead = texts == 8 ? 3 : 6;            // vectors of x in flight per thread: 768 columns of 8 texts
    DecodeMatmulSlice slice(a, rank);
    int cluster = 1 << a.log_cluster, b = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    int num_vec = slice.num_vec(a.K), padded_vec = (slice.end - slice.begin) * DECODE_MATMUL_CHUNK / x128::size;
    const int4* from = reinterpret_cast<const int4*>(a.x + (size_t)min(first_b + b, a.B - 1) * a.K +
                                                     slice.begin * DECODE_MATMUL_CHUNK);
    int4* to = reinterpret_cast<int4*>(shared_x + b * a.stride);

    // the moments of this thread's vectors, `ahead` at a time; the last ones stay in v
    int4 v[ahead];
    float count = 0.0f, mean = 0.0f, squares = 0.0f; // squares: the sum of the squared differences from the mean
    int begin = 0;
#pragma unroll 1
    for (;; begin += ahead * lanes) {
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            int at = begin + i * lanes + lane;
            v[i] = at < num_vec ? __ldcg(from + at) : make_int4(0, 0, 0, 0);
        }
        float now = (float)(min(max(ceil_div(num_vec - begin - lane, lanes), 0), ahead) * x128::size), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ahead; i++) { // vectors that do not exist are zeros
            x128 x = vec128_from_bits<floatX>(v[i]);
            for (int e = 0; e < x128::size; e++) { sum += (float)x[e]; }
        }
        float center = now > 0.0f ? sum / now : 0.0f, own = 0.0f;
        hold_packed(v);
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            float less = begin + i * lanes + lane < num_vec ? center : 0.0f;
            x128 x = vec128_from_bits<floatX>(v[i]);
            for (int e = 0; e < x128::size; e++) { own += ((float)x[e] - less) * ((float)x[e] - less); }
        }
        hold_packed(v);
        float both = count + now, share = both > 0.0f ? now / both : 0.0f;
        squares += own + (center - mean) * (center - mean) * count * share;
        mean += (center - mean) * share, count = both;
        if (begin + ahead * lanes >= num_vec) { break; }
#pragma unroll
        for (int i = 0; i < ahead; i++) { to[begin + i * lanes + lane] = v[i]; } // all of them exist
    }
    // of the text's columns in this block, then of all columns
    float center = lanes_sum<lanes>(mean * count) / (float)max(num_vec * x128::size, 1);
    squares = lanes_sum<lanes>(squares + count * (mean - center) * (mean - center));
    mean = center;
    if (cluster > 1) {
        if (lane == 0) {
            float2 own = make_float2(mean, squares);
            moments[rank * texts + b] = own;
#pragma unroll 1
            for (int r = 0; r < cluster; r++) {
                if (r != rank) { store_cluster_async(moments + rank * texts + b, own, barrier, r); }
            }
        }
        __syncthreads();
        mbarrier_wait_cluster(barrier, 0);
        mean = 0.0f, squares = 0.0f;
#pragma unroll 1
        for (int r = 0; r < cluster; r++) {
            float columns = (float)(DecodeMatmulSlice(a, r).num_vec(a.K) * x128::size);
            mean += moments[r * texts + b].x * (columns / (float)a.K);
        }
#pragma unroll 4
        for (int r = 0; r < cluster; r++) {
            float columns = (float)(DecodeMatmulSlice(a, r).num_vec(a.K) * x128::size);
            float2 part = moments[r * texts + b];
            squares += part.y + columns * (part.x - mean) * (part.x - mean);
        }
    }
    float rstd = rsqrtf(squares / (float)a.K + a.epsilon);

    cp_async_wait<0>();
    __syncthreads(); // every thread has stored its part of shared_norm
    const x128 *scale = shared_norm, *shift = shared_norm + num_columns / x128::size;
#pragma unroll 1
    for (int at = lane; at < begin; at += lanes) {
        to[at] = decode_matmul_normalise(to[at], scale[at], shift[at], mean, rstd);
    }
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        int at = begin + i * lanes + lane;
        if (at < num_vec) { to[at] = decode_matmul_normalise(v[i], scale[at], shift[at], mean, rstd); }
    }
#pragma unroll 1
    for (int at = num_vec + lane; at < padded_vec; at += lanes) { to[at] = make_int4(0, 0, 0, 0); }
}

// Starts the copy of the block's columns of x to shared_x (texts,stride); zeros outside of the matrix.
template <int texts> __device__ inline void decode_matmul_copy(floatX* shared_x, const DecodeMatmulArguments& a,
                                                               int first_b, const DecodeMatmulSlice& slice) {
    constexpr int lanes = DECODE_MATMUL_THREADS / texts; // per text
    int b = threadIdx.x / lanes, begin = slice.begin * DECODE_MATMUL_CHUNK, end = slice.end * DECODE_MATMUL_CHUNK;
    const floatX* from = a.x + (size_t)min(first_b + b, a.B - 1) * a.K;
    for (int column = begin + threadIdx.x % lanes * x128::size; column < end; column += lanes * x128::size) {
        bool there = first_b + b < a.B && column < a.K;
        cp_async_16(shared_x + b * a.stride + column - begin, from + (there ? column : 0), there);
    }
    cp_async_commit();
}

struct alignas(2 * sizeof(floatX)) DecodeMatmulPair {
    floatX x, y;
};

// The sum of n pairs of floats, 1, 2, 4 or 8, each `stride` floats after the last, in this order. Their loads are in flight together.
template <int n> __device__ inline float2 decode_matmul_add(const float* from, int stride) {
    float2 pairs[n], sum = {};
#pragma unroll
    for (int i = 0; i < n; i++) { pairs[i] = *reinterpret_cast<const float2*>(from + i * stride); }
#pragma unroll
    for (int i = 0; i < n; i++) { sum.x += pairs[i].x, sum.y += pairs[i].y; }
    return sum;
}
__device__ inline float2 decode_matmul_add_up(const float* from, int n, int stride) {
    static_assert(DECODE_MATMUL_WARPS <= 8 && DECODE_MATMUL_MAX_CLUSTER <= 8, "");
    return n == 1   ? decode_matmul_add<1>(from, stride)
           : n == 2 ? decode_matmul_add<2>(from, stride)
           : n == 4 ? decode_matmul_add<4>(from, stride)
                    : decode_matmul_add<8>(from, stride);
}

// Applies gelu to one result and stores it.
template <class Out>
__device__ inline void decode_matmul_finish(Out* out, const DecodeMatmulArguments& a, float sum, int row, int b) {
    if (row >= a.OC || b >= a.B) { return; }
    out[(size_t)b * a.OC + row] = (Out)(a.gelu ? gelu(sum) : sum);
}

// Stores the sums of a warp's 16 rows, from `row` on: of the head as results, of other products to `partial`, this lane's first place.
template <bool head, int texts, class Out>
__device__ inline void decode_matmul_store(Out* out, float* partial, const DecodeMatmulArguments& a,
                                           const float (&sums)[2][texts / 8][4], const float (&row_scales)[2], int row,
                                           int first_b, int stride) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < texts / 8; j++, partial += 8 * stride) {
#pragma unroll
        for (int i = 0; i < 4; i++) { // element i is of row lane / 4 + i / 2 * 8 and of text lane % 4 * 2 + i % 2
            float sum = sums[0][j][i] + (texts == 8 ? sums[1][j][i] : 0.0f);
            int r = lane / 4 + i / 2 * 8, b = j * 8 + lane % 4 * 2 + i % 2;
            if (head) {
                decode_matmul_finish(out, a, sum * row_scales[i / 2], row + r, first_b + b);
            } else {
                partial[i % 2 * stride + i / 2 * 8] = sum;
            }
        }
    }
}

// Prepares the barriers for the bytes that the cluster's other blocks send: moments (texts) each, and sums (pairs) each.
template <int texts, bool norm>
__device__ inline void decode_matmul_init(uint64_t (&barriers)[2], int cluster, int pairs) {
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers[0], 1), mbarrier_init(&barriers[1], 1);
        mbarrier_init_fence();
        if (norm) { mbarrier_arrive_expect(&barriers[0], (cluster - 1) * texts * (int)sizeof(float2)); }
        mbarrier_arrive_expect(&barriers[1], (cluster - 1) * pairs * (int)sizeof(float2));
    }
    cluster_arrive_relaxed();
}

// Starts the copy of the block's columns of norm_weight and norm_bias to shared_norm (2, num_columns); zeros past K.
__device__ inline void decode_matmul_copy_norm(floatX* shared_norm, const DecodeMatmulArguments& a,
                                               const DecodeMatmulSlice& slice, int num_columns) {
#pragma unroll 1
    for (int at = threadIdx.x; at < num_columns / x128::size; at += DECODE_MATMUL_THREADS) {
        int column = slice.begin * DECODE_MATMUL_CHUNK + at * x128::size;
        bool there = column < a.K;
        cp_async_16(shared_norm + at * x128::size, a.norm_weight + (there ? column : 0), there);
        cp_async_16(shared_norm + num_columns + at * x128::size, a.norm_bias + (there ? column : 0), there);
    }
    cp_async_commit();
}

// Sends each pair of sums, sum_of(i), to the block of the cluster that stores it: sums (cluster, pairs) there. Waits for the others'.
template <class Sum> __device__ inline void decode_matmul_exchange(float2* sums, uint64_t* barrier, int rank,
                                                                   int cluster, int pairs, int log_pairs,
                                                                   const Sum& sum_of) {
#pragma unroll 1
    for (int i = threadIdx.x; i < cluster * pairs; i += DECODE_MATMUL_THREADS) {
        int owner = i >> log_pairs;
        float2 sum = sum_of(i), *to = sums + rank * pairs + (i & (pairs - 1));
        if (owner == rank) {
            *to = sum;
        } else {
            store_cluster_async(to, sum, barrier, owner);
        }
    }
    __syncthreads(); // the block has stored its own sums
    mbarrier_wait_cluster(barrier, 0);
}

// A block multiplies `rows` rows of the weight by `texts` texts. The blocks of a cluster take a share of the columns
// each; within a block, so do the warps of a group, which have 16 rows in common. With rows = 32 and a cluster of 2:
//
//     chunks          0 1 2    3 4 5    6 7 8    9 10 11  12 13 14 ...
//     rows  0 - 15    warp 0   warp 1   warp 2   warp 3   warp 0   ...
//     rows 16 - 31    warp 4   warp 5   warp 6   warp 7   warp 4   ...
//                     |------------ block 0 ------------| block 1  ...
//
// The warps of a group add up their sums in shared memory. Then each block of the cluster gets the others' sums of its
// share of the results, adds them in the order of the blocks, and stores the results.
//
// The head has so many rows that no sums are split: rows = 128, a warp has all columns and stores its results itself, and
// a block goes on with the rows of tile blockIdx.z + gridDim.z.
template <class Out, class W, int texts, bool norm> __global__ void __launch_bounds__(DECODE_MATMUL_THREADS, 2)
    decode_matmul_sm90_kernel5(Out* out, const DecodeMatmulArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int num_pairs = DECODE_MATMUL_PAIRS;
    constexpr bool head = sizeof(Out) != sizeof(floatX), scaled = sizeof(W) < sizeof(floatX);
    constexpr int ahead = decode_matmul_ahead(scaled, texts, norm);
    extern __shared__ __align__(128) int4 decode_matmul_shared[];
    __shared__ uint64_t barriers[2]; // the moments, the sums of the cluster's other blocks have arrived
    int rank = blockIdx.x, cluster = gridDim.x, first_b = blockIdx.y * texts, tile = blockIdx.z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int rows = 1 << a.log_rows, log_split = 7 - a.log_rows, split = 1 << log_split; // warps per group: 128 / rows
    int group = warp >> log_split, part = warp & (split - 1);
    DecodeMatmulSlice slice(a, rank);
    int num_chunks = slice.end - slice.begin;
    // of the largest slice: shared memory has the same layout in all blocks of a cluster, because they store to it
    int num_columns = ceil_div(ceil_div(a.K, DECODE_MATMUL_CHUNK), cluster) * DECODE_MATMUL_CHUNK;
    int begin = slice.begin + (num_chunks * part >> log_split),
        end = slice.begin + (num_chunks * (part + 1) >> log_split);
    int row = tile * rows + group * 16; // the warp's first row
    int stride = rows + 4;              // of `partial`: a warp's stores of sums are spread over all banks
    int half_rows = rows / 2, log_half = a.log_rows - 1;
    // results that this block stores, in pairs: neighbouring rows of one text
    int pairs = texts * half_rows >> a.log_cluster;

    floatX* shared_x = reinterpret_cast<floatX*>(decode_matmul_shared);                    // (texts, a.stride)
    floatX* shared_norm = shared_x + texts * a.stride;                                     // (2, num_columns), if norm
    float* partial = reinterpret_cast<float*>(shared_norm + (norm ? 2 * num_columns : 0)); // (split, texts, stride)
    float2* sums_there = reinterpret_cast<float2*>(partial + split * texts * stride);      // (cluster, pairs)
    float2* moments = sums_there + cluster * pairs;                                        // (cluster, texts), if norm

    // everything up to grid_wait_dependency() overlaps with the previous kernel
    if (cluster > 1) { decode_matmul_init<texts, norm>(barriers, cluster, pairs); }
    WeightBits<W> w[ahead][2];
    DecodeMatmulRows<W> first_rows(a.weight, row, a.K, a.OC);
#pragma unroll
    for (int i = 0; i < ahead; i++) { first_rows.fetch(w[i], begin + i, begin + i < end, a.K); }
    grid_launch_dependents();
    if (norm) { decode_matmul_copy_norm(shared_norm, a, slice, num_columns); }
    // the place of this thread's pairs of results in the tile
    auto place = [=](int u, int* b, int* r) {
        int i = rank * pairs + threadIdx.x + u * DECODE_MATMUL_THREADS;
        *b = i >> log_half, *r = (i & (half_rows - 1)) * 2;
        return (int)threadIdx.x + u * DECODE_MATMUL_THREADS < pairs;
    };
    // two neighbours of a row of bias or residual; zeros outside of it
    auto pair_of = [=](const floatX* from, int r) {
        DecodeMatmulPair x = {(floatX)0.0f, (floatX)0.0f};
        if (tile * rows + r < a.OC) { x.x = from[tile * rows + r]; }
        if (tile * rows + r + 1 < a.OC) { x.y = from[tile * rows + r + 1]; }
        return x;
    };
    DecodeMatmulPair bias[num_pairs] = {}, residual[num_pairs] = {};
    float2 scales[num_pairs] = {};
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (head || !place(u, &b, &r)) { continue; }
        if (a.bias) { bias[u] = pair_of(a.bias, r); }
        if (scaled && tile * rows + r < a.OC) { scales[u].x = a.weight.scales[tile * rows + r]; }
        if (scaled && tile * rows + r + 1 < a.OC) { scales[u].y = a.weight.scales[tile * rows + r + 1]; }
    }
    constexpr bool prepares = !head && !scaled && texts < 64; // for 64 texts there are not enough registers
    bool all_loaded = prepares && begin + ahead >= end; // the warp's weights: they become operands before the wait
    if (all_loaded) {
#pragma unroll
        for (int i = 0; i < ahead; i++) { DecodeMatmulPairs(w[i], W(), false).arrange(w[i]); }
    }
    if (cluster > 1) { cluster_wait(); } // no block stores to another one before that one's barriers exist
    grid_wait_dependency();              // what was read before this line is not written by earlier kernels of the step

    if (!norm) { decode_matmul_copy<texts>(shared_x, a, first_b, slice); }
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (norm || !place(u, &b, &r) || !a.residual || first_b + b >= a.B) { continue; }
        residual[u] = pair_of(a.residual + (size_t)(first_b + b) * a.OC, r);
    }
    if (norm) {
        decode_matmul_norm<texts>(shared_x, reinterpret_cast<const x128*>(shared_norm), moments, &barriers[0], a,
                                  first_b, num_columns, rank);
    } else {
        cp_async_wait<0>();
    }
    __syncthreads();

    // this lane's vector of the first chunk of the block, in text lane / 4
    const floatX* own_x = shared_x + lane / 4 * a.stride + lane % 4 * x128::size;
    for (; tile * rows < a.OC; tile += gridDim.z) { // only the head has more than one tile
        float sums[2][texts / 8][4] = {};
        float row_scales[2] = {1.0f, 1.0f}; // of the head's rows lane / 4 and lane / 4 + 8
        for (int i = 0; i < 2; i++) {
            if (scaled && head && row + lane / 4 + 8 * i < a.OC) {
                row_scales[i] = a.weight.scales[row + lane / 4 + 8 * i];
            }
        }
        int next_row = row + (int)gridDim.z * rows;
        // Multiplies `ahead` chunks and loads the next ones. only: there are no next ones, and this code has no instructions for them.
        auto round = [&](int chunk, auto is_only) {
            constexpr bool only = decltype(is_only)::value;
            bool more = chunk + ahead < end; // in this tile; if not, the head loads the next one's first chunks
            int next_chunk = more ? chunk + ahead : begin;
            DecodeMatmulRows<W> next(a.weight, more ? row : next_row, a.K, a.OC);
#pragma unroll
            for (int i = 0; i < ahead; i++) {
                if (chunk + i < end) {
                    DecodeMatmulPairs p(w[i], W(), only);
                    const floatX* x = own_x + (chunk + i - slice.begin) * DECODE_MATMUL_CHUNK;
                    decode_matmul_multiply<texts, (only && texts > 8 ? 2 : 1)>(sums, p, x, a.stride);
                }
                if (!only && (more || head)) { next.fetch(w[i], next_chunk + i, next_chunk + i < end, a.K); }
                // keeps the compiler from loading all chunks of x ahead, for which there are not enough registers
                if ((i + 1) % (texts <= 16 ? 24 / texts : 1) == 0) { __syncwarp(); }
            }
        };
        if (all_loaded) {
            round(begin, std::bool_constant<prepares>());
        } else {
            for (int chunk = begin; chunk < end; chunk += ahead) { round(chunk, std::false_type()); }
        }
        float* to_partial = partial + (part * texts + lane % 4 * 2) * stride + group * 16 + lane / 4;
        decode_matmul_store<head, texts>(out, to_partial, a, sums, row_scales, row, first_b, stride);
        if (!head) { break; }
        row = next_row;
    }
    if (head) { return; }

    __syncthreads();
    // the sum over the block's columns of pair i of the tile
    auto sum_of = [=](int i) {
        return decode_matmul_add_up(partial + (i >> log_half) * stride + (i & (half_rows - 1)) * 2, split,
                                    texts * stride);
    };
    if (cluster > 1) {
        int log_pairs = log_half + (texts == 8 ? 3 : texts == 16 ? 4 : texts == 32 ? 5 : 6) - a.log_cluster;
        decode_matmul_exchange(sums_there, &barriers[1], rank, cluster, pairs, log_pairs, sum_of);
    }
#pragma unroll
    for (int u = 0; u < num_pairs; u++) {
        int b, r;
        if (!place(u, &b, &r)) { continue; }
        int k = threadIdx.x + u * DECODE_MATMUL_THREADS;
        const float* there = reinterpret_cast<const float*>(sums_there + k);
        float2 sum = cluster == 1 ? sum_of(k) : decode_matmul_add_up(there, cluster, 2 * pairs);
        if (scaled) { sum.x *= scales[u].x, sum.y *= scales[u].y; }
        sum.x += (float)bias[u].x + (float)residual[u].x, sum.y += (float)bias[u].y + (float)residual[u].y;
        decode_matmul_finish(out, a, sum.x, tile * rows + r, first_b + b);
        decode_matmul_finish(out, a, sum.y, tile * rows + r + 1, first_b + b);
    }
#endif
}

// How kernel 5 is launched.
struct DecodeMatmulPlan {
    int texts, cluster, rows, stride;
    dim3 grid;
    size_t shared_bytes;
};

// Texts per block for B texts.
inline int decode_matmul_texts(int B) {
    int texts = 8;
    while (texts < min(B, 64)) { texts *= 2; }
    return texts;
}
// The most rows of a tile for which a thread stores no more than DECODE_MATMUL_PAIRS pairs of results.
inline int decode_matmul_max_rows(int texts, int cluster) {
    return 2 * DECODE_MATMUL_PAIRS * DECODE_MATMUL_THREADS * cluster / texts;
}

// The launch for blocks of `texts` texts. cluster, rows: 0 to choose them.
inline DecodeMatmulPlan decode_matmul_plan(int texts, int cluster, int rows, bool norm, bool head, int B, int K,
                                           int OC) {
    int num_sms = num_multiprocessors(), num_chunks = ceil_div(K, DECODE_MATMUL_CHUNK), num_y = ceil_div(B, texts);
    if (head) { cluster = 1, rows = 16 * DECODE_MATMUL_WARPS; }
    if (cluster == 0) { // each block reads at most 32 KB of x and, without a layernorm, at most 768 columns
        cluster = 1;
        while (cluster < DECODE_MATMUL_MAX_CLUSTER && (texts * K > cluster * 16384 || (!norm && K > cluster * 768))) {
            cluster *= 2;
        }
    }
    int max_rows = decode_matmul_max_rows(texts, cluster);
    // the most that leave a block for every second SM: fewer blocks read x. Without a layernorm, 32 are faster than 16
    if (rows == 0) {
        int least = norm ? 16 : min(32, max_rows);
        for (rows = 64; rows > least; rows /= 2) {
            if (rows <= max_rows && 2 * ceil_div(OC, rows) * cluster * num_y >= num_sms) { break; }
        }
    }
    require(rows <= 16 * DECODE_MATMUL_WARPS && (head || rows <= max_rows));
    int columns = ceil_div(num_chunks, cluster) * DECODE_MATMUL_CHUNK, split = 16 * DECODE_MATMUL_WARPS / rows;
    // 64 bytes more than a multiple of 128: the 16-byte loads of 8 lanes, from two rows, are spread over all banks
    int stride = ceil_div(columns, 64) * 64 + 32, tiles = ceil_div(OC, rows);
    size_t bytes = ((size_t)texts * stride + (norm ? 2 * columns : 0)) * sizeof(floatX);
    if (!head) { bytes += (size_t)split * texts * (rows + 4) * sizeof(float); }
    if (cluster > 1) { bytes += ((size_t)texts * rows / 2 + cluster * texts) * sizeof(float2); }
    if (head) { tiles = min(tiles, max(1, num_sms * (bytes <= 100 << 10 ? 2 : 1) / num_y)); } // as many as fit
    return {texts, cluster, rows, stride, dim3(cluster, num_y, tiles), bytes};
}

// The plan for a shape. If x does not fit in shared memory, a block takes fewer texts; with too many columns for that,
// shared_bytes of the plan exceeds what an SM has.
constexpr size_t DECODE_MATMUL_MAX_SHARED = (227 << 10) - 1024; // the kernel also has barriers in static shared memory
inline DecodeMatmulPlan decode_matmul_choose(int cluster, int rows, bool norm, bool head, int B, int K, int OC) {
    int texts = decode_matmul_texts(B);
    // Compiled for 16 texts, each chunk of the head waits for all loads, the newest ones too: 46 us instead of 32 (H200, C = 768).
    if (head && texts == 16) { texts = 32; }
    DecodeMatmulPlan plan = decode_matmul_plan(texts, cluster, rows, norm, head, B, K, OC);
    while (plan.shared_bytes > DECODE_MATMUL_MAX_SHARED && texts > 8) {
        texts /= 2;
        plan = decode_matmul_plan(texts, cluster, rows, norm, head, B, K, OC);
    }
    return plan;
}

template <class Out, class W, bool norm> auto decode_matmul_kernel(int texts) {
    return texts == 8    ? decode_matmul_sm90_kernel5<Out, W, 8, norm>
           : texts == 16 ? decode_matmul_sm90_kernel5<Out, W, 16, norm>
           : texts == 32 ? decode_matmul_sm90_kernel5<Out, W, 32, norm>
                         : decode_matmul_sm90_kernel5<Out, W, 64, norm>;
}

// Launches kernel 5; `early`: by programmatic dependent launch.
template <class Out> void decode_matmul_launch(Out* out, DecodeMatmulArguments a, const DecodeMatmulPlan& plan,
                                               bool early, const Execution& exec) {
    require(a.B > 0 && a.K > 0 && a.K % x128::size == 0 && a.OC > 0);
    require(!a.residual || (!a.gelu && !a.norm_weight));
    require((a.norm_weight != NULL) == (a.norm_bias != NULL) && plan.shared_bytes <= DECODE_MATMUL_MAX_SHARED);
    require(plan.grid.y <= 65535 && plan.grid.z <= 65535);
    a.log_rows = __builtin_ctz(plan.rows), a.log_cluster = __builtin_ctz(plan.cluster), a.stride = plan.stride;
    auto kernel = decode_matmul_kernel<Out, floatX, true>(plan.texts);
    weight_dispatch(a.weight, [&](auto type) {
        typedef decltype(type) W;
        kernel = decode_matmul_kernel<Out, W, true>(plan.texts);
        if constexpr (sizeof(Out) == sizeof(floatX)) { // the head always has a layernorm
            if (!a.norm_weight) { kernel = decode_matmul_kernel<Out, W, false>(plan.texts); }
        }
    });
    launch_kernel(kernel, LaunchShape(plan.grid, DECODE_MATMUL_THREADS, plan.shared_bytes, plan.cluster, early), exec,
                  out, a);
}

bool decode_matmul_runs(const DecodeMatmulPlan& plan, int B) {
    return B >= DECODE_MATMUL_MIN_TEXTS && plan.shared_bytes <= DECODE_MATMUL_MAX_SHARED && has_sm90a();
}

// Whether decode_matmul() runs such a product here.
bool decode_matmul_runs(bool norm, int B, int K, int OC) {
    return B <= DECODE_MATMUL_MAX_TEXTS && decode_matmul_runs(decode_matmul_choose(0, 0, norm, false, B, K, OC), B);
}

// out (B,OC) = gelu?(layernorm?(x) weight^T + bias) + residual | x (B,K) | norm_weight, norm_bias (K) or NULL
// | weight (OC,K) | bias (OC) or NULL | residual (B,OC) or NULL, may be out itself; a residual excludes gelu and a layernorm
// Weights and biases are read while the previous kernel in the stream may still run, so no kernel of the step may write
// them. Returns false, and launches nothing, for other numbers of texts than DECODE_MATMUL_MIN_TEXTS to
// DECODE_MATMUL_MAX_TEXTS, for a K too large for shared memory, and where the device has no code for sm_90a.
bool decode_matmul(floatX* out, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                   const WeightMatrix& weight, const floatX* bias, const floatX* residual, bool gelu, int B, int K,
                   int OC, float epsilon, const Execution& exec) {
    DecodeMatmulPlan plan = decode_matmul_choose(0, 0, norm_weight != NULL, false, B, K, OC);
    if (B > DECODE_MATMUL_MAX_TEXTS || !decode_matmul_runs(plan, B)) { return false; }
    double others = (double)B * (K + (residual ? 2.0 : 1.0) * OC) * sizeof(floatX);
    Op op(exec, weight.bytes(OC, K) + others, 2.0 * B * OC * K, "decode_matmul %d -> %d", K, OC);
    decode_matmul_launch(out, {x, norm_weight, norm_bias, weight, bias, residual, B, K, OC, gelu, epsilon, 0, 0, 0},
                         plan, true, exec);
    return true;
}
// ---- kernel 6: the head alone; weights by TMA through a ring in shared memory, which is full when x arrives -----------

constexpr int DECODE_HEAD_CONSUMERS = 256;              // threads: two warpgroups
constexpr int DECODE_HEAD_ROWS = 128;                   // of a tile: 64 of each warpgroup
constexpr int DECODE_HEAD_BOX = DECODE_HEAD_ROWS * 128; // bytes of 128 rows and 64 columns, or 128 of weights in 8 bits
constexpr int DECODE_HEAD_MIN_STAGES = 4, DECODE_HEAD_MAX_STAGES = 13;
// With more texts and full weights, cuBLASLt is faster than kernel 5: 64 texts of 768 channels 34 us instead of 52.
constexpr int DECODE_HEAD_MAX_TEXTS5 = 32;

struct DecodeHeadArguments {
    const floatX *x, *norm_weight, *norm_bias;
    const float* scales;
    int B, K, OC, num_boxes, num_stages; // num_boxes: of the weight, per tile
    float epsilon;                       // of the layernorm
};

// sum += a (64,16) b (16,texts); a: a descriptor, or the warp's registers
template <class A> __device__ inline void decode_head_multiply(float (&sum)[8], A a, uint64_t b, int accumulate) {
    wgmma_64x16x16(sum, a, b, accumulate, floatX());
}
template <class A> __device__ inline void decode_head_multiply(float (&sum)[16], A a, uint64_t b, int accumulate) {
    wgmma_64x32x16(sum, a, b, accumulate, floatX());
}
template <class A> __device__ inline void decode_head_multiply(float (&sum)[32], A a, uint64_t b, int accumulate) {
    wgmma_64x64x16(sum, a, b, accumulate, floatX());
}

// Weights in 8 bits become operands in registers. Of 64 columns, lane t of a quad reads 16 t to 16 t + 15 of rows lane / 4 and lane / 4 + 8
// of its warp's 16, which are its columns in four steps of 16. So columns have another order than in memory, in x, too: column
// 16 t + 4 s + j, j = 0 to 3, is column 2 t, 2 t + 1, 2 t + 8 or 2 t + 9 of step s.
// rows[i]: of step i of a box's 128 columns. `box` begins with the warp's rows.
template <class W> __device__ inline void decode_head_rows(uint32_t (&rows)[8][4], const unsigned char* box) {
    int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int lower = 0; lower < 2; lower++) { // row % 8 is the same for both
            int4 bits = reinterpret_cast<const int4*>(box + (row + 8 * lower) * 128)[(4 * half + t) ^ row];
            uint32_t pairs[2][4];
            weight_pairs(pairs[0], make_int2(bits.x, bits.y), W()),
                weight_pairs(pairs[1], make_int2(bits.z, bits.w), W());
#pragma unroll
            for (int i = 0; i < 8; i++) { rows[4 * half + i / 2][i % 2 * 2 + lower] = pairs[i / 4][i % 4]; }
        }
    }
}

// shared_x = layernorm(x), as boxes of `texts` rows and 64 columns with the 128-byte swizzle; zeros for texts past B and columns past K.
// A warp has every eighth text, a lane of it up to `most` vectors. scaled: columns in the order of decode_head_rows().
template <bool scaled, int texts, int most>
__device__ inline void decode_head_norm(unsigned char* shared_x, const DecodeHeadArguments& a) {
    constexpr int size = x128::size, warps = DECODE_HEAD_CONSUMERS / 32;
    constexpr int together =
        texts / warps < 8 / most * 2 ? texts / warps : 8 / most * 2; // texts of a warp on their way: 2 or 4
    int lane = threadIdx.x % 32, num_vec = a.K / size;
    auto vec = [=](int i) { return i * 32 + lane; };
    int4 weight[most], bias[most];
#pragma unroll
    for (int i = 0; i < most; i++) {
        bool there = vec(i) < num_vec;
        weight[i] = there ? reinterpret_cast<const int4*>(a.norm_weight)[vec(i)] : make_int4(0, 0, 0, 0);
        bias[i] = there ? reinterpret_cast<const int4*>(a.norm_bias)[vec(i)] : make_int4(0, 0, 0, 0);
    }
    grid_wait_dependency(); // what was read before this line is not written by earlier kernels of the step
    const int4* rows = reinterpret_cast<const int4*>(a.x);
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < texts; first += warps * together) {
        int4 x[together][most];
#pragma unroll
        for (int t = 0; t < together; t++) {
            const int4* row = rows + (size_t)min(first + t * warps, a.B - 1) * num_vec;
#pragma unroll
            for (int i = 0; i < most; i++) {
                x[t][i] = vec(i) < num_vec ? __ldcg(row + vec(i)) : make_int4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int t = 0; t < together; t++) {
            int b = first + t * warps;
            float sum = 0.0f, squares = 0.0f;
#pragma unroll
            for (int i = 0; i < most; i++) {
                x128 v = vec128_from_bits<floatX>(x[t][i]);
                for (int e = 0; e < size; e++) { sum += (float)v[e]; }
            }
            float mean = lanes_sum<32>(sum) / (float)a.K;
            hold_packed(x[t]);
#pragma unroll
            for (int i = 0; i < most; i++) {
                x128 v = vec128_from_bits<floatX>(x[t][i]);
                float less = vec(i) < num_vec ? mean : 0.0f;
                for (int e = 0; e < size; e++) { squares += ((float)v[e] - less) * ((float)v[e] - less); }
            }
            float rstd = rsqrtf(lanes_sum<32>(squares) / (float)a.K + a.epsilon);
            hold_packed(x[t]), hold_packed(weight), hold_packed(bias);
#pragma unroll
            for (int i = 0; i < most; i++) {
                int box = vec(i) / 8, chunk = vec(i) % 8;
                if (box >= a.num_boxes * (scaled ? 2 : 1)) { break; }
                x128 scale = vec128_from_bits<floatX>(weight[i]), shift = vec128_from_bits<floatX>(bias[i]);
                int4 normed = decode_matmul_normalise(x[t][i], scale, shift, mean, rstd);
                if (b >= a.B || vec(i) >= num_vec) { normed = make_int4(0, 0, 0, 0); }
                int4* to = reinterpret_cast<int4*>(shared_x + (size_t)(box * texts + b) * 128);
                if (!scaled) {
                    to[chunk ^ b % 8] = normed;
                    continue;
                }
                int pairs[4] = {normed.x, normed.y, normed.z, normed.w};
#pragma unroll
                for (int p = 0; p < 4; p++) { // pair p of the lane's 8 columns, at its place in a chunk
                    reinterpret_cast<int*>(to + ((chunk % 2 * 4 + p) ^ b % 8))[chunk / 2] = pairs[p];
                }
            }
        }
    }
}

// logits (B,OC) = layernorm(x) weight^T. Blocks take tiles of 128 rows of the weight in turn. One warp loads them box by box; each of two
// warpgroups multiplies 64 rows by all texts. As the weights are in shared memory, not in registers on their way, a third of them can be
// there before the kernel in front of this one has ended.
template <class W, int texts, int most> __global__ void __launch_bounds__(DECODE_HEAD_CONSUMERS + 32, 1)
    decode_matmul_head_sm90_kernel6(float* logits, const __grid_constant__ CUtensorMap weight,
                                    const __grid_constant__ DecodeHeadArguments a) {
    constexpr bool scaled = sizeof(W) < sizeof(floatX);
    constexpr int x_boxes = scaled ? 2 : 1; // of 64 columns, per box of the weight
    __shared__ uint64_t full[DECODE_HEAD_MAX_STAGES], empty[DECODE_HEAD_MAX_STAGES];
    extern __shared__ __align__(128) unsigned char decode_head_shared[];
    unsigned char* shared_x =
        &shared_aligned_1024<unsigned char>(decode_head_shared);          // (num_boxes * x_boxes, texts, 64)
    unsigned char* ring = shared_x + a.num_boxes * x_boxes * texts * 128; // (num_stages, 128 rows, 128 bytes)
    int num_tiles = ceil_div(a.OC, DECODE_HEAD_ROWS), warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.num_stages; i++) {
            mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], DECODE_HEAD_CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    int stage = 0, parity = 0;
    auto next = [&] {
        if (++stage == a.num_stages) { stage = 0, parity ^= 1; }
    };
    if (warp == DECODE_HEAD_CONSUMERS / 32) {
        if (lane != 0) { return; }
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            for (int k = 0; k < a.num_boxes; k++, next()) {
                mbarrier_wait(&empty[stage], parity ^ 1); // at first all are empty
                mbarrier_arrive_expect(&full[stage], DECODE_HEAD_BOX);
                tma_load_2d_once(ring + stage * DECODE_HEAD_BOX, &weight, k * 64, tile * DECODE_HEAD_ROWS,
                                 &full[stage]);
            }
        }
        return;
    }
    decode_head_norm<scaled, texts, most>(shared_x, a);
    tma_store_fence(); // wgmma reads what these threads have written
    named_barrier_sync(1, DECODE_HEAD_CONSUMERS);
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        float sum[texts / 2] = {};
        int before = 0;
        for (int k = 0; k < a.num_boxes; k++, next()) {
            mbarrier_wait(&full[stage], parity);
            const unsigned char* box = ring + stage * DECODE_HEAD_BOX;
            const unsigned char* x = shared_x + k * x_boxes * texts * 128;
            if constexpr (scaled) {
                uint32_t rows[8][4];
                decode_head_rows<W>(rows, box + warp * 16 * 128);
                __syncwarp();
                if (lane == 0) { mbarrier_arrive(&empty[stage]); }
                wgmma_hold(sum);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    decode_head_multiply(sum, (const uint32_t*)rows[j],
                                         wgmma_descriptor(x + j / 4 * texts * 128) + 2 * (j % 4), k > 0 || j > 0);
                }
                wgmma_commit();
                wgmma_hold(sum);
                wgmma_wait<0>();
#pragma unroll
                for (int j = 0; j < 8; j++) { wgmma_hold(rows[j]); }
            } else {
                uint64_t rows = wgmma_descriptor(box + warp / 4 * 64 * 128), columns = wgmma_descriptor(x);
                wgmma_hold(sum);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    decode_head_multiply(sum, rows + 2 * j, columns + 2 * j, k > 0 || j > 0);
                }
                wgmma_commit();
                wgmma_hold(sum);
                wgmma_wait<1>(); // for the box before
                if (k > 0 && lane == 0) { mbarrier_arrive(&empty[before]); }
            }
            before = stage;
        }
        wgmma_wait<0>();
        wgmma_hold(sum);
        if (!scaled && lane == 0) { mbarrier_arrive(&empty[before]); }
        int first = tile * DECODE_HEAD_ROWS + warp * 16 + lane / 4; // of the lane's two rows
        float scales[2] = {1.0f, 1.0f};
        for (int i = 0; i < 2; i++) {
            if (scaled && first + 8 * i < a.OC) { scales[i] = a.scales[first + 8 * i]; }
        }
#pragma unroll
        for (int i = 0; i < texts / 2; i++) {
            int row = first + i % 4 / 2 * 8, b = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (row < a.OC && b < a.B) { logits[(size_t)b * a.OC + row] = sum[i] * scales[i % 4 / 2]; }
        }
    }
}

// Texts that kernel 6 is compiled for, and stages in what their x leaves of shared memory. 0 stages: it does not run.
struct DecodeHeadPlan {
    int texts, num_boxes, x_boxes, num_stages;
    size_t shared_bytes() const {
        return 1024 + (size_t)num_boxes * x_boxes * texts * 128 + num_stages * DECODE_HEAD_BOX;
    }
};
inline DecodeHeadPlan decode_head_plan(const WeightMatrix& weight, int B, int K) {
    int x_boxes = weight.format == WEIGHTS_FULL ? 1 : 2;
    DecodeHeadPlan plan = {B <= 16 ? 16 : B <= 32 ? 32 : 64, ceil_div(K, 64 * x_boxes), x_boxes, 0};
    int stages = ((int)DECODE_MATMUL_MAX_SHARED - (int)plan.shared_bytes()) / DECODE_HEAD_BOX;
    bool runs = B <= 64 && K <= 7 * 256 && K % (8 * x_boxes) == 0 && has_sm90a(); // a row is aligned to 16 bytes
    plan.num_stages = runs && stages >= DECODE_HEAD_MIN_STAGES ? min(stages, DECODE_HEAD_MAX_STAGES) : 0;
    return plan;
}

template <class W, int most> auto decode_head_kernel(int texts) {
    return texts == 16   ? decode_matmul_head_sm90_kernel6<W, 16, most>
           : texts == 32 ? decode_matmul_head_sm90_kernel6<W, 32, most>
                         : decode_matmul_head_sm90_kernel6<W, 64, most>;
}
inline void decode_head_launch(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                               const WeightMatrix& weight, int B, int K, int OC, float epsilon,
                               const DecodeHeadPlan& plan, const Execution& exec) {
    require(B > 0 && K % x128::size == 0 && OC > 0);
    void (*kernel)(float*, const CUtensorMap, const DecodeHeadArguments) = NULL;
    weight_dispatch(weight, [&](auto type) {
        typedef decltype(type) W;
        kernel = K <= 4 * 256 ? decode_head_kernel<W, 4>(plan.texts) : decode_head_kernel<W, 7>(plan.texts);
    });
    // two weights in 8 bits are as one of floatX for a copy
    CUtensorMap map = tensor_map((const floatX*)weight.values, {K / plan.x_boxes, OC}, {64, DECODE_HEAD_ROWS});
    DecodeHeadArguments a = {x, norm_weight, norm_bias,      weight.scales,   B,
                             K, OC,          plan.num_boxes, plan.num_stages, epsilon};
    launch_early(kernel, dim3(min(num_multiprocessors(), ceil_div(OC, DECODE_HEAD_ROWS))),
                 dim3(DECODE_HEAD_CONSUMERS + 32), plan.shared_bytes(), exec, logits, map, a);
}

// logits (B,Vp) float = layernorm(x) wte^T | x (B,C) | norm_weight, norm_bias (C) | wte (Vp,C). By kernel 6 for 1 to 64 texts, by kernel
// 5 where that does not run: for 2 to DECODE_HEAD_MAX_TEXTS5 texts, with weights in 8 bits for any number from 2 on. Returns false, and
// launches nothing, elsewhere. wte is read while the previous kernel in the stream may still run.
bool decode_matmul_head(float* logits, const floatX* x, const floatX* norm_weight, const floatX* norm_bias,
                        const WeightMatrix& wte, int B, int C, int Vp, float epsilon, const Execution& exec) {
    DecodeHeadPlan ring = decode_head_plan(wte, B, C);
    DecodeMatmulPlan plan = decode_matmul_choose(0, 0, true, true, B, C, Vp);
    bool many = B > DECODE_HEAD_MAX_TEXTS5 && wte.format == WEIGHTS_FULL;
    if (!ring.num_stages && (many || !decode_matmul_runs(plan, B))) { return false; }
    double others = (double)B * C * sizeof(floatX) + (double)B * Vp * sizeof(float);
    Op op(exec, wte.bytes(Vp, C) + others, 2.0 * B * Vp * C, "decode_matmul %d -> %d, head", C, Vp);
    if (ring.num_stages) {
        decode_head_launch(logits, x, norm_weight, norm_bias, wte, B, C, Vp, epsilon, ring, exec);
        return true;
    }
    decode_matmul_launch(logits, {x, norm_weight, norm_bias, wte, NULL, NULL, B, C, Vp, false, epsilon, 0, 0, 0}, plan,
                         true, exec);
    return true;
}

#else // the tensor cores multiply 16-bit floats

bool decode_matmul_runs(bool, int, int, int) { return false; }
bool decode_matmul(floatX*, const floatX*, const floatX*, const floatX*, const WeightMatrix&, const floatX*,
                   const floatX*, bool, int, int, int, float, const Execution&) {
    return false;
}
bool decode_matmul_head(float*, const floatX*, const floatX*, const floatX*, const WeightMatrix&, int, int, int, float,
                        const Execution&) {
    return false;
}

#endif
// ==== end promoted: decode_matmul ====
#endif
