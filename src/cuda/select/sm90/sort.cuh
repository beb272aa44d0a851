/* sort_keys: radix sort of a segment's keys by the blocks of a cluster, in four passes, and
 * one more for each 8 bits of the index if sequences are packed. */
#pragma once

#include "cuda/select/sm90/memory.cuh"

/* The sum of `value` over the lower digits. Thread d has the value of digit d, and all threads of
 * the block call it. */
template <class config>
__device__ static uint32_t sum_lower_digits(select_memory<config> &shared, uint32_t value) {
    enum { digit_warps = digits / warp_lanes };
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    uint32_t sum = 0;
    if (warp < digit_warps) {
        sum = sum_lower_lanes(value);
        if (lane == warp_lanes - 1)
            shared.scratch[warp] = sum + value;
    }
    __syncthreads();
    if (warp < digit_warps)
        for (uint32_t w = 0; w < warp; w++)
            sum += shared.scratch[w];
    return sum;
}

/* Sorts this block's keys by a digit, and sends its counts to every block. */
template <class config>
__device__ static void sort_block(select_memory<config> &shared, const cluster_work &work,
                                  int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t order[config::items], before[config::items], sum = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        order[r] = shared.key[own_index<config>(work, r)].x;
    count_digits(shared.digit_count[work.warp], order, shift, before);
    __syncthreads();
    if (digit < digits) {
        sum = sum_digit(shared.digit_count, digit);
        shared.own_count[digit] = (uint16_t)sum;
    }
    const uint32_t start = sum_lower_digits(shared, sum);
    if (digit < digits)
        shared.start[digit] = start;
    broadcast_counts(shared, work, digits);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t own = digit_of(order[r], shift);
        const uint32_t n = shared.start[own] + shared.digit_count[work.warp][own] + before[r];
        shared.sorted[n] = make_uint2(order[r], shared.key[own_index<config>(work, r)].y);
    }
}

/* Sends the sorted keys to their blocks. Keys of one digit are neighbours in source and target,
 * because scattered writes to the memory of other blocks are slow. */
template <class config>
__device__ static void send_keys(select_memory<config> &shared, const cluster_work &work,
                                 int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t all = 0, earlier = 0;
    if (digit < digits) {
#pragma unroll
        for (uint32_t block = 0; block < config::most_blocks; block++) {
            const uint32_t count = block < work.blocks ? shared.count[block][digit] : 0;
            earlier += block < work.block ? count : 0;
            all += count;
        }
    }
    const uint32_t first = sum_lower_digits(shared, all) + earlier;
    if (digit < digits)
        shared.offset[digit] = first - shared.start[digit];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t n = r * threads + threadIdx.x;
        const uint2 key = shared.sorted[n];
        const uint32_t index = shared.offset[digit_of(key.x, shift)] + n;
        store_at(index / config::keys, &shared.key[index % config::keys], key);
    }
}

/* Replaces the order of each key by the index of its packed sequence, for the passes that
 * follow. */
template <class config>
__device__ static void sort_by_sequence(select_memory<config> &shared, const cluster_work &work,
                                        const select_call &call) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint2 *const own = &shared.key[own_index<config>(work, r)];
        own->x = sequence_of(call, own->y);
    }
}

/* Ascending and stable, which decides ties: of equal scores the later key has the higher rank.
 * Returns positions in registers, by rank, and clears the memory of the keys for the allowances. */
template <class config>
__device__ static void sort_keys(select_memory<config> &shared, const cluster_work &work,
                                 const select_segment &segment, const select_call &call,
                                 uint32_t (&position)[config::items]) {
    const int order_digits = key_bits / digit_bits;
    const int passes = order_digits + (config::packed ? call.index_digits : 0);

#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r);
        shared.key[index] =
            load_key<config::packed>(call, segment, work.block * config::keys + index);
    }
    wait_blocks(work); // every block has begun, so other blocks can write to its shared memory
    for (int pass = 0; pass < passes; pass++) {
        const int shift = pass % order_digits * digit_bits;
        if (config::packed && pass == order_digits)
            sort_by_sequence(shared, work, call);
        sort_block(shared, work, shift);
        sync_blocks(work);
        send_keys(shared, work, shift);
        sync_blocks(work);
    }
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint2 *const own = &shared.key[own_index<config>(work, r)];
        position[r] = own->y;
        *own = make_uint2(0, 0);
    }
}
