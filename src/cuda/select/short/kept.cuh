/* The steps from sort_keys to follow_slots for a short segment: which keys are ever kept, when each
 * leaves, and its slot. */
#pragma once

#include "cuda/select/short/memory.cuh"

/* One pass of the radix sort: the keys of all threads by the digit at `shift`, in place. */
template <class config>
__device__ static void sort_digit(short_memory<config> &shared, uint2 (&key)[config::items],
                                  int shift) {
    const uint32_t warp = threadIdx.x / warp_lanes, digit = threadIdx.x;
    uint32_t order[config::items], before[config::items], total;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        order[r] = key[r].x;
    count_digits(shared.digit_count[warp], order, shift, before);
    __syncthreads();
    const uint32_t sum = digit < digits ? sum_digit(shared.digit_count, digit) : 0;
    const uint32_t lower_lanes = sum_lower_lanes(sum);
    const uint32_t of_warp = __shfl_sync(all_lanes, lower_lanes + sum, warp_lanes - 1);
    const uint32_t start = lower_lanes + add_lower_warps(shared.digit_scratch, of_warp, &total);
    if (digit < digits)
        shared.start[digit] = start;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t own = digit_of(order[r], shift);
        shared.key[shared.start[own] + shared.digit_count[warp][own] + before[r]] = key[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = shared.key[own_index<config>(r)];
}

/* Ascending and stable, as in sm90/sort.cuh. Returns positions by rank. */
template <class config>
__device__ static void sort_keys(short_memory<config> &shared, const select_call &call,
                                 const select_segment &segment,
                                 uint32_t (&position)[config::items]) {
    uint2 key[config::items];
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = load_key<false>(call, segment, own_index<config>(r));
#pragma unroll 1
    for (int shift = 0; shift < key_bits; shift += digit_bits)
        sort_digit(shared, key, shift);
#pragma unroll
    for (int r = 0; r < config::items; r++)
        position[r] = key[r].y;
}

/* The lanes whose `value`, of `bits` bits, is greater than this lane's value. */
template <int bits> __device__ static uint32_t lanes_above(uint32_t value) {
    uint32_t above = 0, same = all_lanes;
#pragma unroll
    for (int bit = bits - 1; bit >= 0; bit--) {
        const uint32_t agree = vote_ballot_same(value, 1U << bit);
        above |= (value >> bit & 1) != 0 ? 0 : same & ~agree;
        same &= agree;
    }
    return above;
}

/* The position partition of a key by rank. An absent key gets the last one, so it counts as earlier
 * than none. */
template <class config> __device__ static uint32_t partition_of(uint32_t position) {
    return (position & absent) != 0 ? config::partitions - 1 : position / warp_lanes;
}

/* The row of rank partition `own_partition(r)`, without the higher ones. A word has the counts of
 * all position partitions of a lane, which are warp_lanes apart, in 8 bits each: a rank partition
 * has only warp_lanes keys. */
template <class config>
__device__ static void count_row(short_memory<config> &shared, int r, uint32_t position) {
    const uint32_t lane = threadIdx.x % warp_lanes, d = partition_of<config>(position);
    uint32_t *const row = shared.row[threadIdx.x / warp_lanes];
    row[lane] = 0;
    __syncwarp();
    if ((position & absent) == 0)
        atomicAdd(&row[d % warp_lanes], 1U << d / warp_lanes * 8);
    __syncwarp();
    const uint32_t own = row[lane], lower = sum_lower_lanes(own);
    const uint32_t all = __shfl_sync(all_lanes, lower + own, warp_lanes - 1);
    uint32_t before = 0; // in the partitions of lower numbers of all lanes
#pragma unroll
    for (int n = 0; n < config::lane_partitions; n++) {
        shared.earlier_count[own_partition<config>(r)][n * warp_lanes + lane] =
            (uint16_t)(before + (lower >> 8 * n & 0xff));
        before += all >> 8 * n & 0xff;
    }
}

/* Replaces each row of earlier_count by the sum of the rows above it. A thread takes two columns,
 * as a word, of one strip of rows. */
template <class config> __device__ static void sum_columns(short_memory<config> &shared) {
    const uint32_t strip = threadIdx.x / config::pairs, pair = threadIdx.x % config::pairs;
    const uint32_t end = (strip + 1) * config::strip_rows;
    const bool has_strip = strip < config::strips;
    const auto words = reinterpret_cast<uint32_t (*)[config::pairs]>(shared.earlier_count);
    uint32_t own[config::strip_rows], sum = 0;
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++)
        own[n] = has_strip ? words[end - 1 - n][pair] : 0;
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++)
        sum += own[n];
    if (has_strip)
        shared.strip_sum[strip][pair] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t other = strip + 1; other < config::strips; other++)
        sum += shared.strip_sum[other][pair];
