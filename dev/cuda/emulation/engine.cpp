/*
Runs the threads of a grid as fibers: context switch, scheduler, barriers, warp operations, launches.
*/
#include "engine.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <thread>

__thread Fiber* emulation_now;
static __thread void* worker_sp; // the worker's own stack, while a fiber runs

uint64_t next_random(uint64_t* state) { // splitmix64: Steele, Lea, Flood 2014
    uint64_t x = *state += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// ---- context switch -----------------------------------------------------------------------------
// switch_stack(&from, to) saves the registers that a function must preserve on this stack, stores its stack pointer in
// *from and continues where `to` was saved.

extern "C" void emulation_fiber_main();

#if defined(__APPLE__)
#define SYMBOL "_emulation_switch"
#else
#define SYMBOL "emulation_switch"
#endif

#if defined(__x86_64__)
extern "C" void emulation_switch(void** from, void* to);
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
static void* new_stack(char* top) { // at the entry of a function the stack pointer is 8 off a multiple of 16
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15) - 2;
    *sp = (void*)emulation_fiber_main;
    sp -= 6;
    memset(sp, 0, 6 * sizeof(*sp));
    return sp;
}
#elif defined(__aarch64__)
extern "C" void emulation_switch(void** from, void* to);
asm(".text\n.balign 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
static void* new_stack(char* top) {
    void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15) - 20;
    memset(sp, 0, 20 * sizeof(*sp));
    sp[11] = (void*)emulation_fiber_main; // x30, the return address
    return sp;
}
#else
#include <ucontext.h>
static void emulation_switch(void** from, void* to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, (ucontext_t*)to);
}
static void* new_stack(char* top) { // the context is at the top of the stack
    ucontext_t* context = (ucontext_t*)((uintptr_t)(top - sizeof(ucontext_t)) & ~(uintptr_t)63);
    getcontext(context);
    context->uc_stack.ss_sp = top - STACK_BYTES / 2;
    context->uc_stack.ss_size = (size_t)((char*)context - (char*)context->uc_stack.ss_sp);
    context->uc_link = NULL;
    makecontext(context, emulation_fiber_main, 0);
    return context;
}
#endif

static void to_worker() {
    Fiber* f = emulation_now;
    emulation_switch(&f->sp, worker_sp);
}

// ---- which lane runs next -------------------------------------------------------------------------

static int next_lane(Warp* w) {
    unsigned r = w->ready;
    if (w->descending) { // the highest ready lane up to turn, else the highest
        unsigned below = r & (0xFFFFFFFFu >> (31 - w->turn));
        return 31 - __builtin_clz(below ? below : r);
    }
    unsigned above = r & (0xFFFFFFFFu << w->turn);
    return __builtin_ctz(above ? above : r);
}

// Gives up the processor: the next lane of the warp runs, or the worker chooses another warp. Returns when this fiber is
// ready and it is its turn again.
static void switch_lane(bool to_other_warp) {
    Fiber* f = emulation_now;
    Warp* w = f->warp;
    if (w->ready == 0) { f->block->ready_warps &= ~(1u << (w - f->block->warps)); }
    if (w->ready == 0 || to_other_warp) {
        to_worker();
        return;
    }
    w->turn = (unsigned)next_lane(w);
    Fiber* next = f - f->lane + w->turn;
    if (next == f) { return; }
    emulation_now = next;
    emulation_switch(&f->sp, next->sp);
}

// ---- warp operations ---------------------------------------------------------------------------------

static void wake(Block* b, Warp* w, unsigned lanes) {
    w->ready |= lanes;
    if (!b->launch->schedule) { w->turn = 0; }
    b->ready_warps |= 1u << (w - b->warps);
}

static void count_operation(Block* b, Warp* w, WarpOperation* operation, unsigned lanes);

