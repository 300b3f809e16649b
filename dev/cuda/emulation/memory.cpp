/*
Device and shared memory, and what is wrong with the accesses to them: races, reads of uninitialised shared memory,
accesses out of bounds.

The programs are compiled with -fsanitize=thread, but not linked to its runtime: every load and store calls one of the
__tsan functions below. They ignore the host's memory, and a thread's own stack but for the registers of wgmma.

Shared memory. Each byte has a record of its last write and of two reads since then, with pc, thread and epoch. An
access conflicts with a recorded one of another thread unless ordered() says that a barrier is between them. Shuffles,
votes and mma.sync are no barriers: data that one lane writes and another one reads needs a __syncwarp, as in CUDA. But
they order a warp's reads before them and its writes after them, see warp_converged().

Device memory. Every 2 bytes have a record of the last write in this launch, which may be of one of them. An access to
what another thread has written, in the same block without a barrier or in another block, is reported, unless fences and
synchronising accesses order the two, see order.cpp.
*/
#include "engine.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>

// ---- findings -------------------------------------------------------------------------------------

struct Finding {
    const char* what;
    std::string detail;
    const void* kernel;
    void *pc, *other_pc;
    uint3 block, thread, other;
    bool has_other;
    int count;
    Note note;
    std::string more;
    Suspect suspect;
};
static std::vector<Finding> findings;
// Reads of device memory that nobody has written. They are worth telling only if a result is wrong.
static std::vector<Finding> unwritten_reads;
static bool unwritten_is_left; // the launch before has written it
static std::mutex findings_mutex;

// Findings that are as the kernel's author meant it.
static const struct {
    const char *kernel, *what, *why;
} accepted[] = {
    {"attention_forward_kernel6", "a read of uninitialised memory", "columns past HS are read and not stored"},
    {"fused_attention_projection_residual_layernorm_kernel3", "a read of uninitialised memory",
     "tokens past N are not stored"},
    {"attention_forward_sm90_kernel23", "a read of uninitialised memory",
     "before the first tile P = 0 is multiplied by what smem.out holds, and the product is discarded"},
    {"attention_forward_sm90_kernel23", "race: a read of what another thread writes", "likewise"},
    {"attention_forward_sm90_kernel23", "race: a write of what another thread reads", "likewise"},
    {"attention_forward_sm90_kernel23", "a wgmma in flight reads what is overwritten", "likewise"},
    {"attention_forward_sm90_kernel23", "an asynchronous access to what a thread has written without tma_store_fence()",
     "likewise"},
    {"decode_attention_", "a read of uninitialised memory", "the result of the threads from HS on is not used"},
};

static void add_finding(const char* what, const std::string& detail, Fiber* f, void* pc, const uint3* other,
                        void* other_pc, Note note = {}, const std::string& more = "",
                        std::vector<Finding>* list = &findings) {
    std::lock_guard<std::mutex> lock(findings_mutex);
    for (Finding& old : *list) {
        if (old.what == what && old.pc == pc && old.other_pc == other_pc) {
            old.count++;
            return;
        }
    }
    list->push_back({what,
                     detail,
                     f->block->launch->kernel,
                     pc,
                     other_pc,
                     f->block->index,
                     f->index,
                     other ? *other : uint3{0, 0, 0},
                     other != NULL,
                     1,
                     note,
                     more,
                     {f->block->launch->number, f->block->number, f->id, pc}});
}

void report(const char* what, Fiber* f, void* pc, Fiber* other, void* other_pc, const std::string& more) {
    add_finding(what, "", f, pc, other ? &other->index : NULL, other_pc, {}, more);
}

// Calls each(line) for the lines that addr2line or llvm-symbolizer print for these addresses of this program, which must be
// linked at a fixed address.
template <class Each> static void symbolize(const char* options, const std::vector<uintptr_t>& addresses, Each each) {
    char exe[1024], command[2560], line[1024], path[] = "/tmp/emulation_XXXXXX";
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    int file = n > 0 ? mkstemp(path) : -1;
    if (file < 0) { return; }
    exe[n] = '\0';
    for (uintptr_t address : addresses) { dprintf(file, "0x%lx\n", (unsigned long)address); }
    close(file);
    snprintf(command, sizeof(command),
             "{ addr2line -C %s -e '%s' <%s || llvm-symbolizer --output-style=GNU -C %s -e '%s' <%s; } 2>/dev/null",
             options, exe, path, options, exe, path);
    FILE* f = popen(command, "r");
    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        each(std::string(line));
    }
    if (f) { pclose(f); }
    unlink(path);
}

std::vector<std::vector<std::string>> lines_of(const std::vector<uintptr_t>& addresses) {
    std::vector<std::vector<std::string>> all;
    symbolize("-a -i", addresses, [&](const std::string& line) {
        if (line.compare(0, 2, "0x") == 0) { // the address itself
            all.push_back({});
        } else if (!all.empty() && line[0] != '?' && line.find("/cuda/emulation/") == std::string::npos) {
            size_t slash = line.rfind('/');
            all.back().push_back(line.substr(slash + 1, line.find(" (discriminator") - (slash + 1)));
        }
    });
    all.resize(addresses.size());
    return all;
}

// "kernel" -> name of the function at pc; otherwise file:line of pc and of the calls that were inlined around it.
static std::string find_line(void* pc, bool kernel) {
    std::string text;
    if (kernel) {
        symbolize("-f", {(uintptr_t)pc}, [&](const std::string& line) {
            if (text.empty()) { text = line.substr(0, line.find('(')); }
        });
        if (text.compare(0, 5, "void ") == 0) { text = text.substr(5); }
    } else { // the call precedes its return address
        std::vector<std::vector<std::string>> lines = lines_of({(uintptr_t)pc - 1});
        for (const std::string& line : lines[0]) { text += (text.empty() ? "" : ", called from ") + line; }
    }
    char raw[32];
    snprintf(raw, sizeof(raw), "%p", pc);
    return text.empty() || text[0] == '?' ? raw : text;
}

std::string describe_pc(void* pc, bool kernel) {
    static std::map<std::pair<void*, bool>, std::string> known;
    std::string& text = known[{pc, kernel}];
    if (text.empty()) { text = find_line(pc, kernel); }
    return text;
}

