/* decode_layer: the layers of the transformer for the newest token of each of B texts, in a decoding step

   in each layer: y = x + attproj(attention(qkv(layernorm(x)))); x = y + fcproj(gelu(fc(layernorm(y))))
   x (B,C) floatX inout
   keys, values (L,B,capacity,C) floatX inout: the token's own become row position[b] of text b in each layer
   position (B) int in, -1: the text has ended, and nothing is done for it
   weights (L,12*C*C + 13*C) floatX in: of each layer, in the order of a checkpoint: ln1 weight and bias (C), qkv weight
   (3C,C) and bias (3C), attproj (C,C) and (C), ln2 (C), fc (4C,C) and (4C), fcproj (C,4C) and (C).
   packed (L*12*C*C) floatX in, of kernels 5 and 6: the matrices in another order, which decode_layers_pack() makes once.
   Bound: memory, L times 12*C*C weights and 2*(position+1)*C values of the cache of each text. In practice latency: at C = 768
   this takes about 4 us per layer on an H100 (15.8 MB). The phases wait for each other for longer than that.
   Constraint: C % 8 == 0. Kernels 2 to 6: sm_90a, 16-bit floatX, heads of 64. Kernels 2 to 5: one text, C <= 1792. Kernels 2
   and 3: what a block keeps of the weights and of the cache must fit its shared memory. Kernels 3 to 6: all clusters on the
   GPU at once. Kernel 5: the sizes of C in decode_layer_blocks(), and a capacity of up to 1024. Kernel 6: those with 8
   blocks. No other kernel that waits for blocks of its own may run beside kernels 3 to 6 (MPS).
   Error: the results of five phases of a layer are rounded to floatX, as in training: 3 + L ulps of floatX of 1, and 2
   ulps of x.
   Source: a cluster per head, for qkv, attention and projection: the idea is ClusterFusion's (Luo et al. 2025,
   arXiv:2508.18850); one launch for all layers: "megakernels", Spector et al. 2025 (Hazy Research, "Look Ma, No Bubbles!");
   values that come with a flag, which readers poll: NCCL's protocol LL; sums in fixed point, so that their order does not
   matter, and a text in each column of mma's second operand are ours.

   Shape flags: each text attends over T tokens, itself included; in the check shapes of several texts over fewer, and the
   third one has ended, of 12 the first eight, of 10 the last two. L is 12 from T = 512 on, else 3.

   Kernels (this list is written by versions.sh):
     1  five launches: four products and attention
     2  three launches: a cluster per head for qkv, attention and projection
     3  one launch for all layers, with a barrier of all blocks after each half of one (slower than 2)
     4  3 with all weights through a ring of chunks in shared memory (slower than 2)
     5  one launch, weights packed in the order of their use, mma, results that carry their readiness (promoted)
     6  5 for 2 to 16 texts (here also for one), each in a column of mma's other operand (slower than 5)

   nvcc -O3 --use_fast_math decode_layer.cu -o decode_layer      (or: make decode_layer)
   ./decode_layer 2      check kernel 2 against the CPU and time it
   ./decode_layer        every kernel, side by side                                         */
#include "../../llmc/decode_layer.cuh"
#include "bench.h"
#include "decode_attention.cuh"
#include "decode_matmul.cuh"
#include "decode_matvec.cuh"

// ---- kernel 1: five launches: a product, attention, and three more products ----

struct DecodeLayerScratch1 {
    floatX *qkv, *atty, *fch; // (B,3C), (B,C), (B,4C)
    float* attention;
};

// Computes a matmul like generation does: with tensor cores for several sequences.
static void decode_layer1_product(floatX* out, const DecodeProduct& p, cudaStream_t stream) {
    if (!decode_matmul(out, p, stream)) { decode_matvec(out, p, stream); }
}
void decode_layer1_one(const DecodeLayer& l, int B, const DecodeLayerScratch1& s, cudaStream_t stream) {
    int C = l.C;
    float e = l.epsilon;
    decode_layer1_product(s.qkv, {l.x, l.ln1w, l.ln1b, l.qkvw, l.qkvb, NULL, B, C, 3 * C, false, e}, stream);
    decode_attention(s.atty, l.keys, l.values, s.attention, s.qkv, l.position, B, C, l.NH, l.capacity,
                     1.0f / sqrtf((float)(C / l.NH)), stream);
    decode_layer1_product(l.x, {s.atty, NULL, NULL, l.attprojw, l.attprojb, l.x, B, C, C, false, e}, stream);
    decode_layer1_product(s.fch, {l.x, l.ln2w, l.ln2b, l.fcw, l.fcb, NULL, B, C, 4 * C, true, e}, stream);
    decode_layer1_product(l.x, {s.fch, NULL, NULL, l.fcprojw, l.fcprojb, l.x, B, 4 * C, C, false, e}, stream);
}
void decode_layer1(const DecodeLayers& layers, int B, const DecodeLayerScratch1& s, cudaStream_t stream) {
    for (int i = 0; i < layers.num; i++) { decode_layer1_one(layers[i], B, s, stream); }
}

// ---- kernel 2: three launches: a cluster of blocks per head does qkv, attention and projection ----

#include "decode_layer.cuh" // kernels 5 and 6

#if !defined(ENABLE_FP32)

constexpr int DECODE_LAYER_ROWS = 5;   // rows of qkv per warp, at most
constexpr int DECODE_LAYER_VALUES = 7; // columns of x per thread, at most: C <= 1792

// The residual stream between attention and the MLP, y, is a sum that all clusters add to. Its terms are integers, so the
// order in which they come does not change the result: 2^32 stands for 1. The element behind the last one counts
// terms that are not finite or too large; if there are any, all of y is NaN.
typedef unsigned long long DecodeLayerSum; // atomicAdd has no signed 64-bit form; two's complement adds alike

__device__ inline void decode_layer_add(DecodeLayerSum* sums, int i, int C, float x) {
    if (fabsf(x) < 0x1p30f) { // not if x is NaN
        atomicAdd(&sums[i], (DecodeLayerSum)llrintf(x * 0x1p32f));
    } else {
        atomicAdd(&sums[C], 1ull);
    }
}
// y[i], rounded to floatX as the residual stream of a training step is
__device__ inline float decode_layer_value(const DecodeLayerSum* sums, int i, int C) {
    float x = (float)(long long)sums[i] * 0x1p-32f;
    return sums[C] ? NAN : (float)(floatX)x;
}

// The layernorm of x, of which thread t has elements t, t + 256, ... in v; normed (C) is in shared memory. weight and bias:
// those of the same elements, loaded before.
__device__ inline void decode_layer_norm(floatX* normed, const float (&v)[DECODE_LAYER_VALUES],
                                         const float (&weight)[DECODE_LAYER_VALUES],
                                         const float (&bias)[DECODE_LAYER_VALUES], int C, float epsilon) {
    __shared__ float shared[32];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) { sum += v[i]; } // zeros past the end
    float mean = block_sum(sum, shared) / C;
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        bool there = (int)threadIdx.x + i * DECODE_LAYER_THREADS < C;
        squares += there ? (v[i] - mean) * (v[i] - mean) : 0.0f;
    }
    float rstd = rsqrtf(block_sum(squares, shared) / C + epsilon);
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        if (c < C) { normed[c] = (floatX)((v[i] - mean) * rstd * weight[i] + bias[i]); }
    }
}
// Loads this thread's elements of a vector (C); zeros past the end.
__device__ inline void decode_layer_load(float (&v)[DECODE_LAYER_VALUES], const floatX* from, int C) {
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        v[i] = c < C ? (float)from[c] : 0.0f;
    }
}

// What a block of the cluster of a head has in shared memory. All sizes are multiples of 16 bytes.
struct DecodeLayerShared {
    size_t qkv, proj, keys, values, normed, bytes; // where they begin; their end
    __host__ __device__ DecodeLayerShared(int C, int capacity, int cluster) {
        const size_t row = DECODE_LAYER_HS * sizeof(floatX), tokens = decode_layer_most(capacity, cluster);
        qkv = 0;                                                                           // rows of the weight, (,C)
        proj = qkv + decode_layer_most(3 * DECODE_LAYER_HS, cluster) * C * sizeof(floatX); // (,HS)
        keys = proj + decode_layer_most(C, cluster) * row, values = keys + tokens * row;   // (,HS) each
        normed = values + tokens * row;                                                    // (C)
        bytes = normed + C * sizeof(floatX);
    }
};