// Does the operation that the lanes of `mask` wait for, if all of them do. Lanes that have ended are not waited for.
static bool try_complete(Block* b, Warp* w, unsigned mask) {
    unsigned lanes = mask & w->alive;
    if (lanes == 0 || (w->waiting & lanes) != lanes) { return false; }
    Fiber* fibers = b->fibers + 32 * (w - b->warps);
    Fiber* first = fibers + __builtin_ctz(lanes);
    void* args[32];
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Fiber* f = fibers + __builtin_ctz(rest);
        if (f->mask != mask) { return false; }
        if (f->operation != first->operation) {
            report("lanes of a warp wait for each other at different instructions", first, first->pc, f, f->pc);
            end_launch(NULL);
        }
        args[f->lane] = f->arg;
    }
    first->operation(args, lanes);
    if (lanes == w->alive) {
        warp_converged(b, w);
        w->passed.clear();
    }
    if (emulation_counting) { count_operation(b, w, first->operation, lanes); }
    w->waiting &= ~lanes;
    wake(b, w, lanes);
    uint64_t random = next_random(&b->random);
    if (b->launch->schedule) { w->turn = random & 31, w->descending = random & 32; }
    return true;
}

void warp_collective(unsigned mask, WarpOperation* operation, void* arg, void* pc) {
    Fiber* f = emulation_now;
    Warp* w = f->warp;
    unsigned bit = 1u << f->lane;
    if (!(mask & bit)) {
        report("a lane calls a warp operation with a mask that it is not in", f, pc, NULL, NULL);
        end_launch(NULL);
    }
    f->mask = mask, f->operation = operation, f->arg = arg, f->pc = pc;
    w->waiting |= bit, w->ready &= ~bit;
    bool preempted = try_complete(f->block, w, mask) && f->block->preempts && (f->block->random & 3) == 0;
    if (!(w->ready & bit) || preempted || w->turn != (unsigned)f->lane) { switch_lane(preempted); }
}

static void sync_warp(void* const*, unsigned lanes) {
    Fiber* f = emulation_now;
    warp_synchronised(f->warp, lanes);
}
void __syncwarp(unsigned mask) { warp_collective(mask, sync_warp, NULL, __builtin_return_address(0)); }

struct Shuffle {
    uint64_t bits, result;
    int source;
    Fiber* fiber;
    void* pc;
};
static void shuffle(void* const* args, unsigned lanes) {
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Shuffle* to = (Shuffle*)args[__builtin_ctz(rest)];
        if (!(lanes >> to->source & 1)) {
            report("a shuffle reads from a lane that does not take part", to->fiber, to->pc, NULL, NULL);
            to->result = 0x7FC00000; // NaN as a float
            continue;
        }
        to->result = ((Shuffle*)args[to->source])->bits;
    }
}
static void count_operation(Block* b, Warp* w, WarpOperation* operation, unsigned lanes) {
    if (operation == shuffle) { count_event(COUNT_SHUFFLE); }
    if (lanes == w->alive) { count_warp_met(b, (int)(w - b->warps)); }
}
uint64_t emulation_shuffle(char kind, unsigned mask, uint64_t bits, int operand, int width) {
    Fiber* f = emulation_now;
    int first = f->lane / width * width, lane = f->lane, source = lane;
    if (kind == 'i') { source = first + (operand & (width - 1)); }
    if (kind == 'x') { source = lane ^ operand; }
    if (kind == 'u') { source = lane - operand; }
    if (kind == 'd') { source = lane + operand; }
    // a source outside of the segment: the lane keeps its own value
    if (source < first || source >= first + width) { source = lane; }
    Shuffle s = {bits, bits, source, f, __builtin_return_address(0)};
    warp_collective(mask, shuffle, &s, s.pc);
    return s.result;
}

