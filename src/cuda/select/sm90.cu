/* Selection in one launch, a cluster of blocks per segment, on compute capability 9.0 and later.
 * sm80.cu takes the segments that are too long for a cluster. select.cuh names the steps.
 *
 * A block owns as many ranks as positions, and each of its warps a partition of either. Data of
 * another block is written into that block's shared memory. The selection is exact, and its time
 * hardly depends on the order of the scores. */
#include "cuda/select/cluster.cuh"
#include "cuda/select/rules.cuh"

/* ---- shared memory and writes between blocks ---- */

/* items: keys of a thread; most_blocks: of a cluster; packed: sequences are packed. A partition is
 * the keys of a warp. */
template <int items_, int most_blocks_, bool packed_> struct segment_config {
    static constexpr bool packed = packed_;
    static constexpr int items = items_;
    static constexpr int most_blocks = most_blocks_;
    static constexpr int most_partitions = warps * most_blocks;
    static constexpr int lane_partitions = most_partitions / warp_lanes; // partitions that a lane
                                                                         // sums
    static constexpr int counts = most_partitions > digits ? most_partitions : digits;
    static constexpr int row_words = most_partitions + warp_lanes + 1; // odd: no bank conflicts
    static constexpr uint32_t warp_keys = warp_lanes * items;
    static constexpr uint32_t keys = threads * items; // of a block
};

template <class config> struct alignas(16) select_memory {
    union {
        uint2 key[config::keys];       // by rank: {order, position}
        uint2 allowance[config::keys]; // by position: {rank, allowed}; see always_kept
        struct {
            uint32_t parent[config::keys]; // by kept_index: kept_index of the evicted key, then the
                                           // slot with the bit is_slot
            uint32_t root[config::keys];   // the first key of the block with the same slot
        };
    };
    union {
        struct {
            uint32_t digit_count[warps][digits];
            uint2 sorted[config::keys]; // this block's keys by digit, before they are sent
        };
        // counts the keys of this block only; earlier_above counts the blocks above. column_of()
        // spreads the columns
        uint32_t earlier_count[warps][config::row_words];
        struct {
            uint32_t kept_index[config::keys];    // by rank; later the expiry
            uint32_t kept_position[config::keys]; // by kept_index
            uint32_t position[config::keys];      // by rank
        };
    };
    // keys of a digit, or before the end of a position partition: in this block, in each block
    alignas(16) uint16_t own_count[config::counts];
    alignas(16) uint16_t count[config::most_blocks][config::counts];
    uint32_t start[digits];  // index of a digit's first key in the sorted block
    uint32_t offset[digits]; // from an index in the sorted block to one in the segment
    // in units of partitions, plus 1: the partition of the threshold; 0: the set is not full
    uint32_t threshold_rank[config::most_partitions + 1];
    uint32_t own_threshold[config::most_partitions]; // [d]: threshold_rank[d + 1], if in this block
    uint32_t earlier_above[config::most_partitions]; // earlier_count of the blocks of higher ranks
    // kept keys by block of position and block of rank, in pairs of 16 bits
    uint32_t kept_by_block[config::most_blocks][config::most_blocks / 2];
    uint32_t own_kept[config::most_blocks / 2];
    uint32_t scratch[warps];
    // numbers of kept keys: in blocks of lower positions, in blocks of lower ranks, in the segment
    uint32_t kept_before, kept_below, kept_total;
};

static constexpr uint32_t never_kept = UINT32_MAX;

struct cluster_work {
    uint32_t block; // in the cluster
    uint32_t blocks, partitions;
    uint32_t warp, lane;
};

/* The barrier of a cluster makes writes visible to the whole device (MEMBAR.ALL.GPU) and
 * invalidates the L1 cache, so a cluster of one block uses the barrier of a block instead. */
__device__ static void arrive_blocks(const cluster_work &work) {
    if (work.blocks > 1)
        barrier_cluster_arrive();
}

__device__ static void wait_blocks(const cluster_work &work) {
    if (work.blocks > 1)
        barrier_cluster_wait();
    else
        __syncthreads();
}

__device__ static void sync_blocks(const cluster_work &work) {
    arrive_blocks(work);
    wait_blocks(work);
}

template <class config> __device__ static uint32_t own_index(const cluster_work &work, int r) {
    return work.warp * config::warp_keys + r * warp_lanes + work.lane;
}

