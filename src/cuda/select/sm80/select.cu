/* Selection of segments of any length, on every device of compute capability 8.0 and later: one
 * launch per step, a block of threads per partition. select.cuh names the steps. */
#include "cuda/select/sm80/thresholds.cuh"

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