struct Vote {
    uint64_t value, result;
};
static void ballot(void* const* args, unsigned lanes) {
    uint64_t all = 0;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        all |= (uint64_t)(((Vote*)args[lane])->value != 0) << lane;
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) { ((Vote*)args[__builtin_ctz(rest)])->result = all; }
}
static void match_any(void* const* args, unsigned lanes) {
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Vote* to = (Vote*)args[__builtin_ctz(rest)];
        to->result = 0;
        for (unsigned others = lanes; others; others &= others - 1) {
            int lane = __builtin_ctz(others);
            to->result |= (uint64_t)(((Vote*)args[lane])->value == to->value) << lane;
        }
    }
}
unsigned __ballot_sync(unsigned mask, int predicate) {
    Vote v = {(uint64_t)(predicate != 0), 0};
    warp_collective(mask, ballot, &v, __builtin_return_address(0));
    return (unsigned)v.result;
}
int __any_sync(unsigned mask, int predicate) {
    Vote v = {(uint64_t)(predicate != 0), 0};
    warp_collective(mask, ballot, &v, __builtin_return_address(0));
    return v.result != 0;
}
int __all_sync(unsigned mask, int predicate) { // no lane whose predicate is false
    Vote v = {(uint64_t)(predicate == 0), 0};
    warp_collective(mask, ballot, &v, __builtin_return_address(0));
    return v.result == 0;
}
unsigned emulation_match_any(unsigned mask, uint64_t bits) {
    Vote v = {bits, 0};
    warp_collective(mask, match_any, &v, __builtin_return_address(0));
    return (unsigned)v.result;
}

// reductions: one operation for each, because all lanes of a group must wait for the same one
template <class T, T combine(T, T)> static void reduce(void* const* args, unsigned lanes) {
    T all = (T)((Vote*)args[__builtin_ctz(lanes)])->value;
    for (unsigned rest = lanes & (lanes - 1); rest; rest &= rest - 1) {
        all = combine(all, (T)((Vote*)args[__builtin_ctz(rest)])->value);
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        ((Vote*)args[__builtin_ctz(rest)])->result = (uint64_t)(uint32_t)all;
    }
}
template <class T> static T add(T a, T b) { return (T)((unsigned)a + (unsigned)b); }
template <class T> static T smaller(T a, T b) { return b < a ? b : a; }
template <class T> static T larger(T a, T b) { return a < b ? b : a; }
static unsigned bits_and(unsigned a, unsigned b) { return a & b; }
static unsigned bits_or(unsigned a, unsigned b) { return a | b; }
static unsigned bits_xor(unsigned a, unsigned b) { return a ^ b; }
#define REDUCE(T, name, combine)                                                                                       \
    T name(unsigned mask, T value) {                                                                                   \
        Vote v = {(uint64_t)(uint32_t)value, 0};                                                                       \
        warp_collective(mask, reduce<T, combine>, &v, __builtin_return_address(0));                                    \
        return (T)(uint32_t)v.result;                                                                                  \
    }
REDUCE(int, __reduce_add_sync, add<int>)
REDUCE(int, __reduce_min_sync, smaller<int>)
REDUCE(int, __reduce_max_sync, larger<int>)
REDUCE(unsigned, __reduce_add_sync, add<unsigned>)
REDUCE(unsigned, __reduce_min_sync, smaller<unsigned>)
REDUCE(unsigned, __reduce_max_sync, larger<unsigned>)
REDUCE(unsigned, __reduce_and_sync, bits_and)
REDUCE(unsigned, __reduce_or_sync, bits_or)
REDUCE(unsigned, __reduce_xor_sync, bits_xor)

// ---- barriers ------------------------------------------------------------------------------------------

// Lets the waiting threads of a barrier go. Barrier 0 is that of the whole block.
static void release_barrier(Block* b, int id) {
    Barrier* barrier = &b->barriers[id];
    if (emulation_counting) { count_event(COUNT_BARRIER); }
    if (id == 0) {
        block_synchronised(b);
        b->predicates_result = b->predicates, b->predicates = 0;
    }
    for (int w = 0; w < b->num_warps; w++) {
        unsigned lanes = barrier->waiting[w];
        if (!lanes) { continue; }
        if (id != 0) { barrier_passed(b, barrier, w, lanes); }
        if (emulation_counting && lanes == b->warps[w].alive) { count_warp_met(b, w); }
        wake(b, &b->warps[w], lanes);
    }
    *barrier = Barrier{};
}

