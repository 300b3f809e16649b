# one_fragment.cu: `make -f fragment.mk one_fragment` by nvcc, `make -f fragment.mk one_fragment_cpu` by g++ or clang++ and
# dev/cuda/emulation. The program includes llmc/ptx.cuh, so it is compiled within the emulation's rewritten copy of the tree.

NVCC ?= nvcc
FRAGMENT_CPU := ../../build/dev_cuda/cpu
FRAGMENT_ENGINE := $(patsubst ../cuda/emulation/%.cpp,$(FRAGMENT_CPU)/%.o, \
    $(filter-out %/filter.cpp,$(wildcard ../cuda/emulation/*.cpp)))
FRAGMENT_TREE := $(FRAGMENT_CPU)/tree/dev/learn
# as in ../cuda/Makefile: each load and store of a kernel calls the emulation
FRAGMENT_FLAGS = -O1 -g1 -std=c++17 -Wall -Wextra -Wno-unknown-pragmas -I../cuda/emulation -fsanitize=thread -fno-pie \
    $(if $(findstring clang,$(shell $(CXX) --version 2>/dev/null)),-Wno-unused-function -mllvm -tsan-instrument-func-entry-exit=0,\
        --param tsan-instrument-func-entry-exit=0)
FRAGMENT_LINK = -pthread $(if $(filter Linux,$(shell uname -s)),-no-pie)

.PHONY: fragment-emulation
fragment-emulation:
	@$(MAKE) --no-print-directory -s -C ../cuda $(FRAGMENT_CPU)/sources $(FRAGMENT_ENGINE) >/dev/null

# hello_findings.cpp, where there is one, prints the races that the emulation has found. It is linked last: what is constructed
# last registers its exit handler last, so it runs before the engine's list of findings is destroyed.
one_fragment_cpu: one_fragment.cu $(wildcard hello_findings.cpp) fragment-emulation
	@mkdir -p $(FRAGMENT_TREE)
	@$(FRAGMENT_CPU)/filter $< $(FRAGMENT_TREE)/one_fragment.cpp $<
	@$(CXX) $(FRAGMENT_FLAGS) -c -o $(FRAGMENT_TREE)/one_fragment.o $(FRAGMENT_TREE)/one_fragment.cpp
	@$(CXX) -O1 -std=c++17 -I../cuda/emulation -fno-pie -o $@ $(FRAGMENT_TREE)/one_fragment.o $(FRAGMENT_ENGINE) \
	    $(filter %.cpp,$^) $(FRAGMENT_LINK)

one_fragment: one_fragment.cu
	$(NVCC) -O3 -arch=native $< -o $@
