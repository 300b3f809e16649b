/*
What orders the accesses of device memory by different blocks in one launch: fences, atomics, acquire and release
accesses, barriers of a cluster or of the grid. The rules are those of the PTX ISA's memory consistency model.

A write of thread w is ordered before an access of thread r in another block by a chain of four:

    1. A fence of device scope in the writer's block, after the write: by w itself, or by a thread for which a barrier
       has ordered the write before its fence. Or a release access, which does this and 2 at once.
    2. A synchronising write after the fence, at some location: an atomic, store_relaxed(), a volatile store. By the
       thread of the fence, or by one for which a barrier has ordered the fence before it.
    3. A synchronising read of that location in the reader's block, which comes later.
    4. A fence after the read, by its thread or behind a barrier, and before the access. Or 3 is an acquire access.

What a block has acquired by 3 and 4, its later releases pass on. The order of 2 and 3 is the one in which they
happened, so another schedule may find what this one does not. Each fence and each release has an epoch of its own.

An asynchronous store has no epoch until its thread has waited for it by tma_store_wait_written(); this makes it ordinary. An
asynchronous load of what the launch has written needs an async_proxy_fence() somewhere on the chain.

Atomics of floats are sums and not logged. Nothing is logged per ordinary access, and of the synchronising ones only
those that tell somebody something: a thread that polls adds nothing until there is something new.
*/
#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "engine.h"

// What barriers had ordered before a thread: epochs of each warp, and of each lane of its own warp if they differ.
struct View {
    uint32_t warps[MAX_WARPS];
    bool by_lane;
    uint32_t lanes[32];
};
// A thread at some time.
struct Point {
    int thread;
    uint32_t epoch;
    const View* view;
    uint64_t time;
    void* pc;
};
// True if what `thread` of the same block did in `epoch` comes before p.
static bool orders(const Point& p, int thread, uint32_t epoch) {
    if (thread == p.thread) { return epoch <= p.epoch; }
    if (epoch <= p.view->warps[thread / 32]) { return true; }
    return p.view->by_lane && thread / 32 == p.thread / 32 && epoch <= p.view->lanes[thread % 32];
}

struct Location;
// Of each location, how many of its releases have been acquired; sorted.
typedef std::vector<std::pair<Location*, size_t>> Knowledge;

struct Fence {
    Point at;
    FenceScope scope;
};
// A synchronising write that may publish something.
struct Release {
    BlockLog* block;
    Point at;
    bool by_itself;                         // a release access; otherwise a fence must precede it
    std::shared_ptr<const Knowledge> known; // by the threads of this and of all earlier releases of the location
};
struct Location {
    std::vector<Release> releases;
    // since the last other write: the latest atomic sum, maximum, ..., and the latest one by another block than that
    struct Sum {
        const BlockLog* block; // NULL: none
        int thread;
        uint32_t epoch;
        void* pc;
    } sums[2];
    Arrival last[2]; // the latest write, and the latest one at another pc; for messages
};
// A synchronising read that no fence of its thread has followed yet.
struct PendingRead {
    Location* location;
    size_t releases; // that it has seen
    int thread;
    uint32_t epoch;
};
struct Acquired {
    Point at;
    FenceScope scope;
    Knowledge known;
};
// For messages.
struct SyncAccess {
    Location* location;
    Point at;
    bool reads, writes, acquires, releases;
};

struct BlockLog {
    size_t number;
    std::deque<View> views;
    const View* last_view[MAX_WARPS]; // of each warp
    std::vector<Fence> fences;
    std::vector<Point> proxy_fences, written; // `written`: waits until asynchronous stores are in memory
    std::vector<PendingRead> pending;
    std::vector<Acquired> acquired;
    std::vector<SyncAccess> recent; // at most RECENT, a ring
    size_t num_recent;
    struct {
        uint64_t record;
        int thread;
    } checked[64]; // ordered pairs, by a hash
};
enum { RECENT = 64 };