// What the blocks of a cluster send each other, and the mbarriers at which it arrives.
struct DecodeLayerReceived {
    uint64_t qkv_there, parts_there;
    float qkv[3 * DECODE_LAYER_HS], parts[8][DECODE_LAYER_PART];
};
__device__ inline void decode_layer_expect(DecodeLayerReceived& received, int cluster) {
    mbarrier_arrive_expect(&received.qkv_there, sizeof(received.qkv));
    mbarrier_arrive_expect(&received.parts_there, cluster * DECODE_LAYER_PART * (int)sizeof(float));
}
// All blocks of the cluster call this at the same place.
__device__ inline void decode_layer_init(DecodeLayerReceived& received, int cluster) {
    if (threadIdx.x == 0) {
        mbarrier_init(&received.qkv_there, 1), mbarrier_init(&received.parts_there, 1);
        mbarrier_init_fence();
        decode_layer_expect(received, cluster);
    }
}

// y = x + attproj(attention(qkv(layernorm(x)))), into sums (C+1), which are zero before. A cluster, of `cluster` blocks of
// 256 threads, has a head. Each block has a share of the rows of q, k and v; then, of the tokens; and then, of the outputs
// of the projection. What the others need is sent to their shared memory, where it arrives at an mbarrier:
//
//     weights of the share, keys, values       before the previous kernel has ended
//     layernorm(x), in every block             x arrives
//     q, k, v of the share          -> all     normed
//     scores and sums of the share  -> all     q, k, v: 192 numbers
//     projection of the share       -> sums    66 numbers from each block
struct DecodeLayerHead {
    static constexpr int HS = DECODE_LAYER_HS, VEC = x128::size, ROW_VECS = HS / VEC;
    int C, cluster, rank, head, now, lane, warp;
    int group, part;                     // 8 lanes have a row of a head: which, and this lane's first element
    DecodeLayerShare rows, outs, tokens; // tokens before the newest one, which the last block takes
    floatX *weight, *proj, *keys, *values, *normed; // in shared memory

    __device__ DecodeLayerHead(unsigned char* shared, const DecodeLayer& l, int num_blocks) {
        C = l.C, cluster = num_blocks, rank = cluster_rank(), head = blockIdx.x / cluster;
        now = *l.position; // not written by earlier kernels of the step
        lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / ROW_VECS, part = lane % ROW_VECS * VEC;
        rows = decode_layer_share(3 * HS, rank, cluster), outs = decode_layer_share(C, rank, cluster);
        tokens = decode_layer_share(now, rank, cluster);
        DecodeLayerShared at(C, l.capacity, cluster);
        auto array = [&](size_t begin) { return reinterpret_cast<floatX*>(shared + begin); };
        weight = array(at.qkv), proj = array(at.proj), keys = array(at.keys), values = array(at.values);
        normed = array(at.normed);
    }
    __device__ int weight_row(int i) const { return (rows.first + i) / HS * C + head * HS + (rows.first + i) % HS; }
    // Begins to load what does not depend on x: a group of cp.async.
    __device__ void load(const DecodeLayer& l) const {
        for (int i = warp; i < rows.n; i += DECODE_LAYER_WARPS) {
            const floatX* from = l.qkvw + (size_t)weight_row(i) * C;
            for (int c = lane * VEC; c < C; c += 32 * VEC) { cp_async_16(weight + i * C + c, from + c); }
        }
        for (int i = threadIdx.x; i < outs.n * ROW_VECS; i += DECODE_LAYER_THREADS) {
            int r = i / ROW_VECS, c = i % ROW_VECS * VEC;
            cp_async_16(proj + r * HS + c, l.attprojw + (size_t)(outs.first + r) * C + head * HS + c);
        }
        for (int i = threadIdx.x; i < tokens.n * ROW_VECS; i += DECODE_LAYER_THREADS) {
            int r = i / ROW_VECS, c = i % ROW_VECS * VEC;
            size_t from = (size_t)(tokens.first + r) * C + head * HS + c;
            cp_async_16(keys + r * HS + c, l.keys + from);
            cp_async_16(values + r * HS + c, l.values + from);
        }
        cp_async_commit();
    }
    // The bias of the warp's row `lane`, see project_qkv.
    __device__ float load_bias(const DecodeLayer& l) const {
        int own = warp + DECODE_LAYER_WARPS * lane;
        return own < rows.n ? (float)l.qkvb[weight_row(own)] : 0.0f;
    }

    // Sends q, k and v of this block's rows to all blocks. bias: the value from load_bias().
    __device__ void project_qkv(DecodeLayerReceived& received, float bias) const {
        float row_sums[DECODE_LAYER_ROWS] = {};
        for (int c = lane * VEC; c < C; c += 32 * VEC) {
            x128 n = load128(normed + c);
            float elements[VEC];
#pragma unroll
            for (int e = 0; e < VEC; e++) { elements[e] = (float)n[e]; }
#pragma unroll
            for (int j = 0; j < DECODE_LAYER_ROWS; j++) {
                int i = warp + DECODE_LAYER_WARPS * j;
                if (i < rows.n) { row_sums[j] += decode_layer_dot(load128(weight + i * C + c), elements); }
            }
        }
#pragma unroll
        for (int j = 0; j < DECODE_LAYER_ROWS; j++) {
            int i = warp + DECODE_LAYER_WARPS * j;
            float value = (float)(floatX)(warp_sum(row_sums[j]) + __shfl_sync(0xFFFFFFFFu, bias, j));
            if (i < rows.n && lane < cluster) {
                store_cluster_async(&received.qkv[rows.first + i], value, &received.qkv_there, lane);
            }
        }
    }
    // Attention over this block's tokens, 8 lanes per token: what 4 of these groups in a warp know.
    struct Attention {
        float q[VEC], sum[VEC], largest, total;
    };
    __device__ Attention attend_begin(const DecodeLayerReceived& received) const { // q, k, v have arrived
        Attention a = {{}, {}, DECODE_ATTENTION_LOWEST, 0.0f};
#pragma unroll
        for (int e = 0; e < VEC; e++) { a.q[e] = received.qkv[part + e] * (LOG2E * rsqrtf((float)HS)); }
        return a;
    }
    __device__ void attend_token(Attention& a, const x128& k, const x128& v, bool there) const {
        float score = lanes_sum<8>(decode_layer_dot(k, a.q)), before = a.largest;
        if (there) { a.largest = fmaxf(a.largest, score); }
        float rescale = exp2f(before - a.largest), share = there ? exp2f(score - a.largest) : 0.0f;
        a.total = a.total * rescale + share;
#pragma unroll
        for (int e = 0; e < VEC; e++) { a.sum[e] = a.sum[e] * rescale + share * (float)v[e]; }
    }
    // keys, values (n,HS) in shared memory
    __device__ void attend_tokens(Attention& a, const floatX* keys, const floatX* values, int n) const {
        for (int first = warp * 4; first < n; first += 4 * DECODE_LAYER_WARPS) { // all lanes together: shuffles
            int t = first + group;
            x128 k = {}, v = {};
            if (t < n) { k = load128(keys + t * HS + part), v = load128(values + t * HS + part); }
            attend_token(a, k, v, t < n);
        }
    }
    // The newest token, which the last block has. The result of all its tokens, to all blocks.
    __device__ void attend_end(Attention& a, DecodeLayerReceived& received) const {
        __shared__ float warps[DECODE_LAYER_WARPS][DECODE_LAYER_PART];
        if (rank == cluster - 1 && warp == 0) {
            x128 k, v;
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                k[e] = (floatX)received.qkv[HS + part + e], v[e] = (floatX)received.qkv[2 * HS + part + e];
            }
            attend_token(a, k, v, group == 0);
        }
        float(&sum)[VEC] = a.sum, &largest = a.largest, &total = a.total;
        float own = largest;
#pragma unroll
        for (int offset = 16; offset >= ROW_VECS; offset /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
        }
        float rescale = exp2f(own - largest);
        total *= rescale;
#pragma unroll
        for (int offset = 16; offset >= ROW_VECS; offset /= 2) { total += __shfl_xor_sync(0xFFFFFFFFu, total, offset); }
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            sum[e] *= rescale;
#pragma unroll
            for (int offset = 16; offset >= ROW_VECS; offset /= 2) {
                sum[e] += __shfl_xor_sync(0xFFFFFFFFu, sum[e], offset);
            }
            if (group == 0) { warps[warp][part + e] = sum[e]; }
        }
        if (lane == 0) { warps[warp][HS] = largest, warps[warp][HS + 1] = total; }
        __syncthreads();

        if (threadIdx.x < DECODE_LAYER_PART) { // thread t adds up number t of all warps, and sends it
            float all = DECODE_ATTENTION_LOWEST, number = 0.0f;
#pragma unroll
            for (int w = 0; w < DECODE_LAYER_WARPS; w++) { all = fmaxf(all, warps[w][HS]); }
#pragma unroll
            for (int w = 0; w < DECODE_LAYER_WARPS; w++) {
                number += exp2f(warps[w][HS] - all) * warps[w][threadIdx.x];
            }
            if (threadIdx.x == HS) { number = all; }
            for (int r = 0; r < cluster; r++) {
                store_cluster_async(&received.parts[rank][threadIdx.x], number, &received.parts_there, r);
            }
        }
    }
    // The head's attention, from all parts, which have arrived: this lane's elements.
    __device__ void join(float (&attention)[VEC], const DecodeLayerReceived& received) const {
        float all = DECODE_ATTENTION_LOWEST, weights = 0.0f;
#pragma unroll
        for (int e = 0; e < VEC; e++) { attention[e] = 0.0f; }
        for (int r = 0; r < cluster; r++) { all = fmaxf(all, received.parts[r][HS]); }
        for (int r = 0; r < cluster; r++) {
            float share = exp2f(received.parts[r][HS] - all);
            weights += share * received.parts[r][HS + 1];
#pragma unroll
            for (int e = 0; e < VEC; e++) { attention[e] += share * received.parts[r][part + e]; }
        }
#pragma unroll
        for (int e = 0; e < VEC; e++) { attention[e] = (float)(floatX)(attention[e] / weights); }
    }
    // The projection of n outputs from `output` on, whose rows (n,HS) are in shared memory: 8 lanes per row.
    __device__ void project_out(const float (&attention)[VEC], const floatX* rows, int output, int n,
                                DecodeLayerSum* sums) const {
        for (int first = warp * 4; first < n; first += 4 * DECODE_LAYER_WARPS) {
            int i = first + group;
            x128 w = {};
            if (i < n) { w = load128(rows + i * HS + part); }
            float y = lanes_sum<8>(decode_layer_dot(w, attention));
            if (i < n && part == 0) { decode_layer_add(sums, output + i, C, y); }
        }
    }
    // The key and value of the token become a row of the cache.
    __device__ void store(const DecodeLayer& l, const DecodeLayerReceived& received) const {
        if (rank != 0 || threadIdx.x >= 2 * HS) { return; }
        floatX* cache = threadIdx.x < HS ? l.keys : l.values;
        cache[(size_t)now * C + head * HS + threadIdx.x % HS] = (floatX)received.qkv[HS + threadIdx.x];
    }
    // From normed to sums. parity: of the use of `received`, which begins at 0.
    __device__ void run(const DecodeLayer& l, DecodeLayerReceived& received, float bias, DecodeLayerSum* sums,
                        int parity) const {
        float attention[VEC];
        project_qkv(received, bias);
        mbarrier_wait_cluster(&received.qkv_there, parity);
        store(l, received);
        Attention a = attend_begin(received);
        attend_tokens(a, keys, values, tokens.n);
        attend_end(a, received);
        mbarrier_wait_cluster(&received.parts_there, parity);
        join(attention, received);
        project_out(attention, proj, outs.first, outs.n, sums);
    }
};