static void arrive(int id, int threads, bool wait, void* pc) {
    Fiber* f = emulation_now;
    Block* b = f->block;
    Barrier* barrier = &b->barriers[id];
    int warp = (int)(f->warp - b->warps);
    if (id != 0) {
        if (barrier->arrived > 0 && barrier->expected != threads) {
            report("threads use a named barrier with different counts", f, pc, NULL, NULL);
            end_launch(NULL);
        }
        barrier_arrived(b, barrier, warp);
        barrier->expected = threads;
    }
    barrier->arrived++;
    barrier->last = arrival_of(f, pc);
    if (wait) {
        barrier->waiting[warp] |= 1u << f->lane;
        f->warp->ready &= ~(1u << f->lane);
        f->pc = pc;
    }
    if (barrier->arrived == (id == 0 ? b->num_alive : threads)) { release_barrier(b, id); }
    if (wait) { switch_lane(true); } // after a barrier any warp may be the first
}
void __syncthreads() { arrive(0, 0, true, __builtin_return_address(0)); }
void emulation_named_barrier(int id, int threads, bool wait) { arrive(id, threads, wait, __builtin_return_address(0)); }
int __syncthreads_count(int predicate) {
    emulation_now->block->predicates += predicate != 0;
    arrive(0, 0, true, __builtin_return_address(0));
    return emulation_now->block->predicates_result;
}
int __syncthreads_or(int predicate) {
    emulation_now->block->predicates += predicate != 0;
    arrive(0, 0, true, __builtin_return_address(0));
    return emulation_now->block->predicates_result != 0;
}
int __syncthreads_and(int predicate) { // no thread whose predicate is false
    emulation_now->block->predicates += predicate == 0;
    arrive(0, 0, true, __builtin_return_address(0));
    return emulation_now->block->predicates_result == 0;
}

void yield_thread(const Wait& wait) {
    emulation_now->yielded = true;
    emulation_now->wait = wait;
    emulation_now->warp->turn = (emulation_now->lane + 1) & 31;
    to_worker();
}

// All blocks of a cooperative launch are on one worker, so plain counters do. Its first thread speaks for a block, because
// barriers of the block are before and behind it.
static const size_t GRID_BARRIER = 0;
void emulation_grid_barrier() {
    Launch* launch = emulation_now->block->launch;
    if (!launch->all_resident) { emulation_unsupported("a grid barrier in a launch that is not cooperative"); }
    arrive(0, 0, true, __builtin_return_address(0));
    if (emulation_now->id == 0) {
        void* pc = __builtin_return_address(0);
        int phase = launch->grid_phase;
        { SyncScope released(GRID_BARRIER, SYNC_WRITES | SYNC_RELEASES, pc); }
        launch->grid_last = arrival_of(emulation_now, pc);
        if (++launch->grid_arrived == (int)launch->num_blocks) {
            launch->grid_arrived = 0;
            launch->grid_phase++;
        }
        while (launch->grid_phase == phase) { yield_thread({WAIT_GRID, NULL, pc}); }
        SyncScope acquired(GRID_BARRIER, SYNC_READS | SYNC_ACQUIRES, pc);
    }
    arrive(0, 0, true, __builtin_return_address(0));
}

// Ends the phase of a cluster's barrier if all its blocks that have not ended have arrived. They run on one worker.
static void try_complete(Cluster* cluster) {
    int alive = 0;
    for (Block* b : cluster->blocks) { alive += b != NULL; }
    if (cluster->arrived >= alive) { cluster->arrived = 0, cluster->phase++; }
}
// A barrier of the threads that have not ended. The first of these in a block arrives for the block.
static void cluster_barrier(bool releases, void* pc) {
    arrive(0, 0, true, pc);
    Block* b = emulation_now->block;
    const Warp* first = b->warps;
    while (first->alive == 0) { first++; }
    if (emulation_now->warp == first && emulation_now->lane == __builtin_ctz(first->alive)) {
        std::shared_ptr<Cluster> cluster = b->cluster;
        size_t barrier = 1 + b->number / (size_t)b->launch->cluster;
        int phase = cluster->phase;
        if (releases) { SyncScope released(barrier, SYNC_WRITES | SYNC_RELEASES, pc); }
        cluster->arrived++;
        cluster->last = arrival_of(emulation_now, pc);
        try_complete(cluster.get());
        while (cluster->phase == phase) { yield_thread({WAIT_CLUSTER, NULL, pc}); }
        SyncScope acquired(barrier, SYNC_READS | SYNC_ACQUIRES, pc);
    }
    arrive(0, 0, true, pc);
}
void cluster_sync() { cluster_barrier(true, __builtin_return_address(0)); }
// The whole barrier is in cluster_wait().
void cluster_arrive_relaxed() { emulation_now->arrived_relaxed = true; }
void cluster_wait() {
    bool releases = !emulation_now->arrived_relaxed;
    emulation_now->arrived_relaxed = false;
    cluster_barrier(releases, __builtin_return_address(0));
}