/* Copies own_count to every block of the cluster, one warp per block. */
template <class config>
__device__ static void broadcast_counts(select_memory<config> &shared, const cluster_work &work,
                                        uint32_t counts) {
    constexpr uint32_t vector_counts =
        sizeof(uint4) / sizeof(uint16_t); // that a lane sends at once
    const uint32_t n = work.lane * vector_counts;
    for (uint32_t first = 0; first < counts; first += warp_lanes * vector_counts)
        if (work.warp < work.blocks && first + n < counts)
            store_at(work.warp, &shared.count[work.block][first + n],
                     *reinterpret_cast<const uint4 *>(&shared.own_count[first + n]));
}

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

/* ---- kept keys, by position and by rank ---- */

template <class config>
__device__ static uint32_t count_lower_flags(select_memory<config> &shared, uint32_t flags) {
    uint32_t total;
    return sum_lower_warps<warps>(shared.scratch, __reduce_add_sync(all_lanes, __popc(flags)),
                                  &total);
}

/* Sends to every block the number of kept keys that this block of positions has in each block of
 * ranks. */
template <class config>
__device__ static void broadcast_kept(select_memory<config> &shared, const cluster_work &work,
                                      uint32_t kept) {
    static_assert(config::items < 16, "counts of a thread have four bits");
    uint64_t counts = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        counts += (uint64_t)(kept >> r & 1)
                  << 4 * (shared.allowance[own_index<config>(work, r)].x / config::keys);
#pragma unroll
    for (uint32_t n = 0; n < config::most_blocks / 2; n++, counts >>= 8) {
        const uint32_t pair = (uint32_t)(counts & 15) | (uint32_t)(counts >> 4 & 15) << 16;
        const uint32_t sum = __reduce_add_sync(all_lanes, pair);
        if (work.lane == n && sum > 0)
            atomicAdd(&shared.own_kept[n], sum);
    }
    __syncthreads();
    const uint32_t to = threadIdx.x / (config::most_blocks / 2),
                   of = threadIdx.x % (config::most_blocks / 2);
    if (to < work.blocks)
        store_at(to, &shared.kept_by_block[work.block][of], shared.own_kept[of]);
}

/* Sums kept_by_block over the blocks of lower positions, of lower ranks, and all blocks. By one
 * warp. */
template <class config>
__device__ static void sum_kept(select_memory<config> &shared, const cluster_work &work) {
    uint32_t before = 0, below = 0, total = 0;
    for (uint32_t n = work.lane; n < work.blocks * config::most_blocks; n += warp_lanes) {
        const uint32_t by_position = n / config::most_blocks, by_rank = n % config::most_blocks;
        const uint32_t pair = shared.kept_by_block[by_position][by_rank / 2];
        const uint32_t count = by_rank % 2 != 0 ? pair >> 16 : pair & 0xffff;
        before += by_position < work.block ? count : 0;
        below += by_rank < work.block ? count : 0;
        total += count;
    }
    shared.kept_before = __reduce_add_sync(all_lanes, before);
    shared.kept_below = __reduce_add_sync(all_lanes, below);
    shared.kept_total = __reduce_add_sync(all_lanes, total);
}

/* The output of a block, in the registers of its threads. Nothing is written to global memory
 * before the last cluster barrier, which would wait for the writes. */
template <class config> struct select_result {
    uint32_t kept;                // bit r: key r by position is ever kept
    uint32_t next;                // kept_index of the first kept key of this warp, by position
    uint32_t slot[config::items]; // by kept_index
};

__device__ static void write_first_index(const cluster_work &work, const select_call &call,
                                         uint32_t j, uint32_t kept_index) {
    if (call.first_index == NULL || j >= call.kv_len || (uint32_t)call.ranges[j].x != j)
        return;
    segment_of(call, blockIdx.x / work.blocks).first_index[j] = kept_index;
}

/* The number of kept keys of its own packed sequence before the key at position j. */
__device__ static uint32_t index_in_sequence(const cluster_work &work, const select_call &call,
                                             uint32_t j, uint32_t kept_index) {
    const select_segment segment = segment_of(call, blockIdx.x / work.blocks);
    return kept_index - segment.first_index[call.ranges[j].x];
}

/* Calls decide_by_count. Sends kept_index to each kept key's rank, and its position to its
 * kept_index. */
