/* Selection for the last positions of a sequence alone, on compute capability 9.0 and later, by one
 * cluster of thread blocks for each segment. A call of few queries needs no more: which keys are
 * live at its first position, and which of them leave, or arrive, at its other ones. So no key is
 * sorted, and no eviction before that is found.
 *
 *     load_keys      the orders of the keys that compete by score at the first position
 *     find_bound     the lowest of the `wanted` best of them: radix selection, one digit at a time,
 *                    by histograms in shared memory that every block adds up for itself
 *     write_live     numbers the live keys by position, which gives them their slots, and notes
 *                    the worst of them, as many as there are positions after the first
 *     roll_last      one warp lets the keys after those compete, position by position: the worst
 *                    key leaves a set that is full, and the key that arrives takes its slot
 *
 * A key that no query keeps at these positions has itself as expiry, as if it were never kept. So
 * expiry and slot say of these positions what they say in any other selection, but the slots are
 * not those that select.cu hands down from the beginning of the sequence. */
#include "cuda/device/used.cuh"
#include "cuda/select/rules.cuh"
#include "cuda/select/sm90/memory.cuh"

enum {
    position_bits = 24,
    ranked_bits = key_bits + position_bits,
    fixed_items = 8, // an estimate: what a cluster does beside its keys takes as long as so many of
                     // each thread
    most_positions = 16, // the last ones
    most_changes = most_positions - 1,
};

/* The order of a key, and below it its position: of two keys the greater outranks the other. 0 is
 * below every key. */
typedef uint64_t ranked_key;

static constexpr ranked_key above_all = (ranked_key)1 << ranked_bits;

__device__ static uint32_t position_of(ranked_key key) {
    return (uint32_t)key & ((1U << position_bits) - 1);
}

/* A key that may leave at one of the last positions. */
struct worst_key {
    uint32_t order, position, slot;
};

/* The orders of a block's keys follow in memory; see orders_of(). */
struct alignas(16) top_memory {
    uint32_t count[2][digits]; // keys by digit, of two digits in turn: other blocks may still read
                               // the counts of the one before
    uint32_t scratch[warps];
    uint32_t digit, above, keys; // chosen by find_bound(): the keys above it and those that have it
    uint32_t live;               // live keys of this block
    uint32_t worst_count;
    worst_key worst[most_changes];  // of this block
    worst_key listed[most_changes]; // in the first block: of all blocks
};

/* The last positions. */
struct last_positions {
    int32_t first, end; // end: the keys that exist
    int32_t competing;  // the keys up to this one compete by score at the first one; below 0: none
};

/* Where a thread stands. Its key r is key index + r * warp_lanes of its block. */
struct top_work {
    uint32_t block, blocks;
    uint32_t items; // keys of a thread
    uint32_t index;
    uint32_t turn; // counts the digits that were counted
};

__device__ static uint32_t *orders_of(top_memory &shared) { return (uint32_t *)(&shared + 1); }

/* The position of key r of a thread. */
__device__ static uint32_t position_of(const top_work &work, uint32_t r) {
    return work.block * work.items * threads + work.index + r * warp_lanes;
}

/* Key r of a thread; 0 if it does not compete. */
__device__ static ranked_key ranked_at(top_memory &shared, const top_work &work, uint32_t r) {
    const uint32_t order = orders_of(shared)[work.index + r * warp_lanes];
    return order == 0 ? 0 : (ranked_key)order << position_bits | position_of(work, r);
}

__device__ static last_positions last_of(const select_call &call, const int32_t *kv_used, int64_t b,
                                         int32_t count) {
    const int32_t end = count_used(kv_used, b, (int32_t)call.kv_len);
    const int32_t first = max(end - count, 0);
    return {first, end, first - (int32_t)call.recent};
}

__device__ static void load_keys(top_memory &shared, const top_work &work, const select_call &call,
                                 const select_segment &segment, const last_positions &last) {
#pragma unroll 4
    for (uint32_t r = 0; r < work.items; r++) {
        const uint32_t j = position_of(work, r);
        const bool competes = (int32_t)j <= last.competing;
        orders_of(shared)[work.index + r * warp_lanes] =
            competes ? load_key<false>(call, segment, j).x : 0;
    }
}

