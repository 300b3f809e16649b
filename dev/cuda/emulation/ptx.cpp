/*
What ptx.cuh of this folder declares: asynchronous copies, matrix loads, matrix products, ordered accesses. Layouts are
those of the PTX ISA, which llmc/ptx.cuh draws.
*/
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "engine.h"

#include <mutex>

// ---- cp.async -------------------------------------------------------------------------------------------
// A copy reads and writes as late as it may: when its thread waits for it. From its issue on, the bytes that it writes
// belong to nobody, so a read without a wait, or a buffer that is still read when it is filled again, is found.

void emulation_cp_async(void* shared, const void* global, int bytes, bool valid) {
    Fiber* f = emulation_now;
    void* pc = __builtin_return_address(0);
    if ((uintptr_t)shared % (uintptr_t)bytes != 0 || (valid && (uintptr_t)global % (uintptr_t)bytes != 0)) {
        report("cp.async with an address that is not aligned", f, pc, NULL, NULL);
        end_launch(NULL);
    }
    if (emulation_arch() < 80) {
        report("cp.async, which needs compute capability 8.0", f, pc, NULL, NULL);
        end_launch(NULL);
    }
    if (emulation_counting) {
        if (valid) { count_access(f, global, (size_t)bytes, COUNT_CP_ASYNC, pc); }
        count_access(f, shared, (size_t)bytes, COUNT_CP_ASYNC, pc);
    }
    Uncounted uncounted;
    mark_in_flight(f, shared, (size_t)bytes, pc);
    f->copies.push_back({shared, global, bytes, valid, f->group, pc});
}
void cp_async_commit() { emulation_now->group++; }

void emulation_cp_async_wait(int pending) {
    Fiber* f = emulation_now;
    Uncounted uncounted;
    size_t done = 0;
    for (; done < f->copies.size() && f->copies[done].group < f->group - pending; done++) {
        const Copy& c = f->copies[done];
        if (c.valid) {
            check_access(c.from, (size_t)c.bytes, ACCESS_READ, c.pc);
            memcpy(c.to, c.from, (size_t)c.bytes);
        } else {
            memset(c.to, 0, (size_t)c.bytes);
        }
        Shadow* s = f->block->shadow + ((char*)c.to - f->block->shared);
        for (int i = 0; i < c.bytes; i++) { s[i] = {}; }
        for (int i = 0; i < c.bytes; i++) { s[i].write = 1; } // no longer in flight
        check_access(c.to, (size_t)c.bytes, ACCESS_WRITE, c.pc);
    }
    f->copies.erase(f->copies.begin(), f->copies.begin() + (long)done);
}

// ---- ldmatrix, mma -------------------------------------------------------------------------------------------

struct MatrixLoad {
    const char* row;
    uint32_t* r;
    bool transposed;
    Fiber* fiber;
    void* pc;
};
static void load_matrices(void* const* args, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) {
        MatrixLoad* first = (MatrixLoad*)args[__builtin_ctz(lanes)];
        report("ldmatrix by a part of a warp", first->fiber, first->pc, NULL, NULL);
        return;
    }
    for (int lane = 0; lane < 32 && emulation_counting; lane++) {
        MatrixLoad* load = (MatrixLoad*)args[lane];
        count_access(load->fiber, load->row, 16, COUNT_LDMATRIX, load->pc);
    }
    Uncounted uncounted;
    for (int j = 0; j < 4; j++) {
        uint16_t matrix[8][8];
        for (int row = 0; row < 8; row++) {
            MatrixLoad* load = (MatrixLoad*)args[8 * j + row];
            check_access_of(load->fiber, load->row, 16, ACCESS_READ, load->pc);
            memcpy(matrix[row], load->row, 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            MatrixLoad* load = (MatrixLoad*)args[lane];
            int row = lane / 4, column = 2 * (lane % 4);
            uint32_t low = load->transposed ? matrix[column][row] : matrix[row][column];
            uint32_t high = load->transposed ? matrix[column + 1][row] : matrix[row][column + 1];
            load->r[j] = low | high << 16;
        }
    }
}
void emulation_ldmatrix(uint32_t r[4], const void* row, bool transposed) {
    MatrixLoad load = {(const char*)row, r, transposed, emulation_now, __builtin_return_address(0)};
    if ((uintptr_t)row % 16 != 0) {
        report("ldmatrix with an address that is not aligned to 16 bytes", load.fiber, load.pc, NULL, NULL);
        end_launch(NULL);
    }
    warp_collective(0xFFFFFFFFu, load_matrices, &load, load.pc);
    check_access(r, 4 * sizeof(*r), ACCESS_WRITE, load.pc); // they may be registers of wgmma
}
const void* emulation_shared_pointer(uint32_t address) { return emulation_now->block->shared + address; }