// ---- threads end -----------------------------------------------------------------------------------------

extern "C" void emulation_fiber_main() {
    Fiber* f = emulation_now;
    Block* b = f->block;
    Warp* w = f->warp;
    call_kernel(f);
    if (!f->copies.empty()) { f->copies.clear(); } // copies that nobody waited for do not arrive
    if (!f->stores.empty()) { end_thread_sm90(f); }
    w->alive &= ~(1u << f->lane), w->ready &= ~(1u << f->lane);
    b->num_alive--;
    // who waited only for this thread goes on
    for (unsigned rest = w->waiting; rest;) {
        unsigned mask = (f - f->lane + __builtin_ctz(rest))->mask;
        rest &= ~mask;
        try_complete(b, w, mask);
    }
    if (b->num_alive > 0 && b->barriers[0].arrived == b->num_alive) { release_barrier(b, 0); }
    switch_lane(false);
    abort(); // an ended fiber is never continued
}

void end_launch(const char* unsupported) {
    Block* b = emulation_now->block;
    b->launch->unsupported = unsupported ? unsupported : "";
    b->ended = true;
    to_worker();
    abort();
}
void emulation_unsupported(const char* what) {
    if (emulation_now) { end_launch(what); }
    throw EmulationUnsupported{what};
}
void __trap() {
    report("a trap", emulation_now, __builtin_return_address(0), NULL, NULL);
    end_launch(NULL);
}
// The C library's assert() calls this function. In a kernel it ends the launch, like a trap.
extern "C" void __assert_fail(const char* text, const char* file, unsigned line, const char* function) noexcept {
    if (!emulation_now) {
        fprintf(stderr, "%s:%u: %s: assertion %s failed\n", file, line, function, text);
        abort();
    }
    std::string said = text;
    for (const auto& name : {std::pair<const char*, const char*>{"emulation_thread_index()", "threadIdx"},
                             {"emulation_block_index()", "blockIdx"},
                             {"emulation_block_size()", "blockDim"},
                             {"emulation_grid_size()", "gridDim"}}) {
        for (size_t at; (at = said.find(name.first)) != std::string::npos;) {
            said.replace(at, strlen(name.first), name.second);
        }
    }
    report("an assertion that fails", emulation_now, __builtin_return_address(0), NULL, NULL, said);
    end_launch(NULL);
}

// ---- blocks ----------------------------------------------------------------------------------------------------

// Blocks that are not in use, with their memory.
static std::vector<Block*>& spare_blocks() {
    static std::vector<Block*> blocks;
    return blocks;
}
static std::mutex spare_blocks_mutex;

static char* reserve(size_t bytes) { // zeros; pages take memory when they are touched
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulation: mmap");
        exit(EXIT_FAILURE);
    }
    return (char*)p;
}

static Block* take_block() {
    std::lock_guard<std::mutex> lock(spare_blocks_mutex);
    if (!spare_blocks().empty()) {
        Block* b = spare_blocks().back();
        spare_blocks().pop_back();
        return b;
    }
    Block* b = new Block();
    b->stacks = reserve((size_t)MAX_THREADS * STACK_BYTES);
    b->records = (uint64_t*)reserve((size_t)MAX_THREADS * STACK_BYTES / 4 * sizeof(uint64_t));
    b->shared = reserve(SHARED_BYTES);
    b->shadow = (Shadow*)reserve(SHARED_BYTES * sizeof(Shadow));
    return b;
}
static void give_block(Block* b) {
    if (emulation_counting) { count_block_ends(b); }
    b->cluster->blocks[(size_t)b->cluster_rank] = NULL;
    if (b->cluster->arrived > 0) { try_complete(b->cluster.get()); } // the others may have waited for this block only
    b->cluster = NULL;
    b->memory_barriers.clear();
    end_block_memory(b);
    std::lock_guard<std::mutex> lock(spare_blocks_mutex);
    spare_blocks().push_back(b);
}

