/*
What compute capability 9.0 adds: mbarriers, clusters, TMA and bulk copies, wgmma, stmatrix, by the PTX ISA.

Whatever is asynchronous happens as late as it may. A copy to shared memory arrives when a thread waits for its barrier
and nothing else is missing; from its issue on, the bytes that it writes belong to nobody. A bulk store reads shared
memory, and a wgmma reads its operands and writes its accumulators, when a thread waits for its group. The operands in
shared memory are compared with what they were when the wgmma was issued; registers in flight are known to memory.cpp,
which reports their accesses. An mbarrier orders accesses as a named barrier does. Not checked: registers moved by
setmaxnreg.

Asynchronous accesses (TMA, bulk copies, wgmma) are made through the async proxy. What a thread has written to shared
memory by ordinary stores or cp.async, it has to fence, by tma_store_fence() or async_proxy_fence(), before an asynchronous
access reads or overwrites it; and an mbarrier that it has initialised, before a copy arrives there. Device memory that the
same launch has written: see order.cpp. Nothing is demanded between an ordinary read and an asynchronous write that comes after
it.
*/
#include "sm90.h"

#include <algorithm>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "engine.h"

// ---- clusters ---------------------------------------------------------------------------------------------

int cluster_rank() { return emulation_now->block->cluster_rank; }
unsigned emulation_cluster_size() { return (unsigned)emulation_now->block->launch->cluster; }

// Block `rank` of this cluster.
static Block* block_of_cluster(int rank, void* pc) {
    Cluster* cluster = emulation_now->block->cluster.get();
    Block* b = rank >= 0 && rank < (int)cluster->blocks.size() ? cluster->blocks[(size_t)rank] : NULL;
    if (!b) {
        report("an access to shared memory of a block that has ended or is not in the cluster", emulation_now, pc, NULL,
               NULL);
        end_launch(NULL);
    }
    return b;
}
static size_t shared_offset(const void* p) { return (size_t)((const char*)p - emulation_now->block->shared); }

void* emulation_map_shared(void* p, int rank) {
    return block_of_cluster(rank, __builtin_return_address(0))->shared + shared_offset(p);
}

// ---- mbarriers ----------------------------------------------------------------------------------------------

static void check_barrier(const uint64_t* barrier, AccessKind kind, void* pc) {
    Uncounted uncounted;
    check_access(barrier, sizeof(*barrier), kind, pc);
}

void mbarrier_init(uint64_t* barrier, int count) {
    check_barrier(barrier, ACCESS_WRITE, __builtin_return_address(0));
    MemoryBarrier& m = emulation_now->block->memory_barriers[shared_offset(barrier)];
    m = MemoryBarrier{};
    m.count = m.pending = count;
    m.thread = emulation_now->id, m.epoch = emulation_now->warp->epoch, m.pc = __builtin_return_address(0);
}
void mbarrier_init_fence() { barrier_fence(emulation_now); }

static void perform_copy(const BulkCopy& c);

static MemoryBarrier& barrier_of(Block* b, size_t offset, void* pc) {
    auto found = b->memory_barriers.find(offset);
    if (found == b->memory_barriers.end()) {
        report("an mbarrier that was not initialised", emulation_now, pc, NULL, NULL);
        end_launch(NULL);
    }
    return found->second;
}

// Ends the phase if nothing is missing but copies in flight, which then arrive.
static void try_complete(MemoryBarrier& m) {
    if (m.pending > 0) { return; }
    for (const BulkCopy& c : m.copies) {
        perform_copy(c);
        m.bytes -= (long)c.bytes;
    }
    m.copies.clear();
    if (m.bytes != 0) { return; }
    m.phase++;
    m.pending = m.count, m.expected = 0;
    memcpy(m.done, m.clock, sizeof(m.done));
}

