/* The shared memory of short.cu: a segment that one thread block holds. */
#pragma once

#include "cuda/plan/plan.cuh"
#include "cuda/select/select.cuh"

/* keys: the most keys of a segment. A partition, of ranks or of positions, is the 32 keys that the
 * lanes of a warp have at once. */
template <int keys_> struct short_config {
    static constexpr int threads = 512, warps = threads / warp_lanes;
    static constexpr int keys = keys_, items = keys / threads; // items: of a thread
    static constexpr int partitions = keys / warp_lanes;
    static constexpr int partition_bits = keys == 1024 ? 5 : keys == 2048 ? 6 : 7;
    static constexpr int rank_bits = partition_bits + 5;
    static constexpr int lane_partitions = partitions / warp_lanes;
    static constexpr int lists = keys / list_queries; // at most
    static constexpr int most_entries = 32768;        // 64 KB
    static constexpr int entries = lists * keys < most_entries ? lists * keys : most_entries;
    static constexpr int pairs = partitions / 2; // pairs of columns of earlier_count
    static constexpr int strips = threads / pairs < 8 ? threads / pairs : 8;
    static constexpr int strip_rows = partitions / strips;

    static_assert(1 << rank_bits == keys, "keys is 1024, 2048 or 4096");
    static_assert(items > 0 && threads >= digits, "a thread has a key, and maybe a digit");
    static_assert(lane_partitions <= 4, "a word has a count for each partition of a lane");
};

template <class config> struct alignas(16) short_memory {
    union {
        struct {
            uint2 key[config::keys]; // by rank: {order, position}
            uint32_t digit_count[config::warps][digits];
        };
        // [c][d]: keys of rank partition c before position partition d; later those of all higher
        // rank partitions
        struct {
            uint16_t earlier_count[config::partitions][config::partitions];
            uint32_t row[config::warps][warp_lanes]; // counts of a row, before they are summed
        };
        // [t][s]: kept_index + 1 of the live key in slot s at the first position of list t; 0: none
        uint16_t live[config::entries];
    };
    union {
        uint32_t standing[config::keys]; // by position: the rank, and in the upper 16 bits the keys
                                         // of earlier partitions that outrank the key
        struct {                         // by kept_index
            uint16_t parent[config::keys]; // kept_index of the key that it evicts; later the slot,
                                           // with slot_bit
            uint16_t expiry[config::keys];
        };
    };
    union {
        uint16_t kept_index[config::keys]; // by rank, with kept_bit
        // by list: the slots of the keys that are evicted inside its query block
        uint16_t evicted_slot[config::lists][list_queries];
    };
    uint16_t number[config::keys];   // by position: kept keys before it, with kept_bit if it is
                                     // kept
    uint16_t position[config::keys]; // by kept_index
    uint16_t evicted[config::keys];  // by kept_index: the position of the key that it evicts
    uint32_t start[digits];
    uint32_t strip_sum[config::strips][config::pairs];
    // one for each sum over warps, which saves a barrier between two sums
    uint32_t digit_scratch[config::warps], position_scratch[config::warps],
        rank_scratch[config::warps], recent_scratch[config::warps];
    uint16_t evicted_count[config::lists]; // by list
};

/* Bits above any index of a key. */
static constexpr uint32_t kept_bit = 1U << 15, slot_bit = 1U << 15, index_mask = kept_bit - 1;

/* The index of key r of a thread, by position or by rank. */
template <class config> __device__ static uint32_t own_index(int r) {
    return threadIdx.x / warp_lanes * (config::items * warp_lanes) + r * warp_lanes +
           threadIdx.x % warp_lanes;
}

/* The partition of key r of this warp's threads. */
template <class config> __device__ static uint32_t own_partition(int r) {
    return threadIdx.x / warp_lanes * config::items + r;
}

/* The sum of `value`, one per warp, over the lower warps; *total: over all warps. Uses one
 * barrier. */
template <int warps>
__device__ static uint32_t add_lower_warps(uint32_t (&scratch)[warps], uint32_t value,
                                           uint32_t *total) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    if (lane == 0)
        scratch[warp] = value;
    __syncthreads();
    const uint32_t others = lane < warps ? scratch[lane] : 0;
    *total = __reduce_add_sync(all_lanes, others);
    return __reduce_add_sync(all_lanes, lane < warp ? others : 0);
}