__global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_sm90_kernel2(DecodeLayer l, DecodeLayerSum* sums, int cluster) {
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    __shared__ DecodeLayerReceived received;
    DecodeLayerHead head(decode_layer_dynamic, l, cluster);
    int C = l.C;
    head.load(l);
    float x[DECODE_LAYER_VALUES], norm_weight[DECODE_LAYER_VALUES], norm_bias[DECODE_LAYER_VALUES];
    decode_layer_load(norm_weight, l.ln1w, C);
    decode_layer_load(norm_bias, l.ln1b, C);
    float bias = head.load_bias(l);
    decode_layer_init(received, cluster);
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    grid_wait_dependency();

    decode_layer_load(x, l.x, C);
    if (head.head == 0) { // of all heads, one adds x and the bias
        for (int i = threadIdx.x; i < head.outs.n; i += DECODE_LAYER_THREADS) {
            int c = head.outs.first + i;
            decode_layer_add(sums, c, C, (float)l.x[c]);
            decode_layer_add(sums, c, C, (float)l.attprojb[c]);
        }
    }
    decode_layer_norm(head.normed, x, norm_weight, norm_bias, C, l.epsilon);
    cp_async_wait<0>();
    __syncthreads();
    head.run(l, received, bias, sums, 0);
}

// fch (4C) = gelu(fc(layernorm(y))), one warp per row. vecs: vectors of a row per lane. Zeroes `other` (C+1), the sums of the
// next layer, which the kernels before have read.
template <int vecs> __global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_fc_kernel2(floatX* fch, DecodeLayer l, const DecodeLayerSum* sums, DecodeLayerSum* other) {
    __shared__ alignas(16) floatX normed[DECODE_LAYER_VALUES * DECODE_LAYER_THREADS];
    int C = l.C, lane = threadIdx.x % 32, row = blockIdx.x * DECODE_LAYER_WARPS + threadIdx.x / 32;
    bool there = row < 4 * C;
    int4 w[vecs];
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = lane + 32 * i;
        const int4* from = reinterpret_cast<const int4*>(l.fcw + (size_t)row * C) + v;
        w[i] = there && v < C / x128::size ? __ldcs(from) : make_int4(0, 0, 0, 0);
    }
    float bias = there ? (float)l.fcb[row] : 0.0f;
    float y[DECODE_LAYER_VALUES], norm_weight[DECODE_LAYER_VALUES], norm_bias[DECODE_LAYER_VALUES];
    decode_layer_load(norm_weight, l.ln2w, C);
    decode_layer_load(norm_bias, l.ln2b, C);
    grid_launch_dependents();
    grid_wait_dependency();
#pragma unroll
    for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
        int c = threadIdx.x + i * DECODE_LAYER_THREADS;
        y[i] = c < C ? decode_layer_value(sums, c, C) : 0.0f;
    }
    int zero = blockIdx.x * DECODE_LAYER_THREADS + threadIdx.x;
    if (zero <= C) { other[zero] = 0; }
    decode_layer_norm(normed, y, norm_weight, norm_bias, C, l.epsilon);
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = lane + 32 * i;
        float elements[x128::size] = {};
        if (v < C / x128::size) {
            x128 n = load128(normed + v * x128::size);
#pragma unroll
            for (int e = 0; e < x128::size; e++) { elements[e] = (float)n[e]; }
        }
        sum += decode_layer_dot(vec128_from_bits<floatX>(w[i]), elements);
    }
    sum = warp_sum(sum);
    if (there && lane == 0) { fch[row] = (floatX)gelu(sum + bias); }
}

// x = y + fcproj(fch); four warps have a row. vecs: vectors of a row per lane.
template <int vecs> __global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_fcproj_kernel2(const floatX* fch, DecodeLayer l, const DecodeLayerSum* sums) {
    __shared__ float partial[DECODE_LAYER_WARPS];
    int C = l.C, lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 2 + warp / 4;
    int num_vecs = 4 * C / x128::size;
    int4 w[vecs];
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = warp % 4 * 32 + lane + 128 * i;
        const int4* from = reinterpret_cast<const int4*>(l.fcprojw + (size_t)row * 4 * C) + v;
        w[i] = row < C && v < num_vecs ? __ldcs(from) : make_int4(0, 0, 0, 0);
    }
    float bias = row < C ? (float)l.fcprojb[row] : 0.0f;
    grid_launch_dependents();
    grid_wait_dependency();
    float y = row < C && warp % 4 == 0 ? decode_layer_value(sums, row, C) : 0.0f, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < vecs; i++) {
        int v = min(warp % 4 * 32 + lane + 128 * i, num_vecs - 1); // past the end the weights are 0
        x128 h = load128(fch + v * x128::size);
        float elements[x128::size];
#pragma unroll
        for (int e = 0; e < x128::size; e++) { elements[e] = (float)h[e]; }
        sum += decode_layer_dot(vec128_from_bits<floatX>(w[i]), elements);
    }
    sum = warp_sum(sum);
    if (lane == 0) { partial[warp] = sum; }
    __syncthreads();
    if (row < C && threadIdx.x % 128 == 0) {
        for (int i = 1; i < 4; i++) { sum += partial[warp + i]; }
        l.x[row] = (floatX)(sum + bias + y);
    }
}