static void arrive(Block* b, size_t offset, int bytes, void* pc) {
    MemoryBarrier& m = barrier_of(b, offset, pc);
    if (m.pending == 0) { try_complete(m); }
    if (m.pending == 0) {
        report("more arrivals at an mbarrier than its phase has", emulation_now, pc, NULL, NULL);
        end_launch(NULL);
    }
    if (b == emulation_now->block) { memory_barrier_arrived(emulation_now, &m); }
    m.last = arrival_of(emulation_now, pc);
    m.bytes += bytes, m.expected += bytes;
    m.pending--;
    if (m.copies.empty()) { try_complete(m); }
}
void mbarrier_arrive(uint64_t* barrier) {
    void* pc = __builtin_return_address(0);
    check_barrier(barrier, ACCESS_ATOMIC, pc);
    arrive(emulation_now->block, shared_offset(barrier), 0, pc);
}
void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
    void* pc = __builtin_return_address(0);
    check_barrier(barrier, ACCESS_ATOMIC, pc);
    arrive(emulation_now->block, shared_offset(barrier), bytes, pc);
}
void mbarrier_arrive_cluster(uint64_t* barrier, int rank) {
    void* pc = __builtin_return_address(0);
    arrive(block_of_cluster(rank, pc), shared_offset(barrier), 0, pc);
}
// A warp waits together, as on a GPU: where one of its lanes has passed, the others pass, even if the barrier has gone on
// since then. Without this, a lane that has not run yet would miss a phase that its warp has already used and released.
static bool warp_has_passed(Fiber* f, size_t offset, int parity) {
    for (PassedWait& wait : f->warp->passed) {
        if (wait.pc == f->pc && wait.offset == offset && wait.parity == parity && !(wait.lanes >> f->lane & 1)) {
            wait.lanes |= 1u << f->lane;
            return true;
        }
    }
    return false;
}
void mbarrier_wait(uint64_t* barrier, int parity) {
    Fiber* f = emulation_now;
    f->pc = caller_of(__builtin_return_address(0));
    check_barrier(barrier, ACCESS_ATOMIC, f->pc);
    size_t offset = shared_offset(barrier);
    for (;;) {
        MemoryBarrier& m = barrier_of(f->block, offset, f->pc);
        bool passed = warp_has_passed(f, offset, parity);
        if (!passed && (int)(m.phase & 1) == parity) { try_complete(m); }
        if (!passed && (int)(m.phase & 1) != parity) {
            std::vector<PassedWait>& waits = f->warp->passed;
            if (waits.size() >= 64) { waits.erase(waits.begin()); } // of lanes that wait alone
            waits.push_back({f->pc, offset, parity, 1u << f->lane});
            passed = true;
        }
        if (passed) {
            memory_barrier_passed(f, m);
            return;
        }
        yield_thread({WAIT_MBARRIER, barrier, f->pc});
    }
}

bool mbarrier_has_completed(uint64_t* barrier, int parity) {
    Fiber* f = emulation_now;
    void* pc = __builtin_return_address(0);
    check_barrier(barrier, ACCESS_ATOMIC, pc);
    MemoryBarrier& m = barrier_of(f->block, shared_offset(barrier), pc);
    if ((int)(m.phase & 1) == parity) { try_complete(m); }
    if ((int)(m.phase & 1) == parity) { return false; }
    memory_barrier_passed(f, m);
    return true;
}

// ---- TMA and bulk copies to shared memory ----------------------------------------------------------------------

bool emulation_tensor_map(CUtensorMap* out, const void* tensor, int rank, const int* sizes, const int* box,
                          int element_bytes) {
    CUtensorMap map = {};
    map.tensor = {(char*)tensor, {1, 1, 1, 1}, {1, 1, 1, 1}, element_bytes, rank};
    int width = box[0] * element_bytes;
    bool valid = (uintptr_t)tensor % 16 == 0 && (width == 128 || width == 64);
    for (int i = 0; i < rank; i++) {
        map.tensor.sizes[i] = sizes[i], map.tensor.box[i] = box[i];
        valid = valid && sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
    }
    *out = map;
    return valid && (rank == 1 || (size_t)sizes[0] * (size_t)element_bytes % 16 == 0);
}

// The position to which the 128-byte swizzle moves a byte of shared memory, or the 64-byte swizzle.
static size_t swizzled(size_t offset, size_t width = 128) { return offset ^ (offset >> 7 & (width / 16 - 1)) << 4; }
static size_t box_width(const TensorMap& t) { return (size_t)t.box[0] * (size_t)t.element_bytes; } // bytes

