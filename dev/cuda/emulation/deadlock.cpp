/*
Explains a wait that never ends: for what the threads wait, how much of it has come, and who came last.

Threads that wait for the same thing at the same place are one entry. Entries are sorted by how likely it is that an arrival is
missing there, and that the other waits follow from it: an mbarrier that some of its arrivals have reached comes first, a barrier
of the whole block, whose other threads wait elsewhere, comes last.
*/
#include <algorithm>

#include "engine.h"

Arrival arrival_of(const Fiber* f, void* pc) { return {pc, f->index, f->block->index}; }

enum Place { AT_BARRIER, AT_WARP_OPERATION, AT_POLL };
struct Entry {
    Place place;
    const void* object; // the barrier, the warp, the memory, ...
    void* pc;
    Fiber* first;
    int threads, rank; // rank 0: the most likely cause
    std::string what;  // behind "64 threads wait"
};

static std::string by(const Arrival& a) {
    return " at " + describe_pc(a.pc, false) + " by thread " + describe(a.thread) + " of block " + describe(a.block);
}
static std::string count(long came, long of, const char* things) {
    return std::to_string(came) + " of " + std::to_string(of) + " " + things;
}

static void explain_barrier(const Block* b, const Barrier* barrier, Entry* e) {
    if (barrier == b->barriers) {
        e->what = "at a barrier of the block, to which " + count(barrier->arrived, b->num_alive, "threads have come");
        e->rank = 5;
        return;
    }
    e->what = "at barrier " + std::to_string(barrier - b->barriers) + ", at which " +
              count(barrier->arrived, barrier->expected, "threads have arrived") + ", the last one" + by(barrier->last);
    int ended = b->num_threads - b->num_alive;
    if (ended) { e->what += ", and " + std::to_string(ended) + " threads of the block have ended"; }
    e->rank = 1;
}

static void explain_warp(const Fiber* f, Entry* e) {
    char lanes[16];
    snprintf(lanes, sizeof(lanes), "0x%x", f->mask & f->warp->alive & ~f->warp->waiting);
    e->what = std::string("for lanes ") + lanes + " of their warp";
    e->rank = 4;
}

static void explain_mbarrier(const Block* b, const void* place, Entry* e) {
    auto found = b->memory_barriers.find((size_t)((const char*)place - b->shared));
    if (found == b->memory_barriers.end()) { return; }
    const MemoryBarrier& m = found->second;
    long came = m.expected - m.bytes;
    for (const BulkCopy& copy : m.copies) { came += (long)copy.bytes; }
    e->what = "for the mbarrier" + describe_place(b, place) + ": phase " + std::to_string(m.phase) + " has " +
              count(m.count - m.pending, m.count, "arrivals");
    if (m.expected || came) { e->what += " and " + count(came, m.expected, "bytes"); }
    e->what += m.last.pc ? ", the last arrival was" + by(m.last) : ", and nobody has ever arrived";
    e->what += ", initialised at " + describe_pc(m.pc, false);
    bool partly = m.pending < m.count || came != m.expected;
    e->rank = partly ? 0 : m.phase == 0 ? 2 : 3; // one that has worked before is more likely to wait for another one
}

static void explain_memory(const Block* b, const Wait& wait, Entry* e) {
    int value;
    Arrival last;
    memcpy(&value, wait.place, sizeof(value));
    bool known = last_write(b->launch, wait.place, wait.pc, &last);
    e->what = "for a word" + describe_place(b, wait.place) + ", which is " + std::to_string(value) +
              (known ? "; its last atomic write was" + by(last) : "; no other atomic of this launch has written it");
    e->rank = 2;
}

static void explain(Entry* e) {
    const Fiber* f = e->first;
    const Block* b = f->block;
    if (e->place == AT_BARRIER) {
        explain_barrier(b, (const Barrier*)e->object, e);
    } else if (e->place == AT_WARP_OPERATION) {
        explain_warp(f, e);
    } else if (f->wait.kind == WAIT_MEMORY) {
        explain_memory(b, f->wait, e);
    } else if (f->wait.kind == WAIT_MBARRIER) {
        explain_mbarrier(b, f->wait.place, e);
    } else {
        bool grid = f->wait.kind == WAIT_GRID;
        long arrived = grid ? b->launch->grid_arrived.load() : b->cluster->arrived;
        long blocks = grid ? (long)b->launch->num_blocks : (long)b->cluster->blocks.size();
        e->what = std::string("at the barrier of the ") + (grid ? "grid" : "cluster") + ", to which " +
                  count(arrived, blocks, "blocks have come") + ", the last one" +
                  by(grid ? b->launch->grid_last : b->cluster->last);
        e->rank = 3;
    }
}

// Where f waits. It is at least polling: a thread that could do anything else would have done it.
static Entry entry_of(Fiber* f) {
    Block* b = f->block;
    for (const Barrier& barrier : b->barriers) {
        if (barrier.waiting[f->id / 32] >> f->lane & 1) { return {AT_BARRIER, &barrier, f->pc, f, 1, 0, ""}; }
    }
    if (f->warp->waiting >> f->lane & 1) { return {AT_WARP_OPERATION, f->warp, f->pc, f, 1, 0, ""}; }
    const void* object = f->wait.kind == WAIT_CLUSTER ? b->cluster.get() : f->wait.place;
    return {AT_POLL, object, f->wait.pc, f, 1, 0, ""};
}

void report_deadlock(const std::vector<Block*>& blocks, const char* what) {
    enum { MOST = 64, MOST_TOLD = 3 };
    std::vector<Entry> entries;
    for (Block* b : blocks) {
        for (int i = 0; i < b->num_threads; i++) {
            Fiber* f = &b->fibers[i];
            if (!(f->warp->alive >> f->lane & 1)) { continue; }
            Entry e = entry_of(f);
            auto same = [&](const Entry& other) { return other.object == e.object && other.pc == e.pc; };
            auto found = std::find_if(entries.begin(), entries.end(), same);
            if (found != entries.end()) {
                found->threads++;
            } else if (entries.size() < MOST && e.pc) {
                entries.push_back(e);
            }
        }
    }
    if (entries.empty()) { return; }
    for (Entry& e : entries) { explain(&e); }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
    std::string more;
    std::vector<Suspect> told; // one entry for each line
    for (const Entry& e : entries) {
        auto same_line = [&](const Suspect& s) { return s.pc == e.pc; };
        if (told.size() == MOST_TOLD || std::any_of(told.begin(), told.end(), same_line)) { continue; }
        more += told.empty() ? "" : "; ";
        more += std::to_string(e.threads) + (e.threads == 1 ? " thread waits " : " threads wait ") + e.what;
        if (!told.empty()) { more += ", at " + describe_pc(e.pc, false); }
        told.push_back({e.first->block->launch->number, e.first->block->number, e.first->id, e.pc});
    }
    // an arrival is missing of threads that wait elsewhere
    for (size_t i = 1; i <= told.size(); i++) { add_suspect(told[i % told.size()]); }
    report(what, entries[0].first, entries[0].pc, NULL, NULL, more);
}
