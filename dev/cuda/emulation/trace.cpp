/*
Tells how a wrong result came about: the failed check runs again, and the CPU stops after each instruction of the thread that stored
it, so that the message can name the last lines before the store. Then of the thread that wrote what this one has read, and so on.
A check that passes costs nothing. Needs Linux on an x86-64; elsewhere, messages do not have these lines.

The trap flag is set while the thread executes the kernel's code. The functions of the emulation and of libm, which the kernel
calls, run at full speed: they return to emulation_resume, which sets the flag again. One thread is followed at a time.
*/
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "engine.h"

bool emulation_replaying, emulation_property;
size_t emulation_kept;
static uint32_t first_launch; // those before the check
static std::vector<Suspect> suspects;
static Suspect last; // launch 0: none
static std::mutex suspects_mutex;
static bool hangs; // a launch does not end: to follow a thread would take forever

void emulation_begin_check(bool is_property) {
    if (emulation_replaying) { return; }
    emulation_property = is_property;
    suspects.clear();
    last = {};
    emulation_kept = 0;
    hangs = false;
    first_launch = emulation_launches;
}
void last_suspect(const Suspect& s) { last = s; }
void add_suspect(const Suspect& s) {
    std::lock_guard<std::mutex> lock(suspects_mutex);
    if (!emulation_replaying) { suspects.push_back(s); }
}

#if defined(__linux__) && defined(__x86_64__)
// ---- one instruction at a time ---------------------------------------------------------------------------------------

extern "C" {
extern char __executable_start, emulation_switch; // kernels are linked before the emulation: see engine.cpp
void* emulation_return;                           // where the called function would have returned to
void emulation_resume();
void emulation_step(void (*call)(void*), void* closure);
}
asm(".text\n"
    "emulation_resume:\n"
    "pushq emulation_return\npushfq\norq $0x100, (%rsp)\npopfq\nret\n"
    "emulation_step:\n"
    "movq %rdi, %rax\nmovq %rsi, %rdi\npushfq\norq $0x100, (%rsp)\npopfq\njmp *%rax\n");

static const Suspect* target; // NULL: nobody is followed
static const Fiber* followed; // while it runs
static bool has_ended;        // so nothing more is launched
static std::vector<uint32_t>
    last_step; // of each byte of the kernels' code: the number of the step that executed it last
static uint32_t steps;
static uintptr_t kernel, top; // its first instruction; the stack pointer there, 0: the thread has not come to it

static void on_step(int, siginfo_t*, void* context) {
    const uint32_t most_steps = 5000000; // ten seconds
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    uintptr_t sp = (uintptr_t)registers[REG_RSP], text = (uintptr_t)&__executable_start;
    uintptr_t at = (uintptr_t)registers[REG_RIP] - text;
    if (at + text == kernel) { top = sp; }
    bool inside = !top || sp <= top; // the kernel has not returned
    if (at < last_step.size()) {
        if (top && inside) { last_step[at] = ++steps; }
        if (inside) { return; }
    } else if (inside && steps < most_steps) { // a function was called, which has not done anything yet
        void** return_address = (void**)sp;
        emulation_return = *return_address, *return_address = (void*)emulation_resume;
    }
    registers[REG_EFL] &= ~0x100L;
}

void* caller_of(void* pc) { return pc == (void*)emulation_resume ? emulation_return : pc; }
bool is_followed(const Fiber* f) { return f == followed; }
bool replay_is_over() { return has_ended; }

void call_kernel(Fiber* f) {
    const Launch* launch = f->block->launch;
    if (!target || steps || f->id != target->thread || f->block->number != target->block ||
        launch->number - emulation_replay_shift != target->launch) {
        launch->call(launch->closure);
        return;
    }
    kernel = (uintptr_t)launch->kernel, followed = f;
    emulation_step(launch->call, launch->closure);
    followed = NULL, has_ended = true;
    end_launch(NULL);
}

// The writers of the values that the followed thread has read, one per line of code. The latest is at the end.
static std::vector<Suspect> inputs;
void add_input(const Suspect& writer) {
    bool its_own = writer.pc == (void*)emulation_resume;
    if (its_own || (!inputs.empty() && inputs.back().pc == writer.pc)) { return; }
    auto same = [&](const Suspect& old) { return old.pc == writer.pc; };
    inputs.erase(std::remove_if(inputs.begin(), inputs.end(), same), inputs.end());
    inputs.push_back(writer);
    inputs.back().launch -= emulation_replay_shift;
}

// Runs the check again, and follows a thread: see last_step, inputs.
static void replay(const std::function<void()>& again, const Suspect* s) {
    last_step.assign((size_t)(&emulation_switch - &__executable_start), 0);
    inputs.clear();
    steps = 0, top = 0, target = s;
    emulation_replay_shift = emulation_launches - first_launch;
    emulation_replaying = emulation_observed = true;
    again();
    emulation_replaying = emulation_observed = has_ended = false;
    emulation_replay_shift = 0, target = NULL, followed = NULL;
}

// ---- a launch that does not end ------------------------------------------------------------------------------------
// Its threads run and may wait for each other, but none of them ends. A timer checks once per second of CPU time.

void* pc_of_fault(void* context) {
    void* pc = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    return pc >= &__executable_start && pc < &emulation_switch ? (char*)pc + 1 : NULL;
}