// Calls row(p, offset) for each row of a box: where it is in the tensor, NULL if it is outside, and its
// offset in the box. The first `*valid` elements of a row are inside.
template <class Row> static void for_rows(const TensorMap& t, const int* at, Row row) {
    size_t offset = 0, strides[4];
    strides[0] = (size_t)t.element_bytes;
    for (int i = 1; i < 4; i++) { strides[i] = strides[i - 1] * (size_t)t.sizes[i - 1]; }
    for (int w = at[3]; w < at[3] + t.box[3]; w++) {
        for (int z = at[2]; z < at[2] + t.box[2]; z++) {
            for (int y = at[1]; y < at[1] + t.box[1]; y++, offset += box_width(t)) {
                bool inside = y >= 0 && y < t.sizes[1] && z >= 0 && z < t.sizes[2] && w >= 0 && w < t.sizes[3];
                int first = std::max(at[0], 0), end = std::min(at[0] + t.box[0], t.sizes[0]);
                char* p = t.base + (size_t)std::max(w, 0) * strides[3] + (size_t)std::max(z, 0) * strides[2] +
                          (size_t)std::max(y, 0) * strides[1] + (size_t)first * strides[0];
                int begin = (first - at[0]) * t.element_bytes, bytes = (end - first) * t.element_bytes;
                row(p, inside ? std::max(bytes, 0) : 0, begin, offset);
            }
        }
    }
}

static void perform_copy(const BulkCopy& c) {
    Uncounted uncounted;
    char* to = c.to_block->shared + c.to;
    if (c.map.rank) {
        for_rows(c.map, c.coordinates, [&](const char* p, int bytes, int begin, size_t offset) {
            char row[128] = {};
            if (bytes > 0) {
                check_access_of(c.fiber, p, (size_t)bytes, ACCESS_READ, c.pc);
                check_proxy_of_device(c.fiber, p, (size_t)bytes, c.pc);
                if (uncounted.was) { count_bulk(p, (size_t)bytes, COUNT_BULK_READ, c.pc); }
                memcpy(row + begin, p, (size_t)bytes);
            }
            for (size_t i = 0, width = box_width(c.map); i < width; i += 16) {
                memcpy(c.to_block->shared + swizzled(c.to + offset + i, width), row + i, 16);
            }
        });
    } else if (c.global) {
        check_access_of(c.fiber, c.global, c.bytes, ACCESS_READ, c.pc);
        check_proxy_of_device(c.fiber, c.global, c.bytes, c.pc);
        if (uncounted.was) { count_bulk(c.global, c.bytes, COUNT_BULK_READ, c.pc); }
        memcpy(to, c.global, c.bytes);
    } else if (c.from_block) {
        if (c.from_block->cluster != c.to_block->cluster) {
            report("a copy from shared memory of a block that has ended", emulation_now, c.pc, NULL, NULL);
            return;
        }
        // what this reads is not recorded: the block learns from the other one that it has been read
        check_proxy(c.fiber, c.from_block, c.from, c.bytes, c.pc);
        memcpy(to, c.from_block->shared + c.from, c.bytes);
    } else {
        memcpy(to, c.value, c.bytes);
    }
    copy_arrived(c);
}

// The copy c, of which to_block, to, bytes, fiber and pc are not set yet, to the address p of block b.
static void issue_copy(BulkCopy c, Block* b, const void* p, size_t bytes, const uint64_t* barrier, size_t alignment,
                       void* pc) {
    c.to_block = b, c.to = shared_offset(p), c.bytes = bytes, c.fiber = emulation_now, c.pc = pc;
    if (c.to % alignment != 0 || (uintptr_t)c.global % alignment != 0 || c.from % alignment != 0 ||
        c.to + bytes > SHARED_BYTES) {
        report("an asynchronous copy with an address that is not aligned", emulation_now, pc, NULL, NULL);
        end_launch(NULL);
    }
    MemoryBarrier& m = barrier_of(b, shared_offset(barrier), pc);
    if (m.epoch > b->fibers[m.thread].barrier_fence && !b->races_off) {
        report("an asynchronous copy to an mbarrier that was initialised without mbarrier_init_fence()", emulation_now,
               pc, &b->fibers[m.thread], m.pc);
    }
    Uncounted uncounted;
    if (c.map.rank || c.global || c.from_block) { check_proxy(c.fiber, b, c.to, bytes, pc); } // st.async is ordinary
    copy_issued(c);
    m.copies.push_back(c);
}

