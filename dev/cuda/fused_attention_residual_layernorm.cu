/* fused_attention_residual_layernorm: residual = inp + attention(qkv), normed = layernorm(residual) * weight + bias

   residual, normed (B,T,C) floatX out | mean, rstd (B,T) float out | lse (B,NH,T) float out, or NULL
   qkv (B,T,3,NH,HS), inp (B,T,C), weight, bias (C) floatX in | causal, scale = 1 / sqrt(HS), C = NH * HS
   Scratch: kernels 1 and 2 need att (B,T,C) floatX, the output of attention; the other kernels need none.
   mean and rstd are computed from the rounded residual, so that the layernorm sees exactly the values that are stored.
   Bound: 2*B*NH*T*T*HS FLOPs (the causal mask leaves half of the products) and 6*B*T*C*sizeof(floatX) bytes (qkv is 3,
   inp, residual and normed are 1 each). Counted with the traffic between launches, the factor is 9 for kernel 1, 8 for
   kernel 2 and 7 for kernel 7. At B=32 T=512 C=768 in 16 bits the two bounds are about equal: 39 us of memory, some
   40 us of attention.
   Constraint: HS % 8 == 0, HS <= 256. Kernels 4 to 7: 16 bits, HS = 64, sm_90a. Kernel 4: NH <= 18, kernels 5 and 6:
   NH <= 56, because more heads do not fit shared memory. Kernel 7: C <= 2048.
   Error: against the fp64 reference. residual: one ulp of 1, because P is rounded to floatX before P V (see
   attention_forward), half an ulp if the output of attention is rounded before the sum, and half an ulp for the rounded
   sum. normed: the error of residual times rstd * weight. mean and rstd: a quarter of an ulp, because the errors of a
   row cancel. fp32: 32 ulps instead of one, from the sums over HS and from exp.
   Tuned: blocks per cluster of kernels 5 and 6, consumers and cache hints of kernel 7. Kernels 1 and 2 are other ops; a
   block of kernel 4 fills an SM.
   Source: Dao 2023, FlashAttention-2, arXiv:2307.08691; Shah et al. 2024, FlashAttention-3, arXiv:2407.08608; Ba et al.
   2016, arXiv:1607.06450; Chan et al. 1979, Updating formulae and a pairwise algorithm for computing sample variances.

   Kernels (this list is written by versions.sh):
     1  unfused: attention, residual, layernorm
     2  residual and layernorm in one launch
     3  one block per query, one warp per head, fp32 (slower than 2)
     4  wgmma, one block owns 64 queries over all heads (slower than 2)
     5  a cluster divides the heads; separate warps load and normalise
     6  persistent clusters; eight helper warps add inp, sum and normalise
     7  attention adds inp in its epilogue; layernorm launched early (best)

   nvcc -O3 --use_fast_math fused_attention_residual_layernorm.cu -o fused_attention_residual_layernorm
   (or: make fused_attention_residual_layernorm)
   ./fused_attention_residual_layernorm 7      check kernel 7 against the CPU
   ./fused_attention_residual_layernorm 6      the fastest kernel with one launch, at all its cluster sizes
   ./fused_attention_residual_layernorm        every kernel, side by side
   Kernels from 4 on need -gencode arch=compute_90a,code=sm_90a.                                        */
#include "attention_forward.cuh"
#include "attention_forward_blocks.cuh"
#include "bench.h"
#include "fused_residual_layernorm.cuh"
#include "fused_residual_layernorm_early.cuh"
#include "layernorm_forward.cuh"
#include "residual_forward.cuh"

// ---- kernel 1: unfused: attention, residual and layernorm, one launch each -------------------------------

// att (B,T,C) is scratch
void fused_attention_residual_layernorm_forward1(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 floatX* att, const floatX* qkv, const floatX* inp,
                                                 const floatX* weight, const floatX* bias, int B, int T, int C, int NH,
                                                 cudaStream_t stream) {
    attention_forward(att, lse, qkv, B, T, C, NH, 1.0f / sqrtf((float)(C / NH)), stream);
    residual_forward(residual, inp, att, (size_t)B * T * C, stream);
    layernorm_forward(normed, mean, rstd, residual, weight, bias, B * T, C, NORM_EPSILON, stream);
}

// ---- kernel 2: two launches: attention, then residual and layernorm fused ---------------------------------

// att (B,T,C) is scratch
void fused_attention_residual_layernorm_forward2(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 floatX* att, const floatX* qkv, const floatX* inp,
                                                 const floatX* weight, const floatX* bias, int B, int T, int C, int NH,
                                                 cudaStream_t stream) {
    attention_forward(att, lse, qkv, B, T, C, NH, 1.0f / sqrtf((float)(C / NH)), stream);
    fused_residual_layernorm_forward(residual, normed, mean, rstd, inp, att, weight, bias, B * T, C, NORM_EPSILON,
                                     stream);
}

// ---- kernel 3: one block per query, one warp per head, fp32 arithmetic: the sum stays in shared memory ------

// A lane holds elements lane, lane + 32, ... of its head, HS <= 256.
__global__ void fused_attention_kernel3(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                        const floatX* qkv, const floatX* inp, const floatX* weight, const floatX* bias,
                                        int T, int C, int NH, float scale) {
    __shared__ float shared[32];
    extern __shared__ __align__(128) float fused_attention_row[]; // (C)
    float* x = fused_attention_row;
    int t = T - 1 - blockIdx.x % T, lane = threadIdx.x % 32, HS = C / NH; // rows with the most keys first
    size_t b = blockIdx.x / T, row = b * T + t;
    float sum = 0.0f, squares = 0.0f;
    for (int h = threadIdx.x / 32; h < NH; h += blockDim.x / 32) {
        const floatX *q = qkv + row * 3 * C + h * HS, *key = qkv + b * T * 3 * C + C + h * HS;
        float m = -INFINITY, l = 0.0f, o[8] = {}, qv[8] = {};
        for (int j = 0; j < 8; j++) {
            if (lane + 32 * j < HS) { qv[j] = (float)q[lane + 32 * j] * scale; }
        }
        for (int k = 0; k <= t; k++, key += 3 * C) {
            float score = 0.0f;
            for (int j = 0; j < 8; j++) {
                if (lane + 32 * j < HS) { score += qv[j] * (float)key[lane + 32 * j]; }
            }
            score = warp_sum(score);
            float new_m = fmaxf(m, score), rescale = expf(m - new_m), p = expf(score - new_m);
            m = new_m, l = l * rescale + p;
            for (int j = 0; j < 8; j++) {
                if (lane + 32 * j < HS) { o[j] = o[j] * rescale + p * (float)key[C + lane + 32 * j]; }
            }
        }
        if (lse && lane == 0) { lse[(b * NH + h) * T + t] = m + logf(l); }
        for (int j = 0; j < 8; j++) {
            if (lane + 32 * j < HS) {
                int c = h * HS + lane + 32 * j;
                floatX rounded = (floatX)((float)inp[row * C + c] + o[j] / l);
                residual[row * C + c] = rounded;
                x[c] = (float)rounded;
                sum += x[c];
            }
        }
    }
    float average = block_sum(sum, shared) / C; // block_sum's barriers also make x visible
    for (int c = threadIdx.x; c < C; c += blockDim.x) { squares += (x[c] - average) * (x[c] - average); }
    float r = rsqrtf(block_sum(squares, shared) / C + NORM_EPSILON);
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        normed[row * C + c] = (floatX)((x[c] - average) * r * (float)weight[c] + (float)bias[c]);
    }
    if (threadIdx.x == 0) { mean[row] = average, rstd[row] = r; }
}

void fused_attention_residual_layernorm_forward3(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 const floatX* qkv, const floatX* inp, const floatX* weight,
                                                 const floatX* bias, int B, int T, int C, int NH, cudaStream_t stream,
                                                 int block_size) {
    require(C % NH == 0 && C / NH <= 256 && C <= 6144);
    require((size_t)B * T <= INT_MAX);
    fused_attention_kernel3<<<B * T, block_size, C * sizeof(float), stream>>>(
        residual, normed, mean, rstd, lse, qkv, inp, weight, bias, T, C, NH, 1.0f / sqrtf((float)(C / NH)));
    cudaCheck(cudaGetLastError());
}

#if !defined(ENABLE_FP32)
// ---- shared by kernels 4 to 6, built on the helpers of attention_forward's kernels 17 to 24 --------------
// Each step processes 128 keys. Each head has a box in shared memory: rows of 64 elements in TMA's swizzle. In kernels
// 4 and 5 TMA loads inp into the box, each warp adds the output of attention to its 16 rows in place, and TMA stores
// the sum as residual. The sum also stays in the box until it is normalised.

const int FUSED_ATTENTION_BOX_BYTES = 16 * 1024; // a box of 128 rows
static_assert(sizeof(floatX) * ATTENTION_FORWARD_KEYS == FUSED_ATTENTION_BOX_BYTES, "");

// Running statistics of a thread's two rows, over the columns so far: the mean, and the sum of the squared differences
// from the mean. Unlike a sum of squares, these do not lose precision when the mean is large. Source: Chan et al. 1979.
struct FusedAttentionMoments {
    float mean[2], squares[2];
};

__device__ inline float2 fused_attention_unpack(uint32_t pair) {
#if defined(ENABLE_FP16)
    return unpack_16x2(pair, half());
#else
    // a shift and a mask, without splitting the pair into two 16-bit registers first
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#endif
}

// Ends a head: adds its output o / l to the warp's 16 rows of the box, which hold inp, updates the moments of the rows
// and resets o to 0. heads: number of heads in the moments so far. lse: the T values of this sequence and head, or
// NULL. t: the warp's first token.
__device__ inline void fused_attention_finish(floatX* rows, FusedAttentionMoments& moments, float (&o)[32],
                                              const AttentionForwardRows& x, float* lse, int heads, int t, int T) {
    int lane = threadIdx.x % 32;
    float inverse[2], sum[2] = {0, 0}, squares[2] = {0, 0};
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float l = x.l[half_row];
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
        inverse[half_row] = 1.0f / l;
        int row = t + lane / 4 + 8 * half_row;
        if (lse && lane % 4 == 0 && row < T) { lse[row] = (x.m[half_row] + log2f(l)) * LN2; }
    }
    uint32_t pairs[16]; // all loads come first: a load after a store would wait for the store
