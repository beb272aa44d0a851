/* sort_keys: radix sort of many segments of any length, one pass over memory per digit of 8 bits.
 * Ascending and stable, which decides ties: of equal scores the later key has the higher rank.
 *
 * A tile, the keys of one block, finds where its keys of a digit go without a scan over all tiles:
 * it publishes its own counts, then looks back over the tiles before it until it finds one that has
 * published a prefix sum (Merrill, Garland, "Single-pass parallel prefix scan with decoupled
 * look-back", 2016; Adinets, Merrill, "Onesweep", arXiv:2206.01784). Tiles are numbered in the
 * order in which their blocks start, so a tile only waits for blocks that already run. */
#pragma once

#include "cuda/select/select.cuh"

enum {
    sort_threads = 512,
    sort_warps = sort_threads / warp_lanes,
    sort_items = 8, // keys of a thread
    sort_tile = sort_threads * sort_items,
    order_passes = key_bits / digit_bits,
    most_passes = 2 * order_passes, // including those that sort by the index of a sequence
};

/* The flags of a published word. 0: nothing yet; own_count: the count of its tile; sum_count: the
 * sum over its tile and all tiles before it. */
enum : uint32_t { own_count = 1U << 30, sum_count = 1U << 31, count_bits = own_count - 1 };

struct sort_space {
    uint2 *key, *other;    // [segments][kv_len]: {order, position}. The result is in `key`, by
                           // rank, with UINT32_MAX in place of the orders
    uint32_t *digit_total; // [segments][passes][digits]; zero at first, like the next two
    uint32_t *tile_count;  // [passes][segments][tiles][digits]
    uint32_t *next_tile;   // [passes]
    uint32_t segments, tiles;
    int passes; // even, so that the last pass writes to `key`
};

struct sort_memory {
    uint2 key[sort_tile];
    uint32_t digit_count[sort_warps][digits];
    uint32_t start[digits];  // index of a digit's first key in the sorted tile
    uint32_t offset[digits]; // from an index in the sorted tile to one in the segment
    uint32_t scratch[sort_warps];
    uint32_t tile;
};

struct total_memory {
    uint32_t count[most_passes][digits];
};

/* The lowest bit of the digit of a pass: of the order, then of the index of the sequence. */
__device__ static int shift_of(int pass) { return pass % order_passes * digit_bits; }

__device__ static uint2 load_sorted(const select_call &call, const select_segment &segment,
                                    uint32_t j) {
    return call.ranges != NULL ? load_key<true>(call, segment, j)
                               : load_key<false>(call, segment, j);
}

static __global__ void __launch_bounds__(sort_threads)
    count_totals(const select_call call, const sort_space space) {
    total_memory &shared = shared_memory<total_memory>();
    const uint32_t segment = blockIdx.x / space.tiles, tile = blockIdx.x % space.tiles;
    const select_segment here = segment_of(call, segment);
    uint32_t *const count = &shared.count[0][0];
    for (uint32_t n = threadIdx.x; n < most_passes * digits; n += sort_threads)
        count[n] = 0;
    __syncthreads();
    for (int r = 0; r < sort_items; r++) {
        const uint32_t j = tile * sort_tile + r * sort_threads + threadIdx.x;
        if (j >= call.kv_len)
            break;
        const uint2 key = load_sorted(call, here, j);
        for (int pass = 0; pass < order_passes; pass++)
            atomicAdd(&shared.count[pass][digit_of(key.x, pass * digit_bits)], 1);
        for (int pass = order_passes; pass < space.passes; pass++)
            atomicAdd(&shared.count[pass][digit_of(sequence_of(call, j), shift_of(pass))], 1);
    }
    __syncthreads();
    uint32_t *const total = space.digit_total + (size_t)segment * space.passes * digits;
    for (uint32_t n = threadIdx.x; n < (uint32_t)space.passes * digits; n += sort_threads)
        if (count[n] > 0)
            atomicAdd(&total[n], count[n]);
}

/* Waits until another tile has published a word. A debug build traps after two seconds. */
__device__ static uint32_t wait_for(const uint32_t *count) {
    uint32_t seen = ld_relaxed_gpu(count);
#ifdef NDEBUG
    while (seen == 0)
        seen = ld_relaxed_gpu(count);
#else
    const long long two_seconds = 1LL << 32, begin = clock64();
    for (; seen == 0; seen = ld_relaxed_gpu(count))
        if (clock64() - begin > two_seconds)
            __trap();
#endif
    return seen;
}

/* The number of keys of this digit in the earlier tiles of the segment. own: the word where this
 * tile publishes its count; the word of the previous tile is `digits` words earlier. */