template <class config>
__device__ static void index_kept(select_memory<config> &shared, const cluster_work &work,
                                  const select_call &call, select_result<config> &result) {
#pragma unroll
    for (int r = 0; r < config::items; r++)
        shared.kept_index[own_index<config>(work, r)] = never_kept;
    result.kept = decide_by_count(shared, work);
    result.next = count_lower_flags(shared, result.kept);
    broadcast_kept(shared, work, result.kept);
    sync_blocks(work);
    if (work.warp == 0)
        sum_kept(shared, work);
    __syncthreads();
    uint32_t next = result.next += shared.kept_before;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (result.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        if constexpr (config::packed)
            write_first_index(work, call, work.block * config::keys + own_index<config>(work, r),
                              kept_index);
        if (!keeps)
            continue;
        const uint32_t index = own_index<config>(work, r), rank = shared.allowance[index].x;
        store_at(rank / config::keys, &shared.kept_index[rank % config::keys], kept_index);
        store_at(kept_index / config::keys, &shared.kept_position[kept_index % config::keys],
                 work.block * config::keys + index);
    }
}

/* By rank: the i-th worst kept key is evicted by the key of kept_index window + i. That key takes
 * over its slot, so the evicted key becomes its parent. The expiry replaces kept_index. */
template <class config>
__device__ static void match_evictions(select_memory<config> &shared, const cluster_work &work,
                                       const select_call &call) {
    uint32_t kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        kept |= (uint32_t)(shared.kept_index[own_index<config>(work, r)] != never_kept) << r;
    uint32_t next = shared.kept_below + count_lower_flags(shared, kept);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint32_t *const own = &shared.kept_index[own_index<config>(work, r)];
        const bool keeps = (kept >> r & 1) != 0;
        const uint32_t evictor = number_flag(keeps, &next) + call.window;
        const bool evicted = keeps && evictor < shared.kept_total;
        const uint32_t block = evictor / config::keys, index = evictor % config::keys;
        if (evicted)
            store_at(block, &shared.parent[index], *own);
        uint32_t end = call.kv_len;
        if (config::packed && keeps)
            end = (uint32_t)call.ranges[shared.position[own_index<config>(work, r)]].y;
        if (keeps)
            *own = evicted ? min(load_at(block, &shared.kept_position[index]), end) : end;
    }
}

/* ---- slots ---- */

/* root: the first kept key of this block with the same slot. Its parent is in an earlier block or,
 * if it is the first key of its slot, is the slot itself. */
template <class config>
__device__ static void find_roots(select_memory<config> &shared, const cluster_work &work,
                                  const select_call &call, uint32_t (&root)[config::items]) {
    const uint32_t first = work.block * config::keys;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r), kept_index = first + index;
        const bool is_there = kept_index < shared.kept_total;
        uint32_t number = kept_index; // in its sequence
        if (config::packed && is_there)
            number = index_in_sequence(work, call, shared.kept_position[index], kept_index);
        const bool is_first = !is_there || number < call.window;
        if (is_first)
            shared.parent[index] = number | is_slot;
        const uint32_t parent = shared.parent[index];
        root[r] = parent >= first && !is_first ? parent - first : index;
        shared.root[index] = root[r];
    }
    jump_to_roots(shared.root, root, own_index<config>(work, 0), warp_lanes);
}

/* Each root follows the roots before it to its slot. Another thread may already have moved a parent
 * that it reads: then the parent is an earlier key of the same slot, or the slot, and the path is
 * shorter. */
template <class config>
__device__ static void follow_roots(select_memory<config> &shared, const cluster_work &work,
                                    const uint32_t (&root)[config::items],
                                    select_result<config> &result) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r);
        if (root[r] != index || work.block * config::keys + index >= shared.kept_total)
            continue;
        uint32_t slot = shared.parent[index];
        while ((slot & is_slot) == 0) {
            const uint32_t block = slot / config::keys;
            const uint32_t first = load_at(block, &shared.root[slot % config::keys]);
            slot = load_at(block, &shared.parent[first]);
            *(volatile uint32_t *)&shared.parent[index] = slot;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        result.slot[r] = shared.parent[root[r]] & ~is_slot;
}

/* ---- results ---- */

template <class config>
__device__ static void write_global(const cluster_work &work, const select_segment &segment,
                                    const select_call &call, const select_result<config> &result) {
    uint32_t next = result.next;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (result.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        const uint32_t j = work.block * config::keys + own_index<config>(work, r);
        uint32_t end = call.kv_len, slot = kept_index;
        if (config::packed && keeps) {
            end = (uint32_t)call.ranges[j].y;
            slot = segment.slot == NULL ? 0 : index_in_sequence(work, call, j, kept_index);
        }
        if (j < call.kv_len)
            write_key(segment, j, keeps ? end : j, keeps ? (int32_t)slot : -1);
    }
}

