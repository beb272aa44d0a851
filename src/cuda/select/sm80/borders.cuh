/* Where keys of select.cu are cut: chunks of places and of positions, and the floors between which
 * a key that is kept may be. */
#ifndef FDMA_CUDA_SELECT_SM80_BORDERS_CUH
#define FDMA_CUDA_SELECT_SM80_BORDERS_CUH

#include "cuda/select/sm80/sort.cuh"

enum {
    threads = 256,
    warps = threads / warp_lanes,
    column_threads = 1024,
    column_warps = column_threads / warp_lanes,
    head_threads = 1024,
    head_items = 8,
    head_keys = head_threads * head_items, // kept keys whose slots a block follows by itself
    least_chunk_shift = 8,
    most_kv_len = 1 << 28, // a chunk then takes 64 KB of shared memory
};

struct select_space {
    sort_space sort;
    uint2 *verdict;   // [segments][kv_len], by position: {place, how many may outrank it}
    uint32_t *border; // [segments][chunks][chunks]: keys of a chunk of places, in the end of it
                      // and the later ones, that are before the end of a chunk of positions
    uint32_t *floor;  // [segments][chunks + 1]: see find_floors
    uint32_t *kept;   // [segments][kv_len], by kept number: its position
    uint32_t *parent; // [segments][kv_len], by kept number: the evicted key's, then the slot
    uint32_t *head;   // [segments][kv_len], by kept number: see find_heads
    uint32_t *by_position, *by_place; // [segments][chunks]: kept keys
    uint32_t *kept_all;               // [segments]
    uint32_t chunks;
    int shift; // log2 of a chunk's keys
};

/* A block's chunk: warp w has `share` consecutive keys of it. */
struct chunk_place {
    uint32_t segment, chunk, first, share, warp, lane;
    size_t keys, counts; // where the segment begins in arrays of keys, of chunks
};

__device__ static inline chunk_place find_chunk(const select_call &call,
                                                const select_space &space) {
    chunk_place at;
    at.segment = blockIdx.x / space.chunks;
    at.chunk = blockIdx.x % space.chunks;
    at.first = at.chunk << space.shift;
    at.share = (1U << space.shift) / warps;
    at.warp = threadIdx.x / warp_lanes;
    at.lane = threadIdx.x % warp_lanes;
    at.keys = (size_t)at.segment * call.kv_len;
    at.counts = (size_t)at.segment * space.chunks;
    return at;
}

struct chunk_memory {
    uint32_t scratch[warps];
    uint32_t word[1]; // of each key of a chunk, or of each chunk
};

/* Sum of count[0] to count[n - 1], by all threads. */
__device__ static inline uint32_t sum_counts(uint32_t *scratch, const uint32_t *count, uint32_t n) {
    uint32_t sum = 0, total;
    for (uint32_t i = threadIdx.x; i < n; i += threads)
        sum += count[i];
    sum_lower_warps<warps>(scratch, __reduce_add_sync(all_lanes, sum), &total);
    return total;
}

/* ---- borders: border d is the end of chunk d of positions ---- */

__global__ void __launch_bounds__(threads)
    count_before(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    for (uint32_t d = threadIdx.x; d < space.chunks; d += threads)
        shared.word[d] = 0;
    __syncthreads();
    const uint32_t end = at.first + (1U << space.shift);
    for (uint32_t place = at.first + threadIdx.x; place < end; place += threads) {
        const uint32_t position = place < call.kv_len ? space.sort.key[at.keys + place].y : absent;
        if (!(position & absent))
            atomicAdd(&shared.word[position >> space.shift], 1);
    }
    __syncthreads();
    const uint32_t each = (space.chunks + threads - 1) / threads;
    const uint32_t from = threadIdx.x * each, to = min(from + each, space.chunks);
    uint32_t sum = 0, total;
    for (uint32_t d = from; d < to; d++)
        sum += shared.word[d];
    const uint32_t lower = sum_lower_lanes(sum);
    const uint32_t warp_sum = __shfl_sync(all_lanes, lower + sum, warp_lanes - 1);
    sum = lower + sum_lower_warps<warps>(shared.scratch, warp_sum, &total);
    for (uint32_t d = from; d < to; d++)
        shared.word[d] = sum += shared.word[d];
    __syncthreads();
    uint32_t *const row = space.border + (at.counts + at.chunk) * space.chunks;
    for (uint32_t d = threadIdx.x; d < space.chunks; d += threads)
        row[d] = shared.word[d];
}

