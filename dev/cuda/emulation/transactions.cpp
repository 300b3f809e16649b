/*
Counts what memory is asked for and what a GPU would move: OP_cpu KERNEL --transactions. Off, it costs a branch per access.

Requests. On a GPU a warp executes a load or a store once for all its lanes: that is one request. Here the lanes run one
after the other, so their accesses must be paired up. Between two points at which the whole warp meets (a barrier, a shuffle,
a vote, mma.sync), the k-th access of each lane at one place in the code is taken for one request. In a loop whose lanes make
different numbers of rounds this is what a GPU does, too. It is wrong if a lane leaves out a round that others make and goes on
with the next one: then it is paired with the others' earlier round.

Vectors. The compiler may split the load of a float4 into four of 4 bytes. Accesses of one lane are joined again if they
follow one another in memory and in the code, come from the same line and column, and together are an aligned access
of up to 16 bytes. Several places in the code may belong to one line: an unrolled loop, or two loads in one expression.

Device memory moves in sectors of 32 bytes. A request moves each sector that any of its lanes touches, once. Shared memory has
32 banks of 4 bytes. A wavefront serves one word of each bank, to any number of lanes. Accesses of 8 bytes are served in two
halves of the warp, those of 16 bytes in four quarters: each takes as many wavefronts as its busiest bank has distinct words.
*/
#include "engine.h"

#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>

enum { SECTOR = 32, LINE = 128, NUM_BANKS = 32, BANK = 4, MAX_ACCESS = 16 };

bool emulation_counting, emulation_observed;

// ---- what is counted ------------------------------------------------------------------------------

// One instruction of a warp. Offsets are from the begin of device memory, or of the block's shared memory.
struct Request {
    unsigned mask;
    uint32_t offset[32];
    uint8_t bytes[32];
};

// A place in the code that accesses memory, of one kernel.
struct Site {
    int kernel;
    void* pc;
    CountKind kind;
    bool shared;
    int bytes; // per lane: the most
    uint64_t requests, asked;
    uint64_t units, least; // device memory: sectors touched and needed; shared memory: wavefronts
    bool has_example;
    Request example; // of block 0, warp 0: the first request with the most lanes
};

// The launches of one kernel.
struct KernelCounts {
    const void* kernel; // NULL: cudaMemset and cudaMemcpy
    dim3 grid, block;
    bool varies; // grid or block differ between its launches
    uint64_t launches, blocks, read, written, unique, events[NUM_COUNT_EVENTS];
};

static std::vector<Site> sites;
static std::vector<KernelCounts> kernels;
static int kernel_now = -1;                    // index of the kernel that runs
static std::unordered_map<uint64_t, int> find; // a site's key -> its index in sites
static std::vector<uint8_t> touched;           // per sector of device memory, in this launch: 1 read, 2 written

// Accesses of a lane that may turn out to be one.
struct Pending {
    CountKind kind;
    bool shared;
    size_t offset;
    int parts;
    void* pcs[MAX_ACCESS];
    uint8_t bytes[MAX_ACCESS];
    int total;
};

// Of a block that runs: the requests to which lanes may still come.
struct OpenSite {
    std::vector<uint32_t> count; // (MAX_THREADS) accesses of each thread since its warp last met
    std::vector<Request> open[MAX_WARPS];
};
struct OpenBlock {
    std::vector<OpenSite> sites;
    std::vector<int> used[MAX_WARPS];     // sites with open requests
    Pending pending[MAX_THREADS][2] = {}; // reads, others
};

// ---- lines and columns ------------------------------------------------------------------------------
// The program's own line table (DWARF Debugging Information Format, Version 5, 6.2). addr2line names the line of an address,
// but not the column, and starting it for each access would take too long.

struct LineRow {
    uint64_t address;
    uint32_t file, line, column;
    bool operator<(const LineRow& other) const { return address < other.address; }
};

struct Bytes { // little endian
    const uint8_t *p, *end;
    uint64_t number(int bytes) {
        uint64_t x = 0;
        for (int i = 0; i < bytes && p < end; i++) { x |= (uint64_t)*p++ << 8 * i; }
        return x;
    }
    uint64_t leb(bool is_signed) {
        uint64_t x = 0;
        int shift = 0;
        uint8_t byte = 0x80;
        while (byte & 0x80 && p < end) {
            byte = *p++;
            if (shift < 64) { x |= (uint64_t)(byte & 0x7F) << shift; }
            shift += 7;
        }
        return is_signed && byte & 0x40 && shift < 64 ? x | ~(uint64_t)0 << shift : x;
    }
};