#pragma unroll
    for (int n = 0; n < config::strip_rows; n++) {
        if (has_strip)
            words[end - 1 - n][pair] = sum;
        sum += own[n];
    }
}

/* Sends to the position of each key its rank and the number of keys of earlier position partitions
 * that outrank it: keys of higher rank partitions, and keys of its own. */
template <class config>
__device__ static void count_earlier(short_memory<config> &shared,
                                     const uint32_t (&position)[config::items]) {
    __syncthreads(); // every thread has read its sorted keys
#pragma unroll
    for (int r = 0; r < config::items; r++)
        count_row(shared, r, position[r]);
    __syncthreads();
    sum_columns(shared);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t d = partition_of<config>(position[r]);
        const uint32_t earlier = lanes_above<config::partition_bits>(~d);
        const uint32_t higher = shared.earlier_count[own_partition<config>(r)][d] +
                                __popc(earlier & ~lanemask_lt()); // without this lane's own
        const bool is_absent = (position[r] & absent) != 0;
        shared.standing[position[r] & ~absent] =
            own_index<config>(r) | (is_absent ? config::keys : higher) << 16;
    }
    __syncthreads();
}

/* Bit r stands for key r of a thread, by position. */
struct kept_flags {
    uint32_t present, kept; // the key is present; it is ever kept
    uint32_t total;         // kept keys of the segment
};

/* True if fewer keys than the window outrank a key when it arrives. Keys of the same partition are
 * counted here, unless they cannot change the result of any lane. */
template <class config> __device__ static bool is_kept(uint32_t standing, uint32_t window) {
    const uint32_t higher = standing >> 16, rank = standing & 0xffff;
    const uint32_t lane = threadIdx.x % warp_lanes;
    bool keeps = higher < window;
    if (__any_sync(all_lanes, keeps && higher + lane >= window))
        keeps = higher + __popc(lanes_above<config::rank_bits>(rank) & lanemask_lt()) < window;
    return keeps;
}

/* Numbers the kept keys: sends kept_index to each key's rank and position, and its position to its
 * kept_index. The first `window` keys have slots of their own. */
template <class config>
__device__ static kept_flags index_kept(short_memory<config> &shared, uint32_t window) {
    kept_flags own = {};
    uint32_t rank[config::items], count = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t standing = shared.standing[own_index<config>(r)];
        const bool keeps = is_kept<config>(standing, window);
        rank[r] = standing & 0xffff;
        own.present |= (uint32_t)(standing >> 16 != config::keys) << r;
        own.kept |= (uint32_t)keeps << r;
        count += __popc(__ballot_sync(all_lanes, keeps));
    }
    uint32_t next = add_lower_warps(shared.position_scratch, count, &own.total);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r);
        const bool keeps = (own.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        const uint16_t flagged = (uint16_t)(kept_index | (keeps ? kept_bit : 0));
        shared.kept_index[rank[r]] = flagged;
        shared.number[j] = flagged;
        if (keeps)
            shared.position[kept_index] = (uint16_t)j;
        if (keeps && kept_index < window)
            shared.parent[kept_index] = (uint16_t)(kept_index | slot_bit);
    }
    __syncthreads();
    return own;
}

