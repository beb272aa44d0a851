/* The partitions of ranks and positions in select.cu, and its steps count_earlier and
 * find_thresholds. */
#pragma once

#include "cuda/select/rules.cuh"
#include "cuda/select/sm80/sort.cuh"

enum {
    threads = 256,
    warps = threads / warp_lanes,
    column_threads = 1024,
    column_warps = column_threads / warp_lanes,
    least_partition_shift = 8,
    most_kv_len = 1 << 28, // a partition then takes 64 KB of shared memory
};

/* The workspace. The number of partitions is about the number of keys in each, so earlier_count is
 * no larger than the keys. */
struct select_space {
    sort_space sort;
    uint2 *allowance;         // [segments][kv_len], by position: {rank, allowed}; see always_kept
    uint32_t *earlier_count;  // [segments][partitions][partitions]
    uint32_t *threshold_rank; // [segments][partitions + 1]
    uint32_t *kept_position;  // [segments][kv_len], by kept_index
    chain_space chains;       // by kept_index; with the rule `recent`, by number of the valid key
    uint32_t *kept_by_position, *kept_by_rank; // [segments][partitions]: numbers of kept keys
    uint32_t *kept_total;                      // [segments]
    uint32_t *first_index;                     // see select_call
    packed_sequences sequences;
    rules_space rules;
    uint32_t partitions;
    int shift;         // log2 of a partition's keys
    size_t zero_bytes; // size of the head of the workspace that must be zero at first
};

/* The partition of a block. Warp w handles its keys from w * warp_keys on. */
struct partition_work {
    uint32_t segment, partition, first, warp_keys, warp, lane;
    size_t keys, counts; // offsets of the segment in arrays by key, by partition
};

__device__ static partition_work find_work(const select_call &call, const select_space &space) {
    partition_work work;
    work.segment = blockIdx.x / space.partitions;
    work.partition = blockIdx.x % space.partitions;
    work.first = work.partition << space.shift;
    work.warp_keys = (1U << space.shift) / warps;
    work.warp = threadIdx.x / warp_lanes;
    work.lane = threadIdx.x % warp_lanes;
    work.keys = (size_t)work.segment * call.kv_len;
    work.counts = (size_t)work.segment * space.partitions;
    return work;
}

struct partition_memory {
    uint32_t scratch[warps];
    uint32_t word[1]; // one for each key of a partition, or for each partition
};

/* The sum of count[0] to count[n - 1], by all threads. */
__device__ static uint32_t sum_counts(uint32_t *scratch, const uint32_t *count, uint32_t n) {
    uint32_t sum = 0, total;
    for (uint32_t i = threadIdx.x; i < n; i += threads)
        sum += count[i];
    sum_lower_warps<warps>(scratch, __reduce_add_sync(all_lanes, sum), &total);
    return total;
}

/* Counts the keys of each rank partition by position. earlier_count[c][d] then counts the keys of
 * rank partition c alone. find_thresholds adds the partitions above. */
static __global__ void __launch_bounds__(threads)
    count_earlier(const select_call call, const select_space space) {
    partition_memory &shared = shared_memory<partition_memory>();
    const partition_work work = find_work(call, space);
    for (uint32_t d = threadIdx.x; d < space.partitions; d += threads)
        shared.word[d] = 0;
    __syncthreads();
    const uint32_t end = work.first + (1U << space.shift);
    for (uint32_t rank = work.first + threadIdx.x; rank < end; rank += threads) {
        const uint32_t position = rank < call.kv_len ? space.sort.key[work.keys + rank].y : absent;
        if ((position & absent) == 0)
            atomicAdd(&shared.word[position >> space.shift], 1);
    }
    __syncthreads();
    const uint32_t each = (space.partitions + threads - 1) / threads;
    const uint32_t from = threadIdx.x * each, to = min(from + each, space.partitions);
    uint32_t sum = 0, total;
    for (uint32_t d = from; d < to; d++)
        sum += shared.word[d];
    const uint32_t lower = sum_lower_lanes(sum);
    const uint32_t warp_sum = __shfl_sync(all_lanes, lower + sum, warp_lanes - 1);
    sum = lower + sum_lower_warps<warps>(shared.scratch, warp_sum, &total);
    for (uint32_t d = from; d < to; d++)
        shared.word[d] = sum += shared.word[d];
    __syncthreads();
    uint32_t *const row = space.earlier_count + (work.counts + work.partition) * space.partitions;
    for (uint32_t d = threadIdx.x; d < space.partitions; d += threads)
        row[d] = shared.word[d];
}