// Blocks per head: as many as there are SMs for, but 5 to 8; or 0 if what a block keeps does not fit.
static int decode_layer_cluster(int C, int NH, int capacity, int num_sms) {
    if (C != NH * DECODE_LAYER_HS || C > DECODE_LAYER_VALUES * DECODE_LAYER_THREADS) { return 0; }
    int cluster = std::max(5, std::min(8, num_sms / NH)); // with 5, a warp has 5 rows of qkv
    return DecodeLayerShared(C, capacity, cluster).bytes + 8192 <= 227 << 10 ? cluster : 0; // 8 KB: the other arrays
}

// Two layers take turns: the sums of one are zeroed while the other adds to its own.
struct DecodeLayerTurns {
    DecodeLayerSum* sums[2]; // (C+1) each; those of the next layer are zero
    int C, next;
};
// They live as long as the program, because a buffer of the harness does not stay zero between two launches.
static DecodeLayerTurns* decode_layer_turns(int C) {
    static DecodeLayerTurns turns;
    if (turns.C != C) {
        size_t bytes = (C + 1) * sizeof(DecodeLayerSum);
        cudaCheck(cudaFree(turns.sums[0]));
        cudaCheck(cudaMalloc(&turns.sums[0], 2 * bytes));
        cudaCheck(cudaMemset(turns.sums[0], 0, 2 * bytes));
        turns.sums[1] = turns.sums[0] + C + 1, turns.C = C, turns.next = 0;
    }
    return &turns;
}

void decode_layer2_one(const DecodeLayer& l, DecodeLayerTurns* turns, floatX* fch, cudaStream_t stream) {
    int C = l.C, cluster = decode_layer_cluster(C, l.NH, l.capacity, num_multiprocessors());
    require(cluster > 0);
    DecodeLayerSum *own = turns->sums[turns->next], *other = turns->sums[1 - turns->next];
    turns->next = 1 - turns->next;
    size_t bytes = DecodeLayerShared(C, l.capacity, cluster).bytes;
    launch_kernel(decode_layer_sm90_kernel2, LaunchShape(l.NH * cluster, DECODE_LAYER_THREADS, bytes, cluster, true),
                  stream, l, own, cluster);
    with_constant<DECODE_LAYER_VALUES>(ceil_div(C, 32 * x128::size), [&](auto vecs) { // vectors of a row of C per lane
        launch_early(decode_layer_fc_kernel2<vecs.value>, dim3(4 * C / DECODE_LAYER_WARPS), dim3(DECODE_LAYER_THREADS),
                     0, stream, fch, l, own, other);
        launch_early(decode_layer_fcproj_kernel2<vecs.value>, dim3(ceil_div(C, 2)), dim3(DECODE_LAYER_THREADS), 0,
                     stream, fch, l, own);
    });
}
// fch (4C) is scratch.
void decode_layer2(const DecodeLayers& layers, DecodeLayerTurns* turns, floatX* fch, cudaStream_t stream) {
    for (int i = 0; i < layers.num; i++) { decode_layer2_one(layers[i], turns, fch, stream); }
}

// ---- kernel 3: one launch for all layers: weights are loaded while their block waits for the others ----
// The blocks of kernel 2, which stay. Each also has 32 of the hidden units of the MLP: their rows of fc, and their columns of
// fcproj, so that the hidden values stay in the block. A layer has two phases, each ends with a barrier of all blocks:
//
//     y = x + the projections of all heads       from x, into sums
//     x = y + the products of all hidden units   from y, into sums
//
// When a block has finished a phase, it begins to load its weights for that phase of the next layer.

constexpr int DECODE_LAYER_RANKS3 = 8, DECODE_LAYER_UNITS = 4 * DECODE_LAYER_HS / DECODE_LAYER_RANKS3;
constexpr int DECODE_LAYER_UNIT_ROWS = DECODE_LAYER_UNITS / DECODE_LAYER_WARPS; // rows of fc per warp

struct DecodeLayerShared3 : DecodeLayerShared { // all sizes are multiples of 16 bytes
    size_t fc, fcproj;                          // (UNITS,C), (C,UNITS)
    __host__ __device__ DecodeLayerShared3(int C, int capacity) : DecodeLayerShared(C, capacity, DECODE_LAYER_RANKS3) {
        size_t matrix = (size_t)DECODE_LAYER_UNITS * C * sizeof(floatX);
        fc = bytes, fcproj = fc + matrix, bytes = fcproj + matrix;
    }
};

// In global memory, between launches all zero but `x`. Layers take turns: layer l reads x[l % 2] and y[l % 2].
struct DecodeLayerState {
    DecodeLayerSum *x[2], *y[2]; // (C+1) each
    int* arrived;                // blocks at barriers, in this launch
};

// What the two phases of a layer have in common: each begins with a layernorm of sums and ends with a barrier of all blocks.
struct DecodeLayerPhase {
    const DecodeLayerState& state;
    int C, element, target = 0; // target: blocks at the next barrier
    float epsilon;
    float v[DECODE_LAYER_VALUES], weight[DECODE_LAYER_VALUES], bias[DECODE_LAYER_VALUES]; // what this thread normalises

    __device__ DecodeLayerPhase(const DecodeLayer& l, const DecodeLayerState& state)
        : state(state), C(l.C), epsilon(l.epsilon) {
        element = blockIdx.x * DECODE_LAYER_THREADS + threadIdx.x;
    }
    __device__ void prepare(const floatX* norm_weight, const floatX* norm_bias) {
        decode_layer_load(weight, norm_weight, C);
        decode_layer_load(bias, norm_bias, C);
    }
    __device__ void read(const DecodeLayerSum* sums) {
#pragma unroll
        for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
            int c = threadIdx.x + i * DECODE_LAYER_THREADS;
            v[i] = c < C ? decode_layer_value(sums, c, C) : 0.0f;
        }
    }
    // normed = the layernorm of v. The sums of the next phase but one become 0. Of all blocks, the first few add to `to` what is
    // not a product.
    __device__ void begin(floatX* normed, DecodeLayerSum* to, DecodeLayerSum* next, const floatX* linear_bias) const {
        if (element <= C) { next[element] = 0; }
#pragma unroll
        for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
            if (i == (int)blockIdx.x && element < C) {
                decode_layer_add(to, element, C, v[i]);
                decode_layer_add(to, element, C, (float)linear_bias[element]);
            }
        }
        decode_layer_norm(normed, v, weight, bias, C, epsilon);
    }
    // Waits until all blocks have come here. They then see what the others have written.
    __device__ void end() {
        target += gridDim.x;
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(state.arrived, 1);
            while (load_acquire(state.arrived) < target) {}
        }
        __syncthreads();
    }
    // After the last phase: the last block to come here has the result, and leaves the state as it was.
    __device__ void finish(floatX* x, const DecodeLayerSum* sums) {
        __shared__ bool last;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(state.arrived, 1) == target + (int)gridDim.x - 1;
            __threadfence();
        }
        __syncthreads();
        if (!last) { return; }
        read(sums);
#pragma unroll
        for (int i = 0; i < DECODE_LAYER_VALUES; i++) {
            int c = threadIdx.x + i * DECODE_LAYER_THREADS;
            if (c < C) { x[c] = (floatX)v[i]; }
        }
        for (int c = threadIdx.x; c <= C; c += DECODE_LAYER_THREADS) { state.y[0][c] = state.y[1][c] = 0; }
        if (threadIdx.x == 0) { *state.arrived = 0; }
    }
};

// How kernels 3 and 4 start, after they have begun to load weights: what does not depend on x; then x, of which the phase
// normalises its part. Returns the biases of the first products.
__device__ inline float decode_layer_start(DecodeLayerPhase& phase, const DecodeLayerHead& head,
                                           DecodeLayerReceived& received, const DecodeLayer& l) {
    phase.prepare(l.ln1w, l.ln1b);
    float bias = head.load_bias(l);
    decode_layer_init(received, head.cluster);
    grid_launch_dependents();
    cluster_sync(); // the barriers of all blocks are initialised
    grid_wait_dependency();
    decode_layer_load(phase.v, l.x, l.C);
    return bias;
}