/* By rank: the i-th worst kept key is evicted by the key of kept_index window + i. That key takes
 * over its slot, so the evicted key becomes its parent. */
template <class config>
__device__ static void match_evictions(short_memory<config> &shared, const select_call &call,
                                       const uint32_t (&position)[config::items], uint32_t total) {
    uint32_t flagged[config::items], count = 0, all;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        flagged[r] = shared.kept_index[own_index<config>(r)];
        count += __popc(__ballot_sync(all_lanes, (flagged[r] & kept_bit) != 0));
    }
    uint32_t next = call.window + add_lower_warps(shared.rank_scratch, count, &all);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (flagged[r] & kept_bit) != 0;
        const uint32_t evictor = number_flag(keeps, &next), own = flagged[r] & index_mask;
        const bool is_evicted = keeps && evictor < total;
        if (is_evicted) {
            shared.parent[evictor] = (uint16_t)own;
            shared.evicted[evictor] = (uint16_t)position[r];
        }
        if (keeps)
            shared.expiry[own] = is_evicted ? shared.position[evictor] : (uint16_t)call.kv_len;
    }
    __syncthreads();
}

/* Applies the rule `recent` (rules.cuh): each key leaves `recent` valid keys later, and all
 * valid keys are kept for that long. From here on they are numbered by kept_index. Returns their
 * number. */
template <class config>
__device__ static uint32_t move_expiries(short_memory<config> &shared, const select_call &call,
                                         const kept_flags &by_score) {
    uint32_t leaving[config::items], count = 0, total; // leaving: position at which a key leaves by
                                                       // score
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r), number = shared.number[j];
        leaving[r] = (number & kept_bit) != 0 ? shared.expiry[number & index_mask] : j;
        count += __popc(__ballot_sync(all_lanes, (by_score.present >> r & 1) != 0));
    }
    uint32_t next = add_lower_warps(shared.recent_scratch, count, &total);
    const uint32_t first = next;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool present = (by_score.present >> r & 1) != 0;
        const uint32_t j = own_index<config>(r), n = number_flag(present, &next);
        shared.number[j] = (uint16_t)(n | (present ? kept_bit : 0));
        if (present)
            shared.position[n] = (uint16_t)j;
        if (present && n < call.window + call.recent)
            shared.parent[n] = (uint16_t)(n | slot_bit);
    }
    __syncthreads();
    next = first;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool present = (by_score.present >> r & 1) != 0;
        const uint32_t n = number_flag(present, &next);
        if (!present)
            continue;
        const bool leaves_by_score = leaving[r] < call.kv_len;
        const uint32_t evictor =
            leaves_by_score ? (shared.number[leaving[r]] & index_mask) + call.recent : total;
        shared.expiry[n] = evictor < total ? shared.position[evictor] : (uint16_t)call.kv_len;
        if (evictor < total) {
            shared.parent[evictor] = (uint16_t)n;
            shared.evicted[evictor] = (uint16_t)own_index<config>(r);
        }
    }
    __syncthreads();
    return total;
}

/* Replaces parents by slots. Each thread follows the chains of its keys while other threads move
 * the parents that it reads farther along the same chains, so every step may double its length. */
template <class config>
__device__ static void follow_slots(short_memory<config> &shared, uint32_t total) {
    volatile uint16_t *const parent = shared.parent;
    uint32_t link[config::items];
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t n = r * config::threads + threadIdx.x;
        link[r] = n < total ? parent[n] : slot_bit;
    }
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
#pragma unroll
        for (int r = 0; r < config::items; r++) {
            if ((link[r] & slot_bit) != 0)
                continue;
            link[r] = parent[link[r]];
            parent[r * config::threads + threadIdx.x] = (uint16_t)link[r];
            goes_on = true;
        }
    }
    __syncthreads();
}