// Adds the rows of one unit of the table, whose header has been entered: unit.p is at its version.
static void read_unit(Bytes unit, uint32_t number, std::vector<LineRow>* rows) {
    int version = (int)unit.number(2), lengths[256] = {};
    if (version < 2 || version > 5) { return; }
    if (version == 5) { unit.number(2); } // sizes of an address and of a segment selector
    uint64_t header = unit.number(4);
    Bytes program = {unit.p + std::min(header, (uint64_t)(unit.end - unit.p)), unit.end};
    uint64_t step = unit.number(1);
    if (version >= 4) { unit.number(1); } // operations per instruction, for VLIW
    unit.number(1);                       // is_stmt
    int line_base = (int8_t)unit.number(1), line_range = (int)unit.number(1), opcode_base = (int)unit.number(1);
    for (int i = 1; i < opcode_base; i++) { lengths[i] = (int)unit.number(1); }
    if (line_range == 0) { return; }
    LineRow now = {0, 1, 1, 0}, start = now;
    start.file = now.file = number << 16 | 1;
    auto add = [&] { rows->push_back(now); };
    while (program.p < program.end) {
        int opcode = (int)program.number(1);
        if (opcode >= opcode_base) {
            opcode -= opcode_base;
            now.address += step * (uint64_t)(opcode / line_range);
            now.line += (uint32_t)(line_base + opcode % line_range);
            add();
        } else if (opcode == 0) { // extended
            uint64_t length = program.leb(false);
            Bytes operand = {program.p, program.p + std::min(length, (uint64_t)(program.end - program.p))};
            program.p = operand.end;
            int extended = (int)operand.number(1);
            if (extended == 1) { // end of a sequence
                now.line = 0;
                add();
                now = start;
            } else if (extended == 2) {
                now.address = operand.number(8);
            }
        } else if (opcode == 1) {
            add();
        } else if (opcode == 2) {
            now.address += step * program.leb(false);
        } else if (opcode == 3) {
            now.line += (uint32_t)program.leb(true);
        } else if (opcode == 4) {
            now.file = number << 16 | (uint32_t)program.leb(false);
        } else if (opcode == 5) {
            now.column = (uint32_t)program.leb(false);
        } else if (opcode == 8) {
            now.address += step * (uint64_t)((255 - opcode_base) / line_range);
        } else if (opcode == 9) {
            now.address += program.number(2);
        } else {
            for (int i = 0; i < lengths[opcode]; i++) { program.leb(false); }
        }
    }
}

static std::string program_path() {
    char path[1024];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    return std::string(path, n > 0 ? (size_t)n : 0);
}

// The line table, sorted; empty if this is no ELF file of 64 bits with such a table.
static const std::vector<LineRow>& line_table() {
    static std::vector<LineRow> rows;
    static bool is_read = false;
    if (is_read) { return rows; }
    is_read = true;
    std::vector<uint8_t> file;
    FILE* f = fopen(program_path().c_str(), "rb");
    uint8_t buffer[1 << 12];
    for (size_t n; f && (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) { file.insert(file.end(), buffer, buffer + n); }
    if (f) { fclose(f); }
    if (file.size() < 64 || memcmp(file.data(), "\177ELF\2\1", 6) != 0) { return rows; }
    auto at = [&](uint64_t offset, int bytes) {
        offset = std::min(offset, (uint64_t)file.size());
        return Bytes{file.data() + offset, file.data() + file.size()}.number(bytes);
    };
    uint64_t headers = at(0x28, 8), header_bytes = at(0x3A, 2), num_headers = at(0x3C, 2), names = at(0x3E, 2);
    uint64_t strings = at(headers + names * header_bytes + 0x18, 8);
    for (uint64_t i = 0; i < num_headers; i++) {
        uint64_t header = headers + i * header_bytes, name = strings + at(header, 4);
        uint64_t begin = at(header + 0x18, 8), bytes = at(header + 0x20, 8);
        if (name + 12 > file.size() || memcmp(&file[name], ".debug_line", 12) != 0) { continue; }
        if (begin + bytes > file.size()) { break; }
        Bytes table = {&file[begin], &file[begin] + bytes};
        for (uint32_t unit = 0; table.p < table.end; unit++) {
            uint64_t length = std::min(table.number(4), (uint64_t)(table.end - table.p));
            read_unit({table.p, table.p + length}, unit, &rows);
            table.p += length;
        }
    }
    std::stable_sort(rows.begin(), rows.end());
    return rows;
}

// Where the call is that returns to pc; line 0: not known.
static LineRow line_of(void* pc) {
    const std::vector<LineRow>& rows = line_table();
    auto next = std::upper_bound(rows.begin(), rows.end(), LineRow{(uint64_t)(uintptr_t)pc - 1, 0, 0, 0});
    return next == rows.begin() ? LineRow{} : *(next - 1);
}
// load.h has lines from 1000001 on: each of its calls is an access of its own.
static bool same_place(const LineRow& a, const LineRow& b) {
    return a.line > 0 && a.line < 1000000 && a.file == b.file && a.line == b.line && a.column == b.column;
}

// ---- one request ------------------------------------------------------------------------------------

static int num_parts(int bytes) { return bytes <= 4 ? 1 : bytes <= 8 ? 2 : 4; }

// words[bank]: distinct words of the bank that the lanes of this part of the warp ask for. Atomics are served one by one.
static void count_banks(const Request& r, CountKind kind, int part, int parts, int words[NUM_BANKS]) {
    std::vector<uint32_t> asked;
    for (int lane = part * 32 / parts; lane < (part + 1) * 32 / parts; lane++) {
        if (!(r.mask >> lane & 1)) { continue; }
        for (uint32_t w = r.offset[lane] / BANK; w <= (r.offset[lane] + r.bytes[lane] - 1) / BANK; w++) {
            asked.push_back(w);
        }
    }
    std::sort(asked.begin(), asked.end());
    if (kind != COUNT_ATOMIC) { asked.erase(std::unique(asked.begin(), asked.end()), asked.end()); }
    std::fill(words, words + NUM_BANKS, 0);
    for (uint32_t w : asked) { words[w % NUM_BANKS]++; }
}

static int most_bytes(const Request& r) {
    int most = 0;
    for (int lane = 0; lane < 32; lane++) {
        if (r.mask >> lane & 1) { most = std::max(most, (int)r.bytes[lane]); }
    }
    return most;
}

static void count_wavefronts(const Request& r, CountKind kind, uint64_t* wavefronts, uint64_t* least) {
    int parts = num_parts(most_bytes(r)), words[NUM_BANKS];
    *wavefronts = *least = 0;
    for (int part = 0; part < parts; part++) {
        count_banks(r, kind, part, parts, words);
        int busiest = *std::max_element(words, words + NUM_BANKS);
        *wavefronts += (uint64_t)busiest, *least += busiest > 0;
    }
}

// Returns the distinct sectors in ascending order; *distinct: the distinct bytes.
static std::vector<uint32_t> sectors_of(const Request& r, uint64_t* distinct) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges; // begin, end
    for (int lane = 0; lane < 32; lane++) {
        if (r.mask >> lane & 1) { ranges.push_back({r.offset[lane], r.offset[lane] + r.bytes[lane]}); }
    }
    if (!std::is_sorted(ranges.begin(), ranges.end())) { std::sort(ranges.begin(), ranges.end()); }
    std::vector<uint32_t> sectors;
    uint32_t end = 0;
    *distinct = 0;
    for (auto& range : ranges) {
        uint32_t begin = std::max(range.first, end);
        if (range.second > begin) { *distinct += range.second - begin, end = range.second; }
        for (uint32_t s = range.first / SECTOR; s <= (range.second - 1) / SECTOR; s++) {
            if (sectors.empty() || sectors.back() < s) { sectors.push_back(s); }
        }
    }
    return sectors;
}

