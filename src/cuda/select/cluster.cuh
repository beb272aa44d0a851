/* What the kernels of sm90.cu and top.cu share: barriers and writes between the blocks of a
 * cluster, and the clusters that a device runs. */
#pragma once

#include "cuda/select/select.cuh"

enum { threads = 1024, warps = threads / warp_lanes };

__device__ static void sync_cluster(void) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

/* Writes to, or reads from, the same address in the shared memory of another block. */
template <typename value_type>
__device__ static void store_at(uint32_t block, const void *shared, value_type value) {
    st_shared_cluster(mapa(shared_address(shared), block), value);
}

__device__ static uint32_t load_at(uint32_t block, const void *shared) {
    return ld_shared_cluster(mapa(shared_address(shared), block));
}

/* ---- on the host ---- */

/* Most blocks of a cluster, and most on every device. */
enum { most_blocks = 16, portable_blocks = 8, cluster_group = 16 };

static inline int64_t most_cluster_blocks(const cuda_device *device) {
    return device->capability < 110 ? (int64_t)most_blocks : (int64_t)portable_blocks;
}

/* The number of clusters of `blocks` blocks that run at once, with one block per multiprocessor. A
 * cluster lies within a group of 16 multiprocessors; about one group of a device has fewer. */
static inline int64_t clusters_at_once(const cuda_device *device, int64_t blocks) {
    const int64_t groups = device->multiprocessors / cluster_group;
    const int64_t clusters = groups * (cluster_group / blocks) - (blocks > 1);
    return clusters > 1 ? clusters : 1;
}
