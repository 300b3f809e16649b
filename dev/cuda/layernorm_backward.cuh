/*
layernorm_backward: dinp (N,C) = gradient of inp + dresidual (N,C), which may be NULL or dinp | dweight, dbias (C) += |
dinp_sums (C), or NULL, += the column sums of dinp | dout, inp (N,C), weight (C), mean, rstd (N) | scratch in floats
Constraint: C % 8 == 0; C <= 6144 in fp32, 8192 in 16 bits.
Kernels 8 (before sm_80, which has no cp.async, or too little shared memory), 10 (the next rows by cp.async) and 11
(4 rows at a time, for long rows) of layernorm_backward.cu, which has the other kernels, errors and sources.
*/
#pragma once

#include "../../llmc/column_sums.cuh"
#include "../../llmc/cuda_common.cuh"
#include "../../llmc/profile.cuh"
#include "../../llmc/ptx.cuh"
#include "../../llmc/tuned.h"
#include "matmul_backward_bias.cuh"

// ==== promoted: layernorm_backward ====
// ---- kernel 8: column sums also in registers; teams of several warps for long rows ----

// A team of 1, 2, 4, 8 or 16 warps processes one row at a time; each thread holds up to 3 vectors of the row:
//     vector of the row   0 .. team_size-1 | team_size .. 2*team_size-1 | 2*team_size ..
//     held by thread      0 .. team_size-1 | 0 .. team_size-1           | 0 ..             of the team
//     as its vector       j = 0            | j = 1                      | j = 2
// A thread has the same columns in every row, so it sums dweight and dbias in registers. At the end each block adds up
// its teams and writes one partial sum per column; column_sums() adds the partial sums of all blocks in a fixed order.
constexpr int LAYERNORM_BACKWARD_MAX_VECS = 3;
constexpr int LAYERNORM_BACKWARD_THREADS_PER_SM = 512; // leaves 128 registers per thread
constexpr int LAYERNORM_BACKWARD_MIN_BLOCK_SIZE = 128; // bounds the number of blocks, and so the number of partial sums
constexpr int LAYERNORM_BACKWARD_PADDING = 4; // floats after each row of `columns`, against bank conflicts in 16 bits

// Sums a and b over the team; all threads of the team get the same bits. Callers alternate between two `shared` (2, 16)
// buffers, so one barrier per call is enough.
__device__ inline void layernorm_backward_team_sums(float& a, float& b, float (*shared)[16], int team_warps) {
    // the lower half-warp sums a, the upper half-warp sums b: 6 shuffles instead of 10
    bool upper = threadIdx.x & 16;
    float mine = upper ? b : a, other = upper ? a : b;
    mine += __shfl_xor_sync(0xFFFFFFFFu, other, 16);
    for (int offset = 8; offset > 0; offset /= 2) { mine += __shfl_xor_sync(0xFFFFFFFFu, mine, offset); }
    other = __shfl_xor_sync(0xFFFFFFFFu, mine, 16);
    a = upper ? other : mine;
    b = upper ? mine : other;
    if (team_warps == 1) { return; }
    int warp = threadIdx.x / 32, team = warp / team_warps;
    if (threadIdx.x % 32 == 0) { shared[0][warp] = a, shared[1][warp] = b; }
    __syncthreads(); // safe for the whole block, because all its teams make the same number of calls
    a = b = 0.0f;
    for (int i = team * team_warps; i < (team + 1) * team_warps; i++) { a += shared[0][i], b += shared[1][i]; }
}

