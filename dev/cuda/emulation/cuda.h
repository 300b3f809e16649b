/*
What the programs use of the CUDA driver API: the type of a tensor map. TMA is not emulated, so nothing fills one.
*/
#pragma once

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};
