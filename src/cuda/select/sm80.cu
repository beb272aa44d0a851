/* Selection of segments of any length, on every device of compute capability 8.0 and later: one
 * launch per step, a block of threads per partition. select.cuh names the steps. */
#include "cuda/select/rules.cuh"
#include "cuda/select/select.cuh"

/* sort_keys: radix sort of many segments of any length, one pass over memory per digit of 8 bits.
 * Ascending and stable, which decides ties: of equal scores the later key has the higher rank.
 *
 * A tile, the keys of one block, finds where its keys of a digit go without a scan over all tiles:
 * it publishes its own counts, then looks back over the tiles before it until it finds one that has
 * published a prefix sum (Merrill, Garland, "Single-pass parallel prefix scan with decoupled
 * look-back", 2016; Adinets, Merrill, "Onesweep", arXiv:2206.01784). Tiles are numbered in the
 * order in which their blocks start, so a tile only waits for blocks that already run. */

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

/* ---- which keys are ever kept ---- */

enum { few_lanes = 8 }; // most lanes for which a warp counts lane by lane

/* For each lane that wants it, the number of words `from` to `to` - 1 of a partition that are below
 * `bound`. Each lane counts for itself. Most reads are of one word for all lanes, because their
 * ranges begin, or end, near each other. */
__device__ static uint32_t count_alone(const uint32_t *word, bool wanted, uint32_t from,
                                       uint32_t to, uint32_t bound) {
    const uint32_t least_from = __reduce_min_sync(all_lanes, wanted ? from : UINT32_MAX);
    const uint32_t most_from = __reduce_max_sync(all_lanes, wanted ? from : 0);
    const uint32_t least_to = __reduce_min_sync(all_lanes, wanted ? to : UINT32_MAX);
    const uint32_t most_to = __reduce_max_sync(all_lanes, wanted ? to : 0);
    uint32_t count = 0;
    for (uint32_t n = least_from; n < min(most_from, most_to); n++)
        count += n >= from && n < to && word[n] < bound;
#pragma unroll 8
    for (uint32_t n = most_from; n < least_to; n++)
        count += word[n] < bound;
    for (uint32_t n = max(most_from, least_to); n < most_to; n++)
        count += n >= from && n < to && word[n] < bound;
    return count;
}

/* count_alone(), but if few lanes want a count, all lanes count for one after the other. */
__device__ static uint32_t count_below(const uint32_t *word, bool wanted, uint32_t from,
                                       uint32_t to, uint32_t bound) {
    const uint32_t lanes = __ballot_sync(all_lanes, wanted);
    const int own = (int)(threadIdx.x % warp_lanes);
    uint32_t count = 0;
    if (__popc(lanes) > few_lanes)
        return count_alone(word, wanted, from, to, bound);
    for (uint32_t left = lanes; left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const uint32_t end = __shfl_sync(all_lanes, to, lane);
        const uint32_t limit = __shfl_sync(all_lanes, bound, lane);
        uint32_t sum = 0;
        for (uint32_t n = __shfl_sync(all_lanes, from, lane) + own; n < end; n += warp_lanes)
            sum += word[n] < limit;
        sum = __reduce_add_sync(all_lanes, sum);
        count = lane == own ? sum : count;
    }
    return count;
}

/* The number of keys of its position partition that may outrank the key of a rank if it is to be
 * kept. All lanes of a warp call it; shared.word holds the positions of this rank partition. */
__device__ static uint32_t find_allowed(const partition_memory &shared, const select_call &call,
                                        const select_space &space, const partition_work &work,
                                        uint32_t rank) {
    const uint32_t *const threshold_rank = space.threshold_rank + work.counts + work.segment;
    const uint32_t n = rank - work.first, position = shared.word[n];
    const bool present = (position & absent) == 0;
    const uint32_t d = present ? position >> space.shift : 0;
    const uint32_t allowed = present && rank >= threshold_rank[d + 1] ? always_kept : 0;
    const bool unsure = present && allowed == 0 && rank >= threshold_rank[d];
    uint32_t higher = // keys of higher rank before position partition d
        count_below(shared.word, unsure, n + 1, 1U << space.shift, d << space.shift);
    if (!unsure)
        return allowed;
    if (d > 0 && work.partition + 1 < space.partitions)
        higher +=
            space.earlier_count[(work.counts + work.partition + 1) * space.partitions + d - 1];
    return call.window - higher;
}