void emulation_tma_load(void* shared, const void* map, int rank, int x, int y, int z, int w, uint64_t* barrier,
                        unsigned blocks) {
    void* pc = __builtin_return_address(0);
    const TensorMap& t = ((const CUtensorMap*)map)->tensor;
    if (t.rank != rank) {
        report("a TMA load with another number of coordinates than its tensor map", emulation_now, pc, NULL, NULL);
        end_launch(NULL);
    }
    size_t bytes = (size_t)t.element_bytes;
    for (int size : t.box) { bytes *= (size_t)size; }
    BulkCopy c = {};
    c.map = t;
    c.coordinates[0] = x, c.coordinates[1] = y, c.coordinates[2] = z, c.coordinates[3] = w;
    if (blocks == 0) { issue_copy(c, emulation_now->block, shared, bytes, barrier, 128, pc); }
    for (int to = 0; blocks >> to; to++) {
        if (blocks >> to & 1) { issue_copy(c, block_of_cluster(to, pc), shared, bytes, barrier, 128, pc); }
    }
}
void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
    BulkCopy c = {};
    c.global = global;
    issue_copy(c, emulation_now->block, shared, (size_t)bytes, barrier, 16, __builtin_return_address(0));
}
void bulk_copy_cluster(void* to, const void* from, int bytes, uint64_t* barrier, int rank) {
    void* pc = __builtin_return_address(0);
    BulkCopy c = {};
    c.from_block = emulation_now->block, c.from = shared_offset(from);
    issue_copy(c, block_of_cluster(rank, pc), to, (size_t)bytes, barrier, 16, pc);
}
template <class T> static void store_async(const T* p, T x, const uint64_t* barrier, int rank, void* pc) {
    BulkCopy c = {};
    memcpy(c.value, &x, sizeof(x));
    issue_copy(c, block_of_cluster(rank, pc), p, sizeof(x), barrier, sizeof(x), pc);
}
void store_cluster_async(const uint32_t* p, uint32_t x, const uint64_t* barrier, int rank) {
    store_async(p, x, barrier, rank, __builtin_return_address(0));
}
void store_cluster_async(const float* p, float x, const uint64_t* barrier, int rank) {
    store_async(p, x, barrier, rank, __builtin_return_address(0));
}
void store_cluster_async(const float2* p, float2 x, const uint64_t* barrier, int rank) {
    store_async(p, x, barrier, rank, __builtin_return_address(0));
}
void store_cluster_async(const int4* p, int4 x, const uint64_t* barrier, int rank) {
    store_async(p, x, barrier, rank, __builtin_return_address(0));
}

// ---- TMA and bulk copies from shared memory ------------------------------------------------------------------------

