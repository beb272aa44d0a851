/* The steps from count_earlier to decide_by_count, which find the keys that are ever kept. */
#pragma once

#include "cuda/select/sm90/memory.cuh"

/* The column of position partition d in earlier_count. A word is left out after the partitions that
 * one lane sums, so that lanes use different banks. */
template <class config> __device__ static uint32_t column_of(uint32_t d) {
    return d + d / config::lane_partitions;
}

/* A warp's row: the number of its keys before the end of each position partition. */
template <class config>
__device__ static void count_row(select_memory<config> &shared, const cluster_work &work,
                                 const uint32_t (&position)[config::items]) {
    uint32_t *const row = shared.earlier_count[work.warp];
    for (uint32_t word = work.lane; word < column_of<config>(work.partitions); word += warp_lanes)
        row[word] = 0;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        if ((position[r] & absent) == 0)
            atomicAdd(&row[column_of<config>(position[r] / config::warp_keys)], 1);
    __syncwarp();
    // the words past the last partition are undefined
    uint32_t *const own = row + work.lane * (config::lane_partitions + 1);
    uint32_t sum = 0;
#pragma unroll
    for (int d = 0; d < config::lane_partitions; d++)
        sum += own[d];
    sum = sum_lower_lanes(sum);
#pragma unroll
    for (int d = 0; d < config::lane_partitions; d++)
        own[d] = sum += own[d];
}

/* Adds the rows of the later warps to each row of column `threadIdx.x`. */
template <class config> __device__ static void sum_column(select_memory<config> &shared) {
    const uint32_t column = column_of<config>(threadIdx.x);
    uint32_t sum = 0;
#pragma unroll
    for (int w = warps - 1; w >= 0; w--)
        shared.earlier_count[w][column] = sum += shared.earlier_count[w][column];
    shared.own_count[threadIdx.x] = (uint16_t)sum;
}

/* Fills earlier_count of this block, and sends its first row to every block. */
template <class config>
__device__ static void count_earlier(select_memory<config> &shared, const cluster_work &work,
                                     const uint32_t (&position)[config::items]) {
    count_row(shared, work, position);
    __syncthreads();
    if (threadIdx.x < work.partitions)
        sum_column(shared);
    __syncthreads();
    broadcast_counts(shared, work, work.partitions);
    sync_blocks(work);
}

/* The warp with the n-th key from the end of this block, among the keys that a column counts. */
template <class config>
__device__ static uint32_t find_warp(const select_memory<config> &shared, uint32_t column,
                                     uint32_t n) {
    uint32_t w = 0;
#pragma unroll
    for (uint32_t step = warps / 2; step > 0; step /= 2)
        w += shared.earlier_count[w + step][column] >= n ? step : 0;
    return w;
}

/* The block with the threshold at the end of position partition `threadIdx.x`, or work.blocks if
 * fewer keys than the window come before that end. If it is this block, finds the threshold too. */
template <class config>
__device__ static uint32_t find_owner(select_memory<config> &shared, const cluster_work &work,
                                      uint32_t window) {
    const uint32_t d = threadIdx.x;
    uint32_t sum = 0, owner = work.blocks, nth_last = 0;
#pragma unroll
    for (uint32_t block = config::most_blocks; block-- > 0;) {
        const uint32_t reached = sum + (block < work.blocks ? shared.count[block][d] : 0);
        if (block == work.block)
            shared.earlier_above[d] = sum;
        if (sum < window && reached >= window) {
            owner = block;
            nth_last = window - sum;
        }
        sum = reached;
    }
    if (owner == work.block)
        shared.own_threshold[d] =
            work.block * warps + find_warp(shared, column_of<config>(d), nth_last) + 1;
    return owner;
}