/* Counts the digits at `shift` of the keys whose higher digits are `prefix`. */
__device__ static void count_keys(top_memory &shared, const top_work &work, ranked_key prefix,
                                  int shift) {
    uint32_t *const count = shared.count[work.turn % 2];
    if (threadIdx.x < digits)
        count[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t r = 0; r < work.items; r++) {
        const ranked_key key = ranked_at(shared, work, r);
        if (key != 0 && key >> shift >> digit_bits == prefix)
            atomicAdd(&count[key >> shift & (digits - 1)], 1);
    }
}

/* Chooses the digit of the `left`-th best of the counted keys. Returns how many were counted, in
 * all blocks; if they are fewer, none is chosen. */
__device__ static uint32_t choose_digit(top_memory &shared, const top_work &work, uint32_t left) {
    const uint32_t digit = digits - 1 - threadIdx.x; // descending by thread, as the best come first
    uint32_t own = 0, all;
    if (threadIdx.x < digits) {
#pragma unroll
        for (uint32_t block = 0; block < most_blocks; block++)
            own += block < work.blocks ? load_at(block, &shared.count[work.turn % 2][digit]) : 0;
    }
    const uint32_t lower_lanes = sum_lower_lanes(own), warp = __reduce_add_sync(all_lanes, own);
    const uint32_t above = lower_lanes + sum_lower_warps<warps>(shared.scratch, warp, &all);
    if (above < left && left <= above + own) {
        shared.digit = digit;
        shared.above = above;
        shared.keys = own;
    }
    __syncthreads();
    return all;
}

/* The keys from `lowest` on are the best ones, `count` of them. */
struct best_keys {
    ranked_key lowest;
    uint32_t count;
};

/* Finds the `wanted` best of all keys that compete, or all of them if they are fewer. Every thread
 * of the cluster gets the same result. */
__device__ static best_keys find_bound(top_memory &shared, top_work &work, uint32_t wanted) {
    ranked_key prefix = 0;
    uint32_t left = wanted;
    if (wanted == 0)
        return {above_all, 0};
    for (int shift = ranked_bits - digit_bits;; shift -= digit_bits) {
        count_keys(shared, work, prefix, shift);
        sync_cluster();
        const uint32_t counted = choose_digit(shared, work, left);
        work.turn++;
        if (counted < left)
            return {1, counted};
        left -= shared.above;
        prefix = prefix << digit_bits | shared.digit;
        if (shared.keys == left) // of the whole keys no two are equal
            return {max(prefix << shift, (ranked_key)1), wanted}; // 0 is no key
    }
}

/* Whether key r of a thread is live at the first of the last positions. */
__device__ static bool is_live(top_memory &shared, const top_work &work, const last_positions &last,
                               const best_keys &best, uint32_t r) {
    const int32_t j = (int32_t)position_of(work, r);
    const bool is_newest = j > last.competing && j <= last.first;
    return is_newest ? j < last.end : ranked_at(shared, work, r) >= best.lowest;
}

/* The number of the first live key of this thread's warp; *total: the live keys of all blocks. */
__device__ static uint32_t number_warp(top_memory &shared, const top_work &work,
                                       const last_positions &last, const best_keys &best,
                                       uint32_t *total) {
    const uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t live = 0, of_block;
    for (uint32_t r = 0; r < work.items; r++)
        live += is_live(shared, work, last, best, r);
    live = __reduce_add_sync(all_lanes, live);
    const uint32_t lower_warps = sum_lower_warps<warps>(shared.scratch, live, &of_block);
    if (threadIdx.x == 0)
        shared.live = of_block;
    sync_cluster();
    const uint32_t of_lane = lane < work.blocks ? load_at(lane, &shared.live) : 0;
    *total = __reduce_add_sync(all_lanes, of_lane);
    return lower_warps + __reduce_add_sync(all_lanes, lane < work.block ? of_lane : 0);
}

/* Writes expiry and slot of the keys up to the first of the last positions, and of those that do
 * not exist, as if no key were to leave. Keys below `safe` may leave. Returns the live keys. */
__device__ static uint32_t write_live(top_memory &shared, const top_work &work,
                                      const select_call &call, const select_segment &segment,
                                      const last_positions &last, const best_keys &best,
                                      ranked_key safe) {
    uint32_t total, next = number_warp(shared, work, last, best, &total);
    for (uint32_t r = 0; r < work.items; r++) {
        const uint32_t j = position_of(work, r);
        const ranked_key key = ranked_at(shared, work, r);
        const bool live = is_live(shared, work, last, best, r);
        const uint32_t slot = number_flag(live, &next);
        const bool arrives = (int32_t)j > last.first && (int32_t)j < last.end; // see roll_last()
        if (j < call.kv_len && !arrives)
            write_key(segment, j, live ? call.kv_len : j, live ? (int32_t)slot : -1);
        if (live && key != 0 && key < safe)
            shared.worst[atomicAdd(&shared.worst_count, 1)] = {(uint32_t)(key >> position_bits), j,
                                                               slot};
    }
    return total;
}