static void perform_store(Fiber* f, const BulkStore& s) {
    Uncounted uncounted;
    Block* b = f->block;
    check_access_of(f, b->shared + s.from, s.bytes, ACCESS_READ, s.pc);
    check_proxy(f, b, s.from, s.bytes, s.pc);
    if (s.map.rank) {
        for_rows(s.map, s.coordinates, [&](char* p, int bytes, int begin, size_t offset) {
            if (bytes <= 0) { return; }
            char row[128];
            for (size_t i = 0, width = box_width(s.map); i < width; i += 16) {
                memcpy(row + i, b->shared + swizzled(s.from + offset + i, width), 16);
            }
            check_asynchronous_write(f, p, (size_t)bytes, false, s.pc);
            if (uncounted.was) { count_bulk(p, (size_t)bytes, COUNT_BULK_WRITE, s.pc); }
            memcpy(p, row + begin, (size_t)bytes);
        });
        return;
    }
    check_asynchronous_write(f, s.global, s.bytes, s.adds, s.pc);
    if (uncounted.was) { count_bulk(s.global, s.bytes, COUNT_BULK_WRITE, s.pc); }
    if (!s.adds) {
        memcpy(s.global, b->shared + s.from, s.bytes);
        return;
    }
    const float* from = (const float*)(b->shared + s.from);
    for (size_t i = 0; i < s.bytes / sizeof(float); i++) {
        float *to = (float*)s.global + i, old, sum;
        __atomic_load(to, &old, __ATOMIC_SEQ_CST);
        do {
            sum = old + from[i];
        } while (!__atomic_compare_exchange(to, &old, &sum, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    }
}

static void issue_store(BulkStore s, const void* shared, size_t bytes, size_t alignment, void* pc) {
    Fiber* f = emulation_now;
    s.from = shared_offset(shared), s.bytes = bytes, s.group = f->store_group, s.pc = pc;
    if (s.from % alignment != 0 || (uintptr_t)s.global % alignment != 0) {
        report("an asynchronous store with an address that is not aligned", f, pc, NULL, NULL);
        end_launch(NULL);
    }
    f->stores.push_back(s);
}
void emulation_tma_store(const void* map, const void* shared, int rank, int x, int y, int z, int w) {
    void* pc = __builtin_return_address(0);
    const TensorMap& t = ((const CUtensorMap*)map)->tensor;
    if (t.rank != rank) {
        report("a TMA store with another number of coordinates than its tensor map", emulation_now, pc, NULL, NULL);
        end_launch(NULL);
    }
    size_t bytes = (size_t)t.element_bytes;
    for (int size : t.box) { bytes *= (size_t)size; }
    BulkStore s = {};
    s.map = t;
    s.coordinates[0] = x, s.coordinates[1] = y, s.coordinates[2] = z, s.coordinates[3] = w;
    issue_store(s, shared, bytes, 128, pc);
}
void bulk_store(void* global, const void* shared, int bytes) {
    BulkStore s = {};
    s.global = global;
    issue_store(s, shared, (size_t)bytes, 16, __builtin_return_address(0));
}
void bulk_add(float* global, const float* shared, int bytes) {
    BulkStore s = {};
    s.global = global, s.adds = true;
    issue_store(s, shared, (size_t)bytes, 16, __builtin_return_address(0));
}
void tma_store_fence() { proxy_fence(emulation_now); }
void async_proxy_fence() {
    log_proxy_fence(emulation_now);
    proxy_fence(emulation_now);
}
void tma_store_commit() { emulation_now->store_group++; }
void emulation_tma_store_wait(int pending) {
    Fiber* f = emulation_now;
    size_t done = 0;
    for (; done < f->stores.size() && f->stores[done].group < f->store_group - pending; done++) {
        perform_store(f, f->stores[done]);
    }
    f->stores.erase(f->stores.begin(), f->stores.begin() + (long)done);
}
// tma_store_wait() writes too, but what it writes is ordered before nothing until this has been called.
void tma_store_wait_written() {
    emulation_tma_store_wait(0);
    log_stores_written(emulation_now);
}
void end_thread_sm90(Fiber* f) {
    for (const BulkStore& s : f->stores) { perform_store(f, s); }
    f->stores.clear();
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// The type of one operand's elements.
enum ElementType { ELEMENT_BF16, ELEMENT_F16, ELEMENT_E4M3, ELEMENT_E5M2 };
static bool is_8_bit(int wgmma_type) { return wgmma_type == WGMMA_E4M3 || wgmma_type == WGMMA_E5M2_E4M3; }
static ElementType type_of_b(int wgmma_type) {
    return is_8_bit(wgmma_type) ? ELEMENT_E4M3 : wgmma_type == WGMMA_F16 ? ELEMENT_F16 : ELEMENT_BF16;
}
static ElementType type_of_a(int wgmma_type) {
    return wgmma_type == WGMMA_E5M2_E4M3 ? ELEMENT_E5M2 : type_of_b(wgmma_type);
}
static float element_of(const char* p, ElementType type) {
    uint16_t x;
    if (type == ELEMENT_E4M3) { return emulation_e4m3_value((uint8_t)*p); }
    if (type == ELEMENT_E5M2) { return emulation_e5m2_value((uint8_t)*p); }
    memcpy(&x, p, sizeof(x));
    return type == ELEMENT_F16 ? emulation_half_value(x) : __uint_as_float((uint32_t)x << 16);
}

// Calls piece(offset, row, k) for each 16 bytes of shared memory that hold rows first .. first + rows - 1 of a matrix
// (rows, k) of 32 bytes along k. A piece begins at row first + `row` and byte 2 or 1 times `k`, and goes on along k; with
// `transposed`, along the rows. A descriptor has, in units of 16 bytes, the address in bits 0-13, the leading offset in
// 16-29 and the stride offset in 32-45; bits 62 and 63 are 1 for the 128-byte swizzle.
template <class Piece>
static void for_pieces(uint64_t descriptor, int first, int rows, size_t bytes, bool transposed, Piece piece) {
    size_t address = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
           stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) { emulation_unsupported("wgmma without the 128-byte swizzle"); }
    // what is beyond all shared memory is out of bounds at its end, too
    auto inside = [](size_t offset) { return std::min(swizzled(offset), (size_t)SHARED_BYTES - 16); };
    if (!transposed) { // 128 bytes along k per row, 8 rows per group
        for (int r = first; r < first + rows; r++) {
            size_t row = address + (size_t)(r / 8) * stride + (size_t)(r % 8) * 128;
            for (size_t i = 0; i < 32; i += 16) { piece(inside(row + i), (size_t)(r - first), i / bytes); }
        }
        return;
    }
    for (size_t k = 0; k < 32 / bytes; k++) { // 64 rows of the matrix side by side, 8 steps of k per group
        size_t row = address + k / 8 * stride + k % 8 * 128;
        for (int r = first; r < first + rows; r += 8) {
            piece(inside(row + (size_t)(r / 64) * leading + (size_t)(r % 64) * 2), (size_t)(r - first), k);
        }
    }
}
// Calls operand(descriptor, first, rows, type, transposed) for each operand that this warp reads from shared memory.
template <class Operand> static void for_operands(const Fiber* f, const WarpProduct& p, Operand operand) {
    if (!p.a_registers[0]) { operand(p.a_descriptor, f->id / 32 % 4 * 16, 16, type_of_a(p.type), p.a_transposed); }
    operand(p.b_descriptor, 0, p.columns, type_of_b(p.type), p.b_transposed);
}
static size_t bytes_of(ElementType type) { return type == ELEMENT_E4M3 || type == ELEMENT_E5M2 ? 1 : 2; }

// The operands may be read at any time from the issue to the wait. So they must be there at the issue, and are copied;
// they are read at the wait, and must not have changed.
static void copy_operands(Fiber* f, WarpProduct& p) {
    for_operands(f, p, [&](uint64_t descriptor, int first, int rows, ElementType type, bool transposed) {
        size_t end = p.operands.size();
        p.operands.resize(end + (size_t)rows * 32);
        for_pieces(descriptor, first, rows, bytes_of(type), transposed, [&](size_t offset, size_t, size_t) {
            check_operand(f, offset, p.pc);
            memcpy(&p.operands[end], f->block->shared + offset, 16);
            end += 16;
        });
    });
}
// a (k, 16), unless it is in registers, and b (k, columns) get the operands.
static void read_operands(Fiber* f, const WarpProduct& p, float* a, float* b) {
    const char* copy = p.operands.data();
    for_operands(f, p, [&](uint64_t descriptor, int first, int rows, ElementType type, bool transposed) {
        float* out = copy == p.operands.data() && !p.a_registers[0] ? a : b;
        size_t bytes = bytes_of(type), n = 16 / bytes, along_k = transposed ? 0 : 1;
        for_pieces(descriptor, first, rows, bytes, transposed, [&](size_t offset, size_t row, size_t k) {
            const char* from = f->block->shared + offset;
            check_access_of(f, from, 16, ACCESS_READ, p.pc);
            size_t same = (size_t)(std::mismatch(copy, copy + 16, from).first - copy);
            if (same < 16) { operand_changed(f, offset + same, p.pc); }
            copy += 16;
            for (size_t i = 0; i < n; i++) {
                out[(k + i * along_k) * (size_t)rows + row + i * (1 - along_k)] = element_of(from + i * bytes, type);
            }
        });
    });
}

// x without what is below 2^-13 of the largest power of two in `largest`: 14 bits, as an 8-bit product keeps them. `unit`
// is that quantum, `inverse` 1 / unit; |x| / unit is below 2^14, so an int holds it.
static double truncated(double x, double unit, double inverse) { return (double)(int)(x * inverse) * unit; }
static double unit_of(double largest) {
    uint64_t bits;
    memcpy(&bits, &largest, sizeof(bits));
    bits &= (uint64_t)0x7FF << 52; // the power of two
    memcpy(&largest, &bits, sizeof(bits));
    return largest * 0x1p-13;
}

// One row of d = a b with 8-bit operands: 32 products for each of n columns. As Hopper does by DeepSeek-AI 2024
// (arXiv:2412.19437, section 3.5.2): the products are aligned to the largest and keep 14 bits, and so do the sum and the
// accumulator when they are added. That the bits below are cut off, not rounded, is an assumption.
static void sum_8_bit(double* sums, const float* a, int stride, const float* b, int n) {
    double largest[256] = {}, unit[256], inverse[256], all = 0;
    for (int k = 0; k < 32; k++) {
        double x = a[k * stride];
        const float* y = b + (size_t)k * (size_t)n;
        for (int column = 0; column < n; column++) {
            sums[column] += x * y[column];
            largest[column] = std::max(largest[column], fabs(x * y[column]));
        }
    }
    for (int column = 0; column < n; column++) { all += sums[column]; }
    if (!std::isfinite(all)) { return; } // NaN and infinities spread as they do in double
    std::fill(sums, sums + n, 0.0);
    for (int column = 0; column < n; column++) {
        unit[column] = unit_of(largest[column]);
        inverse[column] = unit[column] > 0 ? 1 / unit[column] : 0;
    }
    for (int k = 0; k < 32; k++) {
        double x = a[k * stride];
        const float* y = b + (size_t)k * (size_t)n;
        for (int column = 0; column < n; column++) {
            sums[column] += truncated(x * y[column], unit[column], inverse[column]);
        }
    }
}
// The sum of the accumulator and 32 products, with 14 bits.
static double add_8_bit(double d, double sum) {
    double unit = unit_of(std::max(fabs(d), fabs(sum)));
    if (!(unit > 0) || std::isinf(unit)) { return d + sum; }
    return truncated(d, unit, 1 / unit) + truncated(sum, unit, 1 / unit);
}

// d = a b for the 16 rows of this warp. Sums 16 products in double and rounds once; a tensor core rounds in another way,
// within the tolerances of the checks. 8-bit operands: see sum_8_bit.
static void perform_product(Fiber* fibers, const WarpProduct& p) {
    if (emulation_counting) { count_event(COUNT_WGMMA); }
    Uncounted uncounted;
    static thread_local float a[32 * 16], b[32 * 256];
    int depth = is_8_bit(p.type) ? 32 : 16, n = p.columns;
    read_operands(fibers, p, a, b);
    if (p.a_registers[0]) {
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 8; i++) { // register i / 2: rows g and g + 8 in turn, then columns 8 further
                int row = lane / 4 + i / 2 % 2 * 8, k = lane % 4 * 2 + i % 2 + i / 4 * 8;
                uint16_t bits = (uint16_t)(p.a[lane][i / 2] >> (i % 2 * 16));
                a[k * 16 + row] = element_of((const char*)&bits, type_of_a(p.type));
            }
        }
    }
    for (int row = 0; row < 16; row++) {
        double sums[256] = {};
        if (is_8_bit(p.type)) { sum_8_bit(sums, a + row, 16, b, n); }
        for (int k = 0; !is_8_bit(p.type) && k < depth; k++) {
            double x = a[k * 16 + row];
            const float* y = b + (size_t)k * (size_t)n;
            for (int column = 0; column < n; column++) { sums[column] += x * y[column]; }
        }
        for (int column = 0; column < n; column++) {
            float& d = p.d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
            double before = p.accumulates ? d : 0.0;
            d = (float)(is_8_bit(p.type) ? add_8_bit(before, sums[column]) : before + sums[column]);
        }
    }
}