#pragma unroll
    for (int i = 0; i < 16; i++) {
        pairs[i] = *reinterpret_cast<const uint32_t*>(rows + attention_forward_at<64>(lane / 4 + 8 * (i % 2), i / 2) +
                                                      lane % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        int half_row = i / 2 % 2, row = lane / 4 + 8 * half_row;
        auto* at = reinterpret_cast<uint32_t*>(rows + attention_forward_at<64>(row, i / 4) + lane % 4 * 2);
        float2 inp = fused_attention_unpack(pairs[i / 2]);
        uint32_t pair =
            pack_16x2(fmaf(o[i], inverse[half_row], inp.x), fmaf(o[i + 1], inverse[half_row], inp.y), floatX());
        *at = pair;
        float2 rounded = fused_attention_unpack(pair);
        o[i] = rounded.x, o[i + 1] = rounded.y;
        sum[half_row] += rounded.x + rounded.y;
    }
    float share = 1.0f / (heads + 1);
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) { sum[half_row] *= 1.0f / 16; }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float centered = o[i] - sum[i / 2 % 2];
        squares[i / 2 % 2] += centered * centered;
        o[i] = 0;
    }
    // merge this lane's 16 new columns into its 16 * heads earlier ones
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float delta = sum[half_row] - moments.mean[half_row];
        moments.mean[half_row] += delta * share;
        moments.squares[half_row] += squares[half_row] + delta * delta * (16.0f * heads * share);
    }
}

// Combines the moments of the quad's four lanes, which cover `count` columns each, for both rows. All four lanes get
// the same result.
__device__ inline void fused_attention_quad_moments(FusedAttentionMoments& x, int count) {
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
#pragma unroll
        for (int offset = 1; offset <= 2; offset *= 2) {
            float mean = __shfl_xor_sync(0xFFFFFFFFu, x.mean[half_row], offset);
            float squares = __shfl_xor_sync(0xFFFFFFFFu, x.squares[half_row], offset);
            float delta = mean - x.mean[half_row];
            x.mean[half_row] = 0.5f * (x.mean[half_row] + mean);
            x.squares[half_row] = x.squares[half_row] + squares + delta * delta * (0.5f * count * offset);
        }
    }
}

// Eight adjacent 16-bit elements of a row, as four pairs.
struct FusedAttentionPairs {
    uint32_t pair[4];
};
__device__ inline FusedAttentionPairs fused_attention_load_pairs(const floatX* p) {
    uint4 x = *reinterpret_cast<const uint4*>(p);
    return {{x.x, x.y, x.z, x.w}};
}
__device__ inline void fused_attention_store_pairs(floatX* p, const FusedAttentionPairs& x) {
    __stwb(reinterpret_cast<uint4*>(p), make_uint4(x.pair[0], x.pair[1], x.pair[2], x.pair[3]));
}

// normed = (x - mean) * rstd * weight + bias, for eight adjacent columns of a row.
__device__ inline void fused_attention_normalise(floatX* normed, const floatX* x, const FusedAttentionPairs& weight,
                                                 const FusedAttentionPairs& bias, float2 mean_rstd) {
    FusedAttentionPairs xv = fused_attention_load_pairs(x), y;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float2 xk = fused_attention_unpack(xv.pair[k]), w = fused_attention_unpack(weight.pair[k]),
               b = fused_attention_unpack(bias.pair[k]);
        y.pair[k] = pack_16x2((xk.x - mean_rstd.x) * mean_rstd.y * w.x + b.x,
                              (xk.y - mean_rstd.x) * mean_rstd.y * w.y + b.y, floatX());
    }
    fused_attention_store_pairs(normed, y);
}

// Normalises a warp's 16 rows in `heads` consecutive boxes of box_rows rows each. x: the warp's first row in the first
// box; normed, weight, bias: pointers to the first column of the first head, in normed of the warp's first row.
// mean_rstd: lane i has mean and rstd of row i % 16. empty: NULL, or one barrier per head, at which the warp arrives
// once it has read the head's box.
__device__ inline void fused_attention_normalise_rows(floatX* normed, const floatX* x, int box_rows, float2 mean_rstd,
                                                      const floatX* weight, const floatX* bias, int heads, int num_rows,
                                                      int C, uint64_t* empty = nullptr) {
    int lane = threadIdx.x % 32, chunk = lane % 8; // eight lanes share a row of a box, 128 bytes
    // opaque to the compiler, so that it recomputes addresses per tile instead of keeping them in registers
    asm volatile("" : "+r"(chunk));
    float2 rows[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = lane / 8 + 4 * i;
        rows[i].x = __shfl_sync(0xFFFFFFFFu, mean_rstd.x, row);
        rows[i].y = __shfl_sync(0xFFFFFFFFu, mean_rstd.y, row);
    }
    normed += (size_t)(lane / 8) * C + chunk * 8, weight += chunk * 8, bias += chunk * 8;
#pragma unroll 1
    for (int h = 0; h < heads; h++) {
        FusedAttentionPairs w = fused_attention_load_pairs(weight), b = fused_attention_load_pairs(bias);
        floatX* out = normed;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = lane / 8 + 4 * i;
            if (row < num_rows) {
                fused_attention_normalise(out, x + attention_forward_at<64>(row, chunk), w, b, rows[i]);
            }
            out += 4 * C;
        }
        normed += 64, weight += 64, bias += 64, x += box_rows * 64;
        if (empty) {
            __syncwarp();
            if (lane == 0) { mbarrier_arrive(empty + h); }
        }
    }
}

// ---- kernel 4: one warpgroup owns 64 queries over all heads: no cluster, but only one warpgroup per SM --------

struct FusedAttentionSMem4 { // 81 KB, plus 8 KB per head
    floatX q[2][ATTENTION_FORWARD_BOX];
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    uint64_t q_full[2], k_full[2], v_full[2];             // q_full: for q, and for inp in the box of the same head
    alignas(1024) floatX boxes[1][ATTENTION_FORWARD_BOX]; // one box per head, NH in all
};

__global__ void __launch_bounds__(128)
    fused_attention_sm90_kernel4(floatX* normed, float* mean, float* rstd, float* lse, const floatX* weight,
                                 const floatX* bias, const __grid_constant__ CUtensorMap qkv_map,
                                 const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap residual_map, int T, int NH, float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<FusedAttentionSMem4>(attention_forward_shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, C = NH * 64, num_tiles = ceil_div(T, 64),
        num_sequences = gridDim.x / num_tiles;
    // tiles with the most keys first
    int b = blockIdx.x % num_sequences, q0 = (num_tiles - 1 - (int)blockIdx.x / num_sequences) * 64;
    int num_steps = ceil_div(min(q0 + 64, T), 128), num_blocks = num_steps * NH, t = q0 + warp * 16;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; stage++) {
            mbarrier_init(&smem.q_full[stage], 1);
            mbarrier_init(&smem.k_full[stage], 1);
            mbarrier_init(&smem.v_full[stage], 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    // i counts key blocks over all heads: block i is in head i / num_steps, whose last keys come first
    auto load = [&](int i) {
        int h = i / num_steps, keys = (num_steps - 1 - i % num_steps) * 128, stage = i % 2;
        if (i % num_steps == 0) {
            mbarrier_arrive_expect(&smem.q_full[h % 2],
                                   FUSED_ATTENTION_BOX_BYTES); // q and inp, two boxes of 64 rows
            tma_load_4d(smem.q[h % 2], &qkv_map, 0, h, q0, b, &smem.q_full[h % 2]);
            tma_load_4d(smem.boxes[h], &inp_map, 0, h, q0, b, &smem.q_full[h % 2]);
        }
        attention_forward_tma(smem.k[stage], &smem.k_full[stage], qkv_map, NH + h, keys, b);
        attention_forward_tma(smem.v[stage], &smem.v_full[stage], qkv_map, 2 * NH + h, keys, b);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < min(num_blocks, 2); i++) { load(i); }
    }
    float s[64], o[32];
    uint32_t p[32];
    FusedAttentionMoments moments = {};
#pragma unroll
    for (int j = 0; j < 32; j++) { o[j] = 0; }
    for (int h = 0, i = 0; h < NH; h++) {
        AttentionForwardRows x = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
        mbarrier_wait(&smem.q_full[h % 2], h / 2 % 2);
        for (int step = 0; step < num_steps; step++, i++) {
            int stage = i % 2, parity = i / 2 % 2;
            mbarrier_wait(&smem.k_full[stage], parity);
            wgmma_fence();
            attention_forward_sm90_scores(s, smem.q[h % 2], smem.k[stage]);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(s);
            bool grew =
                step == 0 ? attention_forward_sm90_lazy_softmax<true, true>(s, x, t - (num_steps - 1) * 128, scale_log2)
                          : attention_forward_sm90_lazy_softmax<false, false>(s, x, 0, scale_log2);
            if (grew) { attention_forward_sm90_rescale(o, x); }
            attention_forward_sm90_pack(p, s);
            mbarrier_wait(&smem.v_full[stage], parity);
            wgmma_hold(o);
            wgmma_hold(p);
            wgmma_fence();
            attention_forward_sm90_values(o, p, smem.v[stage]);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_hold(o);
            __syncthreads(); // all warps have read the stage
            if (threadIdx.x == 0 && i + 2 < num_blocks) { load(i + 2); }
        }
        floatX* rows = smem.boxes[h] + warp * 16 * 64;
        fused_attention_finish(rows, moments, o, x, lse ? lse + ((size_t)b * NH + h) * T : nullptr, h, t, T);
        tma_store_fence();
        __syncwarp();
        if (lane == 0) {
            tma_store_4d(&residual_map, rows, 0, h, t, b);
            tma_store_commit();
        }
    }
    fused_attention_quad_moments(moments, 16 * NH);
    float2 rows[2], mean_rstd;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        int row = t + lane / 4 + 8 * half_row;
        rows[half_row] = make_float2(moments.mean[half_row], rsqrtf(moments.squares[half_row] / C + NORM_EPSILON));
        if (lane % 4 == 0 && row < T) {
            mean[(size_t)b * T + row] = rows[half_row].x, rstd[(size_t)b * T + row] = rows[half_row].y;
        }
    }
    float2 other;
    mean_rstd.x = __shfl_sync(0xFFFFFFFFu, rows[0].x, lane % 8 * 4);
    mean_rstd.y = __shfl_sync(0xFFFFFFFFu, rows[0].y, lane % 8 * 4);
    other.x = __shfl_sync(0xFFFFFFFFu, rows[1].x, lane % 8 * 4);
    other.y = __shfl_sync(0xFFFFFFFFu, rows[1].y, lane % 8 * 4);
    if (lane / 8 % 2 == 1) { mean_rstd = other; } // these lanes provide rows 8 to 15
    fused_attention_normalise_rows(normed + ((size_t)b * T + t) * C, smem.boxes[0] + warp * 16 * 64, 64, mean_rstd,
                                   weight, bias, NH, T - t, C);
    if (lane == 0) { tma_store_wait<0>(); }
}