/* The end of the ranks that compete in global scope: the ranks of the key's sequence. */
__device__ static uint32_t end_of_ranks(const select_call &call, uint32_t position) {
    return call.ranges != NULL ? (uint32_t)call.ranges[position].y : call.kv_len;
}

/* Writes the allowance of each key that may be kept to its position. */
static __global__ void __launch_bounds__(threads)
    decide_by_threshold(const select_call call, const select_space space) {
    partition_memory &shared = shared_memory<partition_memory>();
    const partition_work work = find_work(call, space);
    const uint32_t size = 1U << space.shift;
    for (uint32_t n = threadIdx.x; n < size; n += threads)
        shared.word[n] =
            work.first + n < call.kv_len ? space.sort.key[work.keys + work.first + n].y : absent;
    __syncthreads();
    for (uint32_t n = threadIdx.x; n < size; n += threads) {
        const uint32_t rank = work.first + n, position = shared.word[n];
        const bool best =
            (position & absent) == 0 && rank + call.window >= end_of_ranks(call, position);
        const uint32_t allowed = call.causal ? find_allowed(shared, call, space, work, rank)
                                 : best      ? always_kept
                                             : 0;
        if (allowed > 0)
            space.allowance[work.keys + position] = make_uint2(rank, allowed);
    }
}

/* True if key n of a position partition is ever kept. All lanes of a warp call it; shared.word has
 * the ranks of the partition's keys. */
__device__ static bool is_kept(const partition_memory &shared, uint32_t n, uint32_t allowed,
                               uint32_t size) {
    const bool keeps = allowed >= size, unsure = allowed > 0 && !keeps;
    const uint32_t lower = count_below(shared.word, unsure, 0, n, shared.word[n] + 1);
    return keeps || (unsure && n - lower < allowed);
}

/* Counts a warp's kept keys by rank partition, which is the same for most of them. */
__device__ static void count_by_rank(uint32_t *count, bool keeps, uint32_t partition) {
    const uint32_t lanes = __ballot_sync(all_lanes, keeps);
    if (lanes == 0)
        return;
    const uint32_t first = __shfl_sync(all_lanes, partition, __ffs(lanes) - 1);
    const uint32_t same = __ballot_sync(all_lanes, keeps && partition == first);
    if (threadIdx.x % warp_lanes == 0)
        atomicAdd(&count[first], __popc(same));
    if (keeps && partition != first)
        atomicAdd(&count[partition], 1);
}

/* Replaces `allowed` by 1 if the key is kept, otherwise by 0. */
static __global__ void __launch_bounds__(threads)
    decide_by_count(const select_call call, const select_space space) {
    partition_memory &shared = shared_memory<partition_memory>();
    const partition_work work = find_work(call, space);
    const uint32_t size = 1U << space.shift;
    uint2 *const allowance = space.allowance + work.keys + work.first;
    uint32_t sum = 0, total;
    for (uint32_t n = threadIdx.x; n < size; n += threads)
        shared.word[n] = work.first + n < call.kv_len ? allowance[n].x : 0;
    __syncthreads();
    for (uint32_t n = threadIdx.x; n < size; n += threads) {
        const bool inside = work.first + n < call.kv_len;
        const uint32_t allowed = inside ? allowance[n].y : 0;
        const bool keeps = is_kept(shared, n, allowed, size);
        if (inside)
            allowance[n].y = keeps;
        count_by_rank(space.kept_by_rank + work.counts, keeps, shared.word[n] >> space.shift);
        sum += keeps;
    }
    sum_lower_warps<warps>(shared.scratch, __reduce_add_sync(all_lanes, sum), &total);
    if (threadIdx.x == 0)
        space.kept_by_position[work.counts + work.partition] = total;
}

/* ---- kept keys, by position and by rank ---- */