// Writes row blockIdx.x of partials (gridDim.x, num_sums, C): dweight, dbias and, if num_sums is 3, the columns of dinp,
// summed over the block's teams. The sums are exchanged through `columns` (num_sums * x128::size, blockDim.x + padding) in
// shared memory, one vector per thread at a time.
template <int num_vecs, int num_sums>
__device__ inline void layernorm_backward_block_sums(float* partials, const float (*dw)[x128::size],
                                                     const float (*db)[x128::size], const float (*dx)[x128::size],
                                                     float* columns, int C, int team_size) {
    int num_teams = blockDim.x / team_size, stride = team_size * x128::size;
    int pitch = blockDim.x + LAYERNORM_BACKWARD_PADDING;
#pragma unroll
    for (int j = 0; j < num_vecs; j++) {
        for (int k = 0; k < x128::size; k++) {
            columns[k * pitch + threadIdx.x] = dw[j][k];
            columns[(x128::size + k) * pitch + threadIdx.x] = db[j][k];
            if (num_sums == 3) { columns[(2 * x128::size + k) * pitch + threadIdx.x] = dx[j][k]; }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < num_sums * stride; i += blockDim.x) {
            int which = i / stride, column = i % stride; // which: 0 is dweight, 1 is dbias, 2 the columns of dinp
            int member = column / x128::size, k = column % x128::size, c = j * stride + column;
            float sum = 0.0f;
            for (int t = 0; t < num_teams; t++) {
                sum += columns[(which * x128::size + k) * pitch + t * team_size + member];
            }
            if (c < C) { partials[((size_t)blockIdx.x * num_sums + which) * C + c] = sum; }
        }
        __syncthreads();
    }
}

// one_warp: each team is one warp. It then needs no barrier, so the teams may process different numbers of rows.
template <int num_vecs, bool one_warp> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel8(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                               const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                               int C, int team_warps) {
    __shared__ float row_sums[2][2][16];
    extern __shared__ __align__(128) float layernorm_backward_columns[]; // (2 * x128::size, blockDim.x + padding)
    int team_size = 32 * team_warps, num_teams = blockDim.x / team_size;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size, stride = team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C; // only a thread's last vector can be past the row's end
    float inv_C = 1.0f / C;
    int parity = 0;
    grid_wait_dependency(); // layernorm_backward10() launches it early

    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {};
    for (int turn = blockIdx.x * num_teams; turn < N; turn += gridDim.x * num_teams) {
        int row = turn + team;
        if (one_warp && row >= N) { break; }
        bool valid = one_warp || row < N;
        size_t start = (size_t)row * C + first;
        x128 dy[num_vecs] = {}, x[num_vecs] = {}, dx[num_vecs] = {}; // dy is 0 past the row's end and adds nothing
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            if (valid && (j < num_vecs - 1 || last_valid)) {
                dy[j] = load128(dout + start + j * stride);
                x[j] = load128(inp + start + j * stride);
            }
        }
        if (dresidual && valid) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                if (j < num_vecs - 1 || last_valid) { dx[j] = load128(dresidual + start + j * stride); }
            }
        }
        float m = valid ? mean[row] : 0.0f, r = valid ? rstd[row] : 0.0f, sum = 0.0f, dot = 0.0f,
              dnorm[num_vecs][x128::size];
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            x128 w = {}; // the weights are reread from L1 for every row, because no registers are left for them
            if (j < num_vecs - 1 || last_valid) { w = load128(weight + first + j * stride); }
            for (int k = 0; k < x128::size; k++) {
                float d = (float)dy[j][k], norm = ((float)x[j][k] - m) * r;
                dnorm[j][k] = d * (float)w[k];
                sum += dnorm[j][k];
                dot += dnorm[j][k] * norm;
                dw[j][k] += d * norm;
                db[j][k] += d;
            }
        }
        layernorm_backward_team_sums(sum, dot, row_sums[parity], one_warp ? 1 : team_warps);
        parity = 1 - parity;
        sum *= inv_C;
        dot *= inv_C;
        // The shuffle does not change m, but the compiler cannot know that, so it recomputes norm from x below. Without
        // the shuffle it would keep norm in registers and spill.
        m = __shfl_sync(0xFFFFFFFFu, m, 0);
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            for (int k = 0; k < x128::size; k++) {
                float norm = ((float)x[j][k] - m) * r;
                dx[j][k] = (floatX)((float)dx[j][k] + r * (dnorm[j][k] - sum - norm * dot));
            }
            if (valid && (j < num_vecs - 1 || last_valid)) { store128(dinp + start + j * stride, dx[j]); }
        }
    }

    layernorm_backward_block_sums<num_vecs, 2>(partials, dw, db, NULL, layernorm_backward_columns, C, team_size);
}

// Number of floats in scratch: the partial sums of dweight, dbias and the columns of dinp of every block, and what
// matmul_backward_bias() needs where it sums the columns of dinp.
size_t layernorm_backward_scratch(int N, int C) {
    int blocks_per_sm = LAYERNORM_BACKWARD_THREADS_PER_SM / LAYERNORM_BACKWARD_MIN_BLOCK_SIZE;
    return (size_t)num_multiprocessors() * blocks_per_sm * 3 * C + matmul_backward_bias_scratch(N, C);
}