struct Order {
    std::mutex mutex;
    std::unordered_map<size_t, Location> locations;
    std::unordered_map<size_t, std::unique_ptr<BlockLog>> blocks; // by number
    std::atomic<bool> published;                                  // there is a release
    uint64_t time;
};

void begin_order(Launch* launch) { launch->order = new Order(); }
void end_order(Launch* launch) { delete launch->order; }

// ---- the log --------------------------------------------------------------------------------------------------------

static Order* order_of(const Fiber* f) { return f->block->launch->order; }

static BlockLog* log_of(Block* b) {
    if (!b->log) {
        std::unique_ptr<BlockLog>& log = b->launch->order->blocks[b->number & BLOCK_MASK];
        log.reset(new BlockLog());
        log->number = b->number;
        b->log = log.get();
    }
    return b->log;
}

static const View* view_of(Fiber* f, BlockLog* log) {
    const Block* b = f->block;
    int mine = f->id / 32;
    View v = {};
    memcpy(v.warps, b->seen[mine], (size_t)b->num_warps * sizeof(uint32_t));
    v.warps[mine] = f->warp->full;
    v.by_lane = f->warp->partial;
    if (v.by_lane) { memcpy(v.lanes, f->warp->known[f->lane], sizeof(v.lanes)); }
    const View*& last = log->last_view[mine];
    if (!last || memcmp(&v, last, sizeof(v)) != 0) {
        log->views.push_back(v);
        last = &log->views.back();
    }
    return last;
}
static Point point_of(Fiber* f, BlockLog* log, void* pc) {
    return {f->id, f->warp->epoch, view_of(f, log), ++order_of(f)->time, pc};
}

static size_t known_of(const Knowledge& k, const Location* x) {
    auto found = std::lower_bound(k.begin(), k.end(), std::make_pair((Location*)x, (size_t)0));
    return found != k.end() && found->first == x ? found->second : 0;
}
static void learn(Knowledge& k, Location* x, size_t releases) {
    auto found = std::lower_bound(k.begin(), k.end(), std::make_pair(x, (size_t)0));
    if (found != k.end() && found->first == x) {
        found->second = std::max(found->second, releases);
    } else {
        k.insert(found, {x, releases});
    }
}
static void learn_all(Knowledge& k, const Knowledge& more) {
    for (const auto& m : more) { learn(k, m.first, m.second); }
}

// What f has acquired, by itself or by others before a barrier. fenced: only what a fence has followed.
static Knowledge knowledge_of(const Fiber* f, const BlockLog* log, bool fenced) {
    Knowledge k;
    uint64_t last_fence = log->fences.empty() ? 0 : log->fences.back().at.time;
    for (const Acquired& a : log->acquired) {
        bool passed_on = a.scope != SCOPE_BLOCK && (!fenced || a.at.time <= last_fence);
        if (passed_on && ordered(f, a.at.thread, a.at.epoch)) { learn_all(k, a.known); }
    }
    return k;
}
static bool knows(const Fiber* f, const BlockLog* log, const Location* x, size_t releases) {
    for (const Acquired& a : log->acquired) {
        if (ordered(f, a.at.thread, a.at.epoch) && known_of(a.known, x) >= releases) { return true; }
    }
    return false;
}

static void remember(BlockLog* log, const SyncAccess& s) {
    SyncAccess* last = log->recent.empty() ? NULL : &log->recent[(log->num_recent - 1) % RECENT];
    if (last && last->location == s.location && last->at.thread == s.at.thread && last->writes == s.writes) {
        *last = s; // it polls
        return;
    }
    if (log->recent.size() < RECENT) { log->recent.push_back(s); }
    log->recent[log->num_recent++ % RECENT] = s;
}

static void acquire(Fiber* f, BlockLog* log, const Point& at, FenceScope scope, const Knowledge& more) {
    Knowledge k = knowledge_of(f, log, false);
    learn_all(k, more);
    log->acquired.push_back({at, scope, k});
}