std::string describe(uint3 i) {
    return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

// The text of the findings, the first of each kind, and no longer findings afterwards.
static std::string text_of(std::vector<Finding>* list, int* count) {
    std::string text;
    std::set<std::string> kinds;
    *count = 0;
    for (const Finding& found : *list) {
        std::string kernel = describe_pc((void*)found.kernel, true);
        bool known = false;
        for (const auto& a : accepted) {
            known |= kernel.compare(0, strlen(a.kernel), a.kernel) == 0 && strcmp(found.what, a.what) == 0;
        }
        if (known) { continue; }
        ++*count;
        if (!kinds.insert(kernel + found.what).second) { continue; }
        if (found.pc && *count == 1) { add_suspect(found.suspect); }
        text += (text.empty() ? "" : "; ") + kernel + ": " + found.what + found.detail;
        if (found.pc) { text += ", at " + describe_pc(found.pc, false); }
        if (found.pc) { text += ", thread " + describe(found.thread) + " of block " + describe(found.block); }
        if (found.has_other || found.other_pc) {
            text += "; the other access";
            if (found.other_pc) { text += " at " + describe_pc(found.other_pc, false); }
            if (found.has_other) { text += " by thread " + describe(found.other); }
        }
        if (found.note.first) { text += "; " + std::string(found.note.first); }
        if (found.note.pc) { text += " (" + describe_pc(found.note.pc, false) + ")"; }
        if (found.note.second) { text += " " + std::string(found.note.second); }
        if (found.note.second_pc) { text += " (" + describe_pc(found.note.second_pc, false) + ")"; }
        if (!found.more.empty()) { text += "; " + found.more; }
        if (found.count > 1) { text += " (" + std::to_string(found.count) + " times)"; }
    }
    int more = *count - (int)kinds.size();
    if (more > 0) { text += "; the same at " + std::to_string(more) + (more == 1 ? " more place" : " more places"); }
    list->clear();
    return text;
}
static uint32_t last_checked; // the last launch before the findings were asked for
const char* emulation_findings(int* count) {
    static std::string text;
    last_checked = emulation_launches;
    text = text_of(&findings, count);
    return text.c_str();
}
const char* emulation_unwritten_reads() {
    static std::string text;
    int count;
    text = text_of(&unwritten_reads, &count);
    unwritten_is_left = false;
    return text.c_str();
}

// ---- records ------------------------------------------------------------------------------------------
// A record: bits 0-31 the pc, relative to a function of this file; 32-41 the thread; 42-61 the epoch of its warp; 62
// set for an atomic access; 63 set while cp.async writes. 0: not part of a variable. 1: never written.

enum { OUTSIDE = 0, UNINITIALISED = 1 };
static const uint64_t ATOMIC = (uint64_t)1 << 62, IN_FLIGHT = (uint64_t)1 << 63;
static const uint32_t LAST_EPOCH = (1 << 20) - 1;

static uint32_t pack_pc(void* pc) { return (uint32_t)((uintptr_t)pc - (uintptr_t)&pack_pc); }
static void* unpack_pc(uint32_t pc) { return (void*)((uintptr_t)&pack_pc + (uintptr_t)(intptr_t)(int32_t)pc); }
static uint64_t record_of(const Fiber* f, void* pc) {
    return pack_pc(pc) | (uint64_t)f->id << 32 | (uint64_t)f->warp->epoch << 42;
}
static int thread_of(uint64_t record) { return (int)(record >> 32 & 1023); }
static uint32_t epoch_of(uint64_t record) { return (uint32_t)(record >> 42) & LAST_EPOCH; }

// ---- what barriers order --------------------------------------------------------------------------------

void next_epoch(Block* b, Warp* w) {
    if (++w->epoch == LAST_EPOCH) { b->races_off = true; }
}

// From now on the lanes of the warp know different epochs of each other.
static void begin_partial(Warp* w) {
    if (w->partial) { return; }
    for (auto& row : w->known) {
        for (uint32_t& epoch : row) { epoch = w->full; }
    }
    w->partial = true;
}

// A barrier of these lanes, which all have arrived.
void warp_synchronised(Warp* w, unsigned lanes) {
    if (lanes == w->alive) {
        w->full = w->epoch, w->partial = false;
    } else {
        begin_partial(w);
        uint32_t joined[32] = {};
        for (int i = 0; i < 32; i++) {
            if (!(lanes >> i & 1)) { continue; }
            for (int j = 0; j < 32; j++) { joined[j] = std::max(joined[j], w->known[i][j]); }
        }
        for (int i = 0; i < 32; i++) {
            if (lanes >> i & 1) { joined[i] = w->epoch; }
        }
        for (int i = 0; i < 32; i++) {
            if (lanes >> i & 1) { memcpy(w->known[i], joined, sizeof(joined)); }
        }
    }
    next_epoch(emulation_now->block, w);
}

// The warp has executed a shuffle, a vote, ldmatrix or mma.sync together. Such an instruction waits for all lanes, and a
// warp's accesses of shared memory are performed in the order in which they were issued: what was read before it cannot
// see what is written after it. Kernels rely on this where the last use of a tile is an ldmatrix.
void warp_converged(Block* b, Warp* w) {
    w->converged = w->epoch;
    next_epoch(b, w);
}

void block_synchronised(Block* b) {
    for (int i = 0; i < b->num_warps; i++) {
        for (int j = 0; j < b->num_warps; j++) { b->seen[i][j] = b->warps[j].epoch; }
        b->warps[i].full = b->warps[i].epoch, b->warps[i].partial = false;
    }
    for (int i = 0; i < b->num_warps; i++) { next_epoch(b, &b->warps[i]); }
}

// A named barrier passes on all that the arriving warps knew. Lanes that arrive bring their whole warp's accesses: so a
// missing __syncwarp before a single lane's arrival is not found.
void barrier_arrived(Block* b, Barrier* barrier, int warp) {
    for (int i = 0; i < b->num_warps; i++) {
        barrier->clock[i] = std::max(barrier->clock[i], i == warp ? b->warps[i].epoch : b->seen[warp][i]);
    }
    next_epoch(b, &b->warps[warp]);
}
void barrier_passed(Block* b, Barrier* barrier, int warp, unsigned lanes) {
    for (int i = 0; i < b->num_warps; i++) { b->seen[warp][i] = std::max(b->seen[warp][i], barrier->clock[i]); }
    Warp* w = &b->warps[warp];
    if (lanes == w->alive) { w->full = std::max(w->full, barrier->clock[warp]); }
}

// An mbarrier likewise, for one thread at a time.
void memory_barrier_arrived(Fiber* f, MemoryBarrier* m) {
    Block* b = f->block;
    int warp = (int)(f->warp - b->warps);
    for (int i = 0; i < b->num_warps; i++) {
        m->clock[i] = std::max(m->clock[i], i == warp ? b->warps[i].epoch : b->seen[warp][i]);
    }
    next_epoch(b, f->warp);
}
void memory_barrier_passed(Fiber* f, const MemoryBarrier& m) {
    Block* b = f->block;
    int warp = (int)(f->warp - b->warps);
    for (int i = 0; i < b->num_warps; i++) { b->seen[warp][i] = std::max(b->seen[warp][i], m.done[i]); }
    Warp* w = f->warp;
    begin_partial(w);
    for (uint32_t& epoch : w->known[f->lane]) { epoch = std::max(epoch, m.done[warp]); }
}

// ---- shared memory ------------------------------------------------------------------------------------------

void begin_block_memory(Block* b) {
    b->races_off = false;
    for (int i = 0; i < b->num_warps; i++) {
        Warp* w = &b->warps[i];
        w->epoch = 1, w->full = w->converged = 0, w->partial = false;
        memset(b->seen[i], 0, sizeof(b->seen[i]));
    }
    size_t bytes = b->launch->shared_bytes;
    for (size_t i = 0; i < bytes; i++) { b->shadow[SHARED_FIRST + i] = {UNINITIALISED, 0, 0}; }
    memset(b->shared + SHARED_FIRST, 0xFF, bytes); // NaN
    b->shared_end = SHARED_FIRST + bytes;
    b->variables.clear();
    if (bytes) { b->variables.push_back({NULL, SHARED_FIRST, bytes, "dynamic shared memory"}); }
}
void end_block_memory(Block* b) { memset((void*)b->shadow, 0, b->shared_end * sizeof(Shadow)); }

void* emulation_dynamic_shared(size_t) { return emulation_now->block->shared + SHARED_FIRST; }

void* emulation_shared(const void* key, size_t bytes, size_t alignment, const char* name) {
    Block* b = emulation_now->block;
    for (const SharedVariable& v : b->variables) {
        if (v.key == key) { return b->shared + v.offset; }
    }
    size_t offset = (b->shared_end + SHARED_GAP + alignment - 1) / alignment * alignment;
    if (offset + bytes > SHARED_BYTES) { emulation_unsupported("more shared memory than a GPU has"); }
    for (size_t i = 0; i < bytes; i++) { b->shadow[offset + i] = {UNINITIALISED, 0, 0}; }
    memset(b->shared + offset, 0xFF, bytes);
    b->shared_end = offset + bytes;
    b->variables.push_back({key, offset, bytes, name});
    size_t all = 0;
    for (const SharedVariable& v : b->variables) { all += v.bytes; }
    if (all > emulation_shared_limit(b->launch->kernel)) {
        add_finding("a launch that fails on a GPU: too much shared memory",
                    ", " + std::to_string(all) + " bytes, static and dynamic", emulation_now,
                    __builtin_return_address(0), NULL, NULL);
    }
    return b->shared + offset;
}

// As on a GPU, an address within the block's shared memory.
uint64_t __cvta_generic_to_shared(const void* p) { return (uint64_t)((const char*)p - emulation_now->block->shared); }

static std::string describe_shared(const Block* b, size_t offset) {
    for (const SharedVariable& v : b->variables) {
        if (offset < v.offset || offset >= v.offset + v.bytes + SHARED_GAP) { continue; }
        return " of " + std::string(v.name) + ", byte " + std::to_string(offset - v.offset) + " of " +
               std::to_string(v.bytes);
    }
    return " at offset " + std::to_string(offset) + " of the shared memory";
}
static void shared_finding(const char* what, Fiber* f, size_t offset, void* pc, uint64_t record) {
    if (f->block->races_off && record > UNINITIALISED) { return; }
    std::string detail = describe_shared(f->block, offset);
    if (record <= UNINITIALISED) {
        add_finding(what, detail, f, pc, NULL, NULL);
    } else {
        add_finding(what, detail, f, pc, &f->block->fibers[thread_of(record)].index, unpack_pc((uint32_t)record));
    }
}

// The words of a report name the later access first.
static const char* race_between(AccessKind kind, bool other_writes) {
    return kind == ACCESS_READ ? "race: a read of what another thread writes"
           : other_writes      ? "race: a write of what another thread writes"
                               : "race: a write of what another thread reads";
}

static void check_shared(Fiber* f, size_t offset, size_t bytes, AccessKind kind, void* pc) {
    Shadow* s = f->block->shadow + offset;
    uint64_t mine = record_of(f, pc) | (kind == ACCESS_ATOMIC ? ATOMIC : 0);
    uint64_t write_seen = mine, read_seen = mine,
             other_seen = mine; // records that the byte before had: not checked again
    auto races = [&](uint64_t record) { return !ordered(f, thread_of(record), epoch_of(record)); };
    auto read_races = [&](uint64_t record) {
        bool converged = thread_of(record) / 32 == f->id / 32 && epoch_of(record) <= f->warp->converged;
        return !converged && races(record);
    };
    for (size_t i = 0; i < bytes; i++, s++) {
        uint64_t write = s->write;
        if (write != write_seen) {
            write_seen = write;
            if (write == OUTSIDE) {
                shared_finding(kind == ACCESS_READ ? "a read out of bounds" : "a write out of bounds", f, offset + i,
                               pc, write);
                return;
            } else if (write == UNINITIALISED) {
                if (kind != ACCESS_WRITE) {
                    shared_finding("a read of uninitialised memory", f, offset + i, pc, write);
                }
            } else if (write & IN_FLIGHT) {
                shared_finding("an access to what an asynchronous copy is still writing", f, offset + i, pc, write);
            } else if (!(write & ATOMIC && kind == ACCESS_ATOMIC) && races(write)) {
                shared_finding(race_between(kind, true), f, offset + i, pc, write);
            }
        }
        if (kind == ACCESS_READ) {
            uint64_t read = s->read;
            if (read && thread_of(read) != f->id && read_races(read)) {
                // both stay; of several unordered reads, one of another warp is worth more than a third of this one
                if (!s->other_read || thread_of(read) / 32 != f->id / 32) { s->other_read = read; }
            }
            s->read = mine;
            continue;
        }
        if (s->read && s->read != read_seen) {
            read_seen = s->read;
            if (read_races(s->read)) { shared_finding(race_between(kind, false), f, offset + i, pc, s->read); }
        }
        if (s->other_read && s->other_read != other_seen) {
            other_seen = s->other_read;
            if (read_races(s->other_read)) {
                shared_finding(race_between(kind, false), f, offset + i, pc, s->other_read);
            }
        }
        *s = {mine, 0, 0};
    }
}

void mark_in_flight(Fiber* f, const void* p, size_t bytes, void* pc) {
    size_t offset = (size_t)((const char*)p - f->block->shared);
    check_access_of(f, p, bytes, ACCESS_WRITE, pc);
    if (offset >= SHARED_BYTES) { return; }
    for (size_t i = 0; i < bytes; i++) {
        if (f->block->shadow[offset + i].write != OUTSIDE) { f->block->shadow[offset + i].write |= IN_FLIGHT; }
    }
}

void copy_issued(const BulkCopy& c) {
    Shadow* s = c.to_block->shadow + c.to;
    if (c.to_block == c.fiber->block) {
        check_access_of(c.fiber, c.to_block->shared + c.to, c.bytes, ACCESS_WRITE, c.pc);
    } else { // barriers between blocks are not recorded
        for (size_t i = 0; i < c.bytes; i++) { s[i] = {pack_pc(c.pc), 0, 0}; }
    }
    for (size_t i = 0; i < c.bytes; i++) { s[i].write |= IN_FLIGHT; }
}
// The record is one of epoch 0, which is ordered before everything.
void copy_arrived(const BulkCopy& c) {
    Shadow* s = c.to_block->shadow + c.to;
    for (size_t i = 0; i < c.bytes; i++) { s[i] = {pack_pc(c.pc) | (uint64_t)c.fiber->id << 32, 0, 0}; }
}

// A fence has an epoch of its own, so that what the thread writes after it can be told from what it has written before.
void barrier_fence(Fiber* f) {
    f->barrier_fence = f->warp->epoch;
    next_epoch(f->block, f->warp);
}
void proxy_fence(Fiber* f) {
    f->proxy_fence = f->warp->epoch;
    barrier_fence(f);
}
// Records of epoch 0 are of asynchronous copies.
void check_proxy(Fiber* f, const Block* b, size_t offset, size_t bytes, void* pc) {
    if (b->races_off || offset + bytes > SHARED_BYTES) { return; }
    uint64_t seen = OUTSIDE;
    for (size_t i = offset; i < offset + bytes; i++) {
        uint64_t write = b->shadow[i].write;
        if (write == seen) { continue; }
        seen = write;
        bool by_thread = write > UNINITIALISED && !(write & IN_FLIGHT);
        if (by_thread && epoch_of(write) > b->fibers[thread_of(write)].proxy_fence) {
            add_finding("an asynchronous access to what a thread has written without tma_store_fence()", "", f, pc,
                        &b->fibers[thread_of(write)].index, unpack_pc((uint32_t)write));
        }
    }
}

static void observe_read(const Fiber* f, const void* p);
void check_operand(Fiber* f, size_t offset, void* pc) {
    if (emulation_replaying && is_followed(f)) { observe_read(f, f->block->shared + offset); }
    uint64_t write = f->block->shadow[offset].write;
    if (write & IN_FLIGHT) {
        shared_finding("a wgmma reads what an asynchronous copy is still writing", f, offset, pc, write);
    } else {
        check_proxy(f, f->block, offset, 16, pc);
    }
}
void operand_changed(Fiber* f, size_t offset, void* pc) {
    shared_finding("a wgmma in flight reads what is overwritten", f, offset, pc,
                   f->block->shadow[offset].write & ~IN_FLIGHT);
}

// ---- device memory ----------------------------------------------------------------------------------------------
// One range of addresses, of which allocations get pieces with unused bytes between them. valid has a byte for each 8:
// how many of them are part of an allocation. writes has a record for each 2 bytes of the last write.

enum { DEVICE_ALIGNMENT = 512, DEVICE_GAP = 512 };
struct DeviceMemory {
    char* base;
    size_t size, end;                    // end: first byte that was never allocated
    uint8_t* valid;                      // (size / 8)
    uint64_t* writes;                    // (size / 2)
    uint32_t* pcs;                       // (size / 2)
    std::map<size_t, size_t> allocated;  // offset -> bytes asked for
    std::map<size_t, std::string> names; // of allocations, by offset
    std::map<size_t, size_t> watched;    // of emulation_watch(): offset -> bytes
    std::set<size_t> pinned;             // offsets of allocations that the host may access
    std::multimap<size_t, size_t> free;  // bytes -> offset
};
static DeviceMemory& device() {
    static DeviceMemory d;
    return d;
}
static char* device_base; // copies of device()'s members, for speed
static size_t device_size;
static const uint8_t* device_valid;
static const uint64_t* device_writes;

static void* reserve(size_t bytes) {
    void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}
static void on_fault(int signal, siginfo_t*, void* context);
static void open_device() { // reserves addresses, not memory: 64 GB, or what the system allows
    DeviceMemory& d = device();
    for (d.size = (size_t)64 << 30; d.size > ((size_t)64 << 20); d.size /= 2) {
        d.base = (char*)reserve(d.size), d.valid = (uint8_t*)reserve(d.size / 8);
        d.writes = (uint64_t*)reserve(4 * d.size), d.pcs = (uint32_t*)reserve(2 * d.size);
        if (d.base && d.valid && d.writes && d.pcs) { break; }
        if (d.base) { munmap(d.base, d.size); }
        if (d.valid) { munmap(d.valid, d.size / 8); }
        if (d.writes) { munmap(d.writes, 4 * d.size); }
        if (d.pcs) { munmap(d.pcs, 2 * d.size); }
    }
    d.end = DEVICE_GAP;
    struct sigaction fault = {};
    fault.sa_sigaction = on_fault, fault.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &fault, NULL);
    sigaction(SIGBUS, &fault, NULL);
    device_base = d.base, device_size = d.size, device_valid = d.valid, device_writes = d.writes;
}