static void finish_request(Site* site, const Request& r, bool may_be_example) {
    int lanes = __builtin_popcount(r.mask);
    site->requests++;
    for (int lane = 0; lane < 32; lane++) {
        if (r.mask >> lane & 1) { site->asked += r.bytes[lane]; }
    }
    site->bytes = std::max(site->bytes, most_bytes(r));
    if (may_be_example && (!site->has_example || lanes > __builtin_popcount(site->example.mask))) {
        site->has_example = true, site->example = r;
    }
    if (site->shared) {
        uint64_t wavefronts, least;
        count_wavefronts(r, site->kind, &wavefronts, &least);
        site->units += wavefronts, site->least += least;
        return;
    }
    uint64_t distinct;
    std::vector<uint32_t> sectors = sectors_of(r, &distinct);
    site->units += sectors.size(), site->least += (distinct + SECTOR - 1) / SECTOR;
    if (touched.size() <= sectors.back()) { touched.resize(sectors.back() + 1); }
    uint8_t marks = site->kind == COUNT_WRITE || site->kind == COUNT_BULK_WRITE ? 2
                    : site->kind == COUNT_ATOMIC                                ? 3
                                                                                : 1;
    for (uint32_t s : sectors) { touched[s] |= marks; }
}

// ---- accesses become requests -------------------------------------------------------------------------

static int site_of(void* pc, CountKind kind, bool shared) {
    uint64_t key = (uint64_t)(uintptr_t)pc << 16 | (uint64_t)kernel_now << 4 | (uint64_t)kind << 1 | shared;
    auto found = find.find(key);
    if (found != find.end()) { return found->second; }
    sites.push_back(Site{kernel_now, pc, kind, shared, 0, 0, 0, 0, 0, false, {}});
    find[key] = (int)sites.size() - 1;
    return (int)sites.size() - 1;
}

static void add_access(Fiber* f, size_t offset, int bytes, CountKind kind, bool shared, void* pc) {
    OpenBlock* b = f->block->counts;
    int site = site_of(pc, kind, shared), warp = f->id / 32;
    if (b->sites.size() <= (size_t)site) { b->sites.resize((size_t)site + 1); }
    OpenSite& s = b->sites[(size_t)site];
    if (s.count.empty()) { s.count.resize(MAX_THREADS); }
    std::vector<Request>& open = s.open[warp];
    if (open.empty()) { b->used[warp].push_back(site); }
    uint32_t k = s.count[(size_t)f->id]++;
    if (open.size() <= k) { open.resize(k + 1); }
    open[k].mask |= 1u << f->lane, open[k].offset[f->lane] = (uint32_t)offset, open[k].bytes[f->lane] = (uint8_t)bytes;
}