struct column_memory {
    uint32_t part[column_warps][warp_lanes + 1];
    uint32_t chunk[warp_lanes], sought[warp_lanes]; // where a border's floor is, from its end
};

/* Sums a lane's column over the later chunks, a slice of rows a warp; notes where it reaches the
 * window. */
__device__ static void sum_column(column_memory &shared, const select_space &space,
                                  uint32_t *column, bool inside, uint32_t window) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const uint32_t each = (space.chunks + column_warps - 1) / column_warps;
    const uint32_t from = min(warp * each, space.chunks), to = min(from + each, space.chunks);
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t c = from; c < to; c++)
        sum += inside ? column[(size_t)c * space.chunks] : 0;
    shared.part[warp][lane] = sum;
    if (warp == 0)
        shared.sought[lane] = 0;
    __syncthreads();
    sum = 0;
    for (uint32_t w = warp + 1; w < column_warps; w++)
        sum += shared.part[w][lane];
#pragma unroll 8
    for (uint32_t c = to; c > from; c--) {
        uint32_t *const count = column + (size_t)(c - 1) * space.chunks;
        const uint32_t reached = sum + (inside ? *count : 0);
        if (sum < window && reached >= window) {
            shared.chunk[lane] = c - 1;
            shared.sought[lane] = window - sum;
        }
        if (inside)
            *count = reached;
        sum = reached;
    }
    __syncthreads();
}

/* A warp finds the `sought`-th place from a chunk's end whose position is before `end`. */
__device__ static uint32_t find_place(const uint2 *key, const select_space &space, uint32_t kv_len,
                                      uint32_t chunk, uint32_t sought, uint32_t end) {
    const uint32_t lane = threadIdx.x % warp_lanes, first = chunk << space.shift;
    for (uint32_t from = first + (1U << space.shift); from > first;) {
        from -= warp_lanes;
        const bool before = from + lane < kv_len && key[from + lane].y < end;
        const uint32_t some = __ballot_sync(all_lanes, before), count = __popc(some);
        if (count >= sought) {
            const bool found = before && (uint32_t)__popc(some & ~lanemask_lt()) == sought;
            return from + __ffs(__ballot_sync(all_lanes, found)) - 1;
        }
        sought -= count;
    }
    return 0;
}

/* floor[d]: the place of the worst key that is kept when chunk d of positions begins, 0 if every
 * key is. A block takes 32 borders. */
__global__ void __launch_bounds__(column_threads)
    find_floors(const select_call call, const select_space space) {
    column_memory &shared = shared_memory<column_memory>();
    const uint32_t blocks = (space.chunks + warp_lanes - 1) / warp_lanes;
    const uint32_t segment = blockIdx.x / blocks, first = blockIdx.x % blocks * warp_lanes;
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const size_t counts = (size_t)segment * space.chunks;
    uint32_t *const floor = space.floor + counts + segment; // one more than chunks
    sum_column(shared, space, space.border + counts * space.chunks + first + lane,
               first + lane < space.chunks, call.window);
    const uint32_t d = first + warp, sought = shared.sought[warp];
    uint32_t place = 0;
    if (d < space.chunks && sought > 0)
        place = find_place(space.sort.key + (size_t)segment * call.kv_len, space, call.kv_len,
                           shared.chunk[warp], sought, (d + 1) << space.shift);
    if (d < space.chunks && lane == 0)
        floor[d + 1] = place;
    if (first == 0 && threadIdx.x == 0)
        floor[0] = 0;
}

#endif