static size_t rounded(size_t bytes) {
    return (bytes + DEVICE_GAP + DEVICE_ALIGNMENT - 1) / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT;
}
static void set_valid(size_t offset, size_t bytes, bool valid) {
    uint8_t* v = device().valid + offset / 8;
    memset(v, valid ? 8 : 0, bytes / 8);
    if (bytes % 8) { v[bytes / 8] = valid ? (uint8_t)(bytes % 8) : 0; }
}

cudaError_t emulation_malloc(void** p, size_t bytes) {
    DeviceMemory& d = device();
    if (!d.base) { open_device(); }
    size_t total = rounded(bytes), offset;
    auto spare = d.free.lower_bound(total);
    if (spare != d.free.end() && spare->first <= 2 * total) {
        offset = spare->second;
        total = spare->first;
        d.free.erase(spare);
    } else if (d.end + total > d.size) {
        return cudaErrorMemoryAllocation;
    } else {
        offset = d.end, d.end += total;
    }
    d.allocated[offset] = bytes;
    set_valid(offset, bytes, true);
    memset(d.base + offset, 0xFF, std::min(bytes, (size_t)1 << 20)); // NaN, at the begin of large allocations
    *p = d.base + offset;
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    DeviceMemory& d = device();
    if (!p) { return cudaSuccess; }
    cudaDeviceSynchronize();
    auto found = d.allocated.find((size_t)((char*)p - d.base));
    if (found == d.allocated.end()) { return cudaErrorInvalidValue; }
    set_valid(found->first, found->second, false);
    size_t total = rounded(found->second);
    if (total >= (1 << 16)) { // gives the pages back; what is not page-aligned stays
        size_t begin = (found->first + 4095) / 4096 * 4096, end = (found->first + total) / 4096 * 4096;
        madvise(d.base + begin, end - begin, MADV_DONTNEED);
        madvise((char*)d.writes + 4 * begin, 4 * (end - begin), MADV_DONTNEED);
        madvise((char*)d.pcs + 2 * begin, 2 * (end - begin), MADV_DONTNEED);
    }
    d.free.insert({total, found->first});
    d.names.erase(found->first), d.watched.erase(found->first), d.pinned.erase(found->first);
    d.allocated.erase(found);
    return cudaSuccess;
}