void fused_attention_residual_layernorm_forward4(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 const floatX* qkv, const floatX* inp, const floatX* weight,
                                                 const floatX* bias, int B, int T, int C, int NH, cudaStream_t stream) {
    require(C == NH * 64 && has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require(NH <= 18);                    // 18 boxes fit shared memory
    require((size_t)B * T * NH <= INT_MAX);
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap inp_map = tensor_map_heads(inp, B, T, NH, 64);
    CUtensorMap residual_map = tensor_map_heads(residual, B, T, NH, 16);
    int bytes = sizeof(FusedAttentionSMem4) + (NH - 1) * ATTENTION_FORWARD_BOX * sizeof(floatX) + 1024;
    cudaCheck(cudaFuncSetAttribute(fused_attention_sm90_kernel4, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    fused_attention_sm90_kernel4<<<B * ceil_div(T, 64), 128, bytes, stream>>>(
        normed, mean, rstd, lse, weight, bias, qkv_map, inp_map, residual_map, T, NH, LOG2E / sqrtf(64.0f));
    cudaCheck(cudaGetLastError());
}

// ---- kernel 5: a cluster owns two tiles of queries over all heads; its blocks divide the heads -------------------
// A tile is 128 queries. A cluster takes tile i from the start and tile i from the end of a sequence, the shorter one
// first, so that all clusters have equal work. The first tile is normalised while the second is computed. In a block,
// warp 0 loads queries, keys and values, warps 1 to 3 load and store the boxes (each of every third head), and two
// warpgroups compute.
//
// Each block sends the moments of its heads' columns to the shared memory of all blocks of the cluster, which combine
// them in the order of the blocks. No block exits before it has received the moments of all other blocks, so that its
// shared memory still exists when they send.

const int FUSED_ATTENTION_MAX_HEADS = 7;  // per block; 7 boxes fit shared memory
const int FUSED_ATTENTION_MAX_BLOCKS = 8; // per cluster; larger clusters are not portable

struct FusedAttentionSMem { // 114 KB, plus 16 KB per head: one block per SM
    floatX q[2][ATTENTION_FORWARD_KEYS];
    floatX k[2][ATTENTION_FORWARD_KEYS], v[2][ATTENTION_FORWARD_KEYS];
    // [tile][sending block][row]: mean and squares of the row over the heads of that block
    float2 moments[2][FUSED_ATTENTION_MAX_BLOCKS][128];
    float2 mean_rstd[128]; // of the first tile's rows
    uint64_t q_full[2], q_empty[2], k_full[2], k_empty[2], v_full[2], v_empty[2], moments_full[2];
    // inp_full: inp is in the box; sum_full: the consumers have added attention; both have one phase per tile
    uint64_t inp_full[FUSED_ATTENTION_MAX_HEADS], sum_full[FUSED_ATTENTION_MAX_HEADS];
    alignas(1024) floatX boxes[1][ATTENTION_FORWARD_KEYS]; // one box per head of the block
};

struct FusedAttentionSizes {
    int T, NH, num_blocks; // num_blocks: per cluster
};

// The work of a block: its sequence b, its heads, and its tiles (one if first_tile and last_tile are the same).
struct FusedAttentionWork {
    int b, first_head, heads, num_tiles, first_tile, last_tile;
};
__device__ inline int fused_attention_tile(const FusedAttentionWork& work, int j) {
    return j == 0 ? work.first_tile : work.last_tile;
}
__device__ inline int fused_attention_first_head(const FusedAttentionSizes& sizes, int rank) {
    return sizes.NH * rank / sizes.num_blocks;
}
__device__ inline FusedAttentionWork fused_attention_work(const FusedAttentionSizes& sizes, int rank) {
    int num_tiles = ceil_div(sizes.T, 128), num_pairs = ceil_div(num_tiles, 2);
    int cluster = blockIdx.x / sizes.num_blocks, pair = cluster % num_pairs, last = num_tiles - 1 - pair;
    int first_head = fused_attention_first_head(sizes, rank);
    return {cluster / num_pairs, first_head, fused_attention_first_head(sizes, rank + 1) - first_head,
            last > pair ? 2 : 1, pair,       last};
}

// Computes mean and rstd of a row from the moments that all blocks of the cluster have sent.
__device__ inline float2 fused_attention_mean_rstd(const float2 (&moments)[FUSED_ATTENTION_MAX_BLOCKS][128], int row,
                                                   const FusedAttentionSizes& sizes) {
    float2 total = moments[0][row];
    int heads = fused_attention_first_head(sizes, 1); // number of heads combined so far
#pragma unroll 1
    for (int rank = 1; rank < sizes.num_blocks; rank++) {
        int more = fused_attention_first_head(sizes, rank + 1) - heads;
        float2 x = moments[rank][row];
        float delta = x.x - total.x, share = (float)more / (heads + more);
        total.x += delta * share;
        total.y += x.y + delta * delta * share * (64.0f * heads);
        heads += more;
    }
    return make_float2(total.x, rsqrtf(total.y / (64 * heads) + NORM_EPSILON));
}

// The barrier for the moments of `rows` rows. In a cluster it counts the bytes that fused_attention_send sends from
// each block. A single block cannot use st.async, which needs a cluster, so there each row makes one arrival instead.
__device__ inline void fused_attention_init_moments(uint64_t* barrier, int num_blocks, int rows) {
    mbarrier_init(barrier, num_blocks > 1 ? 1 : 1 + rows);
}
__device__ inline void fused_attention_expect_moments(uint64_t* barrier, int num_blocks, int rows) {
    mbarrier_arrive_expect(barrier, num_blocks > 1 ? num_blocks * rows * (int)sizeof(float2) : 0);
}
__device__ inline void fused_attention_send(float2* at, float2 moments, uint64_t* barrier, int to, int num_blocks) {
    if (num_blocks > 1) {
        store_cluster_async(at, moments, barrier, to);
    } else {
        *at = moments;
        mbarrier_arrive(barrier);
    }
}

__device__ inline void fused_attention_init(FusedAttentionSMem& smem, int num_blocks) {
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            mbarrier_init(&smem.q_full[j], 1);
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.q_empty[j], 8); // one arrival per consumer warp
            mbarrier_init(&smem.k_empty[j], 8);
            mbarrier_init(&smem.v_empty[j], 8);
            fused_attention_init_moments(&smem.moments_full[j], num_blocks, 128);
        }
        for (int h = 0; h < FUSED_ATTENTION_MAX_HEADS; h++) {
            mbarrier_init(&smem.inp_full[h], 1);
            mbarrier_init(&smem.sum_full[h], 8);
        }
        mbarrier_init_fence();
        for (int j = 0; j < 2; j++) { fused_attention_expect_moments(&smem.moments_full[j], num_blocks, 128); }
    }
    cluster_sync(); // other blocks may send their moments from here on
}

// The producer thread for queries, keys and values. Producer and consumers keep the same counters: n heads (over all
// tiles), i blocks of 128 keys. Loads are issued as k0 k1 v0 k2 v1 ..., over all heads and tiles, which is the order in
// which the consumers release the stages.
__device__ inline void fused_attention_load(FusedAttentionSMem& smem, const CUtensorMap& qkv_map,
                                            const FusedAttentionWork& work, int NH) {
    int n = 0, i = 0, value_head = 0, value_t = 0;
    auto load_values = [&](int j) {
        mbarrier_wait(&smem.v_empty[j % 2], (j / 2 + 1) % 2);
        attention_forward_tma(smem.v[j % 2], &smem.v_full[j % 2], qkv_map, 2 * NH + value_head, value_t, work.b);
    };
    for (int j = 0; j < work.num_tiles; j++) {
        int tile = fused_attention_tile(work, j);
        for (int h = work.first_head; h < work.first_head + work.heads; h++, n++) {
            mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
            attention_forward_tma(smem.q[n % 2], &smem.q_full[n % 2], qkv_map, h, tile * 128, work.b);
            for (int key_tile = tile; key_tile >= 0; key_tile--, i++) {
                mbarrier_wait(&smem.k_empty[i % 2], (i / 2 + 1) % 2);
                attention_forward_tma(smem.k[i % 2], &smem.k_full[i % 2], qkv_map, NH + h, key_tile * 128, work.b);
                if (i > 0) { load_values(i - 1); }
                value_head = h, value_t = key_tile * 128;
            }
        }
    }
    load_values(i - 1);
}

// Warps 1 to 3, each for heads first, first + 3, ... of the block: loads inp into the boxes and stores residual. If a
// second tile follows, it also normalises the first tile, and then loads inp of the second tile into the same boxes.
__device__ inline void fused_attention_serve(FusedAttentionSMem& smem, floatX* normed, float* mean, float* rstd,
                                             const floatX* weight, const floatX* bias, const CUtensorMap& inp_map,
                                             const CUtensorMap& residual_map, const FusedAttentionWork& work,
                                             const FusedAttentionSizes& sizes, int first, int rank) {
    int lane = threadIdx.x % 32, chunk = lane % 8, C = sizes.NH * 64;
    auto load = [&](int h, int tile) {
        if (lane == 0) {
            mbarrier_arrive_expect(&smem.inp_full[h], FUSED_ATTENTION_BOX_BYTES);
            tma_load_4d(smem.boxes[h], &inp_map, 0, work.first_head + h, tile * 128, work.b, &smem.inp_full[h]);
        }
    };
    for (int h = first; h < work.heads; h += 3) { load(h, work.first_tile); }
#pragma unroll 1
    for (int j = 0; j < work.num_tiles; j++) {
        int q0 = fused_attention_tile(work, j) * 128, num_rows = min(128, sizes.T - q0);
        size_t start = (size_t)work.b * sizes.T + q0;
#pragma unroll 1
        for (int h = first; h < work.heads; h += 3) {
            mbarrier_wait(&smem.sum_full[h], j);
            if (lane == 0) {
                tma_store_4d(&residual_map, smem.boxes[h], 0, work.first_head + h, q0, work.b);
                tma_store_commit();
            }
        }
        if (j == work.num_tiles - 1) { break; } // the consumer warps normalise the last tile
        mbarrier_wait_cluster(&smem.moments_full[j], 0);
        for (int row = threadIdx.x - 32; row < 128; row += 96) {
            float2 x = fused_attention_mean_rstd(smem.moments[j], row, sizes);
            smem.mean_rstd[row] = x;
            if (rank == 0 && row < num_rows) { mean[start + row] = x.x, rstd[start + row] = x.y; }
        }
        named_barrier_sync(3, 96);
        if (lane == 0) { tma_store_wait<0>(); } // TMA has read the boxes, so they may be overwritten
#pragma unroll 1
        for (int h = first; h < work.heads; h += 3) {
            int c = (work.first_head + h) * 64 + chunk * 8;
            FusedAttentionPairs w = fused_attention_load_pairs(weight + c), b = fused_attention_load_pairs(bias + c);
#pragma unroll 4
            for (int row = lane / 8; row < num_rows; row += 4) {
                fused_attention_normalise(normed + (start + row) * C + c,
                                          smem.boxes[h] + attention_forward_at<64>(row, chunk), w, b,
                                          smem.mean_rstd[row]);
            }
            __syncwarp();
            load(h, work.last_tile);
        }
    }
    if (lane == 0) { tma_store_wait<0>(); }
}