/* Writes kept_index by rank, in place of the order in `key`, and the position by kept_index. */
static __global__ void __launch_bounds__(threads)
    index_kept(const select_call call, const select_space space) {
    partition_memory &shared = shared_memory<partition_memory>();
    const partition_work work = find_work(call, space);
    const select_segment segment = segment_of(call, work.segment);
    uint32_t next =
        sum_counts(shared.scratch, space.kept_by_position + work.counts, work.partition);
    const uint32_t before = next;
    uint32_t sum = 0, total;
    const uint32_t first = work.first + work.warp * work.warp_keys;
    for (uint32_t j = first + work.lane; j < first + work.warp_keys; j += warp_lanes)
        sum += j < call.kv_len && space.allowance[work.keys + j].y != 0;
    sum = __reduce_add_sync(all_lanes, sum);
    next += sum_lower_warps<warps>(shared.scratch, sum, &total);
    if (threadIdx.x == 0 && work.partition + 1 == space.partitions)
        space.kept_total[work.segment] = before + total;
    for (uint32_t j = first + work.lane; j < first + work.warp_keys; j += warp_lanes) {
        const bool inside = j < call.kv_len;
        const uint2 allowance = inside ? space.allowance[work.keys + j] : make_uint2(0, 0);
        const bool keeps = allowance.y != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        if (!inside)
            continue;
        if (call.first_index != NULL && (uint32_t)call.ranges[j].x == j)
            segment.first_index[j] = kept_index;
        if (!keeps || !call.causal)
            write_key(segment, j, keeps ? end_of_ranks(call, j) : j,
                      keeps ? (int32_t)kept_index : -1);
        if (!keeps)
            continue;
        space.sort.key[work.keys + allowance.x].x = kept_index;
        space.kept_position[work.keys + kept_index] = j;
    }
}

/* By rank: the i-th worst kept key is evicted by the key of kept_index window + i. That key takes
 * over its slot, so the evicted key becomes its parent. */
static __global__ void __launch_bounds__(threads)
    match_evictions(const select_call call, const select_space space) {
    partition_memory &shared = shared_memory<partition_memory>();
    const partition_work work = find_work(call, space);
    const select_segment segment = segment_of(call, work.segment);
    const uint2 *const key = space.sort.key + work.keys;
    uint32_t next = sum_counts(shared.scratch, space.kept_by_rank + work.counts, work.partition);
    uint32_t sum = 0, total;
    const uint32_t first = work.first + work.warp * work.warp_keys;
    for (uint32_t rank = first + work.lane; rank < first + work.warp_keys; rank += warp_lanes)
        sum += rank < call.kv_len && key[rank].x != UINT32_MAX;
    sum = __reduce_add_sync(all_lanes, sum);
    next += sum_lower_warps<warps>(shared.scratch, sum, &total);
    for (uint32_t rank = first + work.lane; rank < first + work.warp_keys; rank += warp_lanes) {
        const uint2 own = rank < call.kv_len ? key[rank] : make_uint2(UINT32_MAX, 0);
        const bool keeps = own.x != UINT32_MAX;
        const uint32_t evictor = number_flag(keeps, &next) + call.window;
        const bool evicted = evictor < space.kept_total[work.segment];
        if (!keeps)
            continue;
        const uint32_t expiry =
            evicted ? space.kept_position[work.keys + evictor] : end_of_ranks(call, own.y);
        segment.expiry[own.y] = (int32_t)min(expiry, end_of_ranks(call, own.y));
        if (evicted && segment.slot != NULL)
            space.chains.parent[work.keys + evictor] = own.x;
    }
}

/* In global scope index_kept numbers the kept keys of all packed sequences. This makes the slots of
 * each sequence start at 0. */
static __global__ void __launch_bounds__(threads) renumber_slots(const select_call call) {
    const int64_t head = head_of_block();
    const uint32_t j = blockIdx.x * threads + threadIdx.x;
    if (head >= call.kv_heads || j >= call.kv_len)
        return;
    const select_segment segment = segment_of(call, (uint32_t)head);
    if (segment.slot[j] >= 0)
        segment.slot[j] -= (int32_t)segment.first_index[call.ranges[j].x];
}

/* ---- the kernel of the table ---- */

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm80(problem));
    if (refused != NULL)
        return refused;
    return problem->kv_len > most_kv_len ? "more than 2^28 keys" : NULL;
}

/* The least shift with no more partitions than keys in a partition. */
static int find_shift(int64_t kv_len) {
    int shift = least_partition_shift;
    while ((int64_t)1 << 2 * shift < kv_len)
        shift++;
    return shift;
}