bool is_allocated(const void* p, size_t bytes, bool* pinned) {
    DeviceMemory& d = device();
    size_t offset = (size_t)((const char*)p - d.base);
    auto next = d.allocated.upper_bound(offset);
    if (next == d.allocated.begin()) { return false; }
    auto a = std::prev(next);
    *pinned = d.pinned.count(a->first) > 0;
    size_t at = offset - a->first;
    return at <= a->second && bytes <= a->second - at;
}
void pin(const void* p) { device().pinned.insert((size_t)((const char*)p - device().base)); }

void emulation_name(const void* p, const char* name) {
    size_t offset;
    if (device_offset(p, &offset)) { device().names[offset] = name; }
}

// A record of device memory; 0: no kernel has written it, UNWRITTEN: nobody has since emulation_watch(). Bits 0-10 the launch,
// 12-31 the block, 32-41 the thread, 42-61 the epoch, 62 atomic. Bit 63 is set if one byte of the two was written, and then bit
// 11 says which; otherwise bit 11 says that it was asynchronous.
static const uint64_t LAUNCH = 0x7FF, ONE_BYTE = (uint64_t)1 << 63, SECOND_BYTE = (uint64_t)1 << 11;
static const uint64_t ASYNCHRONOUS = SECOND_BYTE, UNWRITTEN = 1; // no record is 1, because epochs begin at 1
static struct { dim3 grid, block; } shapes[LAUNCH + 1];          // of the last launches
static DeviceWrite write_of(uint64_t record) {
    return {record,
            record >> 12 & BLOCK_MASK,
            thread_of(record),
            epoch_of(record),
            (record & (ONE_BYTE | SECOND_BYTE)) == ASYNCHRONOUS,
            (record & ATOMIC) != 0};
}

static Suspect suspect_of(uint64_t record, void* pc) {
    uint32_t since = (emulation_launches - (uint32_t)(record & LAUNCH)) & (uint32_t)LAUNCH;
    return {emulation_launches - since, record >> 12 & BLOCK_MASK, thread_of(record), pc};
}

// What the previous launch of each stream leaves to the next one.
struct PreviousLaunch {
    uint32_t number, overlaps; // overlaps: of a launch that has released its dependents before it waited, otherwise 0
};
static std::map<const void*, PreviousLaunch> previous;
void begin_launch_memory(Launch* launch, bool early) {
    DeviceMemory& d = device();
    bool begins_again = launch->number % (LAUNCH + 1) == 0;
    if (d.base && begins_again) { madvise(d.writes, 4 * d.size, MADV_DONTNEED); }
    shapes[launch->number & LAUNCH] = {launch->grid, launch->block};
    PreviousLaunch p = early ? previous[emulation_running] : PreviousLaunch{0, 0};
    launch->overlaps = p.overlaps ? p.overlaps : p.number;
    if (begins_again || launch->number - launch->overlaps > LAUNCH) { launch->overlaps = 0; } // the records are gone
    launch->early = early, launch->waited = launch->released_early = launch->wrote = false;
}
void end_launch_memory(Launch* launch) {
    previous[emulation_running] = {launch->number, launch->released_early ? launch->overlaps : 0};
    if (launch->early && launch->wrote && !launch->waited && !launch->unsupported) {
        std::lock_guard<std::mutex> lock(findings_mutex);
        Finding found = {};
        found.what = "launched early, it writes device memory, and no thread calls grid_wait_dependency()";
        found.kernel = launch->kernel, found.count = 1;
        findings.push_back(found);
    }
}
void emulation_wait_dependency() {
    Fiber* f = emulation_now;
    if (!f->block->launch->early || f->waited) { return; }
    f->waited = f->block->launch->waited = true;
    f->block->waits.push_back({f->id, f->warp->epoch});
}
void emulation_launch_dependents() {
    Fiber* f = emulation_now;
    if (f->block->launch->overlaps && !f->waited) { f->block->launch->released_early = true; }
}
// True if f, or a thread that a barrier has ordered before f, has waited for the previous launches of the stream.
static bool has_waited(const Fiber* f) {
    if (f->waited || !f->block->launch->overlaps) { return true; }
    for (const auto& wait : f->block->waits) {
        if (ordered(f, wait.first, wait.second)) { return true; }
    }
    return false;
}
// True if the record is of a launch that may still run, because f's launch is early and f has not waited.
static bool overlaps(const Fiber* f, uint64_t record) {
    const Launch* launch = f->block->launch;
    if (!launch->overlaps || record <= UNWRITTEN) { return false; }
    uint32_t before = (launch->number - (uint32_t)(record & LAUNCH)) & LAUNCH;
    return before != 0 && before <= launch->number - launch->overlaps && !has_waited(f);
}

static void set_records(size_t offset, size_t bytes, uint64_t record) {
    for (size_t g = offset / 2; g < (offset + bytes + 1) / 2; g++) {
        if (device().writes[g] != record) {
            device().writes[g] = record;
        } // pages of zeros take no memory until they are written
    }
}
void emulation_watch(const void* p, size_t bytes, EmulationWatch watch) {
    size_t offset;
    if (!bytes || !device_offset(p, &offset)) { return; }
    unwritten_is_left |= watch == EMULATION_LEFT;
    set_records(offset, bytes, watch == EMULATION_WRITTEN ? 0 : UNWRITTEN);
    size_t kept = emulation_kept;
    if (emulation_replaying && kept >= offset && kept < offset + bytes) { set_records(kept, 1, UNWRITTEN); }
    device().watched[offset] = bytes;
    unwritten_reads.clear();
}
void host_has_written(const void* p, size_t bytes) {
    size_t offset;
    previous[emulation_running] = {0, 0}; // a launch waits for what is not a kernel
    if (!bytes || !device_offset(p, &offset)) { return; }
    auto next = device().watched.upper_bound(offset);
    if (next == device().watched.begin()) { return; }
    auto watched = std::prev(next);
    size_t end = std::min(offset + bytes, watched->first + watched->second);
    if (end > offset) { set_records(offset, end - offset, 0); }
}

// Remembers who has written what a property of random results is computed from.
void host_reads(const void* p, size_t bytes) {
    size_t offset;
    if (!emulation_property || emulation_replaying || !device_offset(p, &offset)) { return; }
    uint64_t record = device().writes[(offset + bytes / 2) / 2];
    if (record > UNWRITTEN) { last_suspect(suspect_of(record, unpack_pc(device().pcs[(offset + bytes / 2) / 2]))); }
}

