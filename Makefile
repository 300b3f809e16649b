# GPT-2 in C and CUDA. `make` shows the targets.
#
# A program is one .c or .cu file and the headers it includes. Its binary is written next to it; that of train_gpt2.cu
# is named train_gpt2cu. With BIN_DIR=build/x the same tree of binaries is built below build/x: `make sanitize` and
# `make valgrind` keep their binaries apart in this way.

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# ---- settings; the command line or the environment can override each of them ----

ifeq ($(origin CC),default) # make's own default is cc
CC := $(if $(shell command -v gcc),gcc,cc)
endif
ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++),g++,c++)
endif
# -g1 keeps the lines of a backtrace. -g, which adds the variables, takes gcc a sixth more time.
CFLAGS ?= -O3 -g1
WERROR ?=
BIN_DIR ?= .
FUZZ_SECONDS ?= 60
include dev/cuda/nvcc.mk

# -fopenmp if the compiler supports it, else empty (one thread). Tested once, and only when something is built.
OPENMP_TEST := \#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n
OPENMP = $(eval OPENMP := $$(shell printf '$$(OPENMP_TEST)' | $(CC) -x c -fopenmp - -o /dev/null 2>/dev/null && \
                                   echo -fopenmp))$(OPENMP)
NO_OPENMP_NOTE = $(if $(OPENMP),,note: $(CC) has no OpenMP: programs run on one thread (use gcc, or install libomp-dev for clang))

# The first line of `$(CC) --version`. Asked once, and only when something is built.
COMPILER = $(eval COMPILER := $$(shell $(CC) --version 2>&1 | head -n 1))$(COMPILER)

# Warnings do not stop a build, because a compiler that is not ours may have more of them; CI sets WERROR=-Werror.
# -Wno-format-truncation (gcc): messages and paths are truncated to their buffers on purpose.
# -Wno-pass-failed (clang): it cannot vectorize a maximum of floats, which may be NaN, and says so at every `omp simd`.
# -Wno-unknown-warning-option (clang): CFLAGS may hold an option of gcc's, as in `make sanitize`.
WARNINGS = -Wall -Wextra $(WERROR) \
           $(if $(findstring clang,$(COMPILER)),-Wno-pass-failed -Wno-unknown-warning-option,-Wno-format-truncation)

# no -march: the programs choose AVX-512, AVX2 or portable code at startup
ALL_CFLAGS = -std=gnu11 $(WARNINGS) $(or $(OPENMP),-Wno-unknown-pragmas) -fno-math-errno -fno-trapping-math $(CFLAGS)
LDLIBS = -lm -lpthread

# A test usually runs once per compilation, so these options, which follow CFLAGS, save time: gcc takes a third of the time of
# -O3 -g1. Tests of arithmetic use CFLAGS alone.
TEST_CFLAGS = -Og -g1

CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# compiles at -O1 the headers that a training step does not use; the matmuls of train_gpt2 are a separate object
COLD := -include llmc/cold.h

# ---- programs ----