// Step i: the scores of 128 more keys, and P V of step i - 1, which overlaps with the softmax of the new scores. The
// two warpgroups ping-pong by named barriers. `more` is true if this head has a next step.
__device__ inline void fused_attention_step(float (&s)[64], uint32_t (&p)[32], float (&o)[32], AttentionForwardRows& x,
                                            FusedAttentionSMem& smem, const floatX* q, int warpgroup, int i, bool more,
                                            float scale_log2) {
    int k = i % 2, v = (i - 1) % 2;
    named_barrier_sync(warpgroup, 256);
    wgmma_fence();
    attention_forward_sm90_scores(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / 2 % 2);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    named_barrier_arrive(3 - warpgroup, 256);
    wgmma_wait<1>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[k]); }
    bool grew = attention_forward_sm90_lazy_softmax<false, false>(s, x, 0, scale_log2);
    auto await = [&] { mbarrier_wait(&smem.k_full[(i + 1) % 2], (i + 1) / 2 % 2); };
    attention_forward_end_step(s, p, o, x, grew, more, await, &smem.v_empty[v]);
}

// The first step of a head, step i of the ring: p = P of the 128 keys on the diagonal. Nothing overlaps with it.
__device__ inline void fused_attention_first_step(float (&s)[64], uint32_t (&p)[32], AttentionForwardRows& x,
                                                  FusedAttentionSMem& smem, const floatX* q, int i, bool more,
                                                  int diagonal, float scale_log2) {
    mbarrier_wait(&smem.k_full[i % 2], i / 2 % 2);
    wgmma_fence();
    attention_forward_sm90_scores(s, q, smem.k[i % 2]);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.k_empty[i % 2]); }
    attention_forward_sm90_lazy_softmax<true, true>(s, x, diagonal, scale_log2);
    attention_forward_sm90_pack(p, s);
    if (more) { mbarrier_wait(&smem.k_full[(i + 1) % 2], (i + 1) / 2 % 2); }
}

// The end of a head: P V of its last step, step i of the ring. Nothing overlaps with it.
__device__ inline void fused_attention_last_values(float (&o)[32], uint32_t (&p)[32], FusedAttentionSMem& smem, int i) {
    mbarrier_wait(&smem.v_full[i % 2], i / 2 % 2);
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[i % 2]);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(o);
    if (threadIdx.x % 32 == 0) { mbarrier_arrive(&smem.v_empty[i % 2]); }
}

// The work of the consumer warps, for all tiles of the block. It ends when the moments of the last tile are sent.
__device__ inline void fused_attention_compute(FusedAttentionSMem& smem, float* lse, const FusedAttentionWork& work,
                                               const FusedAttentionSizes& sizes, int rank, int warpgroup, int warp,
                                               float scale_log2) {
    const AttentionForwardRows fresh = {{-1e30f, -1e30f}, {0, 0}, {1, 1}};
    int lane = threadIdx.x % 32, warp_row = warp * 16, n = 0, i = 0;
    const floatX* q = smem.q[0] + (warpgroup - 1) * ATTENTION_FORWARD_BOX;
    float s[64], o[32];
    uint32_t p[32];
#pragma unroll
    for (int j = 0; j < 32; j++) { o[j] = 0; }
    if (warpgroup == 2) { named_barrier_arrive(1, 256); } // lets warpgroup 1 begin
#pragma unroll 1
    for (int j = 0; j < work.num_tiles; j++) {
        FusedAttentionMoments moments = {};
        int tile = fused_attention_tile(work, j), t = tile * 128 + warp_row;
#pragma unroll 1
        for (int h = 0; h < work.heads; h++, n++) {
            AttentionForwardRows x = fresh;
            mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
            fused_attention_first_step(s, p, x, smem, q + n % 2 * ATTENTION_FORWARD_KEYS, i, tile > 0, warp_row,
                                       scale_log2);
            i++;
#pragma unroll 1
            for (int key_tile = tile - 1; key_tile >= 0; key_tile--, i++) {
                fused_attention_step(s, p, o, x, smem, q + n % 2 * ATTENTION_FORWARD_KEYS, warpgroup, i, key_tile > 0,
                                     scale_log2);
            }
            if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
            fused_attention_last_values(o, p, smem, i - 1);
            mbarrier_wait(&smem.inp_full[h], j);
            size_t head = (size_t)work.b * sizes.NH + work.first_head + h;
            fused_attention_finish(smem.boxes[h] + warp_row * 64, moments, o, x, lse ? lse + head * sizes.T : nullptr,
                                   h, t, sizes.T);
            tma_store_fence();
            __syncwarp();
            if (lane == 0) { mbarrier_arrive(&smem.sum_full[h]); }
        }
        fused_attention_quad_moments(moments, 16 * work.heads);
        if (lane % 4 == 0) {
#pragma unroll
            for (int half_row = 0; half_row < 2; half_row++) {
                float2* at = &smem.moments[j][rank][warp_row + lane / 4 + 8 * half_row];
                float2 row = make_float2(moments.mean[half_row], moments.squares[half_row]);
#pragma unroll 1
                for (int to = 0; to < sizes.num_blocks; to++) {
                    fused_attention_send(at, row, &smem.moments_full[j], to, sizes.num_blocks);
                }
            }
        }
    }
    if (warpgroup == 1) { named_barrier_sync(1, 256); } // consumes the last arrival at the barrier
}

// A consumer warp owns the same 16 rows of every tile.
__global__ void __launch_bounds__(384, 1)
    fused_attention_sm90_kernel5(floatX* normed, float* mean, float* rstd, float* lse, const floatX* weight,
                                 const floatX* bias, const __grid_constant__ CUtensorMap qkv_map,
                                 const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap residual_map, FusedAttentionSizes sizes,
                                 float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<FusedAttentionSMem>(attention_forward_shared);
    fused_attention_init(smem, sizes.num_blocks);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0); // the shuffle makes it warp-uniform to the compiler
    int warpgroup = warp / 4, lane = threadIdx.x % 32, rank = cluster_rank(), C = sizes.NH * 64;
    FusedAttentionWork work = fused_attention_work(sizes, rank);
    if (warpgroup == 0) {
        warpgroup_fewer_registers<72>();
        if (warp == 0) {
            if (lane == 0) { fused_attention_load(smem, qkv_map, work, sizes.NH); }
        } else {
            fused_attention_serve(smem, normed, mean, rstd, weight, bias, inp_map, residual_map, work, sizes, warp - 1,
                                  rank);
        }
    } else {
        warpgroup_more_registers<216>();
        int warp_row = (warp - 4) * 16, last = work.num_tiles - 1, t = work.last_tile * 128 + warp_row;
        fused_attention_compute(smem, lse, work, sizes, rank, warpgroup, warp - 4, scale_log2);
        mbarrier_wait_cluster(&smem.moments_full[last], 0);
        float2 mean_rstd = fused_attention_mean_rstd(smem.moments[last], warp_row + lane % 16, sizes);
        size_t row = (size_t)work.b * sizes.T + t;
        if (rank == 0 && lane < 16 && t + lane < sizes.T) {
            mean[row + lane] = mean_rstd.x, rstd[row + lane] = mean_rstd.y;
        }
        int c = work.first_head * 64;
        fused_attention_normalise_rows(normed + row * C + c, smem.boxes[0] + warp_row * 64, 128, mean_rstd, weight + c,
                                       bias + c, work.heads, sizes.T - t, C);
    }
}

// Estimates how many clusters fit on the device together. The GPU has groups of up to 18 SMs (GPCs), and a cluster must fit
// in one group. The estimate assumes groups of 16, and for clusters of more than two blocks 3/4 of the clusters that would
// fit these: on an H200 clusters of four blocks took 1.75 times as long as clusters of two.
inline int fused_attention_clusters_at_once(int num_blocks) {
    return max(num_multiprocessors() / 16 * (16 / num_blocks) * (num_blocks > 2 ? 3 : 4) / 4, 1);
}

void fused_attention_residual_layernorm_forward5(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 const floatX* qkv, const floatX* inp, const floatX* weight,
                                                 const floatX* bias, int B, int T, int C, int NH, cudaStream_t stream,
                                                 int cluster_size) {
    int heads = ceil_div(NH, cluster_size);
    require(C == NH * 64 && has_sm90a()); // nvcc -gencode arch=compute_90a,code=sm_90a
    require((size_t)B * T * NH <= INT_MAX);
    require(cluster_size <= min(FUSED_ATTENTION_MAX_BLOCKS, NH) && heads <= FUSED_ATTENTION_MAX_HEADS);
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    CUtensorMap inp_map = tensor_map_heads(inp, B, T, NH, 128);
    CUtensorMap residual_map = tensor_map_heads(residual, B, T, NH, 128);
    auto kernel = fused_attention_sm90_kernel5;
    int bytes = sizeof(FusedAttentionSMem) + (heads - 1) * FUSED_ATTENTION_BOX_BYTES + 1024;
    static_assert(sizeof(FusedAttentionSMem) + (FUSED_ATTENTION_MAX_HEADS - 1) * FUSED_ATTENTION_BOX_BYTES + 1024 <=
                      227 << 10,
                  "all that compute capability 9.0 has");
    FusedAttentionSizes sizes = {T, NH, cluster_size};
    LaunchShape shape(B * ceil_div(ceil_div(T, 128), 2) * cluster_size, 384, bytes, cluster_size);
    launch_kernel(kernel, shape, stream, normed, mean, rstd, lse, weight, bias, qkv_map, inp_map, residual_map, sizes,
                  LOG2E / sqrtf(64.0f));
}

// ---- kernel 6: the consumer warps only compute attention; eight helper warps add inp, take the moments, normalise --
// Each helper warp shares its 16 rows with one consumer warp. The consumer writes o / l to the head's box and goes on
// with the next head. The helper adds inp from global memory, stores residual, and keeps the moments of the rows.
//
// Clusters are persistent and take pairs of tiles (as in kernel 5) one after the other, so that the end of every tile
// but the last is overlapped with the next tile. As in attention_forward's kernel 23, consecutive heads overlap, and
// the ring has four stages if the boxes leave room. After the diagonal the running maximum is not updated: P is divided
// by its own sum in the end, and may be as large as its type allows.

const int FUSED_ATTENTION_RING_HEADS = 3; // four stages fit up to this number of heads per block

