/*
Shared by the files of the emulation: fibers, warps, blocks, and the records that find races. Kernels do not see this.

Each CUDA thread is a fiber with a stack of its own. A worker, which is a thread of the host, runs one block or a few,
one fiber at a time: a lane runs until it must wait for its warp or its block, then the next lane of its warp runs, and
when the whole warp waits, another warp. The order of lanes and warps is drawn from the schedule's number.

Races are found by what orders two accesses, not by what happened first: an access is recorded with its thread and with
the epoch of its warp, a counter that grows at every barrier the warp takes part in. Two accesses of the same byte by
two threads conflict unless a barrier orders them, see ordered() in memory.cpp.
*/
#pragma once

#include <stdint.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

enum {
    STACK_BYTES = 64 << 10,    // per fiber; only the pages that a kernel uses take memory
    SHARED_BYTES = 320 << 10,  // address range of a block's shared memory: more than a GPU has, for the gaps
    SHARED_LIMIT = 227 << 10,  // what a block may use, as on an H100
    SHARED_DEFAULT = 48 << 10, // what a kernel may use without cudaFuncSetAttribute
    SHARED_FIRST = 1024,       // offset of the dynamic shared memory, so that offset 0 is never a variable
    SHARED_GAP = 128, // unused bytes between two variables: all banks, so that a variable has the banks as on a GPU
    MAX_THREADS = 1024,
    MAX_WARPS = 32,
    MAX_BARRIERS = 16,
};

struct Block;
struct Fiber;
struct Warp;
struct OpenBlock;
struct Order;
struct BlockLog;

// An asynchronous copy that has been issued and not waited for.
struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool valid; // false: zeros are written
    int group;
    void* pc;
};

// A copy by TMA, by the bulk-copy engine or by st.async, whose bytes arrive at a barrier of the block that it writes to.
struct BulkCopy {
    Block* to_block;
    size_t to;          // offset in its shared memory
    Block* from_block;  // NULL: not from shared memory
    size_t from;        // offset in its shared memory
    const void* global; // NULL: not from contiguous device memory
    TensorMap map;      // rank 0: not a box of a tensor
    int coordinates[4];
    char value[16]; // of st.async
    size_t bytes;
    Fiber* fiber; // which issued it
    void* pc;
};

// The other way round: from shared to device memory, by the thread's groups.
struct BulkStore {
    void* global; // NULL: a box of a tensor
    TensorMap map;
    int coordinates[4];
    size_t from, bytes;
    bool adds; // floats
    int group;
    void* pc;
};

// Who came to a barrier last, for messages. pc NULL: nobody.
struct Arrival {
    void* pc;
    uint3 thread, block;
};

// An mbarrier. The first phase is number 0.
struct MemoryBarrier {
    int count, pending; // arrivals of a phase, and those that this phase still needs
    long bytes;         // expected and not yet arrived
    long expected;      // by all arrivals of this phase
    Arrival last;
    uint32_t phase;
    uint32_t clock[32], done[32]; // per warp: the latest epoch that arrivals have brought; of the phase that completed
    std::vector<BulkCopy> copies; // in flight
    int thread;                   // that initialised it, in this epoch of its warp, at this pc
    uint32_t epoch;
    void* pc;
};

// A wait for an mbarrier that some lanes of a warp have behind them.
struct PassedWait {
    void* pc;
    size_t offset;
    int parity;
    unsigned lanes;
};

// A wgmma that has been issued and not waited for: this warp's 16 rows of the 64.
struct WarpProduct {
    float* d[32];                    // (columns / 2) accumulators of each lane
    const uint32_t* a_registers[32]; // (4), NULL: not in registers
    uint32_t a[32][4];               // copies of them
    std::vector<char> operands;      // copies of those in shared memory, when it was issued
    uint64_t a_descriptor, b_descriptor;
    int columns, type; // WGMMA_BF16, ...
    bool a_transposed, b_transposed, accumulates;
    int group;
    void* pc;
};

// args[lane] is what each lane of the mask passed; the operation writes results through it
typedef void WarpOperation(void* const* args, unsigned mask);