P := $(patsubst ./,,$(BIN_DIR)/)
BUILD := $(if $(P),$(P).build,build)
PROGRAMS := $(patsubst %.c,$(P)%,$(wildcard train_gpt2.c dev/data/*.c))
TESTS := $(patsubst %.c,$(P)%,$(wildcard dev/test/unit/test_*.c))
BENCHES := $(patsubst %.c,$(P)%,$(wildcard dev/test/bench/bench_*.c))
FUZZERS := $(patsubst %.c,$(P)%,$(wildcard dev/test/fuzz/whole_program.c))
BINARIES := $(PROGRAMS) $(TESTS) $(BENCHES) $(FUZZERS)
CXX_BINARIES := $(patsubst %.cpp,$(P)%,$(wildcard scripts/*.cpp))
CU_BINARIES := $(patsubst %.cu,$(P)%cu,$(wildcard *.cu))

.PHONY: help all programs tests emulated demo test test-full quick check promote sanitize sanitize-programs sanitize-gpu valgrind fuzz \
        fuzz-program coverage bench learn check-style check-words same-sass clean FORCE

help:
	@echo 'make demo        train a small model on this source tree for a minute, save it, load it, continue a text'
	@echo 'make train_gpt2cu    the program for the GPU: PRECISION=BF16, FP16 or FP32; GPU_COMPUTE_CAPABILITY="80 90" if not the GPU here'
	@echo 'make test_gpt2cu     its tests, for a GPU: ./test_gpt2cu'
	@echo 'make all         the programs: $(PROGRAMS) $(CXX_BINARIES), and train_gpt2cu where there is an nvcc'
	@echo 'make scripts/plot_runs    draws training runs as one SVG; needs a C++ compiler'
	@echo 'make test        what a user needs to believe in the program, in minutes; ends with "N passed, N failed, N skipped"'
	@echo 'make test-full   everything, in hours: all mutants, CUDA in every precision for every architecture, 124M on the CPU'
	@echo 'make quick       in a minute or two: the unit tests, make check, make check-style and make check-words'
	@echo 'make quick SINCE=main    only the tests, of all kinds, that depend on files changed since main; FILES="a b": on these files;'
	@echo '                 make test also takes SINCE and FILES'
	@echo 'make check       whether the kernels in train_gpt2.cu are still those of dev/cuda; make promote copies them'
	@echo 'make same-sass BASE=main    whether every kernel has the machine code that it has there; needs nvcc, no GPU'
	@echo 'make sanitize    the tests built with AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make sanitize-gpu    compute-sanitizer on train_gpt2cu and every op (needs a GPU): SANITIZE_GPU="train gelu_forward" picks'
	@echo 'make valgrind    the test programs under valgrind: VALGRIND_TESTS="test_a test_b" picks some'
	@echo 'make coverage    which lines the tests have run, by gcov; OP=gelu_forward: those of a kernel file, on the CPU'
	@echo 'make fuzz        libFuzzer on every reader: FUZZ_SECONDS=60 or FUZZ_RUNS=1000000 for each (needs clang)'
	@echo 'make fuzz-program    the programs on changed files, with both sanitizers: FUZZ_RUNS=2000 and FUZZ_SEED=1 set number and choice'
	@echo 'make learn       the course in dev/learn, without a GPU: some kernels on the CPU, with what each shows and what memory it moves'
	@echo 'make bench       speed: prints figures, checks nothing'
	@echo 'make check-style clang-format on every source, changes nothing'
	@echo 'make check-words in comments and documents, words that have a standard term; WARN=yes also prints the less certain ones'
	@echo 'make clean       removes what make built'
	@echo
	@echo 'Kernels, each on its own: cd dev/cuda && make help'
	@echo 'One program or test: make train_gpt2, make dev/test/unit/test_NAME. Settings: CC=$(CC) CFLAGS="$(CFLAGS)" WERROR=$(WERROR) (-Werror: no warning passes)'
	@echo 'Model weights and datasets: scripts/download.sh --help'
	@$(if $(OPENMP),,echo '$(NO_OPENMP_NOTE)')

all: programs $(if $(shell command -v $(firstword $(CXX))),$(CXX_BINARIES)) \
     $(if $(shell command -v $(firstword $(NVCC))),$(filter %train_gpt2cu,$(CU_BINARIES)))
programs: $(PROGRAMS)
tests: $(TESTS) $(FUZZERS)

# this file changes only when the compiler or its flags change, and then everything is rebuilt
FLAGS_LINE = $(CC) $(ALL_CFLAGS) $(LDLIBS) $(TEST_CFLAGS) $(COMPILER)
$(BUILD)/flags: FORCE
	@command -v $(firstword $(CC)) >/dev/null || { echo 'error: no compiler $(CC): apt-get install gcc, or set CC=' >&2; exit 1; }
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(FLAGS_LINE))' >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; $(if $(OPENMP),:,echo '$(NO_OPENMP_NOTE)' >&2); fi

# each compilation writes the list of headers that the program includes; if the list is missing, the program is rebuilt
$(BUILD)/%.d: ;

$(BINARIES): $(P)%: %.c $(BUILD)/%.d $(BUILD)/flags
	@mkdir -p $(@D) $(dir $(BUILD)/$*)
	$(CC) $(ALL_CFLAGS) $(OWN_CFLAGS) -MMD -MP -MT $@ -MF $(BUILD)/$*.d -o $@ $< $(filter %.o,$^) $(LDLIBS)
$(filter-out %/test_matmul %/test_train_gpt2,$(TESTS)) $(FUZZERS): private OWN_CFLAGS = $(TEST_CFLAGS)
ifneq ($(filter -O3,$(CFLAGS)),)
$(P)train_gpt2: private OWN_CFLAGS = $(COLD) -DMATMUL_DECLARED
$(P)train_gpt2: $(BUILD)/matmul.o
endif
$(BUILD)/matmul.o: llmc/matmul.h $(BUILD)/matmul.d $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DMATMUL_OBJECT -MMD -MP -MT $@ -MF $(BUILD)/matmul.d -x c -c -o $@ $<

$(CXX_BINARIES): $(P)%: %.cpp $(BUILD)/%.d
	@command -v $(firstword $(CXX)) >/dev/null || { echo 'error: no compiler $(CXX): apt-get install g++, or set CXX=' >&2; exit 1; }
	@mkdir -p $(@D) $(dir $(BUILD)/$*)
	$(CXX) -O2 -std=c++17 $(WARNINGS) $(if $(findstring clang,$(CXX)),-Wno-unknown-warning-option) -MMD -MP -MT $@ -MF $(BUILD)/$*.d -o $@ $<

# glibc before 2.34 has dlopen in a library of its own
$(P)dev/test/unit/test_nccl: private LDLIBS += -ldl

# the same for CUDA; -ldl: NVTX's header loads its library by dlopen
# -Wno-array-bounds: gcc 12 believes that a function which a test never calls is called with NULL
CU_FLAGS = $(NVCC_FLAGS) -Xcompiler -Wno-array-bounds \
           $(if $(OPENMP),-Xcompiler $(OPENMP),-Xcompiler -Wno-unknown-pragmas)
$(BUILD)/nvcc_flags: FORCE
	@command -v $(firstword $(NVCC)) >/dev/null || { $(NVCC_MISSING); }
	@mkdir -p $(@D)
	@printf '%s\n' '$(NVCC) $(CU_FLAGS)' "$$($(NVCC) --version 2>&1 | tail -n 1)" >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# The program and four parts of its kernels are compiled side by side, and an edit of the program compiles no kernels: the source of
# a part is a copy of its lines in section 6 and of what stands before section 2. KERNEL_PARTS= compiles a program in one piece.
KERNEL_PARTS ?= $(if $(DEVICE_ONLY),,2 3 4 5)
KERNELS := $(KERNEL_PARTS:%=$(BUILD)/kernels_%.o)
ifneq ($(filter all %cu,$(MAKECMDGOALS)),)
MAKEFLAGS += -j$(CORES) # unless -j is given
endif
CU_COMPILE = $(NVCC) $(CU_FLAGS) -MMD -MP -MT $@ -MF $(basename $@).d -o $@
ifeq ($(KERNEL_PARTS),)
$(CU_BINARIES): $(P)%cu: %.cu $(BUILD)/%cu.d $(BUILD)/nvcc_flags
	@mkdir -p $(@D)
	$(NVCC) $(CU_FLAGS) -MMD -MP -MT $@ -MF $(BUILD)/$*cu.d -o $@ $< -lcublasLt -ldl
else
$(KERNELS:.o=.cu): $(BUILD)/kernels_%.cu: train_gpt2.cu
	@mkdir -p $(@D)
	@awk -v part=$* '/^\/\/ 2\. the model$$/ { other = 1 } /^#if PART == 0/ { other = $$NF != part } !other' $< >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
$(KERNELS): $(BUILD)/%.o: $(BUILD)/%.cu $(BUILD)/%.d $(BUILD)/nvcc_flags
	@echo "compiling $* of train_gpt2.cu: all parts take about $$(((40 + 120 / $(CORES)) * $(words $(or $(ARCHS),80 PTX 90a)))) s"
	$(CU_COMPILE) -I. -DPART=$(subst kernels_,,$*) -c $<
$(CU_BINARIES:$(P)%=$(BUILD)/%.o): $(BUILD)/%cu.o: %.cu $(BUILD)/%cu.d $(BUILD)/nvcc_flags
	$(CU_COMPILE) $(COLD) -DPART=1 -c $<
$(CU_BINARIES): $(P)%cu: $(BUILD)/%cu.o $(KERNELS)
	@mkdir -p $(@D)
	$(NVCC) $(CU_FLAGS) -o $@ $^ -lcublasLt -ldl
endif

-include $(wildcard $(patsubst $(P)%,$(BUILD)/%.d,$(BINARIES) $(CXX_BINARIES) $(CU_BINARIES)) $(KERNELS:.o=.d) $(BUILD)/matmul.d)

# ---- targets that use the programs ----

demo: programs
	@scripts/demo.sh $(or $(P),./)train_gpt2

# Builds in build/emulated what the tests run in the emulation of dev/cuda: the promoted ops, and train_gpt2.cu with its tests. For
# .ci/run it builds every op, and train_gpt2.cu also in fp32.
EMULATED := $(MAKE) --no-print-directory -C dev/cuda BIN_DIR=../../build/emulated NVCC=/nonexistent
emulated:
	+@$(EMULATED) PRECISION=BF16 $(if $(LLMC_TEST_MORE)$(LLMC_TEST_FULL),,PROMOTED=yes) cpu ../../build/emulated/test_gpt2_cpu
	+@$(if $(LLMC_TEST_FULL),$(EMULATED) PRECISION=FP32 ../../build/emulated/train_gpt2_cpu_fp32)

# SINCE=ref or FILES="a b" on the command line selects the tests that dev/test/affected.sh prints. Otherwise all tests run.
CHOICE := $(if $(findstring command,$(origin SINCE)),--since '$(SINCE)',$(if $(findstring command,$(origin FILES)),$(FILES)))
CHOSEN := $(if $(CHOICE),$(shell dev/test/affected.sh $(CHOICE) || echo failed))
ifeq ($(CHOSEN),failed)
$(error dev/test/affected.sh could not choose the tests)
endif

# make builds what the tests need on all cores, unless -j says otherwise. It does not build the emulation for another BIN_DIR, where
# the tests run no kernels, nor for selected tests, which build the parts of it that they need.
TEST_NEEDS := $(if $(CHOICE),$(if $(filter %.sh,$(CHOSEN)),programs $(FUZZERS)) $(filter $(addprefix %/,$(CHOSEN)),$(TESTS)),programs tests \
                             $(if $(P),,$(if $(and $(wildcard dev/cuda/Makefile),$(shell command -v $(firstword $(CXX)))),emulated)))
JOBS := $(if $(filter -j%,$(MAKEFLAGS)),,-j$(CORES))
RUN_TESTS := BIN_DIR='$(BIN_DIR)' CC='$(CC)' dev/test/run.sh
test:
	@$(if $(strip $(TEST_NEEDS)),$(MAKE) --no-print-directory $(JOBS) $(TEST_NEEDS))
	@$(if $(CHOICE),$(if $(CHOSEN),,echo 'no test depends on these files'; echo '0 passed, 0 failed, 0 skipped'; exit 0;)) \
	    $(RUN_TESTS) $(CHOSEN)

quick: check check-words
	@if command -v clang-format >/dev/null; then $(MAKE) --no-print-directory check-style; else echo 'skip check-style: needs clang-format'; fi
ifdef CHOICE
	@$(MAKE) --no-print-directory test
else
	@$(MAKE) --no-print-directory $(JOBS) $(TESTS)
	@dev/test/program/test_experiments.sh hunks
	@$(RUN_TESTS) $(notdir $(TESTS)) test_structure.sh
endif

check:
	@dev/cuda/promote.sh --check
promote:
	@dev/cuda/promote.sh

same-sass:
	@dev/cuda/same_sass.sh $(if $(BASE),'$(BASE)')

test-full: export LLMC_TEST_FULL = 1
test-full: test

SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# -Wno-maybe-uninitialized: gcc reports false positives in the code that the sanitizers insert
SANITIZE_BUILD := BIN_DIR=build/sanitize CFLAGS='-Og -g1 $(SANITIZE) -Wno-maybe-uninitialized'
# passive: idle threads do not spin while another thread runs slow instrumented code
sanitize: export OMP_WAIT_POLICY := passive
sanitize: export ASAN_OPTIONS := allocator_may_return_null=1:detect_stack_use_after_return=1:$(ASAN_OPTIONS)
sanitize: export LLMC_KILLS := 10
sanitize: export LLMC_ENDS := 8
sanitize: export LLMC_OWNER_RUNS := 8
sanitize: export LLMC_STRIDE := 37
sanitize: export LLMC_WRITE_STRIDE := 5
sanitize: export UBSAN_OPTIONS := print_stacktrace=1:$(UBSAN_OPTIONS)
sanitize:
	@$(MAKE) --no-print-directory $(SANITIZE_BUILD) test
sanitize-programs:
	@$(MAKE) --no-print-directory $(SANITIZE_BUILD) programs $(addprefix build/sanitize/,$(FUZZERS))

sanitize-gpu:
	@PRECISION='$(PRECISION)' dev/test/gpu/sanitize_gpu.sh $(SANITIZE_GPU)

# -O1: valgrind's reports name lines. valgrind hides AVX-512 from the programs, so they run their AVX2 code.
VALGRIND := valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite
valgrind:
	@command -v valgrind >/dev/null || { echo 'error: no valgrind: apt-get install valgrind' >&2; exit 1; }
	@$(MAKE) --no-print-directory BIN_DIR=build/valgrind CFLAGS='-O1 -g' programs tests
	@BIN_DIR=build/valgrind TEST_WRAPPER='$(VALGRIND)' OMP_WAIT_POLICY=passive dev/test/run.sh $(VALGRIND_TESTS)

coverage:
	@dev/test/program/coverage.sh $(addprefix --op ,$(OP)) $(if $(FLAGS),--flags '$(FLAGS)') $(if $(MISSED),--missed '$(MISSED)')

fuzz:
	@FUZZ_SECONDS='$(FUZZ_SECONDS)' FUZZ_RUNS='$(FUZZ_RUNS)' dev/test/fuzz/fuzz.sh $(FUZZ_TARGETS)

fuzz-program:
	@FUZZ_RUNS='$(FUZZ_RUNS)' FUZZ_SEED='$(FUZZ_SEED)' CC='$(CC)' dev/test/fuzz/fuzz_program.sh

bench: programs $(BENCHES)
	@$(if $(BENCHES),set -e; $(foreach b,$(BENCHES),$(if $(P),,./)$(b);),echo 'error: no dev/test/bench/bench_*.c here' >&2; exit 1)

learn:
	@$(MAKE) --no-print-directory -C dev/cuda learn

STYLED := $(wildcard *.c *.cu scripts/*.cpp llmc/*.h llmc/*.cuh dev/*/*.c dev/*/*.cpp dev/*/*.h dev/*/*.cu dev/*/*.cuh dev/test/*/*.[ch] dev/test/*/*.cu \
                     dev/cuda/emulation/*.h dev/cuda/emulation/*.cuh dev/cuda/emulation/*.cpp dev/cuda/emulation/*/*.h dev/cuda/emulation/*/*/*.cuh)
check-style:
	@command -v clang-format >/dev/null || { echo 'error: no clang-format: apt-get install clang-format' >&2; exit 1; }
	clang-format --dry-run --Werror $(filter-out dev/cuda/practice_%,$(STYLED))

check-words:
	@WARN='$(WARN)' dev/test/words.sh

clean:
	rm -rf build
	rm -f $(BINARIES) $(CXX_BINARIES) $(CU_BINARIES)
	@[ ! -e dev/cuda/Makefile ] || $(MAKE) --no-print-directory -C dev/cuda clean