// Returns the number of warps per team. In 16 bits, a thread in a team of several warps holds at most 2 vectors,
// because 3 would spill.
inline int layernorm_backward_team_warps(int num_vectors) {
    const int team_vecs = sizeof(floatX) == 2 ? 2 : LAYERNORM_BACKWARD_MAX_VECS;
    int team_warps = 1;
    while (num_vectors > 32 * (team_warps > 1 ? team_vecs : LAYERNORM_BACKWARD_MAX_VECS) * team_warps) {
        team_warps *= 2;
    }
    return team_warps;
}

inline auto layernorm_backward_choose8(int num_vecs, int team_warps) {
    if (team_warps > 1) {
#if defined(ENABLE_FP32)
        if (num_vecs == 3) { return layernorm_backward_kernel8<3, false>; }
#endif
        return layernorm_backward_kernel8<2, false>;
    }
    return num_vecs == 1   ? layernorm_backward_kernel8<1, true>
           : num_vecs == 2 ? layernorm_backward_kernel8<2, true>
                           : layernorm_backward_kernel8<3, true>;
}

typedef void (*LayernormBackwardKernel)(floatX*, float*, const floatX*, const floatX*, const floatX*, const floatX*,
                                        const float*, const float*, int, int, int);

// How to launch the kernel that writes dinp and partials (grid_size, num_sums, C).
struct LayernormBackwardLaunch {
    LayernormBackwardKernel kernel;
    int grid_size, block_size, num_vecs, team_warps, num_sums;
    size_t shared_bytes;
};

// Chooses the instance and the grid of kernel 8 for rows of C elements. A block is at least one team.
inline LayernormBackwardLaunch layernorm_backward_launch8(int N, int C, int block_size, const Execution& exec) {
    int num_vectors = C / x128::size, team_warps = layernorm_backward_team_warps(num_vectors);
    require(N >= 1 && C >= 8 && C % 8 == 0 && team_warps <= 16);
    block_size = max(block_size, 32 * team_warps);
    require(block_size % (32 * team_warps) == 0);
    require(block_size >= LAYERNORM_BACKWARD_MIN_BLOCK_SIZE && block_size <= LAYERNORM_BACKWARD_THREADS_PER_SM);
    int num_vecs = ceil_div(num_vectors, 32 * team_warps), num_teams = block_size / (32 * team_warps);
    int grid_size = exec.free_sms() * (LAYERNORM_BACKWARD_THREADS_PER_SM / block_size);
    size_t shared_bytes = 2 * x128::size * (block_size + LAYERNORM_BACKWARD_PADDING) * sizeof(float);
    auto kernel = layernorm_backward_choose8(num_vecs, team_warps);
    return {kernel, min(grid_size, ceil_div(N, num_teams)), block_size, num_vecs, team_warps, 2, shared_bytes};
}

// ---- kernel 10: cp.async prefetches the next row, and programmatic dependent launch of the second kernel ----

constexpr int LAYERNORM_BACKWARD_STAGES = 2;

