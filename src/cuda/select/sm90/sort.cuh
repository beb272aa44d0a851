/* Radix sort of a segment's keys by the blocks of a cluster, four passes. */
#ifndef FDMA_CUDA_SELECT_SM90_SORT_CUH
#define FDMA_CUDA_SELECT_SM90_SORT_CUH

#include "cuda/select/sm90/memory.cuh"

/* Of each digit, the sum over the lower digits of what its thread brings. All threads call it. */
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

/* Puts this block's keys in the order of a digit, and counts them. */
template <class config>
__device__ static void sort_block(select_memory<config> &shared, const cluster_place &at,
                                  int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t order[config::items], before[config::items], sum = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        order[r] = shared.key[own_index<config>(at, r)].x;
    count_digits(shared.digit_count[at.warp], order, shift, before);
    __syncthreads();
    if (digit < digits) {
#pragma unroll
        for (int w = 0; w < warps; w++) {
            const uint32_t count = shared.digit_count[w][digit];
            shared.digit_count[w][digit] = sum;
            sum += count;
        }
        shared.own_count[digit] = (uint16_t)sum;
    }
    const uint32_t start = sum_lower_digits(shared, sum);
    if (digit < digits)
        shared.start[digit] = start;
    share_counts(shared, at, digits);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t own = digit_of(order[r], shift);
        const uint32_t n = shared.start[own] + shared.digit_count[at.warp][own] + before[r];
        shared.sorted[n] = make_uint2(order[r], shared.key[own_index<config>(at, r)].y);
    }
}

/* Sends keys from this order to their places: keys of a digit are neighbours in both, and scattered
 * words are what other blocks' memory is slow at. */
template <class config>
__device__ static void send_keys(select_memory<config> &shared, const cluster_place &at,
                                 int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t all = 0, earlier = 0;
    if (digit < digits) {
#pragma unroll
        for (uint32_t rank = 0; rank < config::most_blocks; rank++) {
            const uint32_t count = rank < at.blocks ? shared.count[rank][digit] : 0;
            earlier += rank < at.rank ? count : 0;
            all += count;
        }
    }
    const uint32_t first = sum_lower_digits(shared, all) + earlier;
    if (digit < digits)
        shared.to[digit] = first - shared.start[digit];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t n = r * threads + threadIdx.x;
        const uint2 key = shared.sorted[n];
        const uint32_t place = shared.to[digit_of(key.x, shift)] + n;
        store_at(place / config::keys, &shared.key[place % config::keys], key);
    }
}

/* Ascending and stable: of equal keys the later one is the better. Keys' positions are left in
 * registers; there are no verdicts as yet. */
template <class config>
__device__ static void sort_keys(select_memory<config> &shared, const cluster_place &at,
                                 const select_segment &segment, uint32_t kv_len,
                                 uint32_t (&position)[config::items]) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r);
        shared.key[index] = load_key(segment, at.rank * config::keys + index, kv_len);
    }
    barrier_cluster_wait(); // every block has begun: there is shared memory to write to
    for (int shift = 0; shift < key_bits; shift += digit_bits) {
        sort_block(shared, at, shift);
        sync_cluster();
        send_keys(shared, at, shift);
        sync_cluster();
    }
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint2 *const own = &shared.key[own_index<config>(at, r)];
        position[r] = own->y;
        *own = make_uint2(0, 0);
    }
}

#endif