// x += fcproj(gelu(fc(normed))) for the block's hidden units.
struct DecodeLayerMlp {
    static constexpr int VEC = x128::size, UNITS = DECODE_LAYER_UNITS, ROW_VECS = UNITS / VEC;
    int C, first, lane, warp; // first: of the block's units
    floatX *fc, *fcproj, *normed;
    __device__ DecodeLayerMlp(unsigned char* shared, const DecodeLayer& l) {
        DecodeLayerShared3 at(l.C, l.capacity);
        C = l.C, first = blockIdx.x * UNITS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        auto array = [&](size_t begin) { return reinterpret_cast<floatX*>(shared + begin); };
        fc = array(at.fc), fcproj = array(at.fcproj), normed = array(at.normed);
    }
    // Begins to load the weights: a group of cp.async.
    __device__ void load(const DecodeLayer& l) const {
        const floatX* from = l.fcw + (size_t)first * C; // whole rows
        for (int i = threadIdx.x * VEC; i < UNITS * C; i += DECODE_LAYER_THREADS * VEC) {
            cp_async_16(fc + i, from + i);
        }
        for (int i = threadIdx.x; i < C * ROW_VECS; i += DECODE_LAYER_THREADS) {
            int row = i / ROW_VECS, unit = i % ROW_VECS * VEC;
            cp_async_16(fcproj + row * UNITS + unit, l.fcprojw + (size_t)row * 4 * C + first + unit);
        }
        cp_async_commit();
    }
    // The bias of the warp's row `lane` of fc.
    __device__ float load_bias(const DecodeLayer& l) const {
        return lane < DECODE_LAYER_UNIT_ROWS ? (float)l.fcb[first + warp * DECODE_LAYER_UNIT_ROWS + lane] : 0.0f;
    }
    __device__ void run(float bias, DecodeLayerSum* sums) const {
        __shared__ alignas(16) floatX hidden[UNITS];
        float row_sums[DECODE_LAYER_UNIT_ROWS] = {};
        const floatX* rows = fc + warp * DECODE_LAYER_UNIT_ROWS * C;
        for (int c = lane * VEC; c < C; c += 32 * VEC) {
            x128 n = load128(normed + c);
            float elements[VEC];
#pragma unroll
            for (int e = 0; e < VEC; e++) { elements[e] = (float)n[e]; }
#pragma unroll
            for (int j = 0; j < DECODE_LAYER_UNIT_ROWS; j++) {
                row_sums[j] += decode_layer_dot(load128(rows + j * C + c), elements);
            }
        }
#pragma unroll
        for (int j = 0; j < DECODE_LAYER_UNIT_ROWS; j++) {
            float h = warp_sum(row_sums[j]) + __shfl_sync(0xFFFFFFFFu, bias, j);
            if (lane == 0) { hidden[warp * DECODE_LAYER_UNIT_ROWS + j] = (floatX)gelu(h); }
        }
        __syncthreads();

        int part = lane % ROW_VECS; // 4 lanes have a row of fcproj
        x128 own = load128(hidden + part * VEC);
        float elements[VEC];
#pragma unroll
        for (int e = 0; e < VEC; e++) { elements[e] = (float)own[e]; }
        const int rows_per_pass = DECODE_LAYER_THREADS / ROW_VECS;
        for (int pass = 0; pass < C; pass += rows_per_pass) { // all lanes together: shuffles
            int row = pass + threadIdx.x / ROW_VECS;
            x128 w = {};
            if (row < C) { w = load128(fcproj + row * UNITS + part * VEC); }
            float sum = decode_layer_dot(w, elements);
#pragma unroll
            for (int offset = ROW_VECS / 2; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
            }
            if (row < C && part == 0) { decode_layer_add(sums, row, C, sum); }
        }
    }
};

__global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_sm90_kernel3(const __grid_constant__ DecodeLayers layers,
                              const __grid_constant__ DecodeLayerState state) {
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    __shared__ DecodeLayerReceived received;
    DecodeLayer l = layers[0];
    DecodeLayerHead head(decode_layer_dynamic, l, DECODE_LAYER_RANKS3);
    DecodeLayerMlp mlp(decode_layer_dynamic, l);
    head.load(l);
    mlp.load(l);
    DecodeLayerPhase phase(l, state);
    float bias = decode_layer_start(phase, head, received, l);
    for (int i = 0; i < layers.num; i++) {
        bool goes_on = i + 1 < layers.num;
        DecodeLayer following = layers[goes_on ? i + 1 : i];
        DecodeLayerSum *y = state.y[i % 2], *x = state.x[(i + 1) % 2];
        phase.begin(head.normed, y, x, l.attprojb);
        cp_async_wait<1>(); // the other group is of the next phase
        __syncthreads();
        head.run(l, received, bias, y, i % 2);
        __syncthreads(); // all have read the weights and what was received
        if (threadIdx.x == 0) { decode_layer_expect(received, DECODE_LAYER_RANKS3); }
        goes_on ? head.load(following) : cp_async_commit();
        phase.prepare(l.ln2w, l.ln2b);
        bias = mlp.load_bias(l);
        phase.end();

        phase.read(y);
        phase.begin(head.normed, x, state.y[(i + 1) % 2], l.fcprojb);
        cp_async_wait<1>(); // the other group is of the next layer
        __syncthreads();
        mlp.run(bias, x);
        if (!goes_on) { break; }
        __syncthreads(); // all have read the weights
        mlp.load(following);
        phase.prepare(following.ln1w, following.ln1b);
        bias = head.load_bias(following);
        phase.end();
        phase.read(x);
        l = following;
    }
    phase.finish(l.x, state.x[layers.num % 2]);
}

// Returns the launch for `cluster` blocks per head with `bytes` of dynamic shared memory each.
static LaunchShape decode_layer_shape(int NH, int cluster, size_t bytes) {
    return LaunchShape(NH * cluster, DECODE_LAYER_THREADS, bytes, cluster, true);
}
// Returns true if the blocks have enough shared memory, with 8 KB for the other arrays, and all fit on the GPU together.
template <class Kernel> static bool decode_layer_fits(Kernel* kernel, int C, int NH, int cluster, size_t bytes) {
    int num_clusters = 0;
    if (C != NH * DECODE_LAYER_HS || C > DECODE_LAYER_VALUES * DECODE_LAYER_THREADS) { return false; }
    if (bytes + 8192 > 227 << 10 || !has_sm90a()) { return false; }
    LaunchConfig config(kernel, decode_layer_shape(NH, cluster, bytes), NULL);
    cudaCheck(cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config));
    return num_clusters >= NH;
}
static bool decode_layer_fits3(int C, int NH, int capacity) {
    return decode_layer_fits(decode_layer_sm90_kernel3, C, NH, DECODE_LAYER_RANKS3,
                             DecodeLayerShared3(C, capacity).bytes);
}
// It lives as long as the program, as decode_layer_turns does.
static DecodeLayerState* decode_layer_state(int C) {
    static DecodeLayerState state;
    static int size = 0;
    if (size != C) {
        size_t n = 4 * (C + 1) + 1;
        cudaCheck(cudaFree(state.x[0]));
        cudaCheck(cudaMalloc(&state.x[0], n * sizeof(DecodeLayerSum)));
        cudaCheck(cudaMemset(state.x[0], 0, n * sizeof(DecodeLayerSum)));
        state.x[1] = state.x[0] + C + 1, state.y[0] = state.x[1] + C + 1, state.y[1] = state.y[0] + C + 1;
        state.arrived = (int*)(state.y[1] + C + 1), size = C;
    }
    return &state;
}
void decode_layer3(const DecodeLayers& layers, DecodeLayerState* state, cudaStream_t stream) {
    const DecodeLayer& l = layers.first;
    size_t bytes = DecodeLayerShared3(l.C, l.capacity).bytes;
    launch_kernel(decode_layer_sm90_kernel3, decode_layer_shape(l.NH, DECODE_LAYER_RANKS3, bytes), stream, layers,
                  *state);
}

// ---- kernel 4: 3 for weights of any size: they pass through a ring in shared memory ----
// A block needs its weights in an order that is known in advance: its rows of qkv, its part of the cache, its rows of the
// projection, of fc, and its columns of fcproj, then those of the next layer. So they are loaded in chunks of up to 16 rows of
// C, as many ahead as fit. While the block waits for others, the chunks ahead arrive.

constexpr int DECODE_LAYER_SLOTS = 7;

// n rows in `num` chunks, all of `most` rows but the last one, which has the rest.
struct DecodeLayerChunks {
    int most, num;
    __device__ DecodeLayerChunks(int n, int most) : most(most), num((n + most - 1) / most) {}
};