static void commit(Fiber* f, Pending* p) {
    int parts = p->parts;
    p->parts = 0;
    if (parts == 0) { return; }
    bool joined = (p->total & (p->total - 1)) == 0 && p->offset % (size_t)p->total == 0;
    if (joined) { return add_access(f, p->offset, p->total, p->kind, p->shared, p->pcs[0]); }
    size_t offset = p->offset;
    for (int i = 0; i < parts; i++) {
        add_access(f, offset, p->bytes[i], p->kind, p->shared, p->pcs[i]);
        offset += p->bytes[i];
    }
}

void count_access(Fiber* f, const void* memory, size_t bytes, CountKind kind, void* pc) {
    size_t offset = (size_t)((const char*)memory - f->block->shared);
    bool shared = offset < SHARED_BYTES;
    if (!shared && !device_offset(memory, &offset)) { return; } // the host's memory
    if (offset + bytes > UINT32_MAX) {
        fprintf(stderr, "error: --transactions: more than 4 GB of device memory, take a smaller shape\n");
        _exit(EXIT_FAILURE);
    }
    KernelCounts& k = kernels[(size_t)kernel_now];
    if (!shared) { (kind == COUNT_WRITE || kind == COUNT_ATOMIC ? k.written : k.read) += bytes; }
    while (bytes > MAX_ACCESS) { // a copy: in vectors, as far as it is aligned
        size_t piece = MAX_ACCESS;
        while (offset % piece != 0) { piece /= 2; }
        add_access(f, offset, (int)piece, kind, shared, pc);
        offset += piece, bytes -= piece;
    }
    if (bytes == 0) { return; }
    Pending* p = &f->block->counts->pending[f->id][kind == COUNT_READ ? 0 : 1];
    bool plain = kind == COUNT_READ || kind == COUNT_WRITE;
    if (plain && p->parts > 0 && p->kind == kind && p->shared == shared && p->offset + (size_t)p->total == offset &&
        p->total + (int)bytes <= MAX_ACCESS && (char*)pc > (char*)p->pcs[p->parts - 1] &&
        same_place(line_of(p->pcs[0]), line_of(pc))) {
        p->pcs[p->parts] = pc, p->bytes[p->parts++] = (uint8_t)bytes, p->total += (int)bytes;
        return;
    }
    commit(f, p);
    if (!plain || bytes == MAX_ACCESS) { return add_access(f, offset, (int)bytes, kind, shared, pc); }
    p->kind = kind, p->shared = shared, p->offset = offset, p->parts = 1, p->total = (int)bytes;
    p->pcs[0] = pc, p->bytes[0] = (uint8_t)bytes;
}

// What TMA moves does not come from lanes: up to 512 contiguous bytes count as one request.
void count_bulk(const void* p, size_t bytes, CountKind kind, void* pc) {
    size_t offset;
    if (!device_offset(p, &offset)) { return; }
    KernelCounts& k = kernels[(size_t)kernel_now];
    (kind == COUNT_BULK_WRITE ? k.written : k.read) += bytes;
    int site = site_of(pc, kind, false);
    while (bytes > 0) {
        Request r = {};
        for (int lane = 0; lane < 32 && bytes > 0; lane++) {
            size_t piece = std::min(bytes, (size_t)MAX_ACCESS);
            r.mask |= 1u << lane, r.offset[lane] = (uint32_t)offset, r.bytes[lane] = (uint8_t)piece;
            offset += piece, bytes -= piece;
        }
        finish_request(&sites[(size_t)site], r, true);
    }
}

// The whole warp has met: no lane can come to a request that is open.
void count_warp_met(Block* b, int warp) {
    OpenBlock* o = b->counts;
    for (int i = 32 * warp; i < std::min(32 * warp + 32, b->num_threads); i++) {
        for (Pending& p : o->pending[i]) { commit(&b->fibers[i], &p); }
    }
    for (int site : o->used[warp]) {
        OpenSite& s = o->sites[(size_t)site];
        for (const Request& r : s.open[warp]) { finish_request(&sites[(size_t)site], r, b->number == 0 && warp == 0); }
        s.open[warp].clear();
        std::fill(s.count.begin() + 32 * warp, s.count.begin() + 32 * warp + 32, 0);
    }
    o->used[warp].clear();
}

void count_event(CountEvent event) { kernels[(size_t)kernel_now].events[event]++; }

// ---- blocks, launches -----------------------------------------------------------------------------------

void count_block_begins(Block* b) {
    if (!b->counts) { b->counts = new OpenBlock(); }
}
void count_block_ends(Block* b) {
    for (int warp = 0; warp < b->num_warps; warp++) { count_warp_met(b, warp); }
    b->counts->sites.clear(); // the numbers of sites may begin again
}