static std::string describe_device(size_t offset) {
    DeviceMemory& d = device();
    auto next = d.allocated.upper_bound(offset);
    if (next == d.allocated.begin()) { return " of device memory"; }
    auto a = std::prev(next);
    auto name = d.names.find(a->first);
    return " of device memory, byte " + std::to_string(offset - a->first) + " of an allocation of " +
           std::to_string(a->second) + (name == d.names.end() ? "" : ", " + name->second);
}
static void device_finding(const char* what, Fiber* f, size_t offset, void* pc, const uint3* other, void* other_pc,
                           Note note = {}) {
    add_finding(what, describe_device(offset), f, pc, other, other_pc, note);
}
static void read_unwritten(Fiber* f, size_t offset, void* pc) {
    if (emulation_replaying) {
        last_suspect({f->block->launch->number - emulation_replay_shift, f->block->number, f->id, NULL});
    }
    static __thread void* last = NULL; // a loop would report each of its reads
    if (pc == last && !unwritten_reads.empty()) { return; }
    last = pc;
    const char* what =
        unwritten_is_left ? "a read of what the launch before has left," : "a read of what nobody has written,";
    add_finding(what, describe_device(offset), f, pc, NULL, NULL, {}, "", &unwritten_reads);
}

std::string describe_place(const Block* b, const void* p) {
    size_t offset;
    return device_offset(p, &offset) ? describe_device(offset)
                                     : describe_shared(b, (size_t)((const char*)p - b->shared));
}

// An access to what another thread has written in this launch, where no barrier of the block orders the two.
static void check_order(Fiber* f, size_t offset, AccessKind kind, void* pc, uint64_t old, void* old_pc,
                        bool same_block) {
    DeviceWrite write = write_of(old);
    if (ordered_by_fences(f, write)) { return; }
    uint3 other = {(unsigned)write.thread, 0, 0}; // of another block, only the number is known
    if (same_block) { other = f->block->fibers[write.thread].index; }
    device_finding(race_between(kind, true), f, offset, pc, &other, old_pc, explain_race(f, write));
}

static void check_device(Fiber* f, size_t offset, size_t bytes, AccessKind kind, void* pc, uint64_t asynchronous = 0) {
    DeviceMemory& d = device();
    const uint8_t* valid = d.valid;
    for (size_t g = offset / 8; g <= (offset + bytes - 1) / 8; g++) {
        size_t needed = std::min(offset + bytes - g * 8, (size_t)8);
        if (valid[g] < needed) {
            device_finding(kind == ACCESS_READ ? "a read out of bounds" : "a write out of bounds", f, offset, pc, NULL,
                           NULL);
            return;
        }
    }
    Block* b = f->block;
    const uint64_t place_mask = 0xFFFFFFFF & ~SECOND_BYTE;
    uint64_t place = (b->launch->number & LAUNCH) | (b->number & 0xFFFFF) << 12;
    uint64_t mine = place | (uint64_t)f->id << 32 | (uint64_t)f->warp->epoch << 42 |
                    (kind == ACCESS_ATOMIC ? ATOMIC : 0) | asynchronous;
    if (bytes == 1) { mine |= ONE_BYTE | (offset % 2 ? SECOND_BYTE : 0); }
    if (kind != ACCESS_READ && b->launch->early) { b->launch->wrote.store(true, std::memory_order_relaxed); }
    uint64_t seen = mine;
    for (size_t g = offset / 2; g <= (offset + bytes - 1) / 2; g++) {
        uint64_t old = __atomic_load_n(&d.writes[g], __ATOMIC_RELAXED);
        if (old != seen) {
            seen = old;
            if (__builtin_expect(old == UNWRITTEN && kind == ACCESS_READ, 0)) { read_unwritten(f, g * 2, pc); }
            if (__builtin_expect(overlaps(f, old), 0)) {
                device_finding(kind == ACCESS_READ
                                   ? "before grid_wait_dependency(), a read of what a previous kernel writes,"
                                   : "before grid_wait_dependency(), a write of what a previous kernel writes,",
                               f, g * 2, pc, NULL, unpack_pc(d.pcs[g]));
            }
            bool same_launch = (old & LAUNCH) == (place & LAUNCH) && old > UNWRITTEN;
            bool same_block = (old & place_mask) == place;
            bool atomics = (old & ATOMIC) && kind == ACCESS_ATOMIC;
            bool other_byte = (mine & old & ONE_BYTE) && ((mine ^ old) & SECOND_BYTE);
            bool asynchronous_before =
                (old & (ONE_BYTE | SECOND_BYTE)) == ASYNCHRONOUS; // must be waited for by its thread, too
            if (same_launch && !atomics && !other_byte && !b->races_off &&
                !(same_block && !asynchronous_before && ordered(f, thread_of(old), epoch_of(old)))) {
                check_order(f, g * 2, kind, pc, old, unpack_pc(d.pcs[g]), same_block);
            }
        }
        if (kind != ACCESS_READ) {
            __atomic_store_n(&d.writes[g], mine, __ATOMIC_RELAXED);
            __atomic_store_n(&d.pcs[g], pack_pc(pc), __ATOMIC_RELAXED);
        }
    }
}

// True if check_device() would find nothing in a read, as of most: all of it is valid, and neither this launch nor one that may still
// run has written it.
static inline bool reads_plainly(const Fiber* f, size_t offset, size_t bytes) {
    const Launch* launch = f->block->launch;
    size_t last = offset + bytes - 1;
    for (size_t g = offset / 8; g <= last / 8; g++) {
        if (device_valid[g] != 8) { return false; }
    }
    for (size_t g = offset / 2; g <= last / 2; g++) {
        uint64_t old = __atomic_load_n(&device_writes[g], __ATOMIC_RELAXED);
        if (old == UNWRITTEN || (old && ((old ^ launch->number) & LAUNCH) == 0)) { return false; }
    }
    return !launch->overlaps || f->waited;
}

// An atomic reads *p, before its access is recorded as a write.
static void check_atomic_read(const void* p, size_t bytes, void* pc) {
    size_t offset;
    if (!device_offset(p, &offset)) { return; }
    for (size_t g = offset / 2; g <= (offset + bytes - 1) / 2; g++) {
        if (__atomic_load_n(&device().writes[g], __ATOMIC_RELAXED) == UNWRITTEN) {
            read_unwritten(emulation_now, g * 2, pc);
            return;
        }
    }
}
void poll_memory(const void* p, size_t bytes, void* pc) {
    check_atomic_read(p, bytes, pc);
    yield_thread({WAIT_MEMORY, p, pc});
}

std::string describe_thread(const Suspect& s) {
    dim3 grid = shapes[s.launch & LAUNCH].grid, block = shapes[s.launch & LAUNCH].block;
    unsigned b = (unsigned)s.block, t = (unsigned)s.thread;
    return "thread " + describe({t % block.x, t / block.x % block.y, t / block.x / block.y}) + " of block " +
           describe({b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y});
}
// "written at op.cu:40 by thread ..."; "" if no kernel has written this byte.
static std::string writer_of(size_t offset) {
    uint64_t record = device().writes[offset / 2];
    bool another_byte = (record & ONE_BYTE) && (offset % 2 == 1) != ((record & SECOND_BYTE) != 0);
    if (record <= UNWRITTEN || another_byte) { return ""; }
    Suspect writer = suspect_of(record, unpack_pc(device().pcs[offset / 2]));
    return "written at " + describe_pc(writer.pc, false) + " by " + describe_thread(writer);
}
// Guesses which thread should have written what is missing in this range. It looks in the launch that wrote the neighbour: first
// for the nearest block that has written nothing, then for the nearest such thread of the same block. Without either, it returns
// the neighbour's writer.
static Suspect absentee(size_t offset, size_t bytes, uint64_t neighbour) {
    Suspect s = suspect_of(neighbour, NULL);
    std::set<size_t> blocks, threads; // that have written
    for (size_t g = offset / 2; g < (offset + bytes) / 2; g++) {
        uint64_t record = device().writes[g];
        if (record <= UNWRITTEN || (record & LAUNCH) != (neighbour & LAUNCH)) { continue; }
        blocks.insert(record >> 12 & BLOCK_MASK);
        if ((record >> 12 & BLOCK_MASK) == s.block) { threads.insert((size_t)thread_of(record)); }
    }
    auto missing = [](const std::set<size_t>& present, size_t from, const dim3& size) {
        size_t most = (size_t)size.x * size.y * size.z;
        for (size_t away = 1; away < most; away++) {
            for (size_t i : {from - away, from + away}) {
                if (i < most && !present.count(i)) { return i; }
            }
        }
        return from;
    };
    size_t block = missing(blocks, s.block, shapes[neighbour & LAUNCH].grid);
    if (block == s.block) { s.thread = (int)missing(threads, (size_t)s.thread, shapes[neighbour & LAUNCH].block); }
    s.block = block;
    return s;
}
const char* emulation_writer(const void* p, size_t size, size_t at, size_t n) {
    static std::string text;
    size_t offset;
    if (!device_offset(p, &offset)) { return ""; }
    auto record = [&](size_t i) { return device().writes[(offset + i * size) / 2]; };
    text = "";
    if (at >= n) { // the first element that a kernel has written
        for (at = 0; at < n && record(at) <= UNWRITTEN;) { at++; }
        if (at < n) { text = ", element " + std::to_string(at) + " " + writer_of(offset + at * size); }
        return text.c_str();
    }
    std::string writer = writer_of(offset + at * size);
    if (!writer.empty()) { text = ", " + writer; }
    if (record(at) > UNWRITTEN) {
        add_suspect(suspect_of(record(at), unpack_pc(device().pcs[(offset + at * size) / 2])));
        return text.c_str();
    }
    if (!emulation_replaying && record(at) == 0) { emulation_kept = offset + at * size; }
    text = record(at) == UNWRITTEN ? ", which nobody has written" : ", which no kernel has written";
    for (size_t away = 1; away < n; away++) { // its nearest neighbour that a kernel has written
        for (size_t other : {at - away, at + away}) {
            if (other >= n || record(other) <= UNWRITTEN) { continue; }
            text += "; element " + std::to_string(other) + " was " + writer_of(offset + other * size);
            add_suspect(absentee(offset, n * size, record(other)));
            return text.c_str();
        }
    }
    add_suspect({last_checked, 0, 0, NULL}); // the whole range is as it was
    return text.c_str();
}

