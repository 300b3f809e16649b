// What the programs use of CUB: a stable sort of pairs, by the host.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda_runtime.h"

namespace cub {
struct DeviceRadixSort {
    // As CUB: without storage, it only says how much storage a sort takes. The bits that decide are begin to end - 1.
    template <class Key, class Value> static cudaError_t SortPairs(void* storage, size_t& num_bytes, const Key* keys,
                                                                   Key* sorted_keys, const Value* values,
                                                                   Value* sorted_values, int num, int begin, int end,
                                                                   cudaStream_t stream) {
        size_t needed = (size_t)num * (sizeof(Key) + sizeof(Value));
        if (!storage) {
            num_bytes = needed;
            return cudaSuccess;
        }
        if (num_bytes < needed) { return cudaErrorInvalidValue; }
        emulation_put(stream, [=] {
            std::vector<int> order((size_t)num);
            std::iota(order.begin(), order.end(), 0);
            auto bits = [=](int i) { return (unsigned)keys[i] >> begin & ((1ull << (end - begin)) - 1); };
            std::stable_sort(order.begin(), order.end(), [=](int i, int j) { return bits(i) < bits(j); });
            for (int i = 0; i < num; i++) { sorted_keys[i] = keys[order[i]], sorted_values[i] = values[order[i]]; }
        });
        return cudaSuccess;
    }
};
} // namespace cub