template <class config>
__device__ static void find_thresholds(select_memory<config> &shared, const cluster_work &work,
                                       uint32_t window) {
    const uint32_t d = threadIdx.x;
    uint32_t owner = work.blocks;
    if (d < work.partitions)
        owner = find_owner(shared, work, window);
    sync_blocks(work);
    if (d < work.partitions)
        shared.threshold_rank[d + 1] =
            owner < work.blocks ? load_at(owner, &shared.own_threshold[d]) : 0;
    if (d == 0)
        shared.threshold_rank[0] = 0;
    __syncthreads();
}

/* The number of keys of higher rank than key `index` of this warp before position partition d. */
template <class config>
__device__ static uint32_t
count_higher(const select_memory<config> &shared, const cluster_work &work,
             const uint32_t (&position)[config::items], uint32_t index, uint32_t d) {
    uint32_t count = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        count += r * warp_lanes + work.lane > index && position[r] < d * config::warp_keys;
    count = __reduce_add_sync(all_lanes, count);
    if (d == 0)
        return 0;
    const uint32_t above =
        work.warp + 1 < warps ? shared.earlier_count[work.warp + 1][column_of<config>(d - 1)] : 0;
    return count + above + shared.earlier_above[d - 1];
}

/* Sends the allowance of each key that may be kept to the block of its position. */
template <class config>
__device__ static void decide_by_threshold(select_memory<config> &shared, const cluster_work &work,
                                           const uint32_t (&position)[config::items],
                                           uint32_t window) {
    const uint32_t own = work.block * warps + work.warp + 1; // in the units of threshold_rank
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = position[r] & ~absent, d = j / config::warp_keys;
        const bool present = j == position[r];
        uint32_t allowed = present && own > shared.threshold_rank[d + 1] ? always_kept : 0;
        const bool unsure = present && allowed == 0 && own >= shared.threshold_rank[d];
        for (uint32_t left = __ballot_sync(all_lanes, unsure); left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t higher = count_higher(shared, work, position, r * warp_lanes + lane,
                                                 __shfl_sync(all_lanes, d, lane));
            if (lane == (int)work.lane)
                allowed = higher < window ? window - higher : 0;
        }
        const uint32_t rank = work.block * config::keys + own_index<config>(work, r);
        if (allowed > 0)
            store_at(j / config::keys, &shared.allowance[j % config::keys],
                     make_uint2(rank, allowed));
    }
}

/* decide_by_threshold() for global scope: keeps the best keys of the segment, or of each packed
 * sequence. */
template <class config>
__device__ static void keep_best(select_memory<config> &shared, const cluster_work &work,
                                 const uint32_t (&position)[config::items],
                                 const select_call &call) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t rank = work.block * config::keys + own_index<config>(work, r);
        if ((position[r] & absent) != 0)
            continue;
        // ranks of the key's sequence, or all
        const uint32_t end_rank =
            config::packed ? (uint32_t)call.ranges[position[r]].y : work.blocks * config::keys;
        if (rank + call.window >= end_rank)
            store_at(position[r] / config::keys, &shared.allowance[position[r] % config::keys],
                     make_uint2(rank, always_kept));
    }
}

/* Bit r is set if key r of this thread, now by position, is ever kept. */
template <class config>
__device__ static uint32_t decide_by_count(const select_memory<config> &shared,
                                           const cluster_work &work) {
    uint32_t rank[config::items], kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        rank[r] = shared.allowance[own_index<config>(work, r)].x;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t allowed = shared.allowance[own_index<config>(work, r)].y;
        bool keeps = allowed >= config::warp_keys;
        for (uint32_t left = __ballot_sync(all_lanes, allowed > 0 && !keeps); left != 0;
             left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t other_rank = __shfl_sync(all_lanes, rank[r], lane);
            uint32_t count = 0;
#pragma unroll
            for (int other = 0; other < config::items; other++)
                count += other * warp_lanes + work.lane < (uint32_t)(r * warp_lanes + lane) &&
                         rank[other] > other_rank;
            count = __reduce_add_sync(all_lanes, count);
            keeps = lane == (int)work.lane ? count < allowed : keeps;
        }
        kept |= (uint32_t)keeps << r;
    }
    return kept;
}