template <int stages> struct FusedAttentionSMem6 { // 114 KB with two stages, 178 KB with four, plus 16 KB per head
    floatX q[2][ATTENTION_FORWARD_KEYS];
    floatX k[stages][ATTENTION_FORWARD_KEYS], v[stages][ATTENTION_FORWARD_KEYS];
    float2 moments[2][FUSED_ATTENTION_MAX_BLOCKS][128]; // as in kernel 5, for even and for odd tiles
    uint64_t q_full[2], q_empty[2], k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
    // One barrier per consumer warp and its helper warp, which share 16 rows. moments_full: the moments of all blocks
    // have arrived. box_full: the consumer has written o / l to the box; box_empty: the helper has read the box (both
    // have one phase per tile). sum_full: in the last tile, the helper has written the sums to the boxes.
    uint64_t moments_full[2][8];
    uint64_t box_full[8][FUSED_ATTENTION_MAX_HEADS], box_empty[8][FUSED_ATTENTION_MAX_HEADS];
    uint64_t sum_full[8];
    alignas(1024) floatX boxes[1][ATTENTION_FORWARD_KEYS]; // one per head of the block
};

// The tile scheduler of a cluster. There are num_pairs pairs of tiles in all sequences together; of each pair the
// shorter tile comes first. fused_attention_next advances to the next tile and returns false at the end.
struct FusedAttentionPlace {
    int pair, tile, b; // b: sequence; tile is -1 before the first tile
};
__device__ inline bool fused_attention_next(FusedAttentionPlace& x, int T, int num_blocks, int num_pairs) {
    int num_tiles = ceil_div(T, 128), sequence_pairs = ceil_div(num_tiles, 2);
    int longer = num_tiles - 1 - x.pair % sequence_pairs;
    if (x.tile >= 0 && x.tile < longer) {
        x.tile = longer;
        return true;
    }
    x.pair = x.tile < 0 ? blockIdx.x / num_blocks : x.pair + gridDim.x / num_blocks;
    x.tile = x.pair % sequence_pairs, x.b = x.pair / sequence_pairs;
    return x.pair < num_pairs;
}

template <int stages> __device__ inline void fused_attention_init6(FusedAttentionSMem6<stages>& smem, int num_blocks) {
    if (threadIdx.x == 0) {
        for (int j = 0; j < stages; j++) {
            if (j < 2) {
                mbarrier_init(&smem.q_full[j], 1);
                mbarrier_init(&smem.q_empty[j], 8); // one arrival per consumer warp
            }
            mbarrier_init(&smem.k_full[j], 1);
            mbarrier_init(&smem.v_full[j], 1);
            mbarrier_init(&smem.k_empty[j], 8);
            mbarrier_init(&smem.v_empty[j], 8);
        }
        for (int warp = 0; warp < 8; warp++) {
            fused_attention_init_moments(&smem.moments_full[0][warp], num_blocks, 16);
            fused_attention_init_moments(&smem.moments_full[1][warp], num_blocks, 16);
            mbarrier_init(&smem.sum_full[warp], 32);
            for (int h = 0; h < FUSED_ATTENTION_MAX_HEADS; h++) {
                mbarrier_init(&smem.box_full[warp][h], 1);
                mbarrier_init(&smem.box_empty[warp][h], 1);
            }
        }
        mbarrier_init_fence();
        for (int warp = 0; warp < 8; warp++) {
            fused_attention_expect_moments(&smem.moments_full[0][warp], num_blocks, 16);
            fused_attention_expect_moments(&smem.moments_full[1][warp], num_blocks, 16);
        }
    }
    cluster_sync(); // other blocks may send their moments from here on
}

// The producer thread, as fused_attention_load.
template <int stages> __device__ inline void fused_attention_load6(FusedAttentionSMem6<stages>& smem,
                                                                   const CUtensorMap& qkv_map,
                                                                   const FusedAttentionSizes& sizes, int first_head,
                                                                   int heads, int num_pairs) {
    unsigned n = 0, i = 0;
    int value_vector = 0, value_t = 0, value_b = 0;
    auto load_values = [&](unsigned j) {
        unsigned v = j % stages;
        mbarrier_wait(&smem.v_empty[v], (j / stages + 1) % 2);
        attention_forward_tma(smem.v[v], &smem.v_full[v], qkv_map, value_vector, value_t, value_b);
    };
    FusedAttentionPlace place = {0, -1, 0};
#pragma unroll 1
    while (fused_attention_next(place, sizes.T, sizes.num_blocks, num_pairs)) {
#pragma unroll 1
        for (int h = first_head; h < first_head + heads; h++, n++) {
            mbarrier_wait(&smem.q_empty[n % 2], (n / 2 + 1) % 2);
            attention_forward_tma(smem.q[n % 2], &smem.q_full[n % 2], qkv_map, h, place.tile * 128, place.b);
#pragma unroll 1
            for (int key_tile = place.tile; key_tile >= 0; key_tile--, i++) {
                unsigned k = i % stages;
                mbarrier_wait(&smem.k_empty[k], (i / stages + 1) % 2);
                attention_forward_tma(smem.k[k], &smem.k_full[k], qkv_map, sizes.NH + h, key_tile * 128, place.b);
                if (i > 0) { load_values(i - 1); }
                value_vector = 2 * sizes.NH + h, value_t = key_tile * 128, value_b = place.b;
            }
        }
    }
    if (i > 0) { load_values(i - 1); }
}

// x += y, each sum rounded once
__device__ inline void fused_attention_add(FusedAttentionPairs& x, const FusedAttentionPairs& y) {
#if defined(ENABLE_FP16)
    typedef half2 Pair;
#else
    typedef __nv_bfloat162 Pair;
#endif
#pragma unroll
    for (int k = 0; k < 4; k++) {
        Pair a, b;
        memcpy(&a, &x.pair[k], sizeof(a));
        memcpy(&b, &y.pair[k], sizeof(b));
        a = __hadd2(a, b);
        memcpy(&x.pair[k], &a, sizeof(a));
    }
}

// Merges eight more columns of a row into mean and squares, which cover 8 * heads columns so far. share: the weight of
// the new columns, 1 / (heads + 1).
__device__ inline void fused_attention_join(float& mean, float& squares, const FusedAttentionPairs& x, int heads,
                                            float share) {
    float2 sum = {0, 0}, more = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float2 xk = fused_attention_unpack(x.pair[k]);
        sum.x += xk.x, sum.y += xk.y;
    }
    float average = (sum.x + sum.y) * (1.0f / 8);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float2 xk = fused_attention_unpack(x.pair[k]);
        more.x += (xk.x - average) * (xk.x - average), more.y += (xk.y - average) * (xk.y - average);
    }
    float delta = average - mean;
    mean += delta * share;
    squares += more.x + more.y + delta * delta * (8.0f * heads * share);
}

// The work of helper warp `warp` (0 to 7), for all tiles of the block.
template <int stages>
__device__ inline void fused_attention_help(FusedAttentionSMem6<stages>& smem, floatX* residual, floatX* normed,
                                            float* mean, float* rstd, const floatX* inp, const floatX* weight,
                                            const floatX* bias, const FusedAttentionSizes& sizes, int first_head,
                                            int heads, int num_pairs, int warp, int rank) {
    // a lane owns chunk `chunk` of rows first_row, first_row + 4, ...
    int lane = threadIdx.x % 32, chunk = lane % 8, first_row = lane / 8, C = sizes.NH * 64;
    int offset = first_row * C + chunk * 8; // relative to the warp's first row and the head's first column
    floatX* rows = smem.boxes[0] + warp * 16 * 64;
    weight += first_head * 64, bias += first_head * 64;
    FusedAttentionPlace place = {0, -1, 0}, next = place;
    bool more = fused_attention_next(next, sizes.T, sizes.num_blocks, num_pairs);
#pragma unroll 1
    for (unsigned j = 0; more; j++) {
        place = next;
        more = fused_attention_next(next, sizes.T, sizes.num_blocks, num_pairs);
        int t = place.tile * 128 + warp * 16, num_rows = sizes.T - t;
        size_t start = ((size_t)place.b * sizes.T + t) * C + first_head * 64;
        float row_mean[4] = {}, squares[4] = {};
#pragma unroll 1
        for (int h = 0; h < heads; h++) {
            const floatX* inp_box = inp + start + h * 64;
            floatX* residual_box = residual + start + h * 64;
            FusedAttentionPairs x[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) { // these loads are in flight while the head is computed
                if (first_row + 4 * i < num_rows) { x[i] = fused_attention_load_pairs(inp_box + offset + 4 * i * C); }
            }
            float share = 1.0f / (h + 1);
            mbarrier_wait(&smem.box_full[warp][h], j % 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = first_row + 4 * i;
                floatX* shared = rows + h * ATTENTION_FORWARD_KEYS + attention_forward_at<64>(row, chunk);
                fused_attention_add(x[i], fused_attention_load_pairs(shared));
                *reinterpret_cast<uint4*>(shared) = make_uint4(x[i].pair[0], x[i].pair[1], x[i].pair[2], x[i].pair[3]);
                if (row < num_rows) { fused_attention_store_pairs(residual_box + offset + 4 * i * C, x[i]); }
                fused_attention_join(row_mean[i], squares[i], x[i], h, share);
            }
        }
        if (!more) { mbarrier_arrive(&smem.sum_full[warp]); } // last tile: the consumer warp normalises half of it
#pragma unroll
        for (int i = 0; i < 4; i++) { // combine the moments of a row's eight lanes, each over 8 * heads columns
#pragma unroll
            for (int offset = 1; offset <= 4; offset *= 2) {
                float other_mean = __shfl_xor_sync(0xFFFFFFFFu, row_mean[i], offset);
                float other_squares = __shfl_xor_sync(0xFFFFFFFFu, squares[i], offset);
                float delta = other_mean - row_mean[i];
                row_mean[i] = 0.5f * (row_mean[i] + other_mean);
                squares[i] = squares[i] + other_squares + delta * delta * (4.0f * heads * offset);
            }
            if (chunk < sizes.num_blocks) { // one lane per receiving block
                fused_attention_send(&smem.moments[j % 2][rank][warp * 16 + first_row + 4 * i],
                                     make_float2(row_mean[i], squares[i]), &smem.moments_full[j % 2][warp], chunk,
                                     sizes.num_blocks);
            }
        }
        mbarrier_wait_cluster(&smem.moments_full[j % 2][warp], j / 2 % 2);
        // The next phase of this barrier is for tile j + 2. It may be armed now, because no block sends moments of tile
        // j + 2 before it has received the moments of tile j + 1 from all blocks, including this block.
        if (lane == 0) { fused_attention_expect_moments(&smem.moments_full[j % 2][warp], sizes.num_blocks, 16); }
        float2 mean_rstd = fused_attention_mean_rstd(smem.moments[j % 2], warp * 16 + lane % 16, sizes);
        if (rank == 0 && lane < 16 && lane < num_rows) {
            size_t row = (size_t)place.b * sizes.T + t + lane;
            mean[row] = mean_rstd.x, rstd[row] = mean_rstd.y;
        }
        fused_attention_normalise_rows(normed + start, rows, 128, mean_rstd, weight, bias,
                                       more ? heads : heads - heads / 2, num_rows, C,
                                       more ? smem.box_empty[warp] : nullptr);
    }
}