struct column_memory {
    uint32_t partial[column_warps][warp_lanes + 1]; // sums over a warp's rows
    // of a column: the rank partition of its threshold, and the threshold's index among the
    // partition's keys, counted from the end; 0: the sum does not reach the window
    uint32_t partition[warp_lanes], nth_last[warp_lanes];
};

/* Sums a lane's column of earlier_count over the partitions above, a range of rows per warp, and
 * records where the sum reaches the window. */
__device__ static void sum_column(column_memory &shared, const select_space &space,
                                  uint32_t *column, bool inside, uint32_t window) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const uint32_t each = (space.partitions + column_warps - 1) / column_warps;
    const uint32_t from = min(warp * each, space.partitions);
    const uint32_t to = min(from + each, space.partitions);
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t c = from; c < to; c++)
        sum += inside ? column[(size_t)c * space.partitions] : 0;
    shared.partial[warp][lane] = sum;
    if (warp == 0)
        shared.nth_last[lane] = 0;
    __syncthreads();
    sum = 0;
    for (uint32_t w = warp + 1; w < column_warps; w++)
        sum += shared.partial[w][lane];
#pragma unroll 8
    for (uint32_t c = to; c > from; c--) {
        uint32_t *const count = column + (size_t)(c - 1) * space.partitions;
        const uint32_t reached = sum + (inside ? *count : 0);
        if (sum < window && reached >= window) {
            shared.partition[lane] = c - 1;
            shared.nth_last[lane] = window - sum;
        }
        if (inside)
            *count = reached;
        sum = reached;
    }
    __syncthreads();
}

/* The rank of the n-th key from the end of a rank partition, among the keys before position `end`.
 * The lanes of a warp work together. */
__device__ static uint32_t find_rank(const uint2 *key, const select_space &space, uint32_t kv_len,
                                     uint32_t partition, uint32_t n, uint32_t end) {
    const uint32_t lane = threadIdx.x % warp_lanes, first = partition << space.shift;
    for (uint32_t from = first + (1U << space.shift); from > first;) {
        from -= warp_lanes;
        const bool before = from + lane < kv_len && key[from + lane].y < end;
        const uint32_t lanes = __ballot_sync(all_lanes, before), count = __popc(lanes);
        if (count >= n) {
            const bool found = before && (uint32_t)__popc(lanes & ~lanemask_lt()) == n;
            return from + __ffs(__ballot_sync(all_lanes, found)) - 1;
        }
        n -= count;
    }
    return 0;
}

/* A block takes 32 columns of earlier_count and finds the threshold at the end of each. */
static __global__ void __launch_bounds__(column_threads)
    find_thresholds(const select_call call, const select_space space) {
    column_memory &shared = shared_memory<column_memory>();
    const uint32_t blocks = (space.partitions + warp_lanes - 1) / warp_lanes;
    const uint32_t segment = blockIdx.x / blocks, first = blockIdx.x % blocks * warp_lanes;
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const size_t counts = (size_t)segment * space.partitions;
    uint32_t *const threshold_rank = space.threshold_rank + counts + segment;
    sum_column(shared, space, space.earlier_count + counts * space.partitions + first + lane,
               first + lane < space.partitions, call.window);
    const uint32_t d = first + warp, n = shared.nth_last[warp];
    uint32_t rank = 0;
    if (d < space.partitions && n > 0)
        rank = find_rank(space.sort.key + (size_t)segment * call.kv_len, space, call.kv_len,
                         shared.partition[warp], n, (d + 1) << space.shift);
    if (d < space.partitions && lane == 0)
        threshold_rank[d + 1] = rank;
    if (first == 0 && threadIdx.x == 0)
        threshold_rank[0] = 0;
}
