# generate.c, the example of 11_the_model.md: make generate writes ../../build/generate. The Makefile includes this file; alone:
# make -f generate.mk. The compiler and its flags are those of train_gpt2, from the Makefile of the top folder.

GENERATE_ROOT := $(dir $(lastword $(MAKEFILE_LIST)))../..

.PHONY: generate
generate:
	@$(MAKE) --no-print-directory -C $(GENERATE_ROOT) BIN_DIR=build/learn PROGRAMS=build/learn/dev/learn/generate \
	    build/learn/dev/learn/generate
	@cp $(GENERATE_ROOT)/build/learn/dev/learn/generate $(GENERATE_ROOT)/build/generate