// A consumer warp's 16 rows of the previous head, whose last P V has not been issued yet, or whose output is not stored
// yet.
struct FusedAttentionPending {
    int h, tile, b; // h: index among the block's heads; -1: none
    unsigned i, j;  // i: step of its last values; j: number of its tile
};

// Computes 1 / l of a thread's two rows, and stores their lse.
__device__ inline void fused_attention_inverse(float (&inverse)[2], const AttentionForwardRows& x, float* lse,
                                               const FusedAttentionPending& head, const FusedAttentionSizes& sizes,
                                               int first_head, int warp) {
    int lane = threadIdx.x % 32;
    bool stores = lse && head.h >= 0 && lane % 4 == 0;
    size_t start = ((size_t)head.b * sizes.NH + first_head + head.h) * sizes.T;
#pragma unroll
    for (int half_row = 0; half_row < 2; half_row++) {
        float l = x.l[half_row];
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 1);
        l += __shfl_xor_sync(0xFFFFFFFFu, l, 2);
        inverse[half_row] = 1.0f / l;
        int row = head.tile * 128 + warp * 16 + lane / 4 + 8 * half_row;
        if (stores && row < sizes.T) { lse[start + row] = (x.m[half_row] + log2f(l)) * LN2; }
    }
}

// Writes o * inverse to the head's box when the box is empty, and signals box_full.
template <int stages> __device__ inline void fused_attention_store6(FusedAttentionSMem6<stages>& smem,
                                                                    const float (&o)[32], const float (&inverse)[2],
                                                                    const FusedAttentionPending& head, int warp) {
    int lane = threadIdx.x % 32;
    mbarrier_wait(&smem.box_empty[warp][head.h], (head.j + 1) % 2);
    attention_forward_sm90_to_shared(smem.boxes[head.h] + warp * 16 * 64, o, inverse);
    __syncwarp();
    if (lane == 0) { mbarrier_arrive(&smem.box_full[warp][head.h]); }
}

// Recomputes s = q k^T for one warp's 16 queries and 128 keys. It uses mma.sync, because wgmma needs the whole
// warpgroup.
__device__ inline void fused_attention_warp_scores(float (&s)[64], const floatX* q, const floatX* k) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    uint32_t q_address = shared_address(q + attention_forward_at<64>(row, lane / 16));
    uint32_t k_address = shared_address(k + attention_forward_at<64>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 64; i++) { s[i] = 0; }
#pragma unroll 1
    for (int d = 0; d < 4; d++) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, attention_forward_column<64>(q_address, d));
#pragma unroll
        for (int n = 0; n < 8; n++) { // 16 keys are 2048 bytes
            ldmatrix_x4(b, attention_forward_column<64>(k_address, d) + 2048 * n);
            mma_16x8x16(&s[8 * n], a, b[0], b[1], floatX());
            mma_16x8x16(&s[8 * n + 4], a, b[2], b[3], floatX());
        }
    }
}

// A thread does not need the row maximum of a step in which its sum of P is below this limit, because each P then fits
// floatX, and the sum over many steps fits fp32.
#if defined(ENABLE_FP16)
const float FUSED_ATTENTION_LIMIT = 32768.0f;
#else
const float FUSED_ATTENTION_LIMIT = 1e18f;
#endif

// Like fused_attention_step, but without ping-pong and without the running maximum: P is divided by its own sum in the
// end, and may be as large as its type allows. If a sum reaches the limit, the warp computes its scores again and
// updates the running maximum.
template <int stages> __device__ inline void fused_attention_step6(float (&s)[64], uint32_t (&p)[32], float (&o)[32],
                                                                   AttentionForwardRows& x,
                                                                   FusedAttentionSMem6<stages>& smem, const floatX* q,
                                                                   unsigned i, bool more, float scale_log2) {
    unsigned k = i % stages, v = (i - 1) % stages;
    wgmma_fence();
    attention_forward_sm90_scores<true>(s, q, smem.k[k]);
    wgmma_commit();
    mbarrier_wait(&smem.v_full[v], (i - 1) / stages % 2);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(s);
    float sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 64; j++) {
        s[j] = exp2_approx(fmaf(s[j], scale_log2, -x.m[j / 2 % 2]));
        sum[j / 2 % 2] += s[j];
    }
    // as in attention_forward_end_step: this branch keeps the exponentials in front of wgmma_wait
    if (more && !(sum[0] + sum[1] < 0)) { mbarrier_wait(&smem.k_full[(i + 1) % stages], (i + 1) / stages % 2); }
    wgmma_hold(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    wgmma_hold(o);
    wgmma_hold(p);
    bool grew = false;
    if (__all_sync(0xFFFFFFFFu, sum[0] < FUSED_ATTENTION_LIMIT && sum[1] < FUSED_ATTENTION_LIMIT)) { // false if NaN
        x.l[0] += sum[0], x.l[1] += sum[1];
    } else {
        fused_attention_warp_scores(s, q, smem.k[k]);
        grew = attention_forward_sm90_lazy_softmax<false, false>(s, x, 0, scale_log2);
    }
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(&smem.k_empty[k]);
        mbarrier_arrive(&smem.v_empty[v]);
    }
    if (grew) { attention_forward_sm90_rescale(o, x); }
    attention_forward_sm90_pack(p, s);
}

// The work of consumer warp `warp` (0 to 7), for all tiles of the block. Returns the last head that it computed.
template <int stages>
__device__ inline FusedAttentionPending fused_attention_compute6(FusedAttentionSMem6<stages>& smem, float* lse,
                                                                 const FusedAttentionSizes& sizes, int first_head,
                                                                 int heads, int num_pairs, int warp, float scale_log2) {
    int lane = threadIdx.x % 32;
    AttentionForwardRows x = {{0, 0}, {0, 0}, {0, 0}};
    FusedAttentionPending head = {-1, 0, 0, 0, 0};
    FusedAttentionPlace place = {0, -1, 0};
    float s[64], o[32];
    uint32_t p[32];
#pragma unroll
    for (int j = 0; j < 32; j++) { o[j] = 0, p[j] = 0; }
    unsigned i = 0, n = 0, j = 0; // i: blocks of 128 keys; n: heads, over all tiles; j: tiles
#pragma unroll 1
    for (; fused_attention_next(place, sizes.T, sizes.num_blocks, num_pairs); j++) {
#pragma unroll 1
        for (int h = 0; h < heads; h++, n++) {
            // the diagonal, overlapped with the last P V of the previous head
            const floatX* q = smem.q[n % 2] + warp / 4 * ATTENTION_FORWARD_BOX;
            unsigned k = i % stages, v = head.i % stages;
            mbarrier_wait(&smem.q_full[n % 2], n / 2 % 2);
            mbarrier_wait(&smem.k_full[k], i / stages % 2);
            if (head.h >= 0) { mbarrier_wait(&smem.v_full[v], head.i / stages % 2); }
            wgmma_fence();
            attention_forward_sm90_scores(s, q, smem.k[k]);
            wgmma_commit();
            wgmma_fence();
            // a branch around this product would cost registers, so before the first head it multiplies P = 0 by the
            // queries, and its result is discarded
            attention_forward_sm90_values(o, p, head.h >= 0 ? smem.v[v] : smem.q[n % 2]);
            wgmma_commit();
            float inverse[2];
            fused_attention_inverse(inverse, x, lse, head, sizes, first_head, warp);
            wgmma_hold(inverse); // makes the compiler compute inverse here instead of later, when registers are scarce
            wgmma_wait<1>();
            wgmma_hold(s);
            if (lane == 0) { mbarrier_arrive(&smem.k_empty[k]); }
            attention_forward_sm90_diagonal(s, x, warp, scale_log2);
            if (place.tile > 0 && !(x.l[0] + x.l[1] < 0)) {
                mbarrier_wait(&smem.k_full[(i + 1) % stages], (i + 1) / stages % 2);
            }
            wgmma_hold(s);
            wgmma_wait<0>();
            wgmma_hold(s);
            wgmma_hold(o);
            wgmma_hold(p);
            attention_forward_sm90_pack(p, s);
            if (head.h >= 0) {
                if (lane == 0) { mbarrier_arrive(&smem.v_empty[v]); }
                fused_attention_store6(smem, o, inverse, head, warp);
            }
#pragma unroll
            for (int c = 0; c < 32; c++) { o[c] = 0; }
            i++;
#pragma unroll 1
            for (int step = 1; step <= place.tile; step++, i++) {
                fused_attention_step6(s, p, o, x, smem, q, i, step < place.tile, scale_log2);
            }
            if (lane == 0) { mbarrier_arrive(&smem.q_empty[n % 2]); }
            head = {h, place.tile, place.b, i - 1, j};
        }
    }
    unsigned v = head.i % stages;
    mbarrier_wait(&smem.v_full[v], head.i / stages % 2);
    wgmma_hold(o);
    wgmma_hold(p);
    wgmma_fence();
    attention_forward_sm90_values(o, p, smem.v[v]);
    wgmma_commit();
    float inverse[2];
    fused_attention_inverse(inverse, x, lse, head, sizes, first_head, warp);
    wgmma_wait<0>();
    wgmma_hold(o);
    fused_attention_store6(smem, o, inverse, head, warp);
    return head;
}

// Five warpgroups: two of consumers, two of helpers, and one in which a single thread is the producer.
template <int stages> __global__ void __launch_bounds__(640, 1)
    fused_attention_sm90_kernel6(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                 const floatX* inp, const floatX* weight, const floatX* bias,
                                 const __grid_constant__ CUtensorMap qkv_map, FusedAttentionSizes sizes, int num_pairs,
                                 float scale_log2) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<FusedAttentionSMem6<stages>>(attention_forward_shared);
    fused_attention_init6(smem, sizes.num_blocks);
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, rank = cluster_rank();
    int first_head = fused_attention_first_head(sizes, rank),
        heads = fused_attention_first_head(sizes, rank + 1) - first_head;
    if (warp >= 16) { // registers per thread: 2 * 168 + 2 * 56 + 32 are the 5 * 96 that the launch allocated
        warpgroup_fewer_registers<32>();
        if (threadIdx.x == 512) { fused_attention_load6(smem, qkv_map, sizes, first_head, heads, num_pairs); }
    } else if (warp < 8) {
        warpgroup_more_registers<168>();
        FusedAttentionPending last =
            fused_attention_compute6(smem, lse, sizes, first_head, heads, num_pairs, warp, scale_log2);
        // normalise the second half of the last tile's heads; the helper warp normalises the first half
        int t = last.tile * 128 + warp * 16, done = heads - heads / 2, C = sizes.NH * 64;
        size_t start = ((size_t)last.b * sizes.T + t) * C + (first_head + done) * 64;
        weight += (first_head + done) * 64, bias += (first_head + done) * 64;
        mbarrier_wait(&smem.sum_full[warp], 0);
        mbarrier_wait_cluster(&smem.moments_full[last.j % 2][warp], last.j / 2 % 2);
        float2 mean_rstd = fused_attention_mean_rstd(smem.moments[last.j % 2], warp * 16 + lane % 16, sizes);
        fused_attention_normalise_rows(normed + start, smem.boxes[done] + warp * 16 * 64, 128, mean_rstd, weight, bias,
                                       heads - done, sizes.T - t, C);
    } else {
        warpgroup_fewer_registers<56>();
        fused_attention_help(smem, residual, normed, mean, rstd, inp, weight, bias, sizes, first_head, heads, num_pairs,
                             warp - 8, rank);
    }
}