struct MatrixProduct {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
    bool is_half;
};
static float element(uint32_t bits, int upper, bool is_half) {
    uint16_t x = (uint16_t)(upper ? bits >> 16 : bits);
    return is_half ? emulation_half_value(x) : __uint_as_float((uint32_t)x << 16);
}
// Sums in double and rounds once. A tensor core rounds in another way, within the tolerances of the checks.
static void multiply(void* const* args, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) {
        report("mma.sync by a part of a warp", emulation_now, emulation_now->pc, NULL, NULL);
        return;
    }
    if (emulation_counting) { count_event(COUNT_MMA); }
    double a[16][16], b[16][8], d[16][8] = {};
    for (int lane = 0; lane < 32; lane++) {
        const MatrixProduct* p = (const MatrixProduct*)args[lane];
        int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 2; e++) {
            for (int half = 0; half < 2; half++) { // columns 2t.. and 2t+8.. of a, rows of b
                a[g][8 * half + 2 * t + e] = element(p->a[2 * half], e, p->is_half);
                a[g + 8][8 * half + 2 * t + e] = element(p->a[2 * half + 1], e, p->is_half);
                b[8 * half + 2 * t + e][g] = element(p->b[half], e, p->is_half);
            }
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) { d[row][column] += a[row][k] * b[k][column]; }
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        MatrixProduct* p = (MatrixProduct*)args[lane];
        for (int i = 0; i < 4; i++) {
            p->d[i] = (float)((double)p->d[i] + d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
        }
    }
}
void emulation_mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, bool is_half) {
    MatrixProduct p = {d, a, {b0, b1}, is_half};
    warp_collective(0xFFFFFFFFu, multiply, &p, __builtin_return_address(0));
    check_access(d, 4 * sizeof(*d), ACCESS_WRITE, __builtin_return_address(0));
}

// ---- a counter that one block writes and another one waits for --------------------------------------------------

// Each lets other threads run, because its caller may poll.
int load_acquire(const int* p) {
    void* pc = __builtin_return_address(0);
    poll_memory(p, sizeof(*p), pc);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_READS | SYNC_ACQUIRES, pc);
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
void store_release(int* p, int x) {
    void* pc = __builtin_return_address(0);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_WRITES | SYNC_RELEASES, pc);
    __atomic_store_n(p, x, __ATOMIC_SEQ_CST);
}
void add_release(int* p, int x) {
    void* pc = __builtin_return_address(0);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_WRITES | SYNC_RELEASES, pc);
    __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);
}
uint64_t load_relaxed(const uint64_t* p) {
    void* pc = __builtin_return_address(0);
    poll_memory(p, sizeof(*p), pc);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_READS | SYNC_QUIET, pc);
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
ulonglong2 load_relaxed_pair(const uint64_t* p) {
    void* pc = __builtin_return_address(0);
    poll_memory(p, 2 * sizeof(*p), pc);
    check_access(p, 2 * sizeof(*p), ACCESS_ATOMIC, pc);
    ulonglong2 x;
    {
        SyncScope first(p, SYNC_READS | SYNC_QUIET, pc);
        x.x = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    }
    SyncScope second(p + 1, SYNC_READS | SYNC_QUIET, pc);
    x.y = __atomic_load_n(p + 1, __ATOMIC_SEQ_CST);
    return x;
}
void store_relaxed(uint64_t* p, uint64_t x) {
    void* pc = __builtin_return_address(0);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_WRITES | SYNC_QUIET, pc);
    __atomic_store_n(p, x, __ATOMIC_SEQ_CST);
}
static std::mutex accesses_of_16; // one at a time: no instruction of all CPUs would keep them whole
uint4 load_relaxed_16(const uint4* p) {
    void* pc = __builtin_return_address(0);
    poll_memory(p, sizeof(*p), pc);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_READS | SYNC_QUIET, pc);
    std::lock_guard<std::mutex> lock(accesses_of_16);
    return *p;
}
void store_relaxed_16(uint4* p, uint4 x) {
    void* pc = __builtin_return_address(0);
    check_access(p, sizeof(*p), ACCESS_ATOMIC, pc);
    SyncScope logged(p, SYNC_WRITES | SYNC_QUIET, pc);
    std::lock_guard<std::mutex> lock(accesses_of_16);
    *p = x;
}