static bool same_dims(dim3 a, dim3 b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

void count_launch_begins(const Launch* launch) {
    kernel_now = 0;
    while (kernel_now < (int)kernels.size() && kernels[(size_t)kernel_now].kernel != launch->kernel) { kernel_now++; }
    if (kernel_now == (int)kernels.size()) {
        kernels.push_back(KernelCounts{launch->kernel, launch->grid, launch->block, false, 0, 0, 0, 0, 0, {}});
    }
    KernelCounts& k = kernels[(size_t)kernel_now];
    k.varies |= !same_dims(k.grid, launch->grid) || !same_dims(k.block, launch->block);
    k.launches++, k.blocks += launch->num_blocks;
    touched.clear();
}
void count_launch_ends() {
    uint64_t& unique = kernels[(size_t)kernel_now].unique;
    for (uint8_t marks : touched) { unique += (uint64_t)SECTOR * (uint64_t)((marks & 1) + (marks >> 1)); }
}

void count_copy(size_t read, size_t written) {
    size_t i = 0;
    while (i < kernels.size() && kernels[i].kernel) { i++; }
    if (i == kernels.size()) { kernels.push_back(KernelCounts{NULL, 1, 1, false, 0, 0, 0, 0, 0, {}}); }
    KernelCounts& k = kernels[i];
    k.launches++, k.read += read, k.written += written, k.unique += read + written;
}

void emulation_count(bool on) {
    if (on) { sites.clear(), kernels.clear(), find.clear(), kernel_now = -1; }
    if (on) { line_table(); } // read here: the stacks of kernels are small
    emulation_counting = emulation_observed = on;
}

// ---- where a place is in the source -------------------------------------------------------------------------

struct Place {
    std::string function, path, file; // file: without folders
    int line;
};

// True for functions that only wrap one access: the line that calls them says more.
static bool is_wrapper(const std::string& function, const std::string& path) {
    if (path.find("emulation/") != std::string::npos) { return true; }
    for (const char* name : {"load128", "store128", "vec128_", "operator[]", "__ld", "__st"}) {
        size_t at = function.find(name);
        if (at != std::string::npos && (at == 0 || !isalnum((unsigned char)function[at - 1]))) { return true; }
    }
    return false;
}

static Place place_of_frame(const std::string& function, std::string location) {
    location = location.substr(0, location.find(" (discriminator"));
    size_t colon = location.rfind(':');
    Place p = {function, location.substr(0, colon), "", 0};
    p.line = colon == std::string::npos ? 0 : atoi(location.c_str() + colon + 1);
    size_t slash = p.path.rfind('/');
    p.file = p.path.substr(slash == std::string::npos ? 0 : slash + 1);
    return p;
}

// Asks addr2line, or llvm-symbolizer, about all addresses at once. An address that it does not know is left out.
static std::map<uint64_t, Place> find_places(const std::set<uint64_t>& addresses) {
    std::map<uint64_t, Place> places;
    char list[] = "/tmp/emulation_XXXXXX";
    int fd = mkstemp(list);
    FILE* f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!f) { return places; }
    for (uint64_t address : addresses) { fprintf(f, "0x%lx\n", (unsigned long)address); }
    fclose(f);
    std::string exe = program_path(), command = "{ addr2line -a -f -i -C -e '" + exe + "' <" + list +
                                                " || llvm-symbolizer --output-style=GNU -a -f -i -C -e '" + exe +
                                                "' <" + list + "; } 2>/dev/null";
    f = popen(command.c_str(), "r");
    char line[4096];
    std::string function;
    uint64_t address = 0;
    bool found = false;
    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0x", 2) == 0) {
            address = strtoull(line, NULL, 16), function.clear(), found = false;
        } else if (function.empty()) {
            function = line;
        } else { // the innermost call comes first
            Place p = place_of_frame(function, line);
            if (!found && p.line > 0) { places[address] = p, found = !is_wrapper(function, p.path); }
            function.clear();
        }
    }
    if (f) { pclose(f); }
    unlink(list);
    return places;
}

// The text of a line without the space around it, "" if there is no such file.
static std::string source_line(const Place& p) {
    static std::map<std::string, std::vector<std::string>> files;
    if (!files.count(p.path)) {
        std::vector<std::string>& lines = files[p.path];
        FILE* f = fopen(p.path.c_str(), "r");
        char line[4096];
        while (f && fgets(line, sizeof(line), f)) {
            std::string text = line;
            size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t\r\n");
            lines.push_back(
                begin == std::string::npos || end == std::string::npos ? "" : text.substr(begin, end + 1 - begin));
        }
        if (f) { fclose(f); }
    }
    const std::vector<std::string>& lines = files[p.path];
    return p.line >= 1 && (size_t)p.line <= lines.size() ? lines[(size_t)p.line - 1] : "";
}

// ---- tables -------------------------------------------------------------------------------------------------

// One access in the source: all places in the code that the compiler made of it.
struct Row {
    Place place;
    LineRow at;
    Site sum;
};

