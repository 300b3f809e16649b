/*
encoder_backward: adds the rows of dout (B,T,C) to their tokens' rows of dwte (Vp,C) and their positions' rows of dwpe (maxT,C)
Constraint: C % x128::size == 0, B*T <= 2^30. Deterministic.
Kernel 6 of encoder_backward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/tuned.h"

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
