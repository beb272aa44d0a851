/* The shared memory of select.cu, and how blocks of a cluster write into each other's. */
#ifndef FDMA_CUDA_SELECT_SM90_MEMORY_CUH
#define FDMA_CUDA_SELECT_SM90_MEMORY_CUH

#include "cuda/select/select.cuh"

enum {
    threads = 1024,
    warps = threads / warp_lanes,
    half_rows = sizeof(uint4) / sizeof(uint16_t), // counts in what a lane sends at once
};

/* items: keys of a thread; most_blocks: of a cluster. */
template <int items_, int most_blocks_> struct segment_config {
    static constexpr int items = items_;
    static constexpr int most_blocks = most_blocks_;
    static constexpr int most_borders = warps * most_blocks;
    static constexpr int lane_borders = most_borders / warp_lanes; // that a lane sums
    static constexpr int counts = most_borders > digits ? most_borders : digits;
    static constexpr int row_words = most_borders + warp_lanes + 1; // odd: no bank conflicts
    static constexpr uint32_t chunk = warp_lanes * items;
    static constexpr uint32_t keys = threads * items; // of a block
};

template <class config> struct alignas(16) select_memory {
    union {
        uint2 key[config::keys];     // by place: {order, position}
        uint2 verdict[config::keys]; // by position: {place, how many may outrank it}
        struct {
            uint32_t parent[config::keys]; // by kept number: the evicted key's, in the end the slot
            uint32_t head[config::keys];   // the first of the block that has the same slot
        };
    };
    union {
        struct {
            uint32_t digit_count[warps][digits];
            uint2 sorted[config::keys]; // by digit, on their way to other blocks
        };
        // keys of this warp and the later ones that are before the end of chunk d of positions, see
        // column_of()
        uint32_t border[warps][config::row_words];
        struct {
            // by place: how many kept keys are at lower positions; in the end the expiry
            uint32_t number[config::keys];
            uint32_t kept[config::keys];     // by kept number: its position
            uint32_t position[config::keys]; // by place
        };
    };
    // keys of a digit, or before a border: here, and of each block
    alignas(16) uint16_t own_count[config::counts];
    alignas(16) uint16_t count[config::most_blocks][config::counts];
    uint32_t start[digits]; // of a digit in this block, and what leads from there to its place
    uint32_t to[digits];
    uint32_t floor[config::most_borders + 1]; // see find_borders()
    uint32_t own_floor[config::most_borders]; // those of this block, a border earlier
    uint32_t above[config::most_borders];     // keys of later blocks that are before a border
    // kept keys, by block of position and of place, in pairs of 16 bits
    uint32_t kept_at[config::most_blocks][config::most_blocks / 2];
    uint32_t kept_here[config::most_blocks / 2];
    uint32_t scratch[warps];
    uint32_t kept_before, lower_kept, kept_all;
};

static constexpr uint32_t never_kept = UINT32_MAX;

/* Where a thread is. */
struct cluster_place {
    uint32_t rank, blocks, borders;
    uint32_t warp, lane;
};

__device__ static inline void sync_cluster(void) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

template <typename value_type>
__device__ static inline void store_at(uint32_t rank, const void *shared, value_type value) {
    st_shared_cluster(mapa(shared_address(shared), rank), value);
}

__device__ static inline uint32_t load_at(uint32_t rank, const void *shared) {
    return ld_shared_cluster(mapa(shared_address(shared), rank));
}

template <class config>
__device__ static inline uint32_t own_index(const cluster_place &at, int r) {
    return at.warp * config::chunk + r * warp_lanes + at.lane;
}

/* Tells every block this one's counts, a warp each. */
template <class config>
__device__ static void share_counts(select_memory<config> &shared, const cluster_place &at,
                                    uint32_t counts) {
    const uint32_t n = at.lane * half_rows;
    for (uint32_t first = 0; first < counts; first += warp_lanes * half_rows)
        if (at.warp < at.blocks && first + n < counts)
            store_at(at.warp, &shared.count[at.rank][first + n],
                     *reinterpret_cast<const uint4 *>(&shared.own_count[first + n]));
}

#endif