static const char* const kind_names[] = {"read", "write", "atomic", "cp.async", "ldmatrix", "bulk read", "bulk write"};
static const int WIDTH = 100;

static std::string fit(const std::string& text, size_t width) {
    return text.size() <= width ? text : text.substr(0, width - 3) + "...";
}

// 6.25% 66.67% 100%
static std::string percent(uint64_t part, uint64_t whole) {
    char text[32];
    double value = whole ? 100.0 * (double)part / (double)whole : 100.0;
    snprintf(text, sizeof(text), "%.2f", value);
    std::string s = text;
    while (s.back() == '0') { s.pop_back(); }
    if (s.back() == '.') { s.pop_back(); }
    return s + "%";
}

// True if the column is one of the line that is shown.
static bool has_column(const Row& row) { return row.at.line == (uint32_t)row.place.line && row.at.column > 0; }

static std::vector<Row> rows_of(int kernel, bool shared, const std::map<uint64_t, Place>& places) {
    std::vector<Row> rows;
    for (const Site& s : sites) {
        if (s.kernel != kernel || s.shared != shared || s.requests == 0) { continue; }
        char raw[32];
        snprintf(raw, sizeof(raw), "%p", s.pc);
        auto found = places.find((uint64_t)(uintptr_t)s.pc - 1);
        Place place = found == places.end() ? Place{"", "", raw, 0} : found->second;
        LineRow at = line_of(s.pc);
        auto same = [&](const Row& r) {
            if (r.place.path != place.path || r.place.file != place.file || r.place.line != place.line ||
                r.sum.kind != s.kind || r.sum.bytes != s.bytes) {
                return false;
            }
            // in an inlined function the column is of no help: then what behaves alike is taken for one access
            if (has_column(r) || has_column({place, at, s})) { return same_place(r.at, at); }
            return r.sum.units * s.requests == s.units * r.sum.requests &&
                   r.sum.least * s.requests == s.least * r.sum.requests;
        };
        auto row = std::find_if(rows.begin(), rows.end(), same);
        if (row == rows.end()) {
            rows.push_back({place, at, s});
            continue;
        }
        Site& sum = row->sum;
        sum.requests += s.requests, sum.asked += s.asked, sum.units += s.units, sum.least += s.least;
        int lanes = s.has_example ? __builtin_popcount(s.example.mask) : 0;
        if (lanes > (sum.has_example ? __builtin_popcount(sum.example.mask) : 0)) {
            sum.has_example = true, sum.example = s.example;
        }
    }
    // by file, in the order in which they occur, then by line and column; reads first
    std::vector<std::string> files;
    for (const Row& r : rows) {
        if (std::find(files.begin(), files.end(), r.place.path) == files.end()) { files.push_back(r.place.path); }
    }
    auto rank = [&](const Row& r) { return std::find(files.begin(), files.end(), r.place.path) - files.begin(); };
    std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
        if (rank(a) != rank(b)) { return rank(a) < rank(b); }
        if (a.place.line != b.place.line) { return a.place.line < b.place.line; }
        if (a.sum.kind != b.sum.kind) { return a.sum.kind < b.sum.kind; }
        return has_column(a) && has_column(b) ? a.at.column < b.at.column : a.sum.pc < b.sum.pc;
    });
    return rows;
}

// "read 2 B"; "read 2 B #2" for the second of several such accesses of the line
static std::string row_name(const std::vector<Row>& rows, size_t i) {
    const Row& row = rows[i];
    std::string name = std::string(kind_names[row.sum.kind]) + " " + std::to_string(row.sum.bytes) + " B";
    auto like = [&](const Row& r) {
        return r.place.path == row.place.path && r.place.line == row.place.line && r.sum.kind == row.sum.kind &&
               r.sum.bytes == row.sum.bytes;
    };
    if (std::count_if(rows.begin(), rows.end(), like) == 1) { return name; }
    return name + " #" + std::to_string(std::count_if(rows.begin(), rows.begin() + (long)i + 1, like));
}

static std::string lanes_text(unsigned mask) { // "lanes 0-7 9"
    std::string text = __builtin_popcount(mask) == 1 ? "lane" : "lanes";
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) { continue; }
        int last = lane;
        while (last < 31 && mask >> (last + 1) & 1) { last++; }
        text += " " + std::to_string(lane) + (last > lane ? "-" + std::to_string(last) : "");
        lane = last;
    }
    return text;
}

