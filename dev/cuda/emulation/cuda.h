/*
What the programs use of the CUDA driver API: the type of a tensor map, which ptx.cuh of this folder fills.
*/
#pragma once

#include <stddef.h>

// What TMA knows of a tensor. The innermost dimension is the first; unused sizes are 1.
struct TensorMap {
    char* base;
    int sizes[4], box[4], element_bytes, rank;
};
struct alignas(64) CUtensorMap {
    TensorMap tensor;
    char unused[128 - sizeof(TensorMap)];
};