// Kernel 8 with one warp per team and the next row in flight: cp.async copies it into a ring in shared memory while the
// current row is summed. Each thread reads only what it copied itself, so it waits for its own copies, without barrier.
//                before the loop   1st row           2nd row           3rd row
//     stage 0    copy row 0        read 0, copy 2    (2 in flight)     read 2, copy 4
//     stage 1    copy row 1        (1 in flight)     read 1, copy 3    (3 in flight)
// num_sums: 2, or 3 to also sum the columns of dinp.
template <int num_vecs, int num_sums> __global__ void __launch_bounds__(LAYERNORM_BACKWARD_THREADS_PER_SM, 1)
    layernorm_backward_kernel10(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                                int C, int /*team_warps*/) {
    // (stages, num_vecs, 3, blockDim.x); 3: dout, inp, dresidual
    extern __shared__ __align__(128) int4 layernorm_backward_ring[];
    const int team_size = 32, stride = team_size * x128::size;
    int num_teams = blockDim.x / team_size, row_step = gridDim.x * num_teams;
    int team = threadIdx.x / team_size, first = threadIdx.x % team_size * x128::size;
    bool last_valid = first + (num_vecs - 1) * stride < C;
    float inv_C = 1.0f / C;
    int stage = 0;
    grid_launch_dependents();
    grid_wait_dependency();

    // one commit group per row, empty past the last row, so that the number of groups in flight stays the same
    auto fetch = [&](int row, int to_stage) {
        if (row < N) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                size_t i = (size_t)row * C + first + j * stride;
                bool valid = j < num_vecs - 1 || last_valid;
                int4* slot = layernorm_backward_ring + (to_stage * num_vecs + j) * 3 * blockDim.x + threadIdx.x;
                // an invalid copy writes zeros and reads nothing, but still needs a valid address
                cp_async_16(slot, dout + (valid ? i : 0), valid);
                cp_async_16(slot + blockDim.x, inp + (valid ? i : 0), valid);
                bool add = valid && dresidual;
                cp_async_16(slot + 2 * blockDim.x, add ? dresidual + i : dout, add);
            }
        }
        cp_async_commit();
    };
    auto vector_of_weight = [&](int j) { // the same for all rows, so these loads hit L1
        return to_floats(j < num_vecs - 1 || last_valid ? load128(weight + first + j * stride) : x128());
    };
    float dw[num_vecs][x128::size] = {}, db[num_vecs][x128::size] = {}, dx_sum[num_vecs][x128::size] = {};
    int row = blockIdx.x * num_teams + team;
    for (int i = 0; i < LAYERNORM_BACKWARD_STAGES; i++) { fetch(row + i * row_step, i); }
    for (; row < N; row += row_step) {
        const floatX* slots =
            (const floatX*)(layernorm_backward_ring + stage * num_vecs * 3 * blockDim.x + threadIdx.x);
        int pitch = blockDim.x * x128::size;
        float m = mean[row], r = rstd[row], sum = 0.0f, dot = 0.0f;
        cp_async_wait<LAYERNORM_BACKWARD_STAGES - 1>();
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            auto dy = to_floats(load128(slots + 3 * j * pitch)), x = to_floats(load128(slots + (3 * j + 1) * pitch));
            auto w = vector_of_weight(j);
            for (int k = 0; k < x128::size; k++) {
                float norm = (x[k] - m) * r, dnorm = dy[k] * w[k];
                sum += dnorm;
                dot += dnorm * norm;
                dw[j][k] += dy[k] * norm;
                db[j][k] += dy[k];
            }
        }
        layernorm_backward_team_sums(sum, dot, nullptr, 1);
        // dinp = dresidual + rstd * (dnorm - sum - norm * dot) is a sum of dresidual, dnorm and inp with factors of the row
        float of_inp = -r * r * dot * inv_C, constant = -r * sum * inv_C - of_inp * m;
        __syncwarp(); // makes the compiler reread the row from shared memory; keeping it in registers would spill
#pragma unroll
        for (int j = 0; j < num_vecs; j++) {
            auto dy = to_floats(load128(slots + 3 * j * pitch)), x = to_floats(load128(slots + (3 * j + 1) * pitch));
            auto dx = to_floats(load128(slots + (3 * j + 2) * pitch)), w = vector_of_weight(j);
            x128 result;
            for (int k = 0; k < x128::size; k++) {
                float y = dx[k] + constant + r * (dy[k] * w[k]) + of_inp * x[k];
                if (num_sums == 3) { dx_sum[j][k] += y; }
                result[k] = (floatX)y;
            }
            if (j < num_vecs - 1 || last_valid) { store128(dinp + (size_t)row * C + first + j * stride, result); }
        }
        fetch(row + LAYERNORM_BACKWARD_STAGES * row_step, stage); // the row in this stage has been read
        stage = (stage + 1) % LAYERNORM_BACKWARD_STAGES;
    }
    cp_async_wait<0>();
    __syncthreads(); // now all threads have read the ring, and the column sums may reuse its memory

    layernorm_backward_block_sums<num_vecs, num_sums>(partials, dw, db, dx_sum, (float*)layernorm_backward_ring, C,
                                                      team_size);
}

