# How CUDA programs are compiled. Included by the Makefile here and by the one in the top folder.
#
# NVCC=nvcc  PRECISION=BF16|FP16|FP32  GPU_COMPUTE_CAPABILITY="80 90"  SPILLS=error|warn  DEVICE_ONLY=|yes

NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
PRECISION ?= BF16
# "error": a kernel that spills registers does not build; "warn": the compiler only names it
SPILLS ?= error
# if not empty, only the device code is compiled: a quarter of the time for a small op, but the result cannot run
DEVICE_ONLY ?=

ifeq ($(filter BF16 FP16 FP32,$(PRECISION)),)
$(error PRECISION is BF16, FP16 or FP32, not '$(PRECISION)')
endif

# The architectures to build for: GPU_COMPUTE_CAPABILITY if set, else that of the GPU in this machine, else A100 and
# H100 plus PTX for other GPUs. 90 means 90a, because only 90a has wgmma. Evaluated once, when something is built.
find_archs = $(subst .,,$(or $(GPU_COMPUTE_CAPABILITY),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
                                                               2>/dev/null | head -n 1 | grep -x '[0-9.]*')))
ARCHS = $(eval ARCHS := $$(patsubst 90,90a,$$(find_archs)))$(ARCHS)
GENCODE = $(if $(ARCHS),$(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)),\
    -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a)

# spills are errors only where the kernels are tuned: in bf16 on compute capability 9.0
comma := ,
space := $(subst ,, )
WARN_SPILLS = -Xptxas -warn-spills$(if $(filter errorBF1690a,$(SPILLS)$(PRECISION)$(subst $(space),_,$(strip $(ARCHS)))),$(comma)-Werror)
NVCC_FLAGS = -O3 --use_fast_math -std=c++17 -lineinfo $(GENCODE) -DENABLE_$(PRECISION) \
             -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-Wno-format-truncation $(WARN_SPILLS) \
             $(if $(DEVICE_ONLY),-fatbin)
NVCC_MISSING = echo 'error: no nvcc: install the CUDA toolkit, or set NVCC=/path/to/nvcc' >&2; exit 1
