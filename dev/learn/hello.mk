# Programs of this folder that need no header of the project: `make hello` by nvcc, `make hello_cpu` by g++ or clang++ and
# dev/cuda/emulation, and so for a NAME.cu of your own. Included by the Makefile here; `make -f hello.mk hello_cpu` works too.

NVCC ?= nvcc
EMULATION_DIR := ../../build/dev_cuda/cpu
EMULATION := $(EMULATION_DIR)/filter $(patsubst ../cuda/emulation/%.cpp,$(EMULATION_DIR)/%.o,\
    $(filter-out %/filter.cpp,$(wildcard ../cuda/emulation/*.cpp)))
LEARN_BUILD := ../../build/learn
# as in ../cuda/Makefile: each load and store of a kernel calls the emulation
EMULATION_FLAGS = -O1 -g1 -std=c++17 -Wall -Wextra -Wno-unused-parameter -I../cuda/emulation -fsanitize=thread -fno-pie \
    $(if $(findstring clang,$(shell $(CXX) --version 2>/dev/null)),-mllvm -tsan-instrument-func-entry-exit=0,\
        --param tsan-instrument-func-entry-exit=0)
EMULATION_LINK = -pthread $(if $(filter Linux,$(shell uname -s)),-no-pie)

.PHONY: emulation-is-current
$(EMULATION): emulation-is-current
	@$(MAKE) -s --no-print-directory -C ../cuda $@

# hello_findings.o is linked last: its variables are then the last ones made, and what it does at exit comes first
%_cpu: %.cu hello_findings.cpp $(EMULATION)
	@mkdir -p $(LEARN_BUILD)
	@$(EMULATION_DIR)/filter $< $(LEARN_BUILD)/$*.cpp $<
	$(CXX) $(EMULATION_FLAGS) -c -o $(LEARN_BUILD)/$*.o $(LEARN_BUILD)/$*.cpp
	@$(CXX) -O1 -std=c++17 -Wall -Wextra -I../cuda/emulation -fno-pie -c -o $(LEARN_BUILD)/hello_findings.o hello_findings.cpp
	@$(CXX) -o $@ $(LEARN_BUILD)/$*.o $(filter %.o,$(EMULATION)) $(LEARN_BUILD)/hello_findings.o $(EMULATION_LINK)

hello: hello.cu
	$(NVCC) -O3 $< -o $@