__host__ __device__ inline int decode_layer_chunk_rows(int C) { // of C elements
    return 16 * C * (int)sizeof(floatX) * DECODE_LAYER_SLOTS <= 200 << 10 ? 16 : 8;
}
__host__ __device__ inline size_t decode_layer_bytes4(int C) { // slots, and the normalised vector
    return (size_t)(decode_layer_chunk_rows(C) * DECODE_LAYER_SLOTS + 1) * C * sizeof(floatX);
}

struct DecodeLayerRing {
    static constexpr int VEC = x128::size, HS = DECODE_LAYER_HS;
    const DecodeLayerHead& head;
    floatX* slots;
    int C, slot; // elements of a slot
    int used = 0, loaded = 0, layer = 0,
        next = 0;           // chunks; the one that is loaded next: of which layer, its number there
    DecodeLayerShare units; // of the MLP's hidden units of this head, this block's
    DecodeLayerChunks qkv, tokens, proj, fc, fcproj;

    // units of a block are a multiple of 8
    __device__ static DecodeLayerShare block_units(const DecodeLayerHead& head) {
        DecodeLayerShare vecs = decode_layer_share(4 * HS / VEC, head.rank, head.cluster);
        return {head.head * 4 * HS + vecs.first * VEC, vecs.n * VEC};
    }
    __device__ DecodeLayerRing(const DecodeLayerHead& h, unsigned char* shared)
        : head(h), slots(reinterpret_cast<floatX*>(shared)), C(h.C), slot(decode_layer_chunk_rows(h.C) * h.C),
          units(block_units(h)), qkv(h.rows.n, slot / C), tokens(h.tokens.n, slot / (2 * HS)),
          proj(h.outs.n, slot / HS), fc(units.n, slot / C), fcproj(C, units.n > 0 ? slot / units.n : C) {}

    // rows (n,size) to a slot, a warp per row; from(i): where row i begins
    template <class From> __device__ void load_rows(floatX* to, int n, From from) const {
        for (int i = head.warp; i < n; i += DECODE_LAYER_WARPS) {
            const floatX* row = from(i);
            for (int c = head.lane * VEC; c < C; c += 32 * VEC) { cp_async_16(to + i * C + c, row + c); }
        }
    }
    // The same for rows of num_vecs vectors, of which a warp loads several at once.
    template <class From> __device__ void load_short_rows(floatX* to, int n, int num_vecs, From from) const {
        int together = 32 / num_vecs, own = head.lane / num_vecs, c = head.lane % num_vecs * VEC;
        for (int i = head.warp * together + own; i < n && own < together; i += DECODE_LAYER_WARPS * together) {
            cp_async_16(to + i * num_vecs * VEC + c, from(i) + c);
        }
    }
    // Begins to load the next chunk: a group of cp.async, which is empty after the last one.
    __device__ void load(const DecodeLayers& layers) {
        floatX* to = slots + loaded++ % DECODE_LAYER_SLOTS * slot;
        DecodeLayer l = layers[layer < layers.num ? layer : 0];
        int j = next, C = this->C;
        const DecodeLayerHead& h = head;
        auto left = [&](int n, const DecodeLayerChunks& chunks) { return min(chunks.most, n - j * chunks.most); };
        auto is_in = [&](const DecodeLayerChunks& chunks) { // else j becomes a number in the chunks after these
            if (j < chunks.num) { return true; }
            j -= chunks.num;
            return false;
        };
        if (layer >= layers.num) {
        } else if (is_in(qkv)) {
            load_rows(to, left(h.rows.n, qkv),
                      [&](int i) { return l.qkvw + (size_t)h.weight_row(j * qkv.most + i) * C; });
        } else if (is_in(tokens)) {
            size_t first = (size_t)(h.tokens.first + j * tokens.most) * C + h.head * HS;
            int n = left(h.tokens.n, tokens);
            load_short_rows(to, n, HS / VEC, [&](int i) { return l.keys + first + (size_t)i * C; });
            load_short_rows(to + tokens.most * HS, n, HS / VEC,
                            [&](int i) { return l.values + first + (size_t)i * C; });
        } else if (is_in(proj)) {
            const floatX* first = l.attprojw + (size_t)(h.outs.first + j * proj.most) * C + h.head * HS;
            load_short_rows(to, left(h.outs.n, proj), HS / VEC, [&](int i) { return first + (size_t)i * C; });
        } else if (is_in(fc)) {
            load_rows(to, left(units.n, fc),
                      [&](int i) { return l.fcw + (size_t)(units.first + j * fc.most + i) * C; });
        } else if (units.n > 0) {
            const floatX* first = l.fcprojw + (size_t)j * fcproj.most * 4 * C + units.first;
            load_short_rows(to, left(C, fcproj), units.n / VEC, [&](int i) { return first + (size_t)i * 4 * C; });
        }
        cp_async_commit();
        if (++next == qkv.num + tokens.num + proj.num + fc.num + fcproj.num) { next = 0, layer++; }
    }
    __device__ void begin(const DecodeLayers& layers) {
        for (int i = 0; i < DECODE_LAYER_SLOTS - 1; i++) { load(layers); }
    }
    // The next chunk, which has arrived. The one before is given up: the block has read it, and another one is loaded there.
    __device__ const floatX* take(const DecodeLayers& layers) {
        cp_async_wait<DECODE_LAYER_SLOTS - 2>();
        __syncthreads();
        load(layers);
        return slots + used++ % DECODE_LAYER_SLOTS * slot;
    }

    // Calls result(i, x) for all n rows, x = the product of row i with `normed`, in all lanes of a warp.
    template <class Result> __device__ void products(const DecodeLayers& layers, const DecodeLayerChunks& chunks, int n,
                                                     const floatX* normed, Result result) {
        for (int first = 0; first < n; first += chunks.most) {
            const floatX* rows = take(layers);
            int end = min(n - first, chunks.most);
            for (int i = head.warp; i < end; i += DECODE_LAYER_WARPS) {
                float sum = 0.0f;
                for (int c = head.lane * VEC; c < C; c += 32 * VEC) {
                    x128 x = load128(normed + c);
                    float elements[VEC];
#pragma unroll
                    for (int e = 0; e < VEC; e++) { elements[e] = (float)x[e]; }
                    sum += decode_layer_dot(load128(rows + i * C + c), elements);
                }
                result(first + i, warp_sum(sum));
            }
        }
    }
};