static void log_read(Fiber* f, BlockLog* log, Location* x, const Point& at, bool acquires) {
    size_t releases = x->releases.size();
    if (releases == 0 || knows(f, log, x, releases)) { return; }
    if (acquires) {
        Knowledge k;
        if (x->releases.back().known) { k = *x->releases.back().known; }
        learn(k, x, releases);
        acquire(f, log, at, SCOPE_DEVICE, k);
        return;
    }
    PendingRead* last = log->pending.empty() ? NULL : &log->pending.back();
    if (last && last->location == x && last->thread == f->id) { log->pending.pop_back(); }
    log->pending.push_back({x, releases, f->id, at.epoch});
}

static void log_write(Fiber* f, BlockLog* log, Location* x, const Point& at, bool releases) {
    if (!releases && log->fences.empty()) { return; } // it publishes nothing
    Release r = {log, at, releases, x->releases.empty() ? nullptr : x->releases.back().known};
    Knowledge k = knowledge_of(f, log, !releases);
    if (!k.empty()) {
        if (r.known) { learn_all(k, *r.known); }
        if (!r.known || k != *r.known) { r.known = std::make_shared<const Knowledge>(k); }
    }
    x->releases.push_back(r);
    order_of(f)->published = true;
}

// In device memory these are offsets; the barriers of clusters and of the grid have places of their own.
static size_t place_of(const void* p) {
    size_t offset;
    return device_offset(p, &offset) ? offset / 4 : SIZE_MAX;
}

SyncScope::SyncScope(const void* p, int kind, void* pc) : order(NULL), place(place_of(p)), kind(kind), pc(pc) {
    if (place != SIZE_MAX) { begin(); } // otherwise it is in shared memory
}
SyncScope::SyncScope(size_t barrier, int kind, void* pc)
    : order(NULL), place(SIZE_MAX - 1 - barrier), kind(kind), pc(pc) {
    begin();
}
void SyncScope::begin() {
    order = order_of(emulation_now);
    // an access of a value with its flag is worth a look only if somebody releases something
    if (kind & SYNC_QUIET && !order->published && !emulation_now->block->log) {
        order = NULL;
        return;
    }
    order->mutex.lock();
}
SyncScope::~SyncScope() {
    if (!order) { return; }
    Fiber* f = emulation_now;
    BlockLog* log = log_of(f->block);
    Location* x = &order->locations[place];
    Point at = point_of(f, log, pc);
    if (kind & SYNC_READS) { log_read(f, log, x, at, kind & SYNC_ACQUIRES); }
    if (kind & SYNC_WRITES) {
        log_write(f, log, x, at, kind & SYNC_RELEASES);
        if (!(kind & SYNC_SUMS) || x->sums[0].block != log) { x->sums[1] = x->sums[0]; }
        x->sums[0] = {log, f->id, at.epoch, pc};
        if (!(kind & SYNC_SUMS)) { x->sums[0].block = x->sums[1].block = NULL; }
        if (x->last[0].pc != pc) { x->last[1] = x->last[0]; }
        x->last[0] = arrival_of(f, pc);
    }
    remember(log, {x, at, (kind & SYNC_READS) != 0, (kind & SYNC_WRITES) != 0, (kind & SYNC_ACQUIRES) != 0,
                   (kind & SYNC_RELEASES) != 0});
    order->mutex.unlock();
    if (kind & SYNC_RELEASES) { next_epoch(f->block, f->warp); }
}

void log_fence(FenceScope scope, void* pc) {
    Fiber* f = emulation_now;
    std::lock_guard<std::mutex> lock(order_of(f)->mutex);
    BlockLog* log = log_of(f->block);
    Point at = point_of(f, log, pc);
    if (f->polled) { log_read(f, log, &order_of(f)->locations[place_of(f->polled)], at, false); }
    f->polled = NULL;
    Knowledge k;
    for (const PendingRead& p : log->pending) {
        // a shuffle or a vote that hands on what was read comes before the fence, too
        bool handed_on = p.thread / 32 == f->id / 32 && p.epoch <= f->warp->converged;
        if (!handed_on && !ordered(f, p.thread, p.epoch)) { continue; }
        if (knows(f, log, p.location, p.releases)) { continue; }
        const Release& last = p.location->releases[p.releases - 1];
        if (last.known) { learn_all(k, *last.known); }
        learn(k, p.location, p.releases);
    }
    if (!k.empty()) { acquire(f, log, at, scope, k); }
    log->fences.push_back({at, scope});
    next_epoch(f->block, f->warp);
}