__device__ static uint32_t look_back(uint32_t *own, uint32_t count, uint32_t tile) {
    uint32_t before = 0;
    if (tile > 0)
        st_relaxed_gpu(own, count | own_count);
    const uint32_t *other = own;
    for (uint32_t t = tile; t-- > 0;) {
        other -= digits;
        const uint32_t seen = wait_for(other);
        before += seen & count_bits;
        if ((seen & sum_count) != 0)
            break;
    }
    st_relaxed_gpu(own, (before + count) | sum_count);
    return before;
}

__device__ static void find_offsets(sort_memory &shared, const sort_space &space, uint32_t segment,
                                    uint32_t tile, int pass) {
    const uint32_t digit = threadIdx.x, last = warp_lanes - 1;
    uint32_t count = 0, before = 0, total = 0, sum;
    if (digit < digits) {
        count = sum_digit(shared.digit_count, digit);
        const size_t row = ((size_t)pass * space.segments + segment) * space.tiles + tile;
        before = look_back(space.tile_count + row * digits + digit, count, tile);
        total = space.digit_total[((size_t)segment * space.passes + pass) * digits + digit];
    }
    uint32_t start = sum_lower_lanes(count), base = sum_lower_lanes(total);
    const uint32_t all_starts = __shfl_sync(all_lanes, start + count, last);
    const uint32_t all_bases = __shfl_sync(all_lanes, base + total, last);
    start += sum_lower_warps<sort_warps>(shared.scratch, all_starts, &sum);
    base += sum_lower_warps<sort_warps>(shared.scratch, all_bases, &sum);
    if (digit < digits) {
        shared.start[digit] = start;
        shared.offset[digit] = base + before - start;
    }
    __syncthreads();
}

/* Sorts by one digit. The first pass reads scores, each later one the output of the pass before
 * it. */
static __global__ void __launch_bounds__(sort_threads, 2)
    sort_by_digit(const select_call call, const sort_space space, int pass) {
    sort_memory &shared = shared_memory<sort_memory>();
    if (threadIdx.x == 0)
        shared.tile = atomicAdd(&space.next_tile[pass], 1);
    __syncthreads();
    const uint32_t segment = shared.tile / space.tiles, tile = shared.tile % space.tiles;
    const uint32_t first = tile * sort_tile, left = call.kv_len - first;
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const uint2 *const from =
        (pass % 2 ? space.other : space.key) + (size_t)segment * call.kv_len + first;
    uint2 *const to = (pass % 2 ? space.key : space.other) + (size_t)segment * call.kv_len;
    const select_segment here = segment_of(call, segment);
    const int shift = shift_of(pass);
    uint2 key[sort_items];
    uint32_t order[sort_items], before[sort_items];
#pragma unroll
    for (int r = 0; r < sort_items; r++) {
        const uint32_t index = warp * (warp_lanes * sort_items) + r * warp_lanes + lane;
        key[r] = make_uint2(UINT32_MAX, 0); // past the end: sorts after all keys of the tile
        if (index < left)
            key[r] = pass == 0 ? load_sorted(call, here, first + index) : from[index];
        if (index < left && pass == order_passes)
            key[r].x = sequence_of(call, key[r].y);
        order[r] = key[r].x;
    }
    count_digits(shared.digit_count[warp], order, shift, before);
    __syncthreads();
    find_offsets(shared, space, segment, tile, pass);
#pragma unroll
    for (int r = 0; r < sort_items; r++) {
        const uint32_t digit = digit_of(key[r].x, shift);
        shared.key[shared.start[digit] + shared.digit_count[warp][digit] + before[r]] = key[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < sort_items; r++) {
        const uint32_t n = r * sort_threads + threadIdx.x;
        const uint2 sorted = shared.key[n];
        const uint32_t index = shared.offset[digit_of(sorted.x, shift)] + n;
        if (n < left)
            to[index] = pass + 1 < space.passes ? sorted : make_uint2(UINT32_MAX, sorted.y);
    }
}

static inline fdma_status sort_keys(const fdma_problem *problem, const select_call &call,
                                    const sort_space &space) {
    launch_shape shape = {dim3(space.segments * space.tiles), dim3(sort_threads)};
    shape.shared_bytes = sizeof(total_memory);
    FDMA_TRY(launch("select", count_totals, shape, problem, call, space));
    shape.shared_bytes = sizeof(sort_memory);
    for (int pass = 0; pass < space.passes; pass++)
        FDMA_TRY(launch("select", sort_by_digit, shape, problem, call, space, pass));
    return FDMA_OK;
}