/* Writes the keys that are never kept by position, the expiries of the others by rank, and their
 * slots by kept_index. */
template <class config>
__device__ static void write_causal(const select_memory<config> &shared, const cluster_work &work,
                                    const select_segment &segment, const select_call &call,
                                    const select_result<config> &result) {
#pragma unroll 1 // more would not fit in registers
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = work.block * config::keys + own_index<config>(work, r);
        if (j < call.kv_len && (result.kept >> r & 1) == 0)
            write_key(segment, j, j, -1);
    }
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r), n = work.block * config::keys + index;
        if (shared.kept_index[index] != never_kept)
            segment.expiry[shared.position[index]] = (int32_t)shared.kept_index[index];
        if (segment.slot != NULL && n < shared.kept_total)
            segment.slot[shared.kept_position[index]] = (int32_t)result.slot[r];
    }
}

/* ---- the kernel ---- */

template <class config>
__device__ static void select_causal(select_memory<config> &shared, const cluster_work &work,
                                     const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    count_earlier(shared, work, position);
    find_thresholds(shared, work, call.window);
    decide_by_threshold(shared, work, position, call.window);
    sync_blocks(work);
#pragma unroll
    for (int r = 0; r < config::items; r++) // in the memory of earlier_count, to free registers
        shared.position[own_index<config>(work, r)] = position[r];
    index_kept(shared, work, call, result);
    sync_blocks(work);
    match_evictions(shared, work, call);
    sync_blocks(work);
    if (call.slot.data != NULL) {
        uint32_t root[config::items];
        find_roots(shared, work, call, root);
        sync_blocks(work);
        follow_roots(shared, work, root, result);
    }
    arrive_blocks(work);
    write_causal(shared, work, segment_of(call, opaque(blockIdx.x) / work.blocks), call, result);
    wait_blocks(work); // until then other blocks may read this block's shared memory
}

template <class config>
__device__ static void select_global(select_memory<config> &shared, const cluster_work &work,
                                     const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    sync_blocks(work); // allowances overwrite keys
    keep_best(shared, work, position, call);
    sync_blocks(work);
    index_kept(shared, work, call, result);
    if (config::packed)
        sync_blocks(work); // every block has written first_index
    arrive_blocks(work);
    write_global(work, segment_of(call, opaque(blockIdx.x) / work.blocks), call, result);
    wait_blocks(work);
}

template <class config>
static __global__ void __launch_bounds__(threads, 1)
    select_segments(const select_call call, uint32_t blocks) {
    select_memory<config> &shared = shared_memory<select_memory<config>>();
    cluster_work work;
    work.block = cluster_ctarank();
    work.blocks = blocks;
    work.partitions = work.blocks * warps;
    work.warp = threadIdx.x / warp_lanes;
    work.lane = threadIdx.x % warp_lanes;
    uint32_t position[config::items];
    arrive_blocks(work);
    if (threadIdx.x < config::most_blocks / 2)
        shared.own_kept[threadIdx.x] = 0;
    griddepcontrol_wait(); // for the scores and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, blockIdx.x / blocks);
    sort_keys(shared, work, segment, call, position);
    if (call.causal)
        select_causal(shared, work, call, position);
    else
        select_global(shared, work, call, position);
}

/* ---- the kernel of the table ---- */

enum { most_items = 11 };
enum { most_packed_items = 4 }; // with packed sequences more do not fit in registers

/* The most blocks of a cluster. With more keys per thread, fewer registers and less memory are left
 * for the counts of other blocks. */
static constexpr int most_blocks_of(int items) {
    return items <= 8 ? most_blocks : items <= 10 ? 8 : 4;
}

template <int items, bool packed = false>
using config_of = segment_config<items, most_blocks_of(items), packed>;
template <int items> static constexpr size_t memory_of = sizeof(select_memory<config_of<items>>);
static_assert(memory_of<8> < memory_of<most_items> && memory_of<10> < memory_of<most_items>,
              "refuses() asks for the memory of most_items");

template <class config>
static fdma_status run_config(const fdma_problem *problem, const select_call &call,
                              uint32_t blocks) {
    const auto kernel = select_segments<config>;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    const launch_shape shape = {dim3(segments * blocks), dim3(threads),
                                sizeof(select_memory<config>), start_early, blocks};
    if (blocks > portable_blocks)
        FDMA_TRY(fdma_permit_large_clusters("select", (const void *)kernel, problem->exec.device));
    return launch("select", kernel, shape, problem, call, blocks);
}