// A row per line of 128 bytes, a character per 2 bytes: # asked for, . moved with its sector, blank not moved.
static void print_sectors(const Request& r) {
    uint64_t distinct;
    std::vector<uint32_t> sectors = sectors_of(r, &distinct), lines;
    for (uint32_t s : sectors) {
        if (lines.empty() || lines.back() != s * SECTOR / LINE) { lines.push_back(s * SECTOR / LINE); }
    }
    const size_t most = 12, head = 6; // of a longer picture only the first and the last rows are shown
    for (size_t i = 0; i < lines.size(); i++) {
        if (lines.size() > most && i == head) {
            size_t left_out = lines.size() - head - 2;
            printf("      ...    %zu more lines of 128 bytes\n", left_out);
            i += left_out - 1;
            continue;
        }
        std::string cells(LINE / 2, ' ');
        unsigned mask = 0;
        for (uint32_t s : sectors) {
            if (s * SECTOR / LINE != lines[i]) { continue; }
            for (uint32_t c = 0; c < SECTOR / 2; c++) { cells[s % (LINE / SECTOR) * (SECTOR / 2) + c] = '.'; }
        }
        for (int lane = 0; lane < 32; lane++) {
            if (!(r.mask >> lane & 1)) { continue; }
            for (uint32_t byte = r.offset[lane]; byte < r.offset[lane] + r.bytes[lane]; byte++) {
                if (byte / LINE == lines[i]) { cells[byte % LINE / 2] = '#', mask |= 1u << lane; }
            }
        }
        printf("  %+7ld |", (long)(lines[i] - lines[0]) * LINE);
        for (int s = 0; s < LINE / SECTOR; s++) { printf("%s|", cells.substr((size_t)s * 16, 16).c_str()); }
        printf(" %s\n", fit(lanes_text(mask), 18).c_str());
    }
}

// How many distinct words of each bank a part of the warp asks for.
static void print_banks(const Request& r, CountKind kind) {
    int parts = num_parts(most_bytes(r)), words[NUM_BANKS];
    printf("bank");
    for (int bank = 0; bank < NUM_BANKS; bank++) { printf(" %2d", bank); }
    printf("\n");
    for (int part = 0; part < parts; part++) {
        count_banks(r, kind, part, parts, words);
        if (parts == 1) { printf("word"); }
        if (parts > 1) { printf("%d/%d ", part + 1, parts); }
        for (int bank = 0; bank < NUM_BANKS; bank++) {
            char cell[16] = ".";
            if (words[bank]) { snprintf(cell, sizeof(cell), "%d", words[bank]); }
            printf(" %2s", cell);
        }
        printf("\n");
    }
}

static void print_picture(const Row& row) {
    const Request& r = row.sum.example;
    if (!row.sum.has_example) { return; }
    uint64_t units, least, distinct;
    if (row.sum.shared) {
        count_wavefronts(r, row.sum.kind, &units, &least);
        printf("  its first request, %s: %llu wavefront%s, %llu conflict%s\n", lanes_text(r.mask).c_str(),
               (unsigned long long)units, units == 1 ? "" : "s", (unsigned long long)(units - least),
               units - least == 1 ? "" : "s");
        print_banks(r, row.sum.kind);
    } else {
        units = sectors_of(r, &distinct).size();
        printf("  its first request, %s: %llu bytes in %llu sector%s\n", lanes_text(r.mask).c_str(),
               (unsigned long long)distinct, (unsigned long long)units, units == 1 ? "" : "s");
        print_sectors(r);
    }
}

static void print_rows(const std::vector<Row>& rows, bool shared, bool pictures) {
    if (rows.empty()) { return; }
    if (shared) {
        printf("%-18s %10s %12s %12s %12s %12s\n", "shared memory", "requests", "wavefronts", "per request", "least",
               "conflicts");
    } else {
        printf("%-18s %10s %12s %12s %12s %12s %12s\n", "device memory", "requests", "bytes asked", "sectors",
               "per request", "needed", "efficiency");
    }
    for (size_t i = 0; i < rows.size(); i++) {
        const Site& s = rows[i].sum;
        const Place& p = rows[i].place;
        bool same_line = i > 0 && rows[i - 1].place.path == p.path && rows[i - 1].place.line == p.line;
        std::string at = p.file + (p.line ? ":" + std::to_string(p.line) : "");
        std::string text = source_line(p);
        if (!same_line || pictures) { printf("%s\n", fit(text.empty() ? at : at + "  " + text, WIDTH).c_str()); }
        std::string what = row_name(rows, i);
        double per_request = (double)s.units / (double)s.requests;
        printf("  %-16s %10llu", what.c_str(), (unsigned long long)s.requests);
        if (shared) {
            printf(" %12llu %12.2f %12llu %12llu\n", (unsigned long long)s.units, per_request,
                   (unsigned long long)s.least, (unsigned long long)(s.units - s.least));
        } else {
            printf(" %12llu %12llu %12.2f %12llu %12s\n", (unsigned long long)s.asked, (unsigned long long)s.units,
                   per_request, (unsigned long long)s.least, percent(s.least, s.units).c_str());
        }
        if (pictures) { print_picture(rows[i]); }
    }
    printf("\n");
}

static std::string dims_text(dim3 d) {
    std::string text = std::to_string(d.x);
    if (d.y > 1 || d.z > 1) { text += "x" + std::to_string(d.y); }
    if (d.z > 1) { text += "x" + std::to_string(d.z); }
    return text;
}
static std::string counted(uint64_t n, const char* noun) {
    return std::to_string(n) + " " + noun + (n == 1 ? "" : noun[strlen(noun) - 1] == 'h' ? "es" : "s");
}