// What a thread waits for that gives up its turn until something has changed. See deadlock.cpp.
enum WaitKind { WAIT_MEMORY, WAIT_MBARRIER, WAIT_CLUSTER, WAIT_GRID };
struct Wait {
    WaitKind kind;
    const void* place; // the memory, or the mbarrier
    void* pc;
};

struct Fiber {
    void* sp;
    char* stack;         // (STACK_BYTES)
    uint64_t* registers; // (STACK_BYTES / 4) records of accesses to the stack, see "registers of wgmma" in memory.cpp
    // wgmma_fence() has been called so often on this stack; so often before this thread began
    uint32_t register_fences, first_register_fence;
    Block* block;
    Warp* warp;
    uint3 index;  // threadIdx
    int id, lane; // of the thread in the block, in the warp
    // what it waits for
    unsigned mask;
    WarpOperation* operation;
    void* arg;
    void* pc;     // where it waits
    bool yielded; // it polls memory
    Wait wait;    // for what, when it yielded last
    int group;    // number of the cp.async group that is open
    std::vector<Copy> copies;
    int store_group, product_group; // likewise of bulk stores, of wgmma
    std::vector<BulkStore> stores;
    // Epochs of its last fences. Asynchronous accesses see what this thread has written to shared memory up to
    // proxy_fence; asynchronous copies, the mbarriers that it has initialised up to barrier_fence.
    uint32_t proxy_fence, barrier_fence;
    bool arrived_relaxed; // at the cluster's barrier
    const void* polled;   // its last volatile read of device memory since its last fence, or NULL
    bool waited;          // it has called grid_wait_dependency()
};

struct Warp {
    unsigned alive, ready, waiting; // lanes: not ended, can run, wait for a warp operation
    unsigned turn;                  // lane that runs next, if it is ready
    bool descending;                // the order of the lanes
    // races: epoch counts barriers and other operations of the whole warp. Accesses up to `full` are ordered before
    // every lane's next one; with `partial` set, lane i also knows those of lane j up to known[i][j]. Reads up to
    // `converged` are ordered before every lane's next write, see warp_converged().
    uint32_t epoch, full, converged;
    bool partial;
    uint32_t known[32][32];
    std::vector<WarpProduct> products; // in flight, in order
    std::vector<PassedWait> passed;    // since the warp's last common operation
};

struct Barrier {
    int arrived, expected;       // threads
    unsigned waiting[MAX_WARPS]; // lanes
    uint32_t clock[MAX_WARPS];   // latest epoch of each warp that an arrival has brought
    Arrival last;
};

// A byte of shared memory: who wrote it last, and who read it since. See memory.cpp for the layout of a record.
struct Shadow {
    uint64_t write, read, other_read;
};

struct SharedVariable {
    const void* key;
    size_t offset, bytes;
    const char* name;
};

// A parameter of a kernel that points to the host's memory.
struct HostPointer {
    int number; // from 1
    const char* p;
};

struct Launch {
    const void* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    bool all_resident;
    void (*call)(void*);
    void* closure;
    uint64_t schedule;
    uint32_t number; // counts launches
    std::vector<HostPointer> host_pointers;
    const char *parameters, *parameters_end; // where they are
    size_t num_blocks;
    std::atomic<size_t> next_block;
    std::atomic<const char*> unsupported; // NULL, or why the launch was ended
    std::atomic<int> grid_arrived, grid_phase;
    Arrival grid_last;
    int cluster;                          // blocks per cluster, along x
    bool alone;                           // one worker runs all blocks
    Order* order;                         // of its blocks' accesses, see order.cpp
    std::atomic<bool> holds_accumulators; // a thread has called wgmma_hold() after a wait
    // A programmatic dependent launch: until it waits, the launches from `overlaps` on may still run, 0: none.
    bool early;
    uint32_t overlaps;
    // A thread has waited; one has called launch_dependents before it waited; an early launch has written device memory.
    std::atomic<bool> waited, released_early, wrote;
};

struct Cluster {
    std::vector<Block*> blocks; // by rank; NULL: has ended
    int arrived, phase;         // of cluster_sync
    Arrival last;
};