void log_proxy_fence(Fiber* f) {
    std::lock_guard<std::mutex> lock(order_of(f)->mutex);
    BlockLog* log = log_of(f->block);
    log->proxy_fences.push_back(point_of(f, log, NULL));
}
void log_stores_written(Fiber* f) {
    std::lock_guard<std::mutex> lock(order_of(f)->mutex);
    BlockLog* log = log_of(f->block);
    log->written.push_back(point_of(f, log, NULL));
    next_epoch(f->block, f->warp);
}

// ---- questions ------------------------------------------------------------------------------------------------------

// The epoch in which the thread has waited until its asynchronous write was in memory; false: it has not.
static bool written_epoch(const BlockLog* log, const DeviceWrite& w, uint32_t* epoch) {
    *epoch = w.epoch;
    if (!w.asynchronous) { return true; }
    for (const Point& p : log->written) {
        if (p.thread == w.thread && p.epoch >= w.epoch) {
            *epoch = p.epoch;
            return true;
        }
    }
    return false;
}

// Of the fences of the release's block: the one that publishes the write by this release, or NULL.
static bool publishes(const Release& r, const DeviceWrite& w, uint32_t epoch, bool same_block) {
    if (r.by_itself && orders(r.at, w.thread, epoch)) { return true; }
    if (w.atomic && w.thread == r.at.thread && w.epoch == r.at.epoch) { return true; } // the synchronising write itself
    for (const Fence& fence : r.block->fences) {
        if (fence.at.time > r.at.time) { break; }
        bool counts = fence.scope == SCOPE_DEVICE || same_block;
        if (counts && orders(fence.at, w.thread, epoch) && orders(r.at, fence.at.thread, fence.at.epoch)) {
            return true;
        }
    }
    return false;
}
static bool publishes_any(Location* x, size_t num, const BlockLog* writer, const DeviceWrite& w, uint32_t epoch,
                          bool same_block) {
    for (size_t i = num; i-- > 0;) {
        if (x->releases[i].block == writer && publishes(x->releases[i], w, epoch, same_block)) { return true; }
    }
    return false;
}
static bool published(const Knowledge& k, const BlockLog* writer, const DeviceWrite& w, uint32_t epoch,
                      bool same_block) {
    for (const auto& known : k) {
        if (publishes_any(known.first, known.second, writer, w, epoch, same_block)) { return true; }
    }
    return false;
}

static BlockLog* log_of_number(Order* order, size_t number) {
    auto found = order->blocks.find(number & BLOCK_MASK);
    return found == order->blocks.end() ? NULL : found->second.get();
}

// The time since when f knows of the write; 0: never. The mutex is locked.
static uint64_t acquired_at(Fiber* f, const BlockLog* writer, const DeviceWrite& w) {
    BlockLog* log = f->block->log;
    uint32_t epoch;
    if (!log || !writer || !written_epoch(writer, w, &epoch)) { return 0; }
    bool same_block = writer == log;
    if (same_block && ordered(f, w.thread, epoch)) { return 1; }
    for (const Acquired& a : log->acquired) {
        bool counts = a.scope == SCOPE_DEVICE || same_block;
        if (counts && ordered(f, a.at.thread, a.at.epoch) && published(a.known, writer, w, epoch, same_block)) {
            return a.at.time;
        }
    }
    return 0;
}