__global__ void __launch_bounds__(DECODE_LAYER_THREADS)
    decode_layer_sm90_kernel4(const __grid_constant__ DecodeLayers layers,
                              const __grid_constant__ DecodeLayerState state, int cluster) {
    extern __shared__ __align__(128) unsigned char decode_layer_dynamic[];
    __shared__ DecodeLayerReceived received;
    __shared__ alignas(16) float hidden[DECODE_LAYER_HS]; // a quarter of a head's, as there are 4 blocks at least
    constexpr int VEC = x128::size, HS = DECODE_LAYER_HS;
    DecodeLayer l = layers[0];
    DecodeLayerHead head(decode_layer_dynamic, l, cluster);
    DecodeLayerRing ring(head, decode_layer_dynamic);
    head.normed = ring.slots + DECODE_LAYER_SLOTS * ring.slot;
    int C = l.C, lane = head.lane, warp = head.warp;
    ring.begin(layers);
    DecodeLayerPhase phase(l, state);
    float bias = decode_layer_start(phase, head, received, l);
    for (int i = 0; i < layers.num; i++) {
        bool goes_on = i + 1 < layers.num;
        l = layers[i];
        DecodeLayerSum *y = state.y[i % 2], *x = state.x[(i + 1) % 2];
        phase.begin(head.normed, y, x, l.attprojb);
        __syncthreads();
        ring.products(layers, ring.qkv, head.rows.n, head.normed, [&](int row, float sum) {
            float value = (float)(floatX)(sum + __shfl_sync(0xFFFFFFFFu, bias, row / DECODE_LAYER_WARPS));
            if (lane < cluster) {
                store_cluster_async(&received.qkv[head.rows.first + row], value, &received.qkv_there, lane);
            }
        });
        mbarrier_wait_cluster(&received.qkv_there, i % 2);
        head.store(l, received);
        DecodeLayerHead::Attention a = head.attend_begin(received);
        for (int first = 0; first < head.tokens.n; first += ring.tokens.most) {
            const floatX* keys = ring.take(layers);
            head.attend_tokens(a, keys, keys + ring.tokens.most * HS, min(head.tokens.n - first, ring.tokens.most));
        }
        head.attend_end(a, received);
        mbarrier_wait_cluster(&received.parts_there, i % 2);
        float attention[VEC];
        head.join(attention, received);
        for (int first = 0; first < head.outs.n; first += ring.proj.most) {
            const floatX* rows = ring.take(layers);
            head.project_out(attention, rows, head.outs.first + first, min(head.outs.n - first, ring.proj.most), y);
        }
        __syncthreads(); // all have read what was received
        if (threadIdx.x == 0) { decode_layer_expect(received, cluster); }
        phase.prepare(l.ln2w, l.ln2b);
        int unit = warp + DECODE_LAYER_WARPS * lane; // lane j has the bias of the warp's j-th unit
        bias = unit < ring.units.n ? (float)l.fcb[ring.units.first + unit] : 0.0f;
        phase.end();

        phase.read(y);
        phase.begin(head.normed, x, state.y[(i + 1) % 2], l.fcprojb);
        __syncthreads();
        ring.products(layers, ring.fc, ring.units.n, head.normed, [&](int row, float sum) {
            float h = gelu(sum + __shfl_sync(0xFFFFFFFFu, bias, row / DECODE_LAYER_WARPS));
            if (lane == 0) { hidden[row] = (float)(floatX)h; }
        });
        // A thread has a row of num_vecs vectors. Rows that are a multiple of 32 banks apart begin at different vectors.
        int num_vecs = ring.units.n / VEC, turn = num_vecs % 8 == 0   ? 1
                                                  : num_vecs % 4 == 0 ? 2
                                                  : num_vecs % 2 == 0 ? 4
                                                                      : 8;
        for (int first = 0; first < C; first += ring.fcproj.most) {
            const floatX* rows = ring.take(layers);
            int n = min(C - first, ring.fcproj.most);
            for (int row = threadIdx.x; row < n; row += DECODE_LAYER_THREADS) {
                float sum = 0.0f;
                for (int k = 0; k < num_vecs; k++) {
                    int part = (k + row / turn) % num_vecs * VEC;
                    float elements[VEC];
#pragma unroll
                    for (int e = 0; e < VEC; e++) { elements[e] = hidden[part + e]; }
                    sum += decode_layer_dot(load128(rows + row * ring.units.n + part), elements);
                }
                decode_layer_add(x, first + row, C, sum);
            }
        }
        if (!goes_on) { break; }
        DecodeLayer following = layers[i + 1];
        phase.prepare(following.ln1w, following.ln1b);
        bias = head.load_bias(following);
        phase.end();
        phase.read(x);
    }
    phase.finish(l.x, state.x[layers.num % 2]);
}

// Returns the most blocks per head with which all heads fit on the GPU together; 0: none.
static int decode_layer_cluster4(int C, int NH) {
    for (int cluster = 8; cluster >= 4; cluster--) {
        if (decode_layer_fits(decode_layer_sm90_kernel4, C, NH, cluster, decode_layer_bytes4(C))) { return cluster; }
    }
    return 0;
}
void decode_layer4(const DecodeLayers& layers, DecodeLayerState* state, int cluster, cudaStream_t stream) {
    const DecodeLayer& l = layers.first;
    launch_kernel(decode_layer_sm90_kernel4, decode_layer_shape(l.NH, cluster, decode_layer_bytes4(l.C)), stream,
                  layers, *state, cluster);
}

#endif // !defined(ENABLE_FP32)

// ---- CPU reference ----

static void decode_layer_norm_cpu(std::vector<double>& out, const double* x, const float* weight, const float* bias,
                                  int C, float epsilon) {
    double mean = 0, squares = 0;
    for (int c = 0; c < C; c++) { mean += x[c] / C; }
    for (int c = 0; c < C; c++) { squares += (x[c] - mean) * (x[c] - mean) / C; }
    out.resize(C);
    for (int c = 0; c < C; c++) { out[c] = (x[c] - mean) / sqrt(squares + epsilon) * weight[c] + bias[c]; }
}
static std::vector<double> decode_layer_product_cpu(const std::vector<double>& x, const float* weight,
                                                    const float* bias, int OC) {
    size_t K = x.size();
    std::vector<double> out(bias, bias + OC);
    parallel_for(OC, [&](size_t row) {
        for (size_t k = 0; k < K; k++) { out[row] += x[k] * weight[row * K + k]; }
    });
    return out;
}

// weights: of one layer; keys, values: its cache. x (C) goes from its input to its output.
static void decode_layer_cpu(std::vector<double>& x, float* keys, float* values, const float* weights, int now, int NH,
                             float epsilon) {
    int C = (int)x.size(), HS = C / NH;
    auto next = [&](size_t n) { return (weights += n) - n; };
    const float *ln1w = next(C), *ln1b = next(C), *qkvw = next((size_t)3 * C * C), *qkvb = next(3 * C);
    const float *attprojw = next((size_t)C * C), *attprojb = next(C), *ln2w = next(C), *ln2b = next(C);
    const float *fcw = next((size_t)4 * C * C), *fcb = next(4 * C), *fcprojw = next((size_t)4 * C * C),
                *fcprojb = next(C);
    std::vector<double> normed, attention(C);
    decode_layer_norm_cpu(normed, x.data(), ln1w, ln1b, C, epsilon);
    std::vector<double> qkv = decode_layer_product_cpu(normed, qkvw, qkvb, 3 * C);
    for (int c = 0; c < C; c++) { // the cache holds floatX, and the token attends to these rounded values
        keys[(size_t)now * C + c] = (float)(floatX)(float)qkv[C + c];
        values[(size_t)now * C + c] = (float)(floatX)(float)qkv[2 * C + c];
    }
    for (int h = 0; h < NH; h++) {
        std::vector<double> scores(now + 1);
        double largest = -INFINITY, total = 0;
        for (int t = 0; t <= now; t++) {
            for (int i = h * HS; i < (h + 1) * HS; i++) {
                scores[t] += qkv[i] * keys[(size_t)t * C + i] / sqrt((double)HS);
            }
            largest = std::max(largest, scores[t]);
        }
        for (double& score : scores) { total += score = exp(score - largest); }
        for (int i = h * HS; i < (h + 1) * HS; i++) {
            for (int t = 0; t <= now; t++) { attention[i] += scores[t] / total * values[(size_t)t * C + i]; }
        }
    }
    std::vector<double> projected = decode_layer_product_cpu(attention, attprojw, attprojb, C);
    for (int c = 0; c < C; c++) { x[c] += projected[c]; }
    decode_layer_norm_cpu(normed, x.data(), ln2w, ln2b, C, epsilon);
    std::vector<double> fch = decode_layer_product_cpu(normed, fcw, fcb, 4 * C);
    for (double& h : fch) { h = 0.5 * h * (1 + tanh(sqrt(2 / M_PI) * (h + 0.044715 * h * h * h))); }
    std::vector<double> out = decode_layer_product_cpu(fch, fcprojw, fcprojb, C);
    for (int c = 0; c < C; c++) { x[c] += out[c]; }
}

// The layers' weights: matrices of a size that keeps the size of what they multiply, norms near 1.
static void decode_layer_fill(float* weights, int L, int C, uint64_t seed) {
    size_t c = C;
    struct {
        size_t n;
        float scale, mean;
    } tensors[] = {{c, 0.1f, 1.0f},
                   {c, 0.1f, 0.0f},
                   {3 * c * c, 1.0f / sqrtf(C), 0.0f},
                   {3 * c, 0.1f, 0.0f},
                   {c * c, 1.0f / sqrtf(C), 0.0f},
                   {c, 0.1f, 0.0f},
                   {c, 0.1f, 1.0f},
                   {c, 0.1f, 0.0f},
                   {4 * c * c, 1.0f / sqrtf(C), 0.0f},
                   {4 * c, 0.1f, 0.0f},
                   {4 * c * c, 0.5f / sqrtf(C), 0.0f},
                   {c, 0.1f, 0.0f}};
    for (int l = 0; l < L; l++) {
        for (auto& t : tensors) {
            bench_fill_normal(weights, t.n, ++seed, t.scale, t.mean);
            weights += t.n;
        }
    }
}

