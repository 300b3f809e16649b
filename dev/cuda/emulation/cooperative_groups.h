/*
What the kernels use of cooperative groups: a barrier of the grid. Clusters are not emulated.
*/
#pragma once

#include "cuda_runtime.h"

void emulation_grid_barrier(); // of a cooperative launch

namespace cooperative_groups {
struct grid_group {
    void sync() const { emulation_grid_barrier(); }
};
inline grid_group this_grid() { return {}; }
struct cluster_group {
    void sync() const { emulation_unsupported("clusters"); }
    unsigned block_rank() const { emulation_unsupported("clusters"); }
    unsigned num_blocks() const { emulation_unsupported("clusters"); }
    template <class T> T* map_shared_rank(T*, unsigned) const { emulation_unsupported("clusters"); }
};
inline cluster_group this_cluster() { return {}; }
} // namespace cooperative_groups