struct ProductArguments {
    WarpProduct product;
    float* d;
    const uint32_t* a;
};
static bool same_accumulators(const WarpProduct& p, const WarpProduct& q) {
    return p.columns == q.columns && is_8_bit(p.type) == is_8_bit(q.type) && memcmp(p.d, q.d, sizeof(p.d)) == 0;
}
static void issue_product(void* const* args, unsigned lanes) {
    const ProductArguments* first = (const ProductArguments*)args[__builtin_ctz(lanes)];
    if (lanes != 0xFFFFFFFFu) {
        report("wgmma by a part of a warp", emulation_now, first->product.pc, NULL, NULL);
        return;
    }
    WarpProduct p = first->product;
    std::vector<WarpProduct>& products = emulation_now->warp->products;
    for (int lane = 0; lane < 32; lane++) {
        const ProductArguments* x = (const ProductArguments*)args[lane];
        p.d[lane] = x->d, p.a_registers[lane] = x->a;
        if (x->a) { memcpy(p.a[lane], x->a, sizeof(p.a[lane])); }
    }
    // of products in a chain, one stands for all
    bool chained = !products.empty() && same_accumulators(p, products.back()), another_shape = false;
    for (const WarpProduct& q : products) { another_shape |= p.d[0] == q.d[0] && !same_accumulators(p, q); }
    Fiber* fibers = emulation_now - emulation_now->lane;
    for (int lane = 0; lane < 32; lane++) { registers_issued(fibers + lane, p, !chained, another_shape); }
    Uncounted uncounted;
    copy_operands(fibers, p);
    products.push_back(std::move(p));
}
void emulation_wgmma(float* d, const uint32_t* a_registers, uint64_t a, uint64_t b, int columns, int type,
                     bool a_transposed, bool b_transposed, bool accumulate) {
    ProductArguments x = {};
    WarpProduct& p = x.product;
    p.a_descriptor = a, p.b_descriptor = b, p.columns = columns, p.type = type;
    p.a_transposed = a_transposed, p.b_transposed = b_transposed;
    p.accumulates = accumulate, p.group = emulation_now->product_group, p.pc = caller_of(__builtin_return_address(0));
    x.d = d, x.a = a_registers;
    warp_collective(0xFFFFFFFFu, issue_product, &x, p.pc);
    const Fiber* f = emulation_now;
    if (emulation_replaying && is_followed(f)) { add_input({f->block->launch->number, f->block->number, f->id, p.pc}); }
}
void wgmma_commit() { emulation_now->product_group++; }