static void declare(Bench& b) {
    b.varies("BTH");
    int B = b.B, T = b.T, C = b.C, NH = b.NH, capacity = T <= 1024 ? std::min(T + T / 2, 1024) : T + T / 2,
        L = T >= 512 ? 12 : 1 + T % 3; // state that one launch leaves to the next differs most with one layer
    // positions of the texts: in small shapes unequal, and of several the third one has ended, of 12 the first eight, of 10 the others
    auto ended = [=](int t) { return t == 2 || (B == 12 && t < 8) || (B == 10 && t >= 8); };
    auto now = [=](int t) { return L == 12 ? T - 1 : ended(t) ? -1 : T - 1 - t * 7 % T; };
    cudaStream_t stream = b.stream;
    size_t c = C, BC = (size_t)B * C, cache = (size_t)B * capacity * C, layer = 12 * c * c + 13 * c, n = L * cache;
    float epsilon = L == 2 ? NORM_EPSILON : 0.5f; // another value shows whether a kernel has one of its own
    // large: the residual stream of a trained model has values of some hundreds in a few columns
    bool large = b.cases({"normal", "large values in x"}) == 1;
    Buffer<floatX> x_before = b.input_from<floatX>("x_before", BC, [=, seed = b.next_seed()](float* x) {
        bench_fill_normal(x, BC, seed, 1.0f, 0.1f);
        for (size_t i = 0; large && i < BC; i += 97) { x[i] *= 256.0f; }
    });
    Buffer<floatX> keys_before = b.input<floatX>("keys_before", n), values_before = b.input<floatX>("values_before", n);
    Buffer<floatX> weights = b.input_from<floatX>(
        "weights", L * layer, [=, seed = b.next_seed()](float* p) { decode_layer_fill(p, L, C, seed); });
    Buffer<int> position = b.input_from<int>("position", B, [=](float* p) {
        for (int t = 0; t < B; t++) { p[t] = (float)now(t); }
    });
    float ulp = ulp_of<floatX>();
    Tolerance tolerance = {(3 + L) * ulp + 1e-5f, 2 * ulp + 1e-5f};
    Buffer<floatX> x = b.inout<floatX>("x", BC, x_before, tolerance);
    Buffer<floatX> keys = b.inout<floatX>("keys", n, keys_before, tolerance);
    Buffer<floatX> values = b.inout<floatX>("values", n, values_before, tolerance);
    Buffer<floatX> qkv = b.scratch<floatX>("qkv", 3 * BC), atty = b.scratch<floatX>("atty", BC);
    Buffer<floatX> fch = b.scratch<floatX>("fch", 4 * BC);
    size_t num_scratch = decode_attention_scratch(B, C, NH, capacity);
    Buffer<float> scratch = b.state_of_launches<float>("scratch", num_scratch);
    b.reference([=] {
        memcpy(keys.host, keys_before.host, n * sizeof(float));
        memcpy(values.host, values_before.host, n * sizeof(float));
        for (int t = 0; t < B; t++) {
            std::vector<double> out(x_before.host + t * C, x_before.host + (t + 1) * C);
            for (int l = 0; l < L && now(t) >= 0; l++) {
                size_t own = l * cache + (size_t)t * capacity * C;
                decode_layer_cpu(out, keys.host + own, values.host + own, weights.host + l * layer, now(t), NH,
                                 epsilon);
            }
            std::copy(out.begin(), out.end(), x.host + t * C);
        }
    });
    double by_position = 0; // elements of the cache
    for (int t = 0; t < B; t++) { by_position += 2.0 * L * (now(t) + 1) * C; }
    b.cost(12.0 * L * C * C * sizeof(floatX) + by_position * sizeof(floatX), 24.0 * B * L * C * C + 2 * by_position,
           by_position * sizeof(floatX), 2 * by_position);
    b.reads_only();
    DecodeLayers layers = {{x, keys, values, position, C, NH, capacity, epsilon}, L, layer, cache};
    const floatX* p = weights;
    DecodeLayer& l = layers.first;
    auto next = [&](size_t size) { return (p += size) - size; };
    l.ln1w = next(c), l.ln1b = next(c), l.qkvw = next(3 * c * c), l.qkvb = next(3 * c);
    l.attprojw = next(c * c), l.attprojb = next(c), l.ln2w = next(c), l.ln2b = next(c);
    l.fcw = next(4 * c * c), l.fcb = next(4 * c), l.fcprojw = next(4 * c * c), l.fcprojb = next(c);
    b.kernel(1, "five launches: four products and attention",
             [=](int) {
                 decode_layer1(layers, B, {qkv, atty, fch, scratch}, stream);
                 for (int t = 0; t < B; t++) { // of a text that has ended it leaves anything
                     if (now(t) >= 0) { continue; }
                     cudaCheck(cudaMemcpyAsync(x + t * C, x_before + t * C, C * sizeof(floatX),
                                               cudaMemcpyDeviceToDevice, stream));
                 }
             },
             {0});
#if !defined(ENABLE_FP32)
    if (B == 1 && decode_layer_cluster(C, NH, capacity, b.dry ? 132 : num_multiprocessors())) {
        b.kernel(
            2, "three launches: a cluster per head for qkv, attention and projection",
            [=](int) { decode_layer2(layers, decode_layer_turns(C), fch, stream); }, {0}, -90);
    }
    if (B == 1 && (b.dry || decode_layer_fits3(C, NH, capacity))) {
        b.kernel(
            3, "one launch for all layers, with a barrier of all blocks after each half of one",
            [=](int) { decode_layer3(layers, decode_layer_state(C), stream); }, {0}, -90);
    }
    int most = b.dry ? 8 : decode_layer_cluster4(C, NH);
    std::vector<int> sizes = {0}; // blocks per head; a launch of more blocks than fit on the GPU would never end
    for (int cluster = 4; cluster < most; cluster++) {
        if (b.dry || decode_layer_fits(decode_layer_sm90_kernel4, C, NH, cluster, decode_layer_bytes4(C))) {
            sizes.push_back(cluster);
        }
    }
    if (B == 1 && most > 0) {
        b.kernel(
            4, "3 with all weights through a ring of chunks in shared memory",
            [=](int cluster) { decode_layer4(layers, decode_layer_state(C), cluster ? cluster : most, stream); }, sizes,
            -90);
        b.config("blocks per head");
    }
    // with B = 1 kernel 6 is launched as kernel 5 is, for comparison; decode_layers() takes it from two texts on
    bool runs5 = B == 1 && (b.dry || decode_layers_runs(1, C, 4 * C, NH, capacity));
    bool runs6 = b.dry || decode_layers_runs(std::max(B, 2), C, 4 * C, NH, capacity);
    if (runs5 || runs6) {
        int cluster = b.dry ? 8 : decode_layer_blocks(C);
        Buffer<floatX> packed = b.input_from<floatX>("packed", L * 12 * c * c, [=](float* to) {
            const float* host = weights.host;
            // where they begin in a layer
            const size_t matrices[] = {2 * c, 5 * c + 3 * c * c, 8 * c + 4 * c * c, 12 * c + 8 * c * c};
            DecodeLayerPacked p(C, cluster);
            parallel_for((size_t)L * NH * cluster, [&](size_t i) {
                size_t block = i / L, l = i % L;
                for (int v = 0; v < p.end * 32; v++) {
                    auto source = p.source(v / 32, v % 32, block / cluster, block % cluster);
                    const float* from = host + l * layer + matrices[source.matrix] + source.offset;
                    std::copy(from, from + x128::size, to + (i * p.end * 32 + v) * x128::size);
                }
            });
        });
        Buffer<uint64_t> sums = b.state_of_launches<uint64_t>("sums", b.dry ? 0 : decode_layers_scratch(C, NH));
        auto run = [=](int kernel) { decode_layers(layers, B, packed, sums, stream, kernel); };
        if (runs5) {
            b.kernel(
                5, "one launch, weights packed in the order of their use, mma, results that carry their readiness",
                [=](int) { run(5); }, {0}, -90);
        }
        if (runs6) {
            b.kernel(
                6, "5 for 2 to 16 texts (here also for one), each in a column of mma's other operand",
                [=](int) { run(6); }, {0}, -90);
        }
    }
    b.promoted(B == 1 ? 5 : 6);
#endif
}

int main(int argc, char** argv) {
    return bench_main(argc, argv, "decode_layer", declare, {1, 512, 768, 12, 50257},
                      {{1, 1, 64, 1},
                       {8, 70, 128, 2},
                       {3, 35, 128, 2},
                       {16, 70, 128, 2},
                       {11, 300, 128, 2},
                       {12, 39, 128, 2},
                       {10, 40, 128, 2},
                       {5, 300, 768, 12},
                       {1, 1024, 128, 2},
                       {2, 1024, 128, 2},
                       {1, 17, 72, 3},
                       {1, 68, 320, 5},
                       {1, 90, 128, 2},
                       {1, 200, 256, 4},
                       {1, 77, 512, 4},
                       {1, 300, 768, 12}});
}