void check_proxy_of_device(Fiber* f, const void* p, size_t bytes, void* pc) {
    size_t offset;
    if (f->block->races_off || !device_offset(p, &offset)) { return; }
    uint64_t seen = 0;
    for (size_t g = offset / 2; g <= (offset + bytes - 1) / 2; g++) {
        uint64_t write = __atomic_load_n(&device().writes[g], __ATOMIC_RELAXED);
        if (write == seen) { continue; }
        seen = write;
        if (write > UNWRITTEN && (write & LAUNCH) == (f->block->launch->number & LAUNCH) &&
            !ordered_by_proxy_fence(f, write_of(write))) {
            uint3 other = {(unsigned)thread_of(write), 0, 0}; // its number in its block
            device_finding("an asynchronous read of what its launch has written, without async_proxy_fence(),", f,
                           g * 2, pc, &other, unpack_pc(device().pcs[g]));
            return;
        }
    }
}

// ---- registers of wgmma ---------------------------------------------------------------------------------------------
// Arrays that a kernel passes to wgmma are on its thread's stack here, where each 4 bytes have a record of the last access
// since the thread's first wgmma_fence(): bits 0-31 the pc, 32-59 the number of wgmma_fence() calls before it. While a
// wgmma is in flight, the records of its registers have one of these bits and the pc of the wgmma; from its wait until
// wgmma_hold(), the third one. Records of an earlier thread on the same stack count for nothing.

static const uint64_t UNHELD = (uint64_t)1 << 61, A_IN_FLIGHT = (uint64_t)1 << 62, D_IN_FLIGHT = (uint64_t)1 << 63,
                      REGISTER_FLAGS = UNHELD | A_IN_FLIGHT | D_IN_FLIGHT;
static uint32_t fence_of(uint64_t record) { return (uint32_t)(record >> 32) & 0xFFFFFFF; }
static uint64_t register_record(const Fiber* f, void* pc) { return pack_pc(pc) | (uint64_t)f->register_fences << 32; }

static void register_finding(Fiber* f, uint64_t record, AccessKind kind, void* pc) {
    if (fence_of(record) <= f->first_register_fence) { return; }
    const char* what = "an access to accumulators of a wgmma that has not been waited for";
    if (record & A_IN_FLIGHT) { what = "an access to an operand in registers of a wgmma that has not been waited for"; }
    if (record & UNHELD) {
        // a write is a new value, perhaps of another variable; kernels that never hold accumulators rely on the compiler
        if (kind != ACCESS_READ || !f->block->launch->holds_accumulators) { return; }
        what =
            "a read of accumulators without wgmma_hold() since the wait, which the compiler may move before the wait";
    }
    report(what, f, pc, NULL, unpack_pc((uint32_t)record));
}
static void check_registers(Fiber* f, size_t offset, size_t bytes, AccessKind kind, void* pc) {
    uint64_t mine = register_record(f, pc);
    for (size_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        uint64_t record = f->registers[i];
        if (__builtin_expect((record & REGISTER_FLAGS) != 0, 0)) {
            register_finding(f, record, kind, pc);
            if (!(record & UNHELD)) { continue; } // it is still in flight
        }
        f->registers[i] = mine;
    }
}

// The records of a lane's registers; NULL if they are not on its stack.
static uint64_t* records_of(const Fiber* f, const void* p) {
    size_t offset = (size_t)((const char*)p - f->stack);
    return p && offset < STACK_BYTES ? f->registers + offset / 4 : NULL;
}
static void check_issue(Fiber* f, const uint64_t* records, int n, uint64_t excluded, void* pc) {
    for (int i = 0; records && i < n; i++) {
        uint64_t record = records[i];
        if (fence_of(record) <= f->first_register_fence) { continue; }
        if (record & excluded) { register_finding(f, record, ACCESS_WRITE, pc); }
        if (!(record & REGISTER_FLAGS) && fence_of(record) == f->register_fences) {
            report("wgmma without wgmma_fence() since an access to its registers", f, pc, NULL,
                   unpack_pc((uint32_t)record));
            return;
        }
    }
}
void registers_issued(Fiber* f, const WarpProduct& p, bool of_d, bool another_shape) {
    if (f->register_fences == f->first_register_fence) {
        report("wgmma without a wgmma_fence() before the first one", f, p.pc, NULL, NULL);
        f->register_fences++;
    }
    const uint64_t* d = of_d ? records_of(f, p.d[f->lane]) : NULL;
    if (another_shape && d && (*d & D_IN_FLIGHT) && fence_of(*d) == f->register_fences) {
        report("wgmma without wgmma_fence() since a wgmma of another shape with the same accumulators", f, p.pc, NULL,
               unpack_pc((uint32_t)*d));
    }
    check_issue(f, d, p.columns / 2, A_IN_FLIGHT, p.pc);
    check_issue(f, records_of(f, p.a_registers[f->lane]), 4, D_IN_FLIGHT, p.pc);
    registers_in_flight(f, p, of_d);
}
static void set_records(uint64_t* records, int n, uint64_t record) {
    if (records) { std::fill(records, records + n, record); }
}
void registers_in_flight(Fiber* f, const WarpProduct& p, bool of_d) {
    uint64_t record = register_record(f, p.pc);
    set_records(records_of(f, p.a_registers[f->lane]), 4, record | A_IN_FLIGHT);
    set_records(of_d ? records_of(f, p.d[f->lane]) : NULL, p.columns / 2, record | D_IN_FLIGHT);
}
void registers_completed(Fiber* f, const WarpProduct& p, bool of_d) {
    set_records(records_of(f, p.a_registers[f->lane]), 4, 0);
    set_records(of_d ? records_of(f, p.d[f->lane]) : NULL, p.columns / 2, register_record(f, p.pc) | UNHELD);
}
void emulation_wgmma_hold(const void* x, size_t bytes) {
    Fiber* f = emulation_now;
    uint64_t* records = records_of(f, x);
    uint64_t any = 0;
    for (size_t i = 0; records && i < bytes / 4; i++) { // without branches: accumulators are many
        any |= records[i];
        records[i] = records[i] & UNHELD ? 0 : records[i];
    }
    if (any & UNHELD) { f->block->launch->holds_accumulators = true; }
}
void wgmma_fence() { emulation_now->register_fences++; }

// ---- every access -------------------------------------------------------------------------------------------------

static __thread void* last_pc;        // of the last access to neither shared nor device memory
static __thread bool misaligned_last; // the last access was misaligned, which a CPU does not allow either for 16 bytes