bool ordered_by_fences(Fiber* f, const DeviceWrite& w) {
    BlockLog* log = f->block->log;
    if (!log) { return false; }
    auto& checked = log->checked[(w.record * 0x9E3779B97F4A7C15 >> 48 ^ (uint64_t)f->id * 7) % 64];
    if (w.record && checked.record == w.record && checked.thread == f->id) { return true; }
    Order* order = order_of(f);
    std::lock_guard<std::mutex> lock(order->mutex);
    if (!acquired_at(f, log_of_number(order, w.block), w)) { return false; }
    checked.record = w.record, checked.thread = f->id;
    return true;
}

bool ordered_by_proxy_fence(Fiber* f, const DeviceWrite& w) {
    Order* order = order_of(f);
    std::lock_guard<std::mutex> lock(order->mutex);
    BlockLog *writer = log_of_number(order, w.block), *log = f->block->log;
    // in the same block either barriers order all three, or fences do as between blocks
    bool by_barrier = w.block == (f->block->number & BLOCK_MASK) && ordered(f, w.thread, w.epoch);
    if (writer) {
        for (const Point& p : writer->proxy_fences) {
            bool before = !by_barrier || ordered(f, p.thread, p.epoch);
            if (before && orders(p, w.thread, w.epoch)) { return true; }
        }
    }
    if (by_barrier || !log) { return false; }
    uint64_t since = acquired_at(f, writer, w);
    for (const Point& p : log->proxy_fences) {
        if (p.time > since && ordered(f, p.thread, p.epoch)) { return true; }
    }
    return false;
}

// An atomic exchange takes a sum or a maximum that atomics of other blocks have made: then all of them must have come before. Of
// the reader's side only the synchronising read is demanded, not the fence behind it: the exchange depends on what it has read.
static void explain(Fiber* f, const DeviceWrite& w, Note* note);
bool sum_is_complete(Fiber* f, const void* p, void** pc, Note* note) {
    size_t place = place_of(p);
    if (place == SIZE_MAX) { return true; }
    Order* order = order_of(f);
    std::lock_guard<std::mutex> lock(order->mutex);
    auto found = order->locations.find(place);
    if (found == order->locations.end()) { return true; }
    const Location& x = found->second;
    const BlockLog* log = f->block->log;
    const Location::Sum& sum = x.sums[x.sums[0].block == log];
    if (!sum.block || sum.block == log) { return true; }
    DeviceWrite w = {0, sum.block->number & BLOCK_MASK, sum.thread, sum.epoch, false, false};
    if (acquired_at(f, sum.block, w)) { return true; }
    for (size_t i = 0; log && i < log->pending.size(); i++) {
        const PendingRead& r = log->pending[i];
        if (ordered(f, r.thread, r.epoch) && publishes_any(r.location, r.releases, sum.block, w, w.epoch, false)) {
            return true;
        }
    }
    *pc = sum.pc;
    explain(f, w, note);
    return false;
}

bool last_write(Launch* launch, const void* p, void* pc, Arrival* write) {
    std::lock_guard<std::mutex> lock(launch->order->mutex);
    auto found = launch->order->locations.find(place_of(p));
    if (found == launch->order->locations.end()) { return false; }
    const Location& x = found->second;
    *write = x.last[x.last[0].pc == pc];
    return write->pc != NULL;
}

// ---- what is missing ------------------------------------------------------------------------------------------------