static void end_hung_launch() { end_launch(NULL); }
static void on_second(int, siginfo_t*, void* context) {
    static double seconds, most_seconds = std::max(2.0, 60 * emulation_limit());
    static uint32_t launch;
    const Fiber* f = emulation_now;
    bool same = f && f->block->launch->number == launch;
    seconds = same ? seconds + 1 : 0;
    if (f) { launch = f->block->launch->number; }
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    void* pc = (void*)registers[REG_RIP];
    bool in_kernel = pc >= &__executable_start && pc < &emulation_switch; // so it holds no lock
    if (seconds < most_seconds || !in_kernel) { return; }
    report("a launch that does not end", emulation_now, (char*)pc + 1, NULL, NULL);
    hangs = true;
    seconds = 0, most_seconds = std::min(most_seconds, 5.0); // the next one is probably the same
    registers[REG_RIP] = (greg_t)end_hung_launch, registers[REG_RSP] = ((registers[REG_RSP] - 256) & ~15L) - 8;
}
void watch_for_hangs() {
    static bool watches = false;
    if (std::exchange(watches, true)) { return; }
    struct sigaction second = {};
    second.sa_sigaction = on_second, second.sa_flags = SA_SIGINFO | SA_RESTART;
    sigaction(SIGPROF, &second, NULL);
    itimerval interval = {{1, 0}, {1, 0}};
    setitimer(ITIMER_PROF, &interval, NULL);
}

// ---- what the message says ------------------------------------------------------------------------------------------

// Lines that have been named, as file:line.
struct Places {
    std::vector<std::string> all;
    static constexpr int apart = 10; // a reader who looks at a line also sees its neighbours
    // Adds a line unless it is near another one, or in a helper, whose callers tell more.
    bool add(const std::string& frame) {
        auto line_of = [](const std::string& s) { return atoi(s.c_str() + s.find(':') + 1); };
        auto near = [&](const std::string& other) {
            bool same_file = frame.compare(0, frame.find(':') + 1, other, 0, other.find(':') + 1) == 0;
            return same_file && abs(line_of(frame) - line_of(other)) <= apart;
        };
        bool is_helper = frame.find(".cu") == std::string::npos || frame.compare(0, 12, "cuda_common.") == 0;
        if (is_helper || std::any_of(all.begin(), all.end(), near)) { return false; }
        all.push_back(frame);
        return true;
    }
    // Adds the line of an access and those of the calls around it. Returns the first two that are new.
    std::string add_access(void* pc) {
        std::string text;
        int count = 0;
        const std::vector<std::string> frames = lines_of({(uintptr_t)pc - 1})[0];
        for (const std::string& frame : frames) {
            if (!add(frame) || ++count > 2) { continue; }
            text += (text.empty() ? "" : ", called from ") + frame;
        }
        return text;
    }
};

// The lines that the followed thread has executed last before the instruction at pc, newest first. No more than `most`.
static std::string last_lines(void* pc, Places* places, int most) {
    uintptr_t text = (uintptr_t)&__executable_start, at = (uintptr_t)pc - text;
    uint32_t end = pc && at < last_step.size() && last_step[at] ? last_step[at] : UINT32_MAX;
    std::vector<std::pair<uint32_t, uintptr_t>> executed;
    for (size_t i = 0; i < last_step.size(); i++) {
        if (last_step[i] && last_step[i] < end) { executed.push_back({last_step[i], text + i}); }
    }
    std::sort(executed.rbegin(), executed.rend());
    std::vector<uintptr_t> addresses;
    for (const auto& e : executed) { addresses.push_back(e.second); }
    std::string lines;
    std::vector<std::vector<std::string>> all = lines_of(addresses);
    for (const auto& calls : all) {
        for (const std::string& frame : calls) {
            if (most == 0 || !places->add(frame)) { continue; }
            lines += (lines.empty() ? "" : ", ") + frame;
            most--;
        }
    }
    return lines;
}

const char* emulation_explain(const std::function<void()>& again) {
    static std::string text;
    text = "";
    if (hangs) { return ""; }
    if (emulation_kept) { // who reads the start value should perhaps write another one
        last = {};
        replay(again, NULL);
        if (last.launch) { suspects.insert(suspects.begin(), last); }
    } else if (suspects.empty() && last.launch) { // the message does not tell yet who has written what is wrong
        suspects = {last};
        if (last.pc) { text = "; written at " + describe_pc(last.pc, false) + " by " + describe_thread(last); }
    }
    struct sigaction step = {}, before;
    step.sa_sigaction = on_step, step.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &step, &before);
    Places places;
    Suspect s = suspects.empty() ? Suspect{} : suspects[0];
    for (int depth = 0; depth < 3 && s.launch; depth++) { // its last lines, its input's, and the input's of that one
        std::string access = s.pc ? places.add_access(s.pc) : "";
        replay(again, &s);
        std::string lines = last_lines(s.pc, &places, depth == 0 ? 3 : 1);
        if (depth > 0) {
            text += "; input: " + (access.empty() ? "" : "written at " + access + " ") + "by " + describe_thread(s) +
                    (lines.empty() ? "" : ", which was at " + lines);
        } else if (!lines.empty()) {
            text += "; before: " + describe_thread(s) + " was at " + lines;
        }
        s = {};
        for (size_t j = inputs.size(); j-- > 0 && !s.launch;) { // what it has read, the latest first
            Places known = places;
            if (!known.add_access(inputs[j].pc).empty()) { s = inputs[j]; }
        }
    }
    sigaction(SIGTRAP, &before, NULL);
    return text.c_str();
}
#else
void* pc_of_fault(void*) { return NULL; }
void* caller_of(void* pc) { return pc; }
bool is_followed(const Fiber*) { return false; }
bool replay_is_over() { return false; }
void call_kernel(Fiber* f) { f->block->launch->call(f->block->launch->closure); }
void add_input(const Suspect&) {}
void watch_for_hangs() {}
const char* emulation_explain(const std::function<void()>&) { return ""; }
#endif