/* Gathers the worst live keys of all blocks. Returns how many there are. */
__device__ static uint32_t list_worst(top_memory &shared, const top_work &work) {
    const uint32_t block = threadIdx.x; // a lane of the first warp
    const uint32_t count = block < work.blocks ? load_at(block, &shared.worst_count) : 0;
    const uint32_t first = sum_lower_lanes(count);
    for (uint32_t n = 0; n < count; n++) {
        const worst_key *const from = &shared.worst[n];
        shared.listed[first + n] = {load_at(block, &from->order), load_at(block, &from->position),
                                    load_at(block, &from->slot)};
    }
    __syncwarp();
    return __reduce_add_sync(all_lanes, count);
}

/* A key that competes, or will, at the last positions, one in each lane: below most_changes the
 * worst live keys of the first position, then the keys that enter at the positions after it. */
struct competing_key {
    ranked_key key; // 0: none
    uint32_t slot;
    bool competes;
};

__device__ static competing_key load_competing(const top_memory &shared, uint32_t worst,
                                               const select_call &call,
                                               const select_segment &segment,
                                               const last_positions &last) {
    const uint32_t lane = threadIdx.x;
    const int32_t j = last.competing + 1 + (int32_t)(lane - most_changes);
    if (lane < worst) {
        const worst_key own = shared.listed[lane];
        return {(ranked_key)own.order << position_bits | own.position, own.slot, true};
    }
    if (lane < most_changes || j < 0 || j >= last.end)
        return {0, 0, false};
    const uint32_t order = load_key<false>(call, segment, (uint32_t)j).x;
    // live at the first position already, as one of the newest: it has its slot
    const uint32_t slot = order != 0 && j <= last.first ? (uint32_t)segment.slot[j] : 0;
    return {order == 0 ? 0 : (ranked_key)order << position_bits | (uint32_t)j, slot, false};
}

/* The lane of the lowest key that competes. */
__device__ static uint32_t worst_lane(const competing_key &own) {
    const ranked_key mine = own.competes ? own.key : above_all;
    ranked_key lowest = mine;
#pragma unroll
    for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2) {
        const ranked_key other = __shfl_xor_sync(all_lanes, lowest, lanes);
        lowest = other < lowest ? other : lowest;
    }
    return (uint32_t)__ffs((int)__ballot_sync(all_lanes, mine == lowest)) - 1;
}

/* Writes the keys after the first of the last positions, and the expiries of those that leave, by
 * one warp. competing: how many keys compete at the first position; live: how many are live. */
__device__ static void roll_last(const select_call &call, const select_segment &segment,
                                 const last_positions &last, competing_key own, uint32_t competing,
                                 uint32_t live) {
    const uint32_t lane = threadIdx.x;
    for (int32_t p = last.first + 1; p < last.end; p++) {
        const uint32_t entering = most_changes + (uint32_t)(p - last.first - 1);
        // the key of position p, if it competes at one of the last positions
        const uint32_t arriving = entering + call.recent;
        const bool enters = __shfl_sync(all_lanes, own.key, entering) != 0;
        own.competes |= lane == entering && enters;
        competing += enters;
        const bool evicts = competing > call.window;
        const bool is_kept = call.recent > 0 || enters; // at least while it arrives
        const uint32_t leaving = worst_lane(own), slot = evicts ? 0 : live;
        const uint32_t handed = __shfl_sync(all_lanes, own.slot, leaving);
        const uint32_t taken = evicts ? handed : slot;
        live += is_kept && !evicts;
        if (lane == arriving)
            own.slot = taken;
        const bool passes = call.recent == 0 && evicts && leaving == entering;
        if (lane == 0)
            write_key(segment, (uint32_t)p, is_kept && !passes ? call.kv_len : (uint32_t)p,
                      is_kept && !passes ? (int32_t)taken : -1);
        __syncwarp(); // the key that leaves may be that of position p or of one before it
        if (evicts && lane == leaving) {
            segment.expiry[position_of(own.key)] = p;
            own.competes = false;
        }
        competing -= evicts;
        __syncwarp();
    }
}

