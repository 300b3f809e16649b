# GPT-2 in C and CUDA. `make` shows the targets.
CC ?= gcc
MAKEFLAGS += --no-builtin-rules
OPENMP := $(shell printf 'int main(void){return 0;}' | $(CC) -x c -fopenmp - -o /dev/null 2>/dev/null && echo -fopenmp)
CFLAGS ?= -O3 -g
ALL_CFLAGS = -std=gnu11 -Wall -Wextra -Werror -fno-math-errno -fno-trapping-math $(OPENMP) -MMD -MP $(CFLAGS)
LDLIBS = -lm -lpthread

TESTS := $(patsubst %.c,%,$(wildcard dev/test/test_*.c))

build/%.d: ;

train_gpt2: train_gpt2.c
	@mkdir -p build
	$(CC) $(ALL_CFLAGS) -MF build/$@.d -o $@ $< $(LDLIBS)

dev/%: dev/%.c
	@mkdir -p build
	$(CC) $(ALL_CFLAGS) -MF build/$(notdir $@).d -o $@ $< $(LDLIBS)

-include $(wildcard build/*.d)
