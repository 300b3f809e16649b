/*
What the kernels use of cooperative groups: barriers of the grid and of a cluster, shared
memory of the cluster's other blocks.
*/
#pragma once

#include "cuda_runtime.h"
#include "sm90.h"

void emulation_grid_barrier(); // of a cooperative launch

namespace cooperative_groups {
struct grid_group {
    void sync() const { emulation_grid_barrier(); }
};
inline grid_group this_grid() { return {}; }
struct cluster_group {
    void sync() const { cluster_sync(); }
    unsigned block_rank() const { return (unsigned)cluster_rank(); }
    unsigned num_blocks() const { return emulation_cluster_size(); }
    template <class T> T* map_shared_rank(T* p, unsigned rank) const { return (T*)emulation_map_shared(p, (int)rank); }
};
inline cluster_group this_cluster() { return {}; }
} // namespace cooperative_groups