static Block* begin_block(Launch* launch, size_t number) {
    Block* b = take_block();
    dim3 grid = launch->grid, size = launch->block;
    b->launch = launch, b->number = number;
    b->index = {(unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y),
                (unsigned)(number / grid.x / grid.y)};
    b->num_threads = b->num_alive = (int)(size.x * size.y * size.z);
    b->num_warps = (b->num_threads + 31) / 32;
    b->ready_warps = b->num_warps == 32 ? 0xFFFFFFFFu : (1u << b->num_warps) - 1;
    b->random = launch->schedule * 0x9E3779B97F4A7C15 + number;
    b->preempts = launch->schedule % 2 == 1;
    b->ended = false;
    b->log = NULL;
    b->waits.clear();
    b->predicates = 0;
    b->polled = -1;
    for (Barrier& barrier : b->barriers) { barrier = Barrier{}; }
    for (int i = 0; i < b->num_warps; i++) {
        Warp* w = &b->warps[i];
        int lanes = std::min(32, b->num_threads - 32 * i);
        w->alive = w->ready = lanes == 32 ? 0xFFFFFFFFu : (1u << lanes) - 1;
        w->waiting = 0;
        w->products.clear(), w->passed.clear();
        uint64_t random = next_random(&b->random);
        w->turn = launch->schedule ? random & 31 : 0;
        w->descending = launch->schedule && (random & 32);
    }
    for (int i = 0; i < b->num_threads; i++) {
        Fiber* f = &b->fibers[i];
        unsigned u = (unsigned)i;
        f->block = b, f->warp = &b->warps[i / 32], f->id = i, f->lane = i % 32;
        f->index = {u % size.x, u / size.x % size.y, u / size.x / size.y};
        f->yielded = false, f->group = f->store_group = f->product_group = 0;
        f->copies.clear(), f->stores.clear();
        f->proxy_fence = f->barrier_fence = 0, f->arrived_relaxed = false, f->polled = NULL, f->waited = false;
        f->stack = b->stacks + (size_t)i * STACK_BYTES;
        f->registers = b->records + (size_t)i * STACK_BYTES / 4;
        f->first_register_fence = f->register_fences;
        // the stacks begin at different offsets in their pages, or they would all compete for the same cache lines
        f->sp = new_stack(f->stack + STACK_BYTES - i % 13 * 320);
    }
    begin_block_memory(b);
    if (emulation_counting) { count_block_begins(b); }
    return b;
}

enum Turn { TURN_RAN, TURN_POLLED, TURN_STUCK, TURN_ENDED };

// Runs one warp of the block until it waits for others.
static Turn run_warp(Block* b) {
    if (b->num_alive == 0) { return TURN_ENDED; }
    if (b->ready_warps == 0) { return TURN_STUCK; }
    int skip = b->launch->schedule ? (int)(next_random(&b->random) % (unsigned)__builtin_popcount(b->ready_warps)) : 0;
    unsigned warps = b->ready_warps;
    while (skip-- > 0) { warps &= warps - 1; }
    if (b->polled >= 0) { // schedule 0: a warp that polls lets those behind it run
        unsigned behind = b->ready_warps & ~((2u << b->polled) - 1);
        warps = behind ? behind : b->ready_warps;
    }
    Warp* w = &b->warps[__builtin_ctz(warps)];
    Fiber* f = &b->fibers[32 * (w - b->warps) + next_lane(w)];
    bool polls = f->yielded;
    f->yielded = false;
    emulation_now = f;
    emulation_switch(&worker_sp, f->sp);
    b->polled = b->launch->schedule == 0 && emulation_now->yielded ? emulation_now->id / 32 : -1;
    polls = polls && emulation_now->yielded;
    emulation_now = NULL;
    if (b->ended || b->num_alive == 0) { return TURN_ENDED; }
    return polls ? TURN_POLLED : TURN_RAN;
}

