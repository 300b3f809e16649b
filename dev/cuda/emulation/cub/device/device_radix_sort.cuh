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
            std::vector<Key> k((size_t)num), ordered_k((size_t)num);
            std::vector<Value> v((size_t)num), ordered_v((size_t)num);
            std::vector<int> order((size_t)num);
            emulation_copy(k.data(), keys, (size_t)num * sizeof(Key));
            emulation_copy(v.data(), values, (size_t)num * sizeof(Value));
            std::iota(order.begin(), order.end(), 0);
            auto bits = [&](int i) { return (unsigned)k[i] >> begin & ((1ull << (end - begin)) - 1); };
            std::stable_sort(order.begin(), order.end(), [=](int i, int j) { return bits(i) < bits(j); });
            for (int i = 0; i < num; i++) { ordered_k[i] = k[order[i]], ordered_v[i] = v[order[i]]; }
            emulation_copy(sorted_keys, ordered_k.data(), (size_t)num * sizeof(Key));
            emulation_copy(sorted_values, ordered_v.data(), (size_t)num * sizeof(Value));
        });
        return cudaSuccess;
    }
};
} // namespace cub
