/* The best keys of a segment that a cluster holds, by radix selection: one digit after the other,
 * the highest first. Every block counts the digits of its own keys in shared memory, and adds up
 * the counts of all blocks itself. */
#pragma once

#include "cuda/device/used.cuh"
#include "cuda/select/rules.cuh"
#include "cuda/select/sm90/memory.cuh"

enum {
    // A wide digit is counted as a whole but found in two halves, so that a thread reads at most
    // one count of other blocks for each half.
    half_bits = 6,
    halves = 1 << half_bits,
    wide_bits = 2 * half_bits,
    wide_digits = 1 << wide_bits,
    position_bits = 28,
    ranked_bits = key_bits + position_bits, // a whole number of digits
    load_items = 8,                         // scores whose loads a thread has in flight together
    most_positions = 16,                    // most last positions that a call may have
    most_changes = most_positions - 1,
};

static_assert(ranked_bits % wide_bits == 0, "every digit is wide");
static_assert(halves * most_blocks <= threads, "a thread reads at most one count");
static_assert(wide_digits == 4 * threads, "a thread clears and adds four counts");

static constexpr ranked_key above_all = (ranked_key)1 << ranked_bits;

__device__ static uint32_t position_of(ranked_key key) {
    return (uint32_t)key & ((1U << position_bits) - 1);
}

/* A key that may leave at one of the last positions. */
struct worst_key {
    uint32_t order, position;
};

/* The orders of a block's keys follow in memory; see orders_of(). */
struct alignas(16) top_memory {
    uint32_t count[wide_digits];  // keys of this block by digit
    uint32_t upper_count[halves]; // by the upper half of the digit
    uint32_t upper_sum[halves];   // in all blocks
    uint32_t lower_sum[halves];   // in all blocks, by the lower half, among digits with the chosen
                                  // upper half
    uint32_t scratch[warps];
    uint32_t live; // live keys of this block
    uint32_t worst_count;
    worst_key worst[most_changes];  // of this block
    worst_key listed[most_changes]; // in the first block: of all blocks
};

struct last_positions {
    int32_t first, end; // end: the keys that exist
    int32_t competing;  // keys up to this one compete by score at position `first`; below 0: none
};

/* The indices of a thread. Its key r is key index + r * warp_lanes of its block. */
struct top_work {
    uint32_t block, blocks;
    uint32_t items; // keys of a thread
    uint32_t index;
};

__device__ static uint32_t *orders_of(top_memory &shared) { return (uint32_t *)(&shared + 1); }

__device__ static uint32_t position_of(const top_work &work, uint32_t r) {
    return work.block * work.items * threads + work.index + r * warp_lanes;
}

/* Key r of a thread; 0 if it does not compete. */
__device__ static ranked_key ranked_at(top_memory &shared, const top_work &work, uint32_t r) {
    const uint32_t order = orders_of(shared)[work.index + r * warp_lanes];
    return order == order_none ? 0 : ranked_key_of(order, position_of(work, r), position_bits);
}

__device__ static last_positions last_of(const select_call &call, const int32_t *kv_used, int64_t b,
                                         int32_t count) {
    const int32_t end = count_used(kv_used, b, (int32_t)call.kv_len);
    const int32_t first = max(end - count, 0);
    return {first, end, min(first - (int32_t)call.recent, end - 1)};
}

/* ---- counting ---- */

__device__ static void clear_counts(top_memory &shared) {
    __syncthreads(); // every thread has read the sums
    ((uint4 *)shared.count)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < halves)
        shared.upper_sum[threadIdx.x] = shared.lower_sum[threadIdx.x] = 0;
    __syncthreads();
}

/* Counts the digits at `shift` of the keys whose higher digits are `prefix`. */
__device__ static void count_keys(top_memory &shared, const top_work &work, ranked_key prefix,
                                  int shift) {
    clear_counts(shared);
#pragma unroll 4
    for (uint32_t r = 0; r < work.items; r++) {
        const ranked_key key = ranked_at(shared, work, r);
        if (key != 0 && key >> shift >> wide_bits == prefix)
            atomicAdd(&shared.count[key >> shift & (wide_digits - 1)], 1);
    }
}

/* Loads the orders of load_items keys of a thread, from key `first` on. No load depends on another,
 * so all of them are in flight together. */
__device__ static void load_orders(const select_call &call, const select_segment &segment,
                                   const top_work &work, const last_positions &last, uint32_t first,
                                   uint32_t (&order)[load_items]) {
    float score[load_items];
    bool competes[load_items];
#pragma unroll
    for (int i = 0; i < load_items; i++) {
        const uint32_t j = position_of(work, first + i);
        competes[i] = first + i < work.items && (int32_t)j <= last.competing;
        score[i] = competes[i] ? segment.score[j] : 0;
    }
    if (segment.valid != NULL) {
#pragma unroll
        for (int i = 0; i < load_items; i++)
            competes[i] = competes[i] && segment.valid[position_of(work, first + i)] != 0;
    }
#pragma unroll
    for (int i = 0; i < load_items; i++) {
        const bool is_sink = position_of(work, first + i) < segment.sink_end;
        const uint32_t present = is_sink ? order_sink : order_of(score[i]);
        order[i] = competes[i] ? present : order_none;
    }
}