// A wild pointer: names the thread instead of a bare "Segmentation fault". A misaligned access has been reported already.
static void on_fault(int signal, siginfo_t* fault, void* context) {
    if (emulation_now) {
        if (!misaligned_last) {
            void* pc = pc_of_fault(context);
            bool null = (uintptr_t)fault->si_addr < 4096;
            report("an access through a pointer to no memory", emulation_now, pc ? pc : last_pc, NULL, NULL,
                   null ? "it is NULL" : "a write past the end of a local array may be the cause");
        }
        int count;
        fflush(stdout);
        fprintf(stderr, "error: %s\n", emulation_findings(&count));
        _exit(EXIT_FAILURE);
    }
    ::signal(signal, SIG_DFL); // not in a kernel: the fault happens again, and ends the program
}

bool device_offset(const void* p, size_t* offset) {
    *offset = (size_t)((const char*)p - device_base);
    return *offset < device_size;
}

// A read of shared memory of another block of the cluster, through a mapped pointer. What the two blocks read, and what one
// writes to the other, is not recorded.
static void check_cluster(Fiber* f, const void* p, size_t bytes, void* pc) {
    for (const Block* b : f->block->cluster->blocks) {
        size_t offset = b ? (size_t)((const char*)p - b->shared) : SIZE_MAX;
        if (offset >= SHARED_BYTES || b->races_off) { continue; }
        uint64_t seen = ~(uint64_t)0;
        for (size_t i = offset; i < offset + bytes; i++) {
            uint64_t write = b->shadow[i].write;
            if (write == seen) { continue; }
            seen = write;
            if (write == OUTSIDE || write == UNINITIALISED) {
                add_finding(write == OUTSIDE ? "a read out of bounds" : "a read of uninitialised memory",
                            " in shared memory of another block of the cluster", f, pc, NULL, NULL);
                return;
            }
            DeviceWrite w = {0, b->number & BLOCK_MASK, thread_of(write), epoch_of(write), false, false};
            if (w.epoch == 0 || ordered_by_fences(f, w)) { continue; } // 0: of a copy that has arrived
            add_finding(race_between(ACCESS_READ, true), " in shared memory of another block of the cluster", f, pc,
                        &b->fibers[w.thread].index, unpack_pc((uint32_t)write), explain_race(f, w));
            return;
        }
    }
}

// Reports an access to the host's memory at or above a host pointer that the kernel has received. The parameters and the
// program's constants are there too, and are allowed.
static void check_host_pointers(Fiber* f, const char* p, AccessKind kind, void* pc) {
    const Launch* l = f->block->launch;
    if (p >= l->parameters && p < l->parameters_end) { return; }
    const HostPointer* nearest = NULL;
    for (const HostPointer& h : l->host_pointers) {
        if (h.p <= p && (!nearest || h.p > nearest->p)) { nearest = &h; }
    }
    if (!nearest || p - nearest->p >= (ptrdiff_t)4 << 30) { return; }
    add_finding(kind == ACCESS_READ ? "a read of the host's memory" : "a write to the host's memory",
                " through parameter " + std::to_string(nearest->number) + ", which does not come from cudaMalloc", f,
                pc, NULL, NULL);
}
// Ends the program because the host accesses device memory, which is a segmentation fault on a machine with a GPU.
static void host_access(const void* p, size_t bytes, AccessKind kind, void* pc) {
    size_t offset;
    bool pinned;
    if (bytes == 0 || !device_offset(p, &offset)) { return; }
    bool there = is_allocated(p, bytes, &pinned);
    if (there && pinned) { return; }
    fflush(stdout);
    fprintf(stderr, "error: the host %s%s, at %s: %s\n", kind == ACCESS_READ ? "reads" : "writes",
            describe_device(offset).substr(3).c_str(), describe_pc(pc, false).c_str(),
            there ? "it needs cudaMemcpy" : "that is past its end, or it has been freed");
    _exit(EXIT_FAILURE);
}

// Tells trace.cpp who has written what the followed thread reads.
static void observe_read(const Fiber* f, const void* p) {
    const Block* b = f->block;
    size_t in_shared = (size_t)((const char*)p - b->shared), in_device = (size_t)((const char*)p - device_base);
    if (in_shared < SHARED_BYTES) {
        uint64_t record = b->shadow[in_shared].write & ~IN_FLIGHT;
        if (record > UNINITIALISED) {
            add_input({b->launch->number, b->number, thread_of(record), unpack_pc((uint32_t)record)});
        }
    } else if (in_device < device_size && device().writes[in_device / 2] > UNWRITTEN) {
        add_input(suspect_of(device().writes[in_device / 2], unpack_pc(device().pcs[in_device / 2])));
    }
}
void check_access_of(Fiber* f, const void* p, size_t bytes, AccessKind kind, void* pc) {
    if (__builtin_expect(emulation_observed, 0)) {
        if (emulation_counting) { count_access(f, p, bytes, (CountKind)kind, pc); }
        if (emulation_replaying && kind == ACCESS_READ && is_followed(f)) { observe_read(f, p); }
    }
    size_t in_shared = (size_t)((const char*)p - f->block->shared);
    size_t in_device = (size_t)((const char*)p - device_base);
    if (in_shared < SHARED_BYTES) {
        check_shared(f, in_shared, bytes, kind, pc);
    } else if (in_device < device_size) {
        if (kind != ACCESS_READ || !reads_plainly(f, in_device, bytes)) { check_device(f, in_device, bytes, kind, pc); }
    } else { // the host's memory, for example a kernel's parameters
        last_pc = pc;
        const Launch* l = f->block->launch;
        if (l->cluster > 1 && kind == ACCESS_READ) { check_cluster(f, p, bytes, pc); }
        if (__builtin_expect(!l->host_pointers.empty(), 0)) { check_host_pointers(f, (const char*)p, kind, pc); }
    }
}
static inline void access(const void* p, size_t bytes, AccessKind kind, void* pc) {
    Fiber* f = emulation_now;
    if (!f) {
        host_access(p, bytes, kind, pc);
        return;
    }
    size_t in_stack = (size_t)((const char*)p - f->stack);
    if (in_stack >= STACK_BYTES) {
        check_access_of(f, p, bytes, kind, pc);
    } else if (f->register_fences != f->first_register_fence) {
        check_registers(f, in_stack, bytes, kind, pc);
    }
}
// An access to a type of `bytes` bytes, as the compiler sees it. A GPU stops at an address that is not a multiple of them.
static inline void aligned_access(const void* p, size_t bytes, AccessKind kind, void* pc) {
    Fiber* f = emulation_now;
    access(p, bytes, kind, pc);
    misaligned_last = f && (uintptr_t)p % bytes != 0;
    if (__builtin_expect(misaligned_last, 0)) {
        report(bytes == 16  ? "a misaligned access of 16 bytes"
               : bytes == 8 ? "a misaligned access of 8 bytes"
                            : "a misaligned access of 2 or 4 bytes",
               f, pc, NULL, NULL);
    }
}
void check_access(const void* p, size_t bytes, AccessKind kind, void* pc) { access(p, bytes, kind, pc); }
void check_asynchronous_write(Fiber* f, const void* p, size_t bytes, bool adds, void* pc) {
    size_t offset;
    if (device_offset(p, &offset)) {
        check_device(f, offset, bytes, adds ? ACCESS_ATOMIC : ACCESS_WRITE, pc, ASYNCHRONOUS);
    } else {
        last_pc = pc;
    }
}

void __threadfence() { log_fence(SCOPE_DEVICE, __builtin_return_address(0)); }
void __threadfence_block() { log_fence(SCOPE_BLOCK, __builtin_return_address(0)); }

// The access itself comes after this. Another block's may come between the two, so log_fence() logs the last read again.
static void volatile_access(const void* p, size_t bytes, bool writes, void* pc) {
    size_t offset;
    bool synchronises = emulation_now && device_offset(p, &offset);
    AccessKind kind = synchronises ? ACCESS_ATOMIC : writes ? ACCESS_WRITE : ACCESS_READ;
    if (synchronises && !writes) { poll_memory(p, bytes, pc); }
    aligned_access(p, bytes, kind, pc);
    if (!synchronises) { return; }
    SyncScope logged(p, (writes ? SYNC_WRITES : SYNC_READS) | SYNC_QUIET, pc);
    if (!writes) { emulation_now->polled = p; }
}