template <int items>
static fdma_status run_with(const fdma_problem *problem, const select_call &call, uint32_t blocks) {
    if constexpr (items <= most_packed_items)
        if (call.ranges != NULL)
            return run_config<config_of<items, true>>(problem, call, blocks);
    return run_config<config_of<items>>(problem, call, blocks);
}

typedef struct segment_plan {
    fdma_status (*run)(const fdma_problem *problem, const select_call &call,
                       uint32_t blocks); // NULL: no cluster suffices
    uint32_t blocks;
    int64_t time; // us, on an H200
} segment_plan;

/* Fewer keys per thread are faster, as long as all clusters run at once. */
static segment_plan plan_segments(const fdma_problem *problem) {
    static const struct {
        int items;
        fdma_status (*run)(const fdma_problem *problem, const select_call &call, uint32_t blocks);
    } choices[] = {{1, run_with<1>}, {2, run_with<2>},   {3, run_with<3>},
                   {4, run_with<4>}, {6, run_with<6>},   {8, run_with<8>},
                   {9, run_with<9>}, {10, run_with<10>}, {most_items, run_with<most_items>}};
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    const int64_t most = most_cluster_blocks(device);
    segment_plan best = {NULL, 0, INT64_MAX};
    for (const auto &choice : choices) {
        const int64_t wanted = divide_up(problem->kv_len, (int64_t)threads * choice.items);
        const int64_t blocks = max(wanted, (int64_t)1); // also without keys
        if (blocks > min(most, (int64_t)most_blocks_of(choice.items)))
            continue;
        if (is_present(&problem->starts) && choice.items > most_packed_items)
            continue;
        const int64_t waves =
            divide_up(problem->batch * problem->kv_heads, clusters_at_once(device, blocks));
        const int64_t time = waves * (14 + 7 * choice.items + blocks / 2);
        if (time < best.time)
            best = {choice.run, (uint32_t)blocks, time};
    }
    return best;
}

/* The time of sm80.cu, in us, on an H200. */
static int64_t sm80_time(const fdma_problem *problem) {
    enum { launches = 75, keys_per_us = 16384 };
    return launches + problem->batch * problem->kv_heads * problem->kv_len / keys_per_us;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm90(problem));
    if (refused != NULL)
        return refused;
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    if (memory_of<most_items> > (size_t)device->shared_bytes)
        return "a device with less shared memory per block than this kernel needs";
    const segment_plan plan = plan_segments(problem);
    if (plan.run == NULL)
        return "more keys than a cluster of blocks holds";
    if (problem->exec.kernel == NULL && plan.time > sm80_time(problem))
        return "so many (batch, kv head) pairs that cuda/sm80 is faster";
    return NULL;
}

/* The workspace of the rules and packed sequences; a selection by score alone needs none. */
struct select_space {
    packed_sequences sequences;
    uint32_t *first_index; // see select_call
    rules_space rules;
    chain_space chains;
};

static select_space lay_out(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t keys = problem->batch * problem->kv_heads * problem->kv_len;
    select_space space = {};
    space.sequences = fdma_cuda_lay_out_sequences(problem, arena, true);
    space.first_index = take_first_index(problem, arena);
    space.rules = fdma_cuda_lay_out_rules(problem, arena);
    if (keeps_recent(problem) && is_present(&problem->slot)) {
        space.chains.parent = take<uint32_t>(arena, keys);
        space.chains.root = take<uint32_t>(arena, keys);
    }
    return space;
}

static fdma_status run(const fdma_problem *problem) {
    const segment_plan plan = plan_segments(problem);
    fdma_arena arena = fdma_arena_of(problem);
    const select_space space = lay_out(problem, &arena);
    select_call call = describe_select(problem, space.sequences, space.first_index);
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sequences("select", problem, space.sequences));
    FDMA_TRY(fdma_cuda_find_sinks(problem, space.rules, &call));
    FDMA_TRY(plan.run(problem, call, plan.blocks));
    FDMA_TRY(fdma_cuda_keep_recent(problem, space.rules, space.chains, call));
    return fdma_cuda_keep_near_best(problem, space.rules, call);
}

FDMA_CUDA_TABLE(fdma_cuda_sm90_select, {"cuda/sm90", operation_select, fdma_missing_sm90, refuses,
                                        workspace_of<lay_out>, run, true, 0});