struct Block {
    Launch* launch;
    uint3 index; // blockIdx
    size_t number;
    int num_threads, num_warps, num_alive;
    unsigned ready_warps;
    uint64_t random;
    int polled;                        // schedule 0: the warp that polled in the last turn, -1: none
    bool preempts;                     // the schedule changes warps after warp operations, too
    BlockLog* log;                     // NULL until a fence or a synchronising access: see order.cpp
    bool ended;                        // a thread asked for the end of the launch
    int predicates, predicates_result; // of __syncthreads_or and its kin
    Barrier barriers[MAX_BARRIERS];
    uint32_t seen[MAX_WARPS][MAX_WARPS]; // accesses of warp j up to epoch seen[i][j] are ordered before warp i's next
    bool races_off;                      // epochs have run out
    Warp warps[MAX_WARPS];
    Fiber fibers[MAX_THREADS];
    std::shared_ptr<Cluster> cluster;
    int cluster_rank;
    std::map<size_t, MemoryBarrier> memory_barriers; // by offset in shared memory
    std::vector<SharedVariable> variables;
    size_t shared_end;                           // offset of the first byte after all variables
    char* stacks;                                // (MAX_THREADS, STACK_BYTES)
    uint64_t* records;                           // (MAX_THREADS, STACK_BYTES / 4) of accesses to the stacks
    char* shared;                                // (SHARED_BYTES)
    Shadow* shadow;                              // (SHARED_BYTES)
    OpenBlock* counts;                           // NULL until accesses of this block are counted
    std::vector<std::pair<int, uint32_t>> waits; // calls of grid_wait_dependency(): thread, epoch
};

// The fiber that runs on this thread of the host; NULL in host code.
extern __thread Fiber* emulation_now;
size_t emulation_shared_limit(const void* kernel); // bytes of shared memory, static and dynamic, that a launch may have

// Waits until all lanes of the mask have called it with the same operation, which is then done once. pc is where.
void warp_collective(unsigned mask, WarpOperation* operation, void* arg, void* pc);
// Lets other warps and blocks run, for a thread that polls.
void yield_thread(const Wait& wait);
[[noreturn]] void end_launch(const char* unsupported);
uint64_t next_random(uint64_t* state);

// ---- memory.cpp --------------------------------------------------------------------------------

enum AccessKind { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };
// True if a barrier of the block orders what thread `id` did in `epoch` of its warp before what f does now.
inline bool ordered(const Fiber* f, int id, uint32_t epoch) {
    if (id == f->id) { return true; }
    const Block* b = f->block;
    int warp = id / 32, mine = (int)(f->warp - b->warps);
    if (warp != mine) { return epoch <= b->seen[mine][warp]; }
    return epoch <= f->warp->full || (f->warp->partial && epoch <= f->warp->known[f->lane][id % 32]);
}
void check_access(const void* p, size_t bytes, AccessKind kind, void* pc);
// The access of another thread of the block, on whose behalf a warp operation reads or writes.
void check_access_of(Fiber* f, const void* p, size_t bytes, AccessKind kind, void* pc);
void mark_in_flight(Fiber* f, const void* p, size_t bytes, void* pc); // cp.async will write here

void begin_block_memory(Block* b); // before the block's first thread
void end_block_memory(Block* b);
void warp_synchronised(Warp* w, unsigned lanes);
void warp_converged(Block* b, Warp* w);
void block_synchronised(Block* b);
void barrier_arrived(Block* b, Barrier* barrier, int warp);
void barrier_passed(Block* b, Barrier* barrier, int warp, unsigned lanes);
void next_epoch(Block* b, Warp* w);
// early: a programmatic dependent launch
void begin_launch_memory(Launch* launch, bool early);
void end_launch_memory(Launch* launch);
extern const void* emulation_running;               // the stream whose task runs, NULL: the default one
void host_has_written(const void* p, size_t bytes); // device memory, by a copy, a memset or a library
void host_reads(const void* p, size_t bytes);
// False unless p points to device memory. *offset: from its begin.
bool device_offset(const void* p, size_t* offset);
// True if the bytes from p on are in one allocation of device memory. *pinned: by cudaMallocHost, which the host may access.
bool is_allocated(const void* p, size_t bytes, bool* pinned);
void pin(const void* p); // an allocation