static __global__ void __launch_bounds__(threads)
    select_last(const select_call call, const int32_t *kv_used, int32_t positions, uint32_t blocks,
                uint32_t items) {
    top_memory &shared = shared_memory<top_memory>();
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    top_work work = {cluster_ctarank(), blocks, items, warp * items * warp_lanes + lane, 0};
    const uint32_t number = blockIdx.x / blocks;
    if (threadIdx.x == 0)
        shared.worst_count = 0;
    griddepcontrol_wait(); // for the scores and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, number);
    const last_positions last = last_of(call, kv_used, number / call.kv_heads, positions);
    const uint32_t changes = (uint32_t)max(last.end - last.first - 1, 0);
    load_keys(shared, work, call, segment, last);
    const best_keys best = find_bound(shared, work, call.window);
    const uint32_t safe = best.count - min(best.count, changes);
    const ranked_key lowest_safe = changes == 0 ? 0 : find_bound(shared, work, safe).lowest;
    const uint32_t live = write_live(shared, work, call, segment, last, best, lowest_safe);
    sync_cluster();
    if (work.block == 0 && warp == 0 && changes > 0) {
        const uint32_t worst = list_worst(shared, work);
        const competing_key own = load_competing(shared, worst, call, segment, last);
        roll_last(call, segment, last, own, best.count, live);
    }
    sync_cluster(); // until then the first block may read the memory of the others
}

/* ---- the kernel of the table ---- */

/* A cluster that holds all keys; blocks 0: none does. */
struct cluster_shape {
    uint32_t blocks, items;
};

/* Few keys of a thread are fast as long as all clusters run at once. */
static cluster_shape shape_of(const fdma_problem *problem) {
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    const int64_t room = device->shared_bytes - (int64_t)sizeof(top_memory);
    const int64_t most_items = room / (int64_t)(threads * sizeof(uint32_t));
    const int64_t segments = problem->batch * problem->kv_heads;
    cluster_shape best = {0, 0};
    int64_t least = INT64_MAX;
    for (int64_t blocks = 1; blocks <= most_cluster_blocks(device); blocks *= 2) {
        const int64_t items = max(divide_up(problem->kv_len, blocks * threads), (int64_t)1);
        const int64_t waves = divide_up(segments, clusters_at_once(device, blocks));
        const int64_t time = waves * (fixed_items + items + blocks / 4);
        if (items <= most_items && time < least) {
            best = {(uint32_t)blocks, (uint32_t)items};
            least = time;
        }
    }
    return problem->kv_len >> position_bits == 0 ? best : cluster_shape{0, 0};
}

static const char *refuses(const fdma_problem *problem) {
    const bool is_padded = is_present(&problem->key_valid) || is_present(&problem->kv_used);
    const char *refused = fdma_refuses_before_sm90(problem);
    if (refused == NULL)
        refused = refuses_scores(problem);
    if (refused != NULL)
        return refused;
    if (problem->last_positions == 0 || problem->last_positions > most_positions)
        return "a selection for all positions";
    if (problem->scope != FDMA_SCOPE_CAUSAL || !is_present(&problem->slot))
        return "global scope or a selection without slots";
    if (problem->gap > 0 || is_present(&problem->starts))
        return "a gap or packed sequences";
    if (keeps_recent(problem) && is_padded)
        return "recent keys with padding or kv_used";
    return shape_of(problem).blocks == 0 ? "more keys than a cluster of blocks holds" : NULL;
}

static rules_space lay_out(const fdma_problem *problem, fdma_arena *arena) {
    return fdma_cuda_lay_out_rules(problem, arena);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const rules_space rules = lay_out(problem, &arena);
    const cluster_shape cluster = shape_of(problem);
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    select_call call = describe_select(problem, {}, NULL);
    call.slot = numbers_of<int32_t>(&problem->slot); // also with recent keys
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sinks(problem, rules, &call));
    if (cluster.blocks > portable_blocks)
        FDMA_TRY(check_cuda(
            "select",
            cudaFuncSetAttribute(select_last, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
    const launch_shape shape = {dim3(segments * cluster.blocks), dim3(threads),
                                sizeof(top_memory) + cluster.items * threads * sizeof(uint32_t),
                                start_early, cluster.blocks};
    return launch("select", select_last, shape, problem, call,
                  (const int32_t *)problem->kv_used.data, (int32_t)problem->last_positions,
                  cluster.blocks, cluster.items);
}

FDMA_CUDA_TABLE(fdma_cuda_sm90_top, {"cuda/sm90/top", operation_select, fdma_missing_sm90, refuses,
                                     workspace_of<lay_out>, run, true, false});