// Chooses kernel 10 if a team is one warp, the device code has cp.async and the ring fits in shared memory; otherwise
// kernel 8, which always has two sums.
inline LayernormBackwardLaunch layernorm_backward_launch10(int N, int C, int block_size, int num_sums,
                                                           const Execution& exec) {
    LayernormBackwardLaunch l = layernorm_backward_launch8(N, C, block_size, exec);
    size_t sums_bytes = num_sums * x128::size * (block_size + LAYERNORM_BACKWARD_PADDING) * sizeof(float);
    LayernormBackwardKernel kernel = NULL;
    with_constant<3>(l.num_vecs, [&](auto n) {
        kernel = num_sums == 3 ? layernorm_backward_kernel10<n.value, 3> : layernorm_backward_kernel10<n.value, 2>;
    });
    size_t ring_bytes = (size_t)LAYERNORM_BACKWARD_STAGES * l.num_vecs * 3 * l.block_size * sizeof(x128);
    size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4 * 16 * sizeof(float);
    if (l.team_warps == 1 && compiled_arch(kernel) >= 80 && max(ring_bytes, sums_bytes) <= limit) {
        l.kernel = kernel, l.num_sums = num_sums;
        l.shared_bytes = max(ring_bytes, sums_bytes);
    }
    return l;
}

// threads: of a block; 0: 512. dinp_sums: see layernorm_backward
void layernorm_backward10(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                          const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                          const float* mean, const float* rstd, int N, int C, const Execution& exec, int threads) {
    LayernormBackwardLaunch l = layernorm_backward_launch10(N, C, threads ? threads : 512, dinp_sums ? 3 : 2, exec);
    launch_early(l.kernel, dim3(l.grid_size), dim3(l.block_size), l.shared_bytes, exec, dinp, scratch, dout, dresidual,
                 inp, weight, mean, rstd, N, C, l.team_warps);
    column_sums<16>(dweight, dbias, l.num_sums == 3 ? dinp_sums : NULL, scratch, l.grid_size, C, exec);
    scratch += (size_t)l.grid_size * l.num_sums * C; // its terms may have to wait: exec.sums
    if (dinp_sums && l.num_sums < 3) { matmul_backward_bias(dinp_sums, scratch, dinp, N, C, exec); }
}
// ---- kernel 11: 5 with the next rows copied ahead by cp.async, for rows that are longer than a warp holds ----

constexpr int LAYERNORM_BACKWARD_BLOCK_SIZE11 = 256; // the largest; two blocks leave 128 registers per thread