// The number in an environment variable of the table in engine.cpp; `otherwise` if it is not set.
double emulation_setting(const char* name, double otherwise);
// A copy to shared memory has been issued: what it will write belongs to nobody until it has arrived.
void copy_issued(const BulkCopy& c);
void copy_arrived(const BulkCopy& c);
// An asynchronous access, which f issued: of shared memory of block b, of device memory. Reports a missing fence after an
// ordinary write.
void check_proxy(Fiber* f, const Block* b, size_t offset, size_t bytes, void* pc);
// wgmma, which f issued at pc, will read 16 bytes of shared memory; they have changed since then.
void check_operand(Fiber* f, size_t offset, void* pc);
void operand_changed(Fiber* f, size_t offset, void* pc);
void check_proxy_of_device(Fiber* f, const void* p, size_t bytes, void* pc);
// A write of device memory by an asynchronous store that f issued. adds: floats
void check_asynchronous_write(Fiber* f, const void* p, size_t bytes, bool adds, void* pc);
void proxy_fence(Fiber* f);
void barrier_fence(Fiber* f);
// Registers that a wgmma of f uses, accumulators only if `of_d`: checks that they may be used, then they are in flight.
// another_shape: of a wgmma in flight that has the same accumulators.
void registers_issued(Fiber* f, const WarpProduct& p, bool of_d, bool another_shape);
void registers_in_flight(Fiber* f, const WarpProduct& p, bool of_d); // without a check
void registers_completed(Fiber* f, const WarpProduct& p, bool of_d);
void memory_barrier_arrived(Fiber* f, MemoryBarrier* m);
void memory_barrier_passed(Fiber* f, const MemoryBarrier& m);

// ---- order.cpp ---------------------------------------------------------------------------------

void begin_order(Launch* launch);
void end_order(Launch* launch);

enum FenceScope { SCOPE_BLOCK, SCOPE_DEVICE };
void log_fence(FenceScope scope, void* pc);
void log_proxy_fence(Fiber* f);
void log_stores_written(Fiber* f); // f has waited until its asynchronous stores are in memory

// Bits of a synchronising access. SUMS: an addition, a maximum, ...; TAKES: an exchange; QUIET: relaxed, of a word that may
// be its own flag.
enum {
    SYNC_READS = 1,
    SYNC_WRITES = 2,
    SYNC_ACQUIRES = 4,
    SYNC_RELEASES = 8,
    SYNC_SUMS = 16,
    SYNC_TAKES = 32,
    SYNC_QUIET = 64
};
// Logs a synchronising access of *p, or of a barrier between blocks, which happens in its scope. No other block's does.
struct SyncScope {
    Order* order; // NULL: not logged
    size_t place;
    int kind;
    void* pc;
    SyncScope(const void* p, int kind, void* pc);
    SyncScope(size_t barrier, int kind, void* pc); // 0: of the grid; 1 + i: of cluster i
    SyncScope(const SyncScope&) = delete;
    ~SyncScope();
    void begin();
};

// A write in the same launch. record: names the write, its block, thread and epoch; 0 if it is not in device memory.
const size_t BLOCK_MASK = 0xFFFFF;
struct DeviceWrite {
    uint64_t record;
    size_t block; // number & BLOCK_MASK
    int thread;
    uint32_t epoch;
    bool asynchronous, atomic;
};
// What a report adds: "first (line of pc) second (line of second_pc)". NULL: nothing.
struct Note {
    const char* first;
    void* pc;
    const char* second;
    void* second_pc;
};
bool ordered_by_fences(Fiber* f, const DeviceWrite& w);
bool ordered_by_proxy_fence(Fiber* f, const DeviceWrite& w); // for an asynchronous read
// False if what an exchange takes may be incomplete. *pc: the atomic of another block that may come later.
bool sum_is_complete(Fiber* f, const void* p, void** pc, Note* note);
Note explain_race(Fiber* f, const DeviceWrite& w); // which fence is missing