static select_space lay_out(const fdma_problem *problem, fdma_arena *arena) {
    select_space space = {};
    const int64_t segments = problem->batch * problem->kv_heads;
    const int64_t keys = segments * problem->kv_len;
    space.shift = find_shift(problem->kv_len);
    space.partitions = (uint32_t)divide_up(problem->kv_len, (int64_t)1 << space.shift);
    space.sort.segments = (uint32_t)segments;
    space.sort.tiles = (uint32_t)divide_up(problem->kv_len, sort_tile);
    space.sort.passes = order_passes + (int)round_up(count_index_digits(problem), 2);
    const int64_t counts = segments * space.partitions, tiles = segments * space.sort.tiles;
    space.sort.next_tile = take<uint32_t>(arena, space.sort.passes);
    space.sort.digit_total = take<uint32_t>(arena, segments * space.sort.passes * digits);
    space.sort.tile_count = take<uint32_t>(arena, tiles * space.sort.passes * digits);
    space.kept_by_rank = take<uint32_t>(arena, counts);
    space.zero_bytes = arena->used;
    space.kept_by_position = take<uint32_t>(arena, counts);
    space.kept_total = take<uint32_t>(arena, segments);
    space.threshold_rank = take<uint32_t>(arena, counts + segments);
    space.earlier_count = take<uint32_t>(arena, counts * space.partitions);
    space.kept_position = take<uint32_t>(arena, keys);
    space.sort.key = take<uint2>(arena, keys);
    space.sort.other = take<uint2>(arena, keys);
    // these share memory, because each is used after the one before it
    space.allowance = space.sort.other;
    space.chains.parent = (uint32_t *)space.sort.other;
    space.chains.root = space.chains.parent != NULL ? space.chains.parent + keys : NULL;
    space.rules = fdma_cuda_lay_out_rules(problem, arena);
    space.sequences = fdma_cuda_lay_out_sequences(problem, arena, true);
    space.first_index = take_first_index(problem, arena);
    return space;
}

static fdma_status select_by_score(const fdma_problem *problem, const select_call &call,
                                   const select_space &space) {
    const uint32_t column_blocks =
        space.sort.segments * (uint32_t)divide_up(space.partitions, warp_lanes);
    const uint32_t words = max(1U << space.shift, space.partitions);
    const launch_shape by_partition = {dim3(space.sort.segments * space.partitions), dim3(threads),
                                       sizeof(partition_memory) + sizeof(uint32_t) * words};
    const launch_shape by_column = {dim3(column_blocks), dim3(column_threads),
                                    sizeof(column_memory)};
    const size_t allowance_bytes = (size_t)space.sort.segments * call.kv_len * sizeof(uint2);
    FDMA_TRY(sort_keys(problem, call, space.sort));
    FDMA_TRY(clear("select", problem, space.allowance, allowance_bytes));
    if (call.causal) {
        FDMA_TRY(launch("select", count_earlier, by_partition, problem, call, space));
        FDMA_TRY(launch("select", find_thresholds, by_column, problem, call, space));
    }
    FDMA_TRY(launch("select", decide_by_threshold, by_partition, problem, call, space));
    FDMA_TRY(launch("select", decide_by_count, by_partition, problem, call, space));
    FDMA_TRY(launch("select", index_kept, by_partition, problem, call, space));
    return call.causal ? launch("select", match_evictions, by_partition, problem, call, space)
                       : FDMA_OK;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const select_space space = lay_out(problem, &arena);
    select_call call = describe_select(problem, space.sequences, space.first_index);
    if (space.sort.segments == 0 || call.kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sequences("select", problem, space.sequences));
    FDMA_TRY(fdma_cuda_find_sinks(problem, space.rules, &call));
    FDMA_TRY(clear("select", problem, arena.base, space.zero_bytes));
    FDMA_TRY(select_by_score(problem, call, space));
    if (call.causal && call.slot.data != NULL)
        FDMA_TRY(
            fdma_cuda_hand_down_slots(problem, call,
                                      {space.chains, space.kept_position, call.first_index,
                                       space.kept_total, space.sort.segments, 1, call.window}));
    if (!call.causal && call.first_index != NULL)
        FDMA_TRY(
            launch("select", renumber_slots,
                   {grid_of(divide_up(call.kv_len, threads), space.sort.segments), dim3(threads)},
                   problem, call));
    FDMA_TRY(fdma_cuda_keep_recent(problem, space.rules, space.chains, call));
    return fdma_cuda_keep_near_best(problem, space.rules, call);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_select, {"cuda/sm80", operation_select, fdma_missing_sm80, refuses,
                                        workspace_of<lay_out>, run, true, 0});
