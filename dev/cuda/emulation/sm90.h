/*
What compute capability 9.0 adds, as functions of sm90.cpp, which ptx.cuh gives the names of llmc/ptx.cuh.
*/
#pragma once

#include "cuda.h"
#include "cuda_runtime.h"

// Fills *map; returns false where cuTensorMapEncodeTiled refuses.
bool emulation_tensor_map(CUtensorMap* map, const void* tensor, int rank, const int* sizes, const int* box,
                          int element_bytes);

void mbarrier_init(uint64_t* barrier, int count);
void mbarrier_init_fence();
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_arrive_expect(uint64_t* barrier, int bytes);
void mbarrier_arrive_cluster(uint64_t* barrier, int rank);
void mbarrier_wait(uint64_t* barrier, int parity);
bool mbarrier_has_completed(uint64_t* barrier, int parity);

int cluster_rank();
void cluster_sync();
void cluster_arrive_relaxed();
void cluster_wait();
unsigned emulation_cluster_size();
void* emulation_map_shared(void* p, int rank); // the same place in the shared memory of block `rank`
void store_cluster_async(const uint32_t* p, uint32_t x, const uint64_t* barrier, int rank);
void store_cluster_async(const float* p, float x, const uint64_t* barrier, int rank);
void store_cluster_async(const float2* p, float2 x, const uint64_t* barrier, int rank);
void store_cluster_async(const int4* p, int4 x, const uint64_t* barrier, int rank);
void bulk_copy_cluster(void* to, const void* from, int bytes, uint64_t* barrier, int rank);

// blocks: a bit per block of the cluster that gets the box; 0: this block
void emulation_tma_load(void* shared, const void* map, int rank, int x, int y, int z, int w, uint64_t* barrier,
                        unsigned blocks);
void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier);
void emulation_tma_store(const void* map, const void* shared, int rank, int x, int y, int z, int w);
void bulk_store(void* global, const void* shared, int bytes);
void bulk_add(float* global, const float* shared, int bytes);
void tma_store_fence();
void async_proxy_fence();
void tma_store_commit();
void emulation_tma_store_wait(int pending);
void tma_store_wait_written();

enum { WGMMA_BF16, WGMMA_F16, WGMMA_E4M3, WGMMA_E5M2_E4M3 }; // the last one: a is e5m2, b is e4m3
// a_registers is NULL, or the fragment of this warp's rows, and then `a` is not used.
void emulation_wgmma(float* d, const uint32_t* a_registers, uint64_t a, uint64_t b, int columns, int type,
                     bool a_transposed, bool b_transposed, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void emulation_wgmma_hold(const void* x, size_t bytes);
void emulation_wgmma_wait(int pending);

void stmatrix_x4(uint32_t address, const uint32_t r[4]);
void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]);