// ---- launches -----------------------------------------------------------------------------------------------------

// How often threads may poll, one after the other, before nothing more can come. With one worker it is enough that each
// thread has had many turns.
static long most_polls(const Launch* launch, size_t num_blocks) {
    if (emulation_replaying) { return 100000; } // the deadlock is known
    long threads = (long)num_blocks * (launch->block.x * launch->block.y * launch->block.z);
    return launch->alone ? std::max(1000000L, 100 * threads) : 10000000;
}
enum { FEW_BLOCKS = 16 }; // as many as may be resident
static void run_blocks(Launch* launch) {
    std::vector<Block*> live;
    uint64_t random = launch->schedule;
    long polled = 0; // turns since anything but polling happened
    // Of a persistent kernel, one block would take all work from the others; every other schedule runs its blocks together.
    bool together = launch->schedule % 2 == 1 && launch->num_blocks <= FEW_BLOCKS;
    for (;;) {
        // one block at a time, more if the live ones only poll: they may wait for blocks that have not begun
        bool more = live.empty() || launch->all_resident || together || polled > 64 * (long)live.size();
        while (more && !launch->unsupported) {
            size_t number = launch->next_block.fetch_add((size_t)launch->cluster);
            if (number >= launch->num_blocks) { break; }
            auto cluster = std::make_shared<Cluster>();
            for (int rank = 0; rank < launch->cluster; rank++) {
                Block* b = begin_block(launch, number + (size_t)rank);
                b->cluster = cluster, b->cluster_rank = rank;
                cluster->blocks.push_back(b);
                live.push_back(b);
            }
            more = launch->all_resident || together;
            polled = 0;
        }
        if (live.empty()) { return; }
        size_t i = live.size() > 1 ? next_random(&random) % live.size() : 0;
        Turn turn = launch->unsupported ? TURN_ENDED : run_warp(live[i]);
        polled = turn == TURN_POLLED ? polled + 1 : 0;
        // another worker may have the block they wait for
        if (!launch->alone && polled > 1000 * (long)live.size()) { sched_yield(); }
        if (polled > most_polls(launch, live.size())) {
            report_deadlock(live, "a deadlock: all threads poll memory that nobody writes");
            launch->unsupported = "";
        }
        if (turn == TURN_STUCK) {
            report_deadlock({live[i]}, "a deadlock: the threads wait for others that do not come");
        }
        if (turn == TURN_STUCK || turn == TURN_ENDED) {
            give_block(live[i]);
            live.erase(live.begin() + (long)i);
        }
    }
}

static int schedule_number = -1;
void emulation_schedule(int number) { schedule_number = number; }

static const struct {
    const char* name;
    bool whole;
    double least, most;
} numbers[] = {{"EMULATION_LIMIT", false, 0, 1e9},
               {"EMULATION_THREADS", true, 1, 64},
               {"EMULATION_SMS", true, 1, 1024},
               {"EMULATION_GPUS", true, 1, 64}};
static const struct {
    const char *name, *words; // with a space behind each of them
} choices[] = {{"EMULATION_ARCH", "75 80 90 "}, {"EMULATION_STREAMS", "early late "}};
double emulation_setting(const char* name, double otherwise) {
    const char* text = getenv(name);
    return text ? atof(text) : otherwise;
}
// All of them are checked at the start, whether the program will ask for them or not.
__attribute__((constructor)) static void check_settings() {
    for (const auto& n : numbers) {
        const char* text = getenv(n.name);
        char* end;
        double x = text ? strtod(text, &end) : n.least;
        if (!text || (end != text && !*end && x >= n.least && x <= n.most && (!n.whole || x == floor(x)))) { continue; }
        fprintf(stderr, "error: %s must be a %snumber from %g to %g, not '%s'\n", n.name, n.whole ? "whole " : "",
                n.least, n.most, text);
        exit(2);
    }
    for (const auto& c : choices) {
        const char* text = getenv(c.name);
        if (!text || (text[0] && !strchr(text, ' ') && strstr(c.words, (text + std::string(" ")).c_str()))) {
            continue;
        }
        fprintf(stderr, "error: %s must be one of: %s, not '%s'\n", c.name,
                std::string(c.words, strlen(c.words) - 1).c_str(), text);
        exit(2);
    }
}