// The last synchronising write of *p in this launch that is not at `pc`; false: none is known.
bool last_write(Launch* launch, const void* p, void* pc, Arrival* write);

// ---- sm90.cpp ----------------------------------------------------------------------------------

void end_thread_sm90(Fiber* f); // bulk stores that nobody waited for

// Reports something that is wrong in the kernel that runs. what: "a deadlock: ...". pc and other may be NULL. `more`: a
// sentence for the end of the message.
void report(const char* what, Fiber* f, void* pc, Fiber* other, void* other_pc, const std::string& more = "");
std::string describe_pc(void* pc, bool kernel); // file:line, or the name of a kernel
// Returns for each address its file:line, followed by the lines of the calls that were inlined around it.
std::vector<std::vector<std::string>> lines_of(const std::vector<uintptr_t>& addresses);
std::string describe(uint3 index);
// A thread to follow when a check has failed.
struct Suspect {
    uint32_t launch; // its number
    size_t block;
    int thread;
    void* pc; // of the access that is wrong, or NULL: the lines after it are of no interest
};
std::string describe_thread(const Suspect& s);
// "byte 8 of x, ...": a place in shared memory of block b, or in device memory.
std::string describe_place(const Block* b, const void* p);
// An atomic reads *p and is perhaps a poll: lets other threads run.
void poll_memory(const void* p, size_t bytes, void* pc);

// ---- deadlock.cpp --------------------------------------------------------------------------------

Arrival arrival_of(const Fiber* f, void* pc);
// Reports for what the threads of these blocks wait that never comes.
void report_deadlock(const std::vector<Block*>& blocks, const char* what);

// ---- trace.cpp -----------------------------------------------------------------------------------

extern uint32_t emulation_launches,
    emulation_replay_shift;      // launches up to now; those after which a failed check ran again
extern bool emulation_replaying; // then one worker runs all blocks, in the order of the first time
extern bool emulation_property;  // the check computes a property of what it reads; no element of its own is wrong
void add_suspect(const Suspect& s);
void last_suspect(const Suspect& s); // the one to follow if there is none
extern size_t emulation_kept; // offset of what should have been written and still has its start value, 0: of nothing
void* pc_of_fault(void* context); // NULL: unknown, or not in a kernel
void call_kernel(Fiber* f);
void watch_for_hangs();
double emulation_limit(); // how much longer than usual a check may take: EMULATION_LIMIT
bool replay_is_over();
bool is_followed(const Fiber* f);
void add_input(const Suspect& writer); // of what the followed thread reads
void* caller_of(void* pc);             // a return address, also if the thread is followed

// ---- transactions.cpp ---------------------------------------------------------------------------

extern bool emulation_counting; // --transactions: then all blocks run on one worker
extern bool emulation_observed; // counting or replaying
enum CountKind {
    COUNT_READ,
    COUNT_WRITE,
    COUNT_ATOMIC,
    COUNT_CP_ASYNC,
    COUNT_LDMATRIX,
    COUNT_BULK_READ, // TMA and bulk copies, in device memory
    COUNT_BULK_WRITE
};
enum CountEvent { COUNT_BARRIER, COUNT_SHUFFLE, COUNT_MMA, COUNT_WGMMA, NUM_COUNT_EVENTS };
void count_access(Fiber* f, const void* p, size_t bytes, CountKind kind, void* pc);
void count_bulk(const void* p, size_t bytes, CountKind kind, void* pc); // contiguous bytes
void count_warp_met(Block* b, int warp); // all lanes that have not ended are at the same instruction
void count_event(CountEvent event);
void count_block_begins(Block* b);
void count_block_ends(Block* b);
void count_launch_begins(const Launch* launch);
void count_launch_ends();
void count_copy(size_t read, size_t written); // cudaMemset, cudaMemcpy

// Checks of accesses in its scope are not counted, because they do not happen there on a GPU.
struct Uncounted {
    bool was;
    Uncounted() : was(emulation_counting) { emulation_counting = false; }
    ~Uncounted() { emulation_counting = was; }
};