/* Loads the keys, and counts their highest digits. */
__device__ static void load_keys(top_memory &shared, const top_work &work, const select_call &call,
                                 const select_segment &segment, const last_positions &last) {
    clear_counts(shared);
    for (uint32_t first = 0; first < work.items; first += load_items) {
        uint32_t order[load_items];
        load_orders(call, segment, work, last, first, order);
#pragma unroll
        for (int i = 0; i < load_items; i++) {
            if (first + i >= work.items)
                break;
            orders_of(shared)[work.index + (first + i) * warp_lanes] = order[i];
            if (order[i] != order_none)
                atomicAdd(&shared.count[order[i] >> (key_bits - wide_bits)], 1);
        }
    }
}

/* Sums the counts of this block's digits by their upper halves. */
__device__ static void count_upper(top_memory &shared) {
    constexpr uint32_t adders = halves / 4; // threads of a half
    __syncthreads();
    const uint4 four = ((const uint4 *)shared.count)[threadIdx.x];
    uint32_t sum = four.x + four.y + four.z + four.w;
#pragma unroll
    for (uint32_t lanes = adders / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(all_lanes, sum, lanes);
    if (threadIdx.x % adders == 0)
        shared.upper_count[threadIdx.x / adders] = sum;
}

/* Adds the counts of all blocks to sum[]; they have the same address in each block. */
__device__ static void add_blocks(const top_work &work, const uint32_t *count,
                                  uint32_t (&sum)[halves]) {
    const uint32_t block = threadIdx.x / halves, half = threadIdx.x % halves;
    if (block < work.blocks)
        atomicAdd(&sum[half], load_at(block, &count[half]));
}

/* ---- choosing ---- */

/* One half of a digit: the number of keys above it, and of keys with it. */
struct chosen_half {
    uint32_t half, above, keys;
    uint32_t all; // keys that were counted
};

/* Chooses the half of the `left`-th best key; all warps compute the same. If there are fewer keys,
 * none is chosen. A lane has two halves, descending by lane, because the best come first. */
__device__ static chosen_half choose_half(const uint32_t (&sum)[halves], uint32_t left) {
    static_assert(halves == 2 * warp_lanes, "a lane has two");
    const uint32_t lower = halves - 2 - 2 * (threadIdx.x % warp_lanes);
    const uint32_t high = sum[lower + 1], low = sum[lower];
    const uint32_t above = sum_lower_lanes(high + low);
    const bool is_high = left <= above + high, is_low = !is_high;
    const uint32_t lanes = __ballot_sync(all_lanes, left <= above + high + low);
    const uint32_t all = __shfl_sync(all_lanes, above + high + low, warp_lanes - 1);
    if (lanes == 0)
        return {0, 0, 0, all};
    const int owner = __ffs((int)lanes) - 1;
    return {__shfl_sync(all_lanes, lower + is_high, owner),
            __shfl_sync(all_lanes, above + (is_low ? high : 0), owner),
            __shfl_sync(all_lanes, is_low ? low : high, owner), all};
}

/* The best keys are those from `lowest` on, `count` of them. */
struct best_keys {
    ranked_key lowest;
    uint32_t count;
};

/* Finds the `wanted` best of all keys that compete, or all if there are fewer. Every thread of the
 * cluster gets the same result. is_counted: the highest digits have been counted. */
__device__ static best_keys find_bound(top_memory &shared, const top_work &work, uint32_t wanted,
                                       bool is_counted) {
    ranked_key prefix = 0;
    uint32_t left = wanted;
    if (wanted == 0)
        return {above_all, 0};
    for (int shift = ranked_bits - wide_bits;; shift -= wide_bits) {
        if (!is_counted)
            count_keys(shared, work, prefix, shift);
        is_counted = false;
        count_upper(shared);
        sync_cluster();
        add_blocks(work, shared.upper_count, shared.upper_sum);
        __syncthreads();
        const chosen_half upper = choose_half(shared.upper_sum, left);
        add_blocks(work, &shared.count[upper.half * halves], shared.lower_sum);
        barrier_cluster_arrive(); // this thread has read the counts of other blocks
        __syncthreads();
        const chosen_half lower = choose_half(shared.lower_sum, left - upper.above);
        barrier_cluster_wait();
        if (upper.all < left)
            return {1, upper.all};
        left -= upper.above + lower.above;
        prefix = prefix << wide_bits | upper.half << half_bits | lower.half;
        if (lower.keys == left)                                   // no two whole keys are equal
            return {max(prefix << shift, (ranked_key)1), wanted}; // 0 means no key
    }
}