// Returns the number of blocks per cluster with the shortest estimated time. Pairs of tiles are processed in turns, in
// each turn as many as clusters fit on the device. Per head of a block, a turn takes the num_tiles + 1 steps of a pair of
// tiles, and the end of the grid takes about one more step.
inline int fused_attention_blocks(int B, int T, int NH) {
    int num_tiles = ceil_div(T, 128), num_pairs = B * ceil_div(num_tiles, 2), best = 0;
    size_t least = SIZE_MAX;
    for (int blocks = 1; blocks <= min(FUSED_ATTENTION_MAX_BLOCKS, NH); blocks++) {
        int heads = ceil_div(NH, blocks), turns = ceil_div(num_pairs, fused_attention_clusters_at_once(blocks));
        size_t time = ((size_t)turns * (num_tiles + 1) + 1) * heads;
        if (heads <= FUSED_ATTENTION_MAX_HEADS && time < least) { best = blocks, least = time; }
    }
    return best;
}

template <int stages> void fused_attention_launch6(floatX* residual, floatX* normed, float* mean, float* rstd,
                                                   float* lse, const floatX* qkv, const floatX* inp,
                                                   const floatX* weight, const floatX* bias, int B, int T, int NH,
                                                   cudaStream_t stream, int cluster_size) {
    CUtensorMap qkv_map = tensor_map_heads(qkv, B, T, 3 * NH, 64);
    auto kernel = fused_attention_sm90_kernel6<stages>;
    const int max_heads = stages == 4 ? FUSED_ATTENTION_RING_HEADS : FUSED_ATTENTION_MAX_HEADS;
    const int most = sizeof(FusedAttentionSMem6<stages>) + (max_heads - 1) * FUSED_ATTENTION_BOX_BYTES + 1024;
    static_assert(most <= 227 << 10, "all that compute capability 9.0 has");
    int heads = ceil_div(NH, cluster_size), num_pairs = B * ceil_div(ceil_div(T, 128), 2);
    int num_clusters = min(num_pairs, fused_attention_clusters_at_once(cluster_size));
    FusedAttentionSizes sizes = {T, NH, cluster_size};
    LaunchShape shape(num_clusters * cluster_size, 640, most - (max_heads - heads) * FUSED_ATTENTION_BOX_BYTES,
                      cluster_size);
    launch_kernel(kernel, shape, stream, residual, normed, mean, rstd, lse, inp, weight, bias, qkv_map, sizes,
                  num_pairs, LOG2E / sqrtf(64.0f));
}

// cluster_size: blocks per cluster; if it is 0, fused_attention_blocks() chooses it
void fused_attention_residual_layernorm_forward6(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                 const floatX* qkv, const floatX* inp, const floatX* weight,
                                                 const floatX* bias, int B, int T, int C, int NH, cudaStream_t stream,
                                                 int cluster_size) {
    require(C == NH * 64 && NH <= FUSED_ATTENTION_MAX_HEADS * FUSED_ATTENTION_MAX_BLOCKS && has_sm90a());
    require((size_t)B * T * NH <= INT_MAX);
    if (cluster_size == 0) { cluster_size = fused_attention_blocks(B, T, NH); }
    int heads = ceil_div(NH, cluster_size);
    require(cluster_size <= min(FUSED_ATTENTION_MAX_BLOCKS, NH) && heads <= FUSED_ATTENTION_MAX_HEADS);
    auto launch = heads <= FUSED_ATTENTION_RING_HEADS ? fused_attention_launch6<4> : fused_attention_launch6<2>;
    launch(residual, normed, mean, rstd, lse, qkv, inp, weight, bias, B, T, NH, stream, cluster_size);
}

// ---- kernel 7: two launches: attention adds inp in its epilogue, the layernorm overlaps with attention's end ----
// The layernorm reads the sum, residual, from L2. If the whole sum fits in L2, attention loads everything else
// evict-first, so that L2 keeps the sum. The addition does not delay attention: inp is loaded while the steps of the
// tile run.

template <int groups> struct FusedAttentionSMem7 : AttentionForwardSMem<groups> {
    uint64_t inp_full[4 * groups]; // one per consumer warp
};

// The Store for attention_forward_sm90_block: residual = inp + attention
struct FusedAttentionStore7 {
    const CUtensorMap &inp_map, &residual_map; // boxes of 16 tokens of a head
    uint64_t* full;                            // this warp's barrier
    int parity;                                // parity of the barrier's phase for this tile

    __device__ void prepare(floatX* place, int t, int h, int b) {
        if (threadIdx.x % 32 == 0) {
            tma_store_wait<0>(); // TMA has read the previous tile's output from place
            mbarrier_arrive_expect(full, 16 * ATTENTION_FORWARD_ROW * sizeof(floatX));
            tma_load_4d_once(place, &inp_map, 0, h, t, b, full);
        }
    }
    __device__ void store(floatX* place, const float (&o)[32], const float (&l)[2], int t, int h, int b) {
        int lane = threadIdx.x % 32;
        uint32_t address = shared_address(place + attention_forward_at<64>(lane % 16, lane / 16));
        float inverse[2] = {1.0f / l[0], 1.0f / l[1]};
        mbarrier_wait(full, parity);
        parity ^= 1;
#pragma unroll
        for (int d = 0; d < 4; d++) { // 16 columns at a time, as in attention_forward_sm90_to_shared
            uint32_t r[4];
            ldmatrix_x4(r, attention_forward_column<64>(address, d));
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float2 add = unpack_16x2(r[e], floatX());
                r[e] = pack_16x2(fmaf(o[8 * d + 2 * e], inverse[e % 2], add.x),
                                 fmaf(o[8 * d + 2 * e + 1], inverse[e % 2], add.y), floatX());
            }
            stmatrix_x4(attention_forward_column<64>(address, d), r);
        }
        tma_store_fence();
        __syncwarp();
        if (lane == 0 && t >= 0) {
            tma_store_4d(&residual_map, place, 0, h, t, b);
            tma_store_commit();
        }
    }
};

template <int groups, bool once> __global__ void __launch_bounds__(128 * (groups + 1), 1)
    fused_attention_sm90_kernel7(float* lse, const __grid_constant__ CUtensorMap qkv_map, int T, int NH,
                                 AttentionForwardList list, float scale_log2,
                                 const __grid_constant__ CUtensorMap inp_map,
                                 const __grid_constant__ CUtensorMap residual_map) {
    extern __shared__ __align__(256) unsigned char attention_forward_shared[];
    auto& smem = shared_aligned_1024<FusedAttentionSMem7<groups>>(attention_forward_shared);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&qkv_map), tma_prefetch_map(&inp_map), tma_prefetch_map(&residual_map);
        for (int warp = 0; warp < 4 * groups; warp++) { mbarrier_init(&smem.inp_full[warp], 1); }
    }
    FusedAttentionStore7 store = {inp_map, residual_map, &smem.inp_full[threadIdx.x / 32 % (4 * groups)], 0};
    attention_forward_sm90_block<once, groups>(smem, lse, qkv_map, T, NH, list, scale_log2, store);
}

template <int groups, bool once> void fused_attention_launch7(floatX* residual, float* lse, const floatX* qkv,
                                                              const floatX* inp, int B, int T, int NH,
                                                              cudaStream_t stream) {
    CUtensorMap inp_map = tensor_map_heads(inp, B, T, NH, 16);
    CUtensorMap residual_map = tensor_map_heads(residual, B, T, NH, 16);
    attention_forward_sm90_launch_kernel<groups, FusedAttentionSMem7<groups>>(
        fused_attention_sm90_kernel7<groups, once>, lse, qkv, B, T, NH, stream, inp_map, residual_map);
}

// The forms of kernel 7: two or four consumer warpgroups; ONCE: TMA loads the inputs evict-first, which pays if L2 holds
// the sum until the layernorm reads it.
enum { FUSED_ATTENTION_TWO_ONCE = 1, FUSED_ATTENTION_FOUR_ONCE, FUSED_ATTENTION_FOUR };
static void fused_attention_form7(floatX* residual, float* lse, const floatX* qkv, const floatX* inp, int B, int T,
                                  int NH, cudaStream_t stream, int form) {
    auto attention = form == FUSED_ATTENTION_TWO_ONCE    ? fused_attention_launch7<2, true>
                     : form == FUSED_ATTENTION_FOUR_ONCE ? fused_attention_launch7<4, true>
                                                         : fused_attention_launch7<4, false>;
    attention(residual, lse, qkv, inp, B, T, NH, stream);
}
#endif

// Whether kernel 7 supports this shape on this device.
inline bool fused_attention_has_sm90(int C, int NH) {
#if defined(ENABLE_FP32)
    (void)C, (void)NH;
    return false;
#else
    return C == NH * 64 && C <= 2048 && has_sm90a();
#endif
}

// residual, normed (B,T,C), mean, rstd (B,T), lse (B,NH,T) or NULL | att (B,T,C) scratch | qkv (B,T,3,NH,HS), inp
// (B,T,C), weight, bias (C). C = NH * HS. All pointers are aligned to 16 bytes. If fused_attention_has_sm90(), this
// runs kernel 7 and att may be NULL, otherwise it runs kernel 2. form: of kernel 7; 0: the best one for the shape.
void fused_attention_residual_layernorm_forward(floatX* residual, floatX* normed, float* mean, float* rstd, float* lse,
                                                floatX* att, const floatX* qkv, const floatX* inp, const floatX* weight,
                                                const floatX* bias, int B, int T, int C, int NH, cudaStream_t stream,
                                                int form = 0) {
#if !defined(ENABLE_FP32)
    if (fused_attention_has_sm90(C, NH)) {
        require((size_t)B * T * NH <= INT_MAX);
        bool few = attention_forward_sm90_groups(B, T, NH) == 2; // few tiles, so that L2 holds everything
        bool fits = (size_t)B * T * C * sizeof(floatX) <= (size_t)device_attribute(cudaDevAttrL2CacheSize);
        int best = few ? FUSED_ATTENTION_TWO_ONCE : fits ? FUSED_ATTENTION_FOUR_ONCE : FUSED_ATTENTION_FOUR;
        fused_attention_form7(residual, lse, qkv, inp, B, T, NH, stream, form ? form : best);
        return fused_residual_layernorm_forward9(NULL, normed, mean, rstd, residual, NULL, weight, bias, B * T, C,
                                                 NORM_EPSILON, stream);
    }
#endif
    (void)form;
    require(att != NULL);
    fused_attention_residual_layernorm_forward2(residual, normed, mean, rstd, lse, att, qkv, inp, weight, bias, B, T, C,
                                                NH, stream);
}