static void finish_products(void* const* args, unsigned lanes) {
    Fiber* fibers = emulation_now - emulation_now->lane;
    if (lanes != 0xFFFFFFFFu) {
        report("a wait for wgmma by a part of a warp", emulation_now, emulation_now->pc, NULL, NULL);
        return;
    }
    std::vector<WarpProduct>& products = fibers->warp->products;
    size_t done = 0;
    int group = fibers->product_group - *(const int*)args[0];
    for (; done < products.size() && products[done].group < group; done++) { perform_product(fibers, products[done]); }
    for (size_t i = 0; i < products.size() && done > 0; i++) {
        bool chained = i > 0 && i != done && same_accumulators(products[i], products[i - 1]);
        for (int lane = 0; lane < 32; lane++) {
            if (i < done) { registers_completed(fibers + lane, products[i], !chained); }
            if (i >= done) { registers_in_flight(fibers + lane, products[i], !chained); }
        }
    }
    products.erase(products.begin(), products.begin() + (long)done);
}
void emulation_wgmma_wait(int pending) {
    warp_collective(0xFFFFFFFFu, finish_products, &pending, __builtin_return_address(0));
}

// ---- stmatrix ----------------------------------------------------------------------------------------------------

struct MatrixStore {
    size_t offset;
    const uint32_t* r;
    bool transposed;
    Fiber* fiber;
    void* pc;
};
// Element (row, column) of matrix j as the lanes hold it.
static uint16_t matrix_element(void* const* args, int j, int row, int column) {
    return (uint16_t)(((MatrixStore*)args[row * 4 + column / 2])->r[j] >> column % 2 * 16);
}
static void store_matrices(void* const* args, unsigned lanes) {
    if (lanes != 0xFFFFFFFFu) {
        MatrixStore* first = (MatrixStore*)args[__builtin_ctz(lanes)];
        report("stmatrix by a part of a warp", first->fiber, first->pc, NULL, NULL);
        return;
    }
    for (int j = 0; j < 4; j++) {
        for (int row = 0; row < 8; row++) {
            MatrixStore* store = (MatrixStore*)args[8 * j + row];
            uint16_t elements[8];
            for (int i = 0; i < 8; i++) {
                elements[i] = store->transposed ? matrix_element(args, j, i, row) : matrix_element(args, j, row, i);
            }
            char* to = store->fiber->block->shared + store->offset;
            check_access_of(store->fiber, to, 16, ACCESS_WRITE, store->pc);
            memcpy(to, elements, 16);
        }
    }
}
static void store_matrix(uint32_t address, const uint32_t r[4], bool transposed, void* pc) {
    MatrixStore store = {address, r, transposed, emulation_now, pc};
    if (address % 16 != 0) {
        report("stmatrix with an address that is not aligned to 16 bytes", store.fiber, store.pc, NULL, NULL);
        end_launch(NULL);
    }
    check_access(r, 4 * sizeof(*r), ACCESS_READ, store.pc); // they may be registers of wgmma
    warp_collective(0xFFFFFFFFu, store_matrices, &store, store.pc);
}
void stmatrix_x4(uint32_t address, const uint32_t r[4]) {
    store_matrix(address, r, false, __builtin_return_address(0));
}
void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]) {
    store_matrix(address, r, true, __builtin_return_address(0));
}
