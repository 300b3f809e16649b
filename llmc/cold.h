/*
Compiles at -O1 the code that runs rarely: flags, recipes, reports, checkpoints, vocabularies, the data loader, export, the links
between ranks. gcc then takes 9 instead of 14 s for train_gpt2.c. `make` includes this file in front of the programs (-include). They
do not depend on it: a program that is compiled by one command has all of its code at that command's level.

The first group, with the headers that it includes, keeps the level of the command line: its functions convert every weight, or run
for every token that is generated.
*/
#ifndef LLMC_COLD_H
#define LLMC_COLD_H

#if defined(__OPTIMIZE__) && !defined(__clang__) // clang does not know the pragma
#include "activation.h"
#include "crc32c.h"
#include "rand.h"
#include "safetensors.h"
#include "sampler.h"
#ifdef __CUDACC__
#include "cuda_common.cuh"
#include <algorithm>
#include <vector>
#pragma nv_diag_suppress 1675 // nvcc calls the pragma unknown, but passes it on to gcc
#endif

#pragma GCC push_options
#pragma GCC optimize("O1")
#include "evaluation.h"
#include "export.h"
#include "prompts.h"
#include "run.h"
#ifdef __CUDACC__
#include "choices.cuh"
#include "distributed.cuh"
#include "profile.cuh"
#endif
#pragma GCC pop_options
#endif

#endif