// A block processes `rows` rows at a time; thread t holds the vectors t, t + blockDim.x ... of each row. While the sums of
// these rows are computed, cp.async copies the rows of the next turns into a ring in shared memory. A thread reads only what
// it copied itself, so the only barrier is that of the row sums. dy, x and dx are read from the ring a second time for dinp:
// that costs less than the registers that would hold them. num_sums: as in kernel 10.
template <int num_vecs, int rows, int num_sums>
__global__ void __launch_bounds__(LAYERNORM_BACKWARD_BLOCK_SIZE11, num_vecs == 1 ? 2 : 1)
    layernorm_backward_kernel11(floatX* dinp, float* partials, const floatX* dout, const floatX* dresidual,
                                const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                                int C) {
    static_assert(num_vecs * rows == 4);
    extern __shared__ __align__(128) int4 layernorm_backward_ring11[]; // (stages, rows, num_vecs, 3, blockDim.x)
    // [stage][warp]: sum and dot of each row. The stages alternate, so one barrier per turn is enough
    __shared__ float shared[LAYERNORM_BACKWARD_STAGES][LAYERNORM_BACKWARD_BLOCK_SIZE11 / 32][8];
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
    auto slots = [&](int of_stage) { return layernorm_backward_ring11 + of_stage * 12 * blockDim.x + threadIdx.x; };
    // what is past the end of a row, or of all rows, becomes 0 and adds nothing
    auto fetch = [&](int start, int to_stage) {
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
        cp_async_wait<LAYERNORM_BACKWARD_STAGES - 1>();
        const int4* own = slots(stage);
        auto vector = [=](int i, int j, int which) { // 0: dout, 1: inp, 2: dresidual
            return to_floats(vec128_from_bits<floatX>(own[((i * num_vecs + j) * 3 + which) * blockDim.x]));
        };
#pragma unroll
        for (int i = 0; i < rows; i++) {
#pragma unroll
            for (int j = 0; j < num_vecs; j++) {
                auto dy = vector(i, j, 0), x = vector(i, j, 1), scale = to_floats(w[j]);
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
        static_assert(LAYERNORM_BACKWARD_BLOCK_SIZE11 <= 8 * 32); // this lane: sum lane % 8 of two of the warps
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
                auto dy = vector(i, j, 0), x = vector(i, j, 1), dx = vector(i, j, 2), scale = to_floats(w[j]);
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
    cp_async_wait<0>();
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

// Vectors per thread of kernel 11; 0 if a row is too long for it, or the device code has no cp.async.
inline int layernorm_backward_vecs11(int C) {
    int num_vecs = ceil_div(C / x128::size, LAYERNORM_BACKWARD_BLOCK_SIZE11);
    return num_vecs <= 2 && compiled_arch(layernorm_backward_kernel11<1, 4, 2>) >= 80 ? num_vecs : 0;
}

// threads_per_sm: of the blocks that run side by side on an SM; 0: two blocks, or one of the largest. dinp_sums: see
// layernorm_backward
void layernorm_backward11(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                          const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                          const float* mean, const float* rstd, int N, int C, const Execution& exec,
                          int threads_per_sm) {
    int num_vecs = layernorm_backward_vecs11(C);
    require(C % x128::size == 0 && num_vecs > 0);
    int block_size = 32 * ceil_div(C / x128::size, 32 * num_vecs), rows = 4 / num_vecs, resident;
    int blocks_per_sm = threads_per_sm ? min(max(threads_per_sm / block_size, 1), 4)
                                       : (block_size < LAYERNORM_BACKWARD_BLOCK_SIZE11 ? 2 : 1);
    auto kernel = layernorm_backward_kernel11<1, 4, 2>;
    with_constant<2>(num_vecs, [&](auto n) {
        constexpr int vecs = n.value;
        kernel =
            dinp_sums ? layernorm_backward_kernel11<vecs, 4 / vecs, 3> : layernorm_backward_kernel11<vecs, 4 / vecs, 2>;
    });
    size_t ring_bytes = (size_t)LAYERNORM_BACKWARD_STAGES * 12 * block_size * sizeof(x128);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)ring_bytes));
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block_size, ring_bytes));
    int grid_size = min(exec.free_sms() * min(max(resident, 1), blocks_per_sm), ceil_div(N, rows));
    launch_early(kernel, dim3(grid_size), dim3(block_size), ring_bytes, exec, dinp, scratch, dout, dresidual, inp,
                 weight, mean, rstd, N, C);
    column_sums<16>(dweight, dbias, dinp_sums, scratch, grid_size, C, exec);
}

// Whether a row is longer than what kernel 10 holds in a warp, and kernel 11 takes it.
inline bool layernorm_backward_is_wide(int C) {
    return layernorm_backward_team_warps(C / x128::size) > 1 && layernorm_backward_vecs11(C) > 0;
}

// dinp (N,C) = dresidual + gradient of inp; dweight, dbias (C) += their gradients | dinp_sums (C) += the sums of dinp's
// columns, the gradient of a bias that was added to inp; may be NULL
// | scratch (layernorm_backward_scratch(N, C)) | dout (N,C); dresidual (N,C), may be NULL (then 0) or dinp; inp (N,C);
// weight (C); mean, rstd (N)
void layernorm_backward(floatX* dinp, float* dinp_sums, float* dweight, float* dbias, float* scratch,
                        const floatX* dout, const floatX* dresidual, const floatX* inp, const floatX* weight,
                        const float* mean, const float* rstd, int N, int C, const Execution& exec) {
    Op op(exec, (dresidual ? 4.0 : 3.0) * N * C * sizeof(floatX), 0, "layernorm_backward");
    bool wide = layernorm_backward_is_wide(C);
    int config = tuned_config(exec.tuned, "layernorm_backward", N, C, wide ? 0 : 512);
    (wide ? layernorm_backward11 : layernorm_backward10)(dinp, dinp_sums, dweight, dbias, scratch, dout, dresidual, inp,
                                                         weight, mean, rstd, N, C, exec, config);
}
// ==== end promoted: layernorm_backward ====