#define TSAN_ACCESS(bytes)                                                                                             \
    extern "C" void __tsan_read##bytes(void* p) {                                                                      \
        aligned_access(p, bytes, ACCESS_READ, __builtin_return_address(0));                                            \
    }                                                                                                                  \
    extern "C" void __tsan_write##bytes(void* p) {                                                                     \
        aligned_access(p, bytes, ACCESS_WRITE, __builtin_return_address(0));                                           \
    }                                                                                                                  \
    extern "C" void __tsan_unaligned_read##bytes(void* p) {                                                            \
        access(p, bytes, ACCESS_READ, __builtin_return_address(0));                                                    \
    }                                                                                                                  \
    extern "C" void __tsan_unaligned_write##bytes(void* p) {                                                           \
        access(p, bytes, ACCESS_WRITE, __builtin_return_address(0));                                                   \
    }
// A volatile access of device memory is relaxed and synchronises. Who reads may poll. In shared memory it is as any other.
#define TSAN_VOLATILE(bytes)                                                                                           \
    extern "C" void __tsan_volatile_read##bytes(void* p) {                                                             \
        volatile_access(p, bytes, false, __builtin_return_address(0));                                                 \
    }                                                                                                                  \
    extern "C" void __tsan_volatile_write##bytes(void* p) {                                                            \
        volatile_access(p, bytes, true, __builtin_return_address(0));                                                  \
    }                                                                                                                  \
    extern "C" void __tsan_unaligned_volatile_read##bytes(void* p) {                                                   \
        volatile_access(p, bytes, false, __builtin_return_address(0));                                                 \
    }                                                                                                                  \
    extern "C" void __tsan_unaligned_volatile_write##bytes(void* p) {                                                  \
        volatile_access(p, bytes, true, __builtin_return_address(0));                                                  \
    }
TSAN_VOLATILE(1)
TSAN_VOLATILE(2)
TSAN_VOLATILE(4)
TSAN_VOLATILE(8)
TSAN_VOLATILE(16)
TSAN_ACCESS(1)
TSAN_ACCESS(2)
TSAN_ACCESS(4)
TSAN_ACCESS(8)
TSAN_ACCESS(16)
extern "C" void __tsan_read_range(void* p, size_t n) { access(p, n, ACCESS_READ, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void* p, size_t n) { access(p, n, ACCESS_WRITE, __builtin_return_address(0)); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
    access(from, n, ACCESS_READ, __builtin_return_address(0));
    access(to, n, ACCESS_WRITE, __builtin_return_address(0));
    return memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t n) {
    access(from, n, ACCESS_READ, __builtin_return_address(0));
    access(to, n, ACCESS_WRITE, __builtin_return_address(0));
    return memmove(to, from, n);
}
extern "C" void* __tsan_memset(void* p, int value, size_t n) {
    access(p, n, ACCESS_WRITE, __builtin_return_address(0));
    return memset(p, value, n);
}

// std::atomic of the host code. The memory order is the strongest, whatever was asked for.
#define TSAN_ATOMIC(bits, T)                                                                                           \
    extern "C" T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    extern "C" void __tsan_atomic##bits##_store(volatile T* p, T x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); } \
    extern "C" T __tsan_atomic##bits##_exchange(volatile T* p, T x, int) {                                             \
        return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                                                            \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_fetch_add(volatile T* p, T x, int) {                                            \
        return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_fetch_sub(volatile T* p, T x, int) {                                            \
        return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_fetch_or(volatile T* p, T x, int) {                                             \
        return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);                                                              \
    }                                                                                                                  \
    extern "C" T __tsan_atomic##bits##_fetch_and(volatile T* p, T x, int) {                                            \
        return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* old, T x, int, int) {               \
        return __atomic_compare_exchange_n(p, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                      \
    }                                                                                                                  \
    extern "C" int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* old, T x, int, int) {                 \
        return __atomic_compare_exchange_n(p, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                      \
    }
TSAN_ATOMIC(8, uint8_t)
TSAN_ATOMIC(16, uint16_t)
TSAN_ATOMIC(32, uint32_t)
TSAN_ATOMIC(64, uint64_t)
extern "C" void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
extern "C" void __tsan_atomic_signal_fence(int) {}

// ---- atomics of kernels ----------------------------------------------------------------------------------------------

// Applies combine(old, x) until no other thread of the host interferes. Returns the old value.
template <class T, class Combine> static T change(T* p, T x, Combine combine) {
    T old, wanted;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do {
        wanted = combine(old, x);
    } while (!__atomic_compare_exchange(p, &old, &wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
// An exchange takes what atomics of other blocks have added up.
static void check_sum(const void* p, void* pc) {
    Note note = {};
    void* other_pc = NULL;
    size_t offset;
    if (!device_offset(p, &offset) || sum_is_complete(emulation_now, p, &other_pc, &note)) { return; }
    const char* what = "race: an exchange takes what an atomic of another block may not have reached yet";
    device_finding(what, emulation_now, offset, pc, NULL, other_pc, note);
}
// An atomic of an integer is a synchronising access. With `polls`, an atomic that changes nothing lets the other threads run.
template <class T, class Combine> static T atomic(T* p, T x, int kind, bool polls, void* pc, Combine combine) {
    if (!(kind & SYNC_TAKES)) { check_atomic_read(p, sizeof(T), pc); }
    check_access(p, sizeof(T), ACCESS_ATOMIC, pc);
    if (std::is_floating_point<T>::value) { return change(p, x, combine); }
    if (kind & SYNC_TAKES) { check_sum(p, pc); }
    T old;
    {
        SyncScope logged(p, SYNC_READS | SYNC_WRITES | kind, pc);
        old = change(p, x, combine);
    }
    if (polls && combine(old, x) == old) { yield_thread({WAIT_MEMORY, p, pc}); }
    return old;
}
#define ATOMIC_FUNCTION(name, T, kind, polls, expression)                                                              \
    T name(T* p, T x) {                                                                                                \
        return atomic(p, x, kind, polls, __builtin_return_address(0), [](T old, T x) -> T { return expression; });     \
    }
ATOMIC_FUNCTION(atomicAdd, int, SYNC_SUMS, true, (int)((unsigned)old + (unsigned)x))
ATOMIC_FUNCTION(atomicAdd, unsigned, SYNC_SUMS, true, old + x)
ATOMIC_FUNCTION(atomicAdd, unsigned long long, SYNC_SUMS, true, old + x)
ATOMIC_FUNCTION(atomicAdd, float, SYNC_SUMS, true, old + x)
ATOMIC_FUNCTION(atomicAdd, double, SYNC_SUMS, true, old + x)
float4 atomicAdd(float4* p, float4 x) { // each element by itself
    float* to = &p->x;
    return {atomicAdd(to, x.x), atomicAdd(to + 1, x.y), atomicAdd(to + 2, x.z), atomicAdd(to + 3, x.w)};
}
ATOMIC_FUNCTION(atomicMax, int, SYNC_SUMS, false, old < x ? x : old)
ATOMIC_FUNCTION(atomicMax, unsigned, SYNC_SUMS, false, old < x ? x : old)
ATOMIC_FUNCTION(atomicMax, unsigned long long, SYNC_SUMS, false, old < x ? x : old)
ATOMIC_FUNCTION(atomicMin, int, SYNC_SUMS, false, x < old ? x : old)
ATOMIC_FUNCTION(atomicMin, unsigned, SYNC_SUMS, false, x < old ? x : old)
ATOMIC_FUNCTION(atomicExch, int, SYNC_TAKES, true, ((void)old, x))
ATOMIC_FUNCTION(atomicExch, unsigned, SYNC_TAKES, true, ((void)old, x))
ATOMIC_FUNCTION(atomicExch, float, SYNC_TAKES, true, ((void)old, x))
ATOMIC_FUNCTION(atomicExch, unsigned long long, SYNC_TAKES, true, ((void)old, x))
ATOMIC_FUNCTION(atomicOr, unsigned, SYNC_SUMS, true, old | x)
ATOMIC_FUNCTION(atomicAnd, unsigned, SYNC_SUMS, true, old& x)
ATOMIC_FUNCTION(atomicInc, unsigned, SYNC_SUMS, false, old >= x ? 0 : old + 1)
// A thread that takes a lock polls, so the others must get their turn.
#define ATOMIC_CAS(T)                                                                                                  \
    T atomicCAS(T* p, T compare, T x) {                                                                                \
        auto swap = [=](T old, T x) { return old == compare ? x : old; };                                              \
        void* pc = __builtin_return_address(0);                                                                        \
        T old = atomic(p, x, 0, false, pc, swap);                                                                      \
        if (old != compare) { yield_thread({WAIT_MEMORY, p, pc}); }                                                    \
        return old;                                                                                                    \
    }
ATOMIC_CAS(int)
ATOMIC_CAS(unsigned)
ATOMIC_CAS(unsigned long long)