// What the writer's block lacks for this write before its synchronising write s; false: nothing.
static bool explain_writer(const BlockLog* writer, const DeviceWrite& w, const SyncAccess& s, bool same_block,
                           Note* note) {
    const Fence *narrow = NULL, *late = NULL, *early = NULL;
    uint32_t epoch;
    if (!written_epoch(writer, w, &epoch)) {
        *note = {"the writer has not called tma_store_wait_written() before the atomic", s.at.pc, NULL, NULL};
        return true;
    }
    if (s.releases && orders(s.at, w.thread, epoch)) { return false; }
    for (const Fence& fence : writer->fences) {
        bool after_write = orders(fence.at, w.thread, epoch);
        bool before = fence.at.time < s.at.time && orders(s.at, fence.at.thread, fence.at.epoch);
        bool counts = fence.scope == SCOPE_DEVICE || same_block;
        if (after_write && before && counts) { return false; }
        if (after_write && before) { narrow = &fence; }
        if (after_write && fence.at.time > s.at.time && !late) { late = &fence; }
        if (!after_write && before) { early = &fence; }
    }
    if (narrow) {
        *note = {"the writer's fence", narrow->at.pc, "is of block scope, before the atomic", s.at.pc};
    } else if (late) {
        *note = {"the writer's fence", late->at.pc, "comes after the atomic", s.at.pc};
    } else if (s.releases) {
        *note = {"no barrier orders the write before the release", s.at.pc, NULL, NULL};
    } else if (early) {
        *note = {"the writer's fence", early->at.pc, "is not ordered after the write, but before the atomic", s.at.pc};
    } else {
        *note = {"the writer has not fenced before the atomic", s.at.pc, NULL, NULL};
    }
    return true;
}
static void explain_reader(Fiber* f, const BlockLog* log, const SyncAccess& s, Note* note) {
    const Fence *narrow = NULL, *elsewhere = NULL, *early = NULL;
    for (const Fence& fence : log->fences) {
        bool mine = ordered(f, fence.at.thread, fence.at.epoch);
        bool after = orders(fence.at, s.at.thread, s.at.epoch) && fence.at.time > s.at.time;
        if (after && mine) { narrow = &fence; }
        if (after && !mine) { elsewhere = &fence; }
        if (!after && mine && fence.at.time < s.at.time) { early = &fence; }
    }
    if (s.acquires) {
        *note = {"no barrier orders this access after the acquiring load", s.at.pc, NULL, NULL};
    } else if (narrow && narrow->scope == SCOPE_BLOCK) {
        *note = {"the reader's fence", narrow->at.pc, "is of block scope, after the atomic", s.at.pc};
    } else if (elsewhere) {
        *note = {"no barrier orders this access after the reader's fence", elsewhere->at.pc, "behind the atomic",
                 s.at.pc};
    } else if (early) {
        *note = {"the reader's fence", early->at.pc, "comes before the atomic, and none after it", s.at.pc};
    } else {
        *note = {"the reader has not fenced after the atomic", s.at.pc, NULL, NULL};
    }
}

static void explain(Fiber* f, const DeviceWrite& w, Note* note) {
    Order* order = order_of(f);
    const BlockLog *writer = log_of_number(order, w.block), *reader = f->block->log;
    uint32_t epoch;
    bool same_block = w.block == (f->block->number & BLOCK_MASK);
    if (same_block && ordered(f, w.thread, w.epoch) && !(writer && written_epoch(writer, w, &epoch))) {
        *note = {"the writer has not called tma_store_wait_written() since then", NULL, NULL, NULL};
    }
    if (!writer || !reader) { return; }
    // of the pairs of a write by one and a read by the other: the latest in which the writer lacks nothing, or the latest
    bool found = false;
    for (size_t i = 0; i < reader->recent.size(); i++) {
        const SyncAccess& read = reader->recent[(reader->num_recent - 1 - i) % RECENT];
        for (size_t j = 0; read.reads && j < writer->recent.size(); j++) {
            const SyncAccess& write = writer->recent[(writer->num_recent - 1 - j) % RECENT];
            bool pair = write.writes && write.location == read.location && write.at.time <= read.at.time;
            if (!pair || (write.at.thread == w.thread && write.at.epoch < w.epoch)) { continue; }
            Note lacks;
            if (!explain_writer(writer, w, write, same_block, &lacks)) {
                explain_reader(f, reader, read, note);
                return;
            }
            if (!found) { *note = lacks; }
            found = true;
        }
    }
}
Note explain_race(Fiber* f, const DeviceWrite& w) {
    Note note = {};
    std::lock_guard<std::mutex> lock(order_of(f)->mutex);
    explain(f, w, &note);
    return note;
}