double emulation_limit() { return emulation_setting("EMULATION_LIMIT", 1); }
bool emulation_affords(double bytes, double flops) {
    double limit = emulation_limit();
    return bytes <= limit * 1e7 && flops <= limit * 1e8;
}

static int num_workers() {
    static int workers =
        (int)emulation_setting("EMULATION_THREADS", std::clamp((int)std::thread::hardware_concurrency(), 1, 64));
    return workers;
}

uint32_t emulation_launches, emulation_replay_shift;

static Launch parameters_of; // of the next launch
void emulation_parameter(int number, const void* place, size_t bytes, const void* pointer) {
    Launch& l = parameters_of;
    const char *begin = (const char*)place, *end = begin + bytes;
    if (number == 0) { l.host_pointers.clear(), l.parameters = begin, l.parameters_end = end; }
    l.parameters = std::min(l.parameters, begin), l.parameters_end = std::max(l.parameters_end, end);
    size_t offset;
    if (pointer && !device_offset(pointer, &offset)) { l.host_pointers.push_back({number, (const char*)pointer}); }
}

cudaError_t emulation_check_config(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes);

void emulation_launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, bool all_resident, int cluster,
                      bool early, void (*call)(void*), void* closure) {
    if (emulation_check_config(kernel, grid, block, shared_bytes) != cudaSuccess || replay_is_over()) { return; }
    Launch launch;
    launch.kernel = kernel, launch.grid = grid, launch.block = block, launch.shared_bytes = shared_bytes;
    launch.all_resident = all_resident, launch.call = call, launch.closure = closure;
    launch.number = ++emulation_launches;
    launch.schedule = schedule_number < 0 ? (launch.number - emulation_replay_shift) % 1000 : (uint64_t)schedule_number;
    launch.num_blocks = (size_t)grid.x * grid.y * grid.z;
    launch.cluster = cluster;
    launch.host_pointers = parameters_of.host_pointers;
    launch.parameters = parameters_of.parameters, launch.parameters_end = parameters_of.parameters_end;
    launch.next_block = 0, launch.unsupported = NULL, launch.grid_arrived = launch.grid_phase = 0;
    launch.grid_last = {};
    launch.holds_accumulators = false;
    watch_for_hangs();
    begin_launch_memory(&launch, early);
    begin_order(&launch);
    size_t num_threads = launch.num_blocks * block.x * block.y * block.z;
    bool small = all_resident || num_threads < 8192 || emulation_counting || emulation_replaying;
    int workers = small ? 1 : (int)std::min((size_t)num_workers(), launch.num_blocks);
    launch.alone = workers == 1;
    if (emulation_counting) { count_launch_begins(&launch); }
    std::vector<std::thread> threads;
    for (int i = 1; i < workers; i++) { threads.emplace_back(run_blocks, &launch); }
    run_blocks(&launch);
    sigset_t second; // watch_for_hangs() wants to see the workers
    sigemptyset(&second), sigaddset(&second, SIGPROF);
    pthread_sigmask(SIG_BLOCK, &second, NULL);
    for (std::thread& thread : threads) { thread.join(); }
    pthread_sigmask(SIG_UNBLOCK, &second, NULL);
    if (emulation_counting) { count_launch_ends(); }
    end_order(&launch);
    end_launch_memory(&launch);
    const char* unsupported = launch.unsupported;
    if (unsupported && unsupported[0]) { throw EmulationUnsupported{unsupported}; }
}

// ---- where a thread is, its shared memory ---------------------------------------------------------------------------

uint3 emulation_thread_index() { return emulation_now->index; }
uint3 emulation_block_index() { return emulation_now->block->index; }
dim3 emulation_block_size() { return emulation_now->block->launch->block; }
dim3 emulation_grid_size() { return emulation_now->block->launch->grid; }