// ---- inputs, checks and main ----------------------------------------------------------------------------------

enum { PLAIN, LARGE, ALIKE, HOT }; // the kinds of input

// Fills queries, keys and values (B,T,3,NH,HS) with normal numbers. LARGE: scores of the order of 10^4, and in every
// other head all rows are equal, so that the softmax is uniform. ALIKE: values of 1 and scores of 0, so that the output
// of attention is 1.
static void fill_qkv(float* qkv, int B, int T, int NH, int HS, int kind, uint32_t seed) {
    size_t n = (size_t)B * T * 3 * NH * HS;
    bench_fill_normal(qkv, n, seed, 1.0f, 0.0f);
    for (size_t i = 0; i < n && (kind == LARGE || kind == ALIKE); i++) {
        size_t h = i / HS % NH, part = i / HS / NH % 3;
        if (kind == LARGE && part < 2) { qkv[i] = h % 2 == 1 ? 30.0f : 30.0f * qkv[i]; }
        if (kind == ALIKE) { qkv[i] = part == 0 ? 0.0f : part == 2 ? 1.0f : qkv[i]; }
    }
}

// Fills inp (N,C) with normal numbers. ALIKE: 2 everywhere, so that the rows of the sum have no variance. HOT: the
// middle row is a thousand times as large as the others, and its mean is 3 of its standard deviations.
static void fill_inp(float* inp, int N, int C, int kind, uint32_t seed) {
    bench_fill_normal(inp, (size_t)N * C, seed, 1.0f, 0.0f);
    for (size_t i = 0; i < (size_t)N * C && kind == ALIKE; i++) { inp[i] = 2.0f; }
    for (size_t c = 0; c < (size_t)C && kind == HOT; c++) {
        float& x = inp[N / 2 * (size_t)C + c];
        x = 1000.0f * (x + 3.0f);
    }
}

static void declare(Bench& b) {
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, HS = C / NH, N = B * T;
    int kind = b.cases({"normal", "scores of some 10^4, or equal ones", "equal values in each row", "a hot row"});
    cudaStream_t stream = b.stream;
    size_t n = (size_t)N * C, num_rows = (size_t)N * NH;
    Buffer<floatX> qkv =
        b.input_from<floatX>("qkv", 3 * n, [&](float* x) { fill_qkv(x, B, T, NH, HS, kind, b.rng()); });
    Buffer<floatX> inp = b.input_from<floatX>("inp", n, [&](float* x) { fill_inp(x, N, C, kind, b.rng()); });
    Buffer<floatX> weight = b.input<floatX>("weight", C, 0.1f, 1.0f);
    Buffer<floatX> bias = b.input<floatX>("bias", C, 0.1f);
    // score_error, as in attention_forward: 32 ulps of fp32 at a score of 1000. normed_error of HOT: an element of
    // residual that rounds to the neighbouring number is off by 7 ulps of the row's standard deviation if it is 7
    // standard deviations large. normed_error of ALIKE: without variance rstd is 316, which amplifies the mean's error.
    float score_error = kind == LARGE ? 4e-3f : 0, ulp = ulp_of<floatX>() * (sizeof(floatX) == 2 ? 1 : 32);
    float normed_error = kind == HOT ? 8 * ulp : kind == ALIKE ? 1e-3f : 0;
    Buffer<floatX> residual = b.output<floatX>("residual", n, {2 * ulp + score_error, 0.5f * ulp});
    Buffer<floatX> normed = b.output<floatX>("normed", n, {3 * ulp + 2 * score_error + normed_error, 1.5f * ulp});
    // The roundings of C elements are independent, about 0.45 ulps each (rms), and average out; 5.5 times that, because
    // thousands of rows are compared.
    float row_error = sizeof(floatX) == 2 ? std::max(0.25f, 2.5f / sqrtf((float)C)) * ulp : ulp;
    Buffer<float> mean = b.output<float>("mean", N, {row_error + score_error, row_error});
    Buffer<float> rstd = b.output<float>("rstd", N, {score_error, row_error});
    Buffer<float> lse = b.output<float>("lse", num_rows, {1e-5f + score_error, 2e-6f});
    Buffer<floatX> att = b.scratch<floatX>("att", n);
    std::vector<size_t> tokens = b.sample(N, 2.0 * T * C);
    b.reference([=] {
        size_t num = tokens.size();
        std::vector<float> sum(n), y(num * C), m(num), r(num);
        attention_forward_rows_cpu(sum.data(), lse.host, qkv.host, B, T, C, NH, attention_rows(tokens, T, NH));
        sum = rows_of(sum.data(), tokens, C);
        residual_forward_cpu(sum.data(), sum.data(), rows_of(inp.host, tokens, C).data(), sum.size());
        put_rows(residual.host, sum, tokens, C);
        for (float& x : sum) { x = (float)(floatX)x; }
        layernorm_forward_cpu(y.data(), m.data(), r.data(), sum.data(), weight.host, bias.host, (int)num, C);
        put_rows(normed.host, y, tokens, C);
        put_rows(mean.host, m, tokens, 1), put_rows(rstd.host, r, tokens, 1);
    });
    double tensor = (double)n * sizeof(floatX), rest = (num_rows + 2.0 * N) * sizeof(float); // bytes
    double fused = 6 * tensor + rest;
    b.cost(fused, 2.0 * B * NH * T * (double)T * HS);

    bool fast = !b.dry && fused_attention_has_sm90(C, NH); // otherwise the launcher without a number runs kernel 2
    b.kernel(1, "unfused: attention, residual, layernorm",
             [=](int) {
                 fused_attention_residual_layernorm_forward1(residual, normed, mean, rstd, lse, att, qkv, inp, weight,
                                                             bias, B, T, C, NH, stream);
             },
             {0});
    b.moves(3, 9 * tensor + rest);
    b.kernel(2, "residual and layernorm in one launch",
             [=](int) {
                 if (fast) {
                     fused_attention_residual_layernorm_forward2(residual, normed, mean, rstd, lse, att, qkv, inp,
                                                                 weight, bias, B, T, C, NH, stream);
                 } else {
                     fused_attention_residual_layernorm_forward(residual, normed, mean, rstd, lse, att, qkv, inp,
                                                                weight, bias, B, T, C, NH, stream);
                 }
             },
             {0});
    b.moves(2, 8 * tensor + rest);
    b.kernel(3, "one block per query, one warp per head, fp32",
             [=](int bs) {
                 fused_attention_residual_layernorm_forward3(residual, normed, mean, rstd, lse, qkv, inp, weight, bias,
                                                             B, T, C, NH, stream, bs);
             },
             {128, 384});
    b.moves(1, fused);
#if !defined(ENABLE_FP32)
    bool has_tiles = HS == 64 && C % HS == 0;
    if (has_tiles && NH <= 18) {
        b.kernel(
            4, "wgmma, one block owns 64 queries over all heads",
            [=](int) {
                fused_attention_residual_layernorm_forward4(residual, normed, mean, rstd, lse, qkv, inp, weight, bias,
                                                            B, T, C, NH, stream);
            },
            {0}, -90);
        b.moves(1, fused);
    }
    if (has_tiles && NH <= FUSED_ATTENTION_MAX_HEADS * FUSED_ATTENTION_MAX_BLOCKS) {
        std::vector<int> cluster_sizes;
        for (int size = 1; size <= min(FUSED_ATTENTION_MAX_BLOCKS, NH); size++) {
            bool even = NH % size == 0 || size == ceil_div(NH, FUSED_ATTENTION_MAX_HEADS);
            if (even && ceil_div(NH, size) <= FUSED_ATTENTION_MAX_HEADS) { cluster_sizes.push_back(size); }
        }
        b.kernel(
            5, "a cluster divides the heads; separate warps load and normalise",
            [=](int cs) {
                fused_attention_residual_layernorm_forward5(residual, normed, mean, rstd, lse, qkv, inp, weight, bias,
                                                            B, T, C, NH, stream, cs);
            },
            cluster_sizes, -90);
        b.config("blocks per cluster");
        b.moves(1, fused);
        cluster_sizes.insert(cluster_sizes.begin(), 0);
        b.kernel(
            6, "persistent clusters; eight helper warps add inp, sum and normalise",
            [=](int cs) {
                fused_attention_residual_layernorm_forward6(residual, normed, mean, rstd, lse, qkv, inp, weight, bias,
                                                            B, T, C, NH, stream, cs);
            },
            cluster_sizes, -90);
        b.config("blocks per cluster");
        b.moves(1, fused);
    }
    if (has_tiles && C <= 2048) {
        b.kernel(
            7, "attention adds inp in its epilogue; layernorm launched early",
            [=](int form) {
                fused_attention_residual_layernorm_forward(residual, normed, mean, rstd, lse, NULL, qkv, inp, weight,
                                                           bias, B, T, C, NH, stream, form);
            },
            {0}, -90);
        b.config("form", {{0, "by the shape"},
                          {FUSED_ATTENTION_TWO_ONCE, "two consumers; evict-first"},
                          {FUSED_ATTENTION_FOUR_ONCE, "four consumers; evict-first"},
                          {FUSED_ATTENTION_FOUR, "four consumers"}});
        b.moves(2, 7 * tensor + rest);
    }
#endif
    b.best(fast ? 7 : 2);
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "fused_attention_residual_layernorm", declare, {32, 512, 768, 12},
                      {{1, 1, 64, 1},
                       {1, 1, 768, 12},
                       {2, 17, 128, 2},
                       {1, 127, 384, 6},
                       {3, 128, 192, 3},
                       {1, 129, 1600, 25},
                       {2, 200, 768, 12},
                       {1, 333, 1024, 16},
                       {2, 513, 128, 2},
                       {1, 700, 320, 5},
                       {1, 300, 256, 4},
                       {2, 150, 768, 12},
                       {1, 260, 448, 7},
                       {430, 100, 768, 12}, // the sum does not fit in L2
                       {1, 90, 416, 2},
                       {2, 70, 80, 2}});
}
