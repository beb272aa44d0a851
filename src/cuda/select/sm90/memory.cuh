/* The shared memory of select.cu, writes between the blocks of a cluster, and the clusters that a
 * device runs. */
#pragma once

#include "cuda/select/select.cuh"

enum {
    threads = 1024,
    warps = threads / warp_lanes,
    vector_counts = sizeof(uint4) / sizeof(uint16_t), // counts that a lane sends at once
};

/* items: keys of a thread; most_blocks: of a cluster; packed: sequences are packed. A partition is
 * the keys of a warp. */
template <int items_, int most_blocks_, bool packed_> struct segment_config {
    static constexpr bool packed = packed_;
    static constexpr int items = items_;
    static constexpr int most_blocks = most_blocks_;
    static constexpr int most_partitions = warps * most_blocks;
    static constexpr int lane_partitions = most_partitions / warp_lanes; // partitions that a lane
                                                                         // sums
    static constexpr int counts = most_partitions > digits ? most_partitions : digits;
    static constexpr int row_words = most_partitions + warp_lanes + 1; // odd: no bank conflicts
    static constexpr uint32_t warp_keys = warp_lanes * items;
    static constexpr uint32_t keys = threads * items; // of a block
};

template <class config> struct alignas(16) select_memory {
    union {
        uint2 key[config::keys];       // by rank: {order, position}
        uint2 allowance[config::keys]; // by position: {rank, allowed}; see always_kept
        struct {
            uint32_t parent[config::keys]; // by kept_index: kept_index of the evicted key, then the
                                           // slot with the bit is_slot
            uint32_t root[config::keys];   // the first key of the block with the same slot
        };
    };
    union {
        struct {
            uint32_t digit_count[warps][digits];
            uint2 sorted[config::keys]; // this block's keys by digit, before they are sent
        };
        // counts the keys of this block only; earlier_above counts the blocks above. column_of()
        // spreads the columns
        uint32_t earlier_count[warps][config::row_words];
        struct {
            uint32_t kept_index[config::keys];    // by rank; later the expiry
            uint32_t kept_position[config::keys]; // by kept_index
            uint32_t position[config::keys];      // by rank
        };
    };
    // keys of a digit, or before the end of a position partition: in this block, in each block
    alignas(16) uint16_t own_count[config::counts];
    alignas(16) uint16_t count[config::most_blocks][config::counts];
    uint32_t start[digits];  // index of a digit's first key in the sorted block
    uint32_t offset[digits]; // from an index in the sorted block to one in the segment
    // in units of partitions, plus 1: the partition of the threshold; 0: the set is not full
    uint32_t threshold_rank[config::most_partitions + 1];
    uint32_t own_threshold[config::most_partitions]; // [d]: threshold_rank[d + 1], if in this block
    uint32_t earlier_above[config::most_partitions]; // earlier_count of the blocks of higher ranks
    // kept keys by block of position and block of rank, in pairs of 16 bits
    uint32_t kept_by_block[config::most_blocks][config::most_blocks / 2];
    uint32_t own_kept[config::most_blocks / 2];
    uint32_t scratch[warps];
    // numbers of kept keys: in blocks of lower positions, in blocks of lower ranks, in the segment
    uint32_t kept_before, kept_below, kept_total;
};

static constexpr uint32_t never_kept = UINT32_MAX;

struct cluster_work {
    uint32_t block; // in the cluster
    uint32_t blocks, partitions;
    uint32_t warp, lane;
};

__device__ static void sync_cluster(void) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

/* The barrier of a cluster makes writes visible to the whole device (MEMBAR.ALL.GPU) and
 * invalidates the L1 cache, so a cluster of one block uses the barrier of a block instead. */
__device__ static void arrive_blocks(const cluster_work &work) {
    if (work.blocks > 1)
        barrier_cluster_arrive();
}

__device__ static void wait_blocks(const cluster_work &work) {
    if (work.blocks > 1)
        barrier_cluster_wait();
    else
        __syncthreads();
}

__device__ static void sync_blocks(const cluster_work &work) {
    arrive_blocks(work);
    wait_blocks(work);
}

/* Writes to, or reads from, the same address in the shared memory of another block. */
template <typename value_type>
__device__ static void store_at(uint32_t block, const void *shared, value_type value) {
    st_shared_cluster(mapa(shared_address(shared), block), value);
}

__device__ static uint32_t load_at(uint32_t block, const void *shared) {
    return ld_shared_cluster(mapa(shared_address(shared), block));
}

template <class config> __device__ static uint32_t own_index(const cluster_work &work, int r) {
    return work.warp * config::warp_keys + r * warp_lanes + work.lane;
}

/* Copies own_count to every block of the cluster, one warp per block. */
template <class config>
__device__ static void broadcast_counts(select_memory<config> &shared, const cluster_work &work,
                                        uint32_t counts) {
    const uint32_t n = work.lane * vector_counts;
    for (uint32_t first = 0; first < counts; first += warp_lanes * vector_counts)
        if (work.warp < work.blocks && first + n < counts)
            store_at(work.warp, &shared.count[work.block][first + n],
                     *reinterpret_cast<const uint4 *>(&shared.own_count[first + n]));
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