struct Totals {
    uint64_t launches, asked, moved, needed, unique, wavefronts, conflicts;
};

static void print_kernel(int number, const std::map<uint64_t, Place>& places, bool pictures, Totals* all) {
    const KernelCounts& k = kernels[(size_t)number];
    uint64_t asked = k.read + k.written;
    if (!k.kernel) {
        printf("cudaMemset, cudaMemcpy: %s, %llu bytes read, %llu written\n\n", counted(k.launches, "call").c_str(),
               (unsigned long long)k.read, (unsigned long long)k.written);
        all->launches += k.launches, all->asked += asked, all->moved += asked, all->needed += asked;
        all->unique += k.unique;
        return;
    }
    auto found = places.find((uint64_t)(uintptr_t)k.kernel);
    std::string name = found == places.end() ? "a kernel" : found->second.function;
    name = name.substr(0, name.find('('));
    if (name.compare(0, 5, "void ") == 0) { name = name.substr(5); }
    printf("%s: %s, ", name.c_str(), counted(k.launches, "launch").c_str());
    if (k.varies) {
        printf("%llu blocks of several sizes\n\n", (unsigned long long)k.blocks);
    } else {
        printf("%s block%s of %s threads%s\n\n", dims_text(k.grid).c_str(), dims_text(k.grid) == "1" ? "" : "s",
               dims_text(k.block).c_str(), k.launches > 1 ? " each" : "");
    }
    std::vector<Row> device = rows_of(number, false, places), shared = rows_of(number, true, places);
    print_rows(device, false, pictures);
    print_rows(shared, true, pictures);
    Totals t = {k.launches, asked, 0, 0, k.unique, 0, 0};
    for (const Row& r : device) { t.moved += SECTOR * r.sum.units, t.needed += SECTOR * r.sum.least; }
    for (const Row& r : shared) { t.wavefronts += r.sum.units, t.conflicts += r.sum.units - r.sum.least; }
    auto line = [](const char* what, uint64_t value, const char* note) {
        printf("  %-24s %12llu%s%s\n", what, (unsigned long long)value, *note ? "  " : "", note);
    };
    printf("total of %s\n", name.c_str());
    line("bytes read", k.read, "");
    line("bytes written", k.written, "");
    line("bytes in sectors", t.moved, "moved if nothing is cached");
    line("bytes in unique sectors", t.unique, "each sector once per launch, read or written: the least for DRAM");
    line("shared wavefronts", t.wavefronts, (std::to_string(t.conflicts) + " of them conflicts").c_str());
    double barriers = (double)k.events[COUNT_BARRIER] / (double)k.blocks;
    printf("  %-24s %12.*f\n", "barriers per block", k.events[COUNT_BARRIER] % k.blocks ? 2 : 0, barriers);
    line("shuffles", k.events[COUNT_SHUFFLE], "");
    if (k.events[COUNT_MMA]) { line("mma.sync", k.events[COUNT_MMA], ""); }
    if (k.events[COUNT_WGMMA]) { line("wgmma", k.events[COUNT_WGMMA] / 4, "of a warpgroup each"); }
    printf("\n");
    all->launches += t.launches, all->asked += t.asked, all->moved += t.moved, all->needed += t.needed;
    all->unique += t.unique, all->wavefronts += t.wavefronts, all->conflicts += t.conflicts;
}

void emulation_print_transactions(bool pictures) {
    std::set<uint64_t> addresses; // the call precedes its return address
    for (const Site& s : sites) { addresses.insert((uint64_t)(uintptr_t)s.pc - 1); }
    for (const KernelCounts& k : kernels) {
        if (k.kernel) { addresses.insert((uint64_t)(uintptr_t)k.kernel); }
    }
    std::map<uint64_t, Place> places = find_places(addresses);
    static bool explained = false;
    if (pictures && !explained) {
        explained = true;
        printf("Pictures show the first request of warp 0 of block 0. Device memory: a row is 128 bytes, | is between "
               "two\n"
               "sectors, a character is 2 bytes: # asked for, . moved because its sector is, blank not moved. Shared\n"
               "memory: how many distinct words of each bank are asked for; the most is how many wavefronts it "
               "takes.\n\n");
    }
    Totals all = {};
    for (size_t i = 0; i < kernels.size(); i++) { print_kernel((int)i, places, pictures, &all); }
    printf("all: %s, %llu bytes asked, %llu in sectors, efficiency %s, %llu unique; %llu shared wavefronts, %s\n",
           counted(all.launches, "launch").c_str(), (unsigned long long)all.asked, (unsigned long long)all.moved,
           percent(all.needed, all.moved).c_str(), (unsigned long long)all.unique, (unsigned long long)all.wavefronts,
           counted(all.conflicts, "conflict").c_str());
}
