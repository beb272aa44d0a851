/* Selection for the last positions of a sequence alone, on compute capability 9.0 and later, by one
 * cluster of thread blocks for each segment. A call of few queries needs only the keys that are
 * live at its first position, and the keys that leave or arrive at its other positions. So the
 * kernel sorts no keys, finds no earlier evictions, and writes nothing for keys that no query
 * keeps. Instead of expiry and slot, it writes the list and the records that forward works from.
 *
 *     load_keys      the orders of the keys that compete by score at the first position
 *     find_bound     the lowest of the `wanted` best of them: radix selection, one digit at a time,
 *                    by histograms in shared memory that every block adds up for itself
 *     list_live      lists the live keys by position, and records the worst of them, as many as
 *                    there are positions after the first
 *     roll_last      one warp lets the keys after those compete, position by position, and lists
 *                    those that arrive: the worst key leaves a set that is full
 *
 * A list in ascending order does not depend on the size of the cluster, so the bits of forward's
 * sums over it do not either. */
#include "cuda/plan/plan.cuh"
#include "cuda/select/sm90/bound.cuh"

/* The output of a selection for one segment; see forward_plan. */
struct last_segment {
    int32_t *list;
    int2 *count;
    key_record *records;
    const float *bias; // NULL: 0
};

struct last_output {
    int32_t *list; // [segments][room]
    int64_t room;
    int2 *count;         // [segments]
    key_record *records; // [segments][kv_len]
    number_view<const float> bias;
};

__device__ static last_segment last_segment_of(const last_output &to, const select_call &call,
                                               uint32_t segment) {
    const int64_t b = segment / call.kv_heads, g = segment % call.kv_heads;
    return {to.list + segment * to.room, to.count + segment,
            to.records + (int64_t)segment * call.kv_len,
            to.bias.data != NULL ? to.bias.at(b, g) : NULL};
}

/* True if key r of a thread is live at the first of the last positions. */
__device__ static bool is_live(top_memory &shared, const top_work &work, const last_positions &last,
                               const best_keys &best, uint32_t r) {
    const int32_t j = (int32_t)position_of(work, r);
    const bool is_newest = j > last.competing && j <= last.first;
    return is_newest ? j < last.end : ranked_at(shared, work, r) >= best.lowest;
}

/* Of a block: where its live keys begin in the list and their number; the total of all blocks. */
struct live_keys {
    uint32_t first, count, total;
};

/* Numbers the live keys. *next: the number of the first live key of this thread's warp. */
__device__ static live_keys number_live(top_memory &shared, const top_work &work,
                                        const last_positions &last, const best_keys &best,
                                        uint32_t *next) {
    const uint32_t lane = threadIdx.x % warp_lanes;
    live_keys live;
    uint32_t own = 0;
#pragma unroll 4
    for (uint32_t r = 0; r < work.items; r++)
        own += is_live(shared, work, last, best, r);
    own = __reduce_add_sync(all_lanes, own);
    const uint32_t lower_warps = sum_lower_warps<warps>(shared.scratch, own, &live.count);
    if (threadIdx.x == 0)
        shared.live = live.count;
    sync_cluster();
    const uint32_t of_lane = lane < work.blocks ? load_at(lane, &shared.live) : 0;
    live.total = __reduce_add_sync(all_lanes, of_lane);
    live.first = __reduce_add_sync(all_lanes, lane < work.block ? of_lane : 0);
    barrier_cluster_arrive(); // this thread has read the live keys of other blocks
    *next = live.first + lower_warps;
    return live;
}

__device__ static key_record record_of(const last_segment &to, int32_t j, int32_t expiry) {
    return {expiry, to.bias == NULL ? 0 : log2_e * to.bias[j]};
}

/* Lists the live keys of the first position, with records as if none were to leave. Keys below
 * `safe` may leave. Returns the number of live keys. */
__device__ static uint32_t list_live(top_memory &shared, const top_work &work,
                                     const last_positions &last, const best_keys &best,
                                     ranked_key safe, const last_segment &to) {
    uint32_t next;
    const live_keys own = number_live(shared, work, last, best, &next);
#pragma unroll 4
    for (uint32_t r = 0; r < work.items; r++) {
        const bool live = is_live(shared, work, last, best, r);
        const uint32_t n = number_flag(live, &next);
        if (!live)
            continue;
        const ranked_key key = ranked_at(shared, work, r);
        to.list[n] = (int32_t)position_of(work, r);
        if (key != 0 && key < safe)
            shared.worst[atomicAdd(&shared.worst_count, 1)] = {(uint32_t)(key >> position_bits),
                                                               position_of(work, r)};
    }
    __syncthreads(); // the block has listed its keys
    for (uint32_t n = threadIdx.x; n < own.count; n += threads) {
        const int32_t j = to.list[own.first + n];
        to.records[j] = record_of(to, j, INT32_MAX);
    }
    __syncwarp();           // for the barrier
    barrier_cluster_wait(); // until then other blocks may read shared.live
    return own.total;
}

/* Gathers the worst live keys of all blocks. Returns their number. */
__device__ static uint32_t gather_worst(top_memory &shared, const top_work &work) {
    const uint32_t block = threadIdx.x; // lane of the first warp
    const uint32_t count = block < work.blocks ? load_at(block, &shared.worst_count) : 0;
    const uint32_t first = sum_lower_lanes(count);
    for (uint32_t n = 0; n < count; n++) {
        const worst_key *const from = &shared.worst[n];
        shared.listed[first + n] = {load_at(block, &from->order), load_at(block, &from->position)};
    }
    __syncwarp();
    return __reduce_add_sync(all_lanes, count);
}

/* A key that competes at the last positions, now or later, one per lane. Lanes below most_changes
 * have the worst live keys of the first position, the others the keys that enter at the positions
 * after it. */
struct competing_key {
    ranked_key key; // 0: none
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
        return {ranked_key_of(own.order, own.position, position_bits), true};
    }
    if (lane < most_changes || j < 0 || j >= last.end)
        return {0, false};
    const uint32_t order = load_key<false>(call, segment, (uint32_t)j).x;
    return {order == order_none ? 0 : ranked_key_of(order, (uint32_t)j, position_bits), false};
}

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

/* Lets the keys after the first of the last positions compete, by one warp. competing: the number
 * of keys that compete at the first position. Writes the expiries of keys that were live there and
 * leave. Returns the expiry of the key of this lane's position, last.first + 1 + lane, which is
 * that position itself if the key is not kept. */
__device__ static int32_t roll_last(const select_call &call, const last_positions &last,
                                    competing_key own, uint32_t competing, const last_segment &to) {
    const int32_t lane = (int32_t)threadIdx.x;
    int32_t expiry = last.first + 1 + lane;
    for (int32_t p = last.first + 1; p < last.end; p++) {
        const int32_t n = p - last.first - 1, entering = most_changes + n;
        const bool enters = __shfl_sync(all_lanes, own.key, entering) != 0;
        own.competes |= lane == entering && enters;
        competing += enters;
        if (lane == n && (call.recent > 0 || enters)) // key p is kept, at least at its own position
            expiry = INT32_MAX;
        if (competing <= call.window)
            continue;
        const bool leaves = lane == (int32_t)worst_lane(own);
        const int32_t left =
            (int32_t)__reduce_add_sync(all_lanes, leaves ? position_of(own.key) : 0);
        if (left == last.first + 1 + lane)
            expiry = p;
        if (leaves && left <= last.first)
            to.records[left].expiry = p;
        own.competes &= !leaves;
        competing--;
    }
    return expiry;
}

/* Lists the keys that arrive after the first of the last positions, by one warp, after the `live`
 * keys of the first one. */
__device__ static void list_arriving(const last_positions &last, int32_t expiry, uint32_t live,
                                     const last_segment &to) {
    const int32_t j = last.first + 1 + (int32_t)threadIdx.x;
    const bool is_kept = j < last.end && expiry > j;
    uint32_t next = live;
    const uint32_t n = number_flag(is_kept, &next);
    if (is_kept) {
        to.list[n] = j;
        to.records[j] = record_of(to, j, expiry);
    }
    if (threadIdx.x == 0)
        *to.count = make_int2((int32_t)live, (int32_t)next);
}

static __global__ void __launch_bounds__(threads)
    select_last(const select_call call, const last_output output, const int32_t *kv_used,
                int32_t positions, uint32_t blocks, uint32_t items) {
    top_memory &shared = shared_memory<top_memory>();
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const top_work work = {cluster_ctarank(), blocks, items, warp * items * warp_lanes + lane};
    const uint32_t number = blockIdx.x / blocks;
    if (threadIdx.x == 0)
        shared.worst_count = 0;
    griddepcontrol_wait(); // for the scores, the bias and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, number);
    const last_segment to = last_segment_of(output, call, number);
    const last_positions last = last_of(call, kv_used, number / call.kv_heads, positions);
    const uint32_t changes = (uint32_t)max(last.end - last.first - 1, 0);
    load_keys(shared, work, call, segment, last);
    const best_keys best = find_bound(shared, work, call.window, true);
    const uint32_t safe = best.count - min(best.count, changes);
    const ranked_key lowest_safe = changes == 0 ? 0 : find_bound(shared, work, safe, false).lowest;
    const uint32_t live = list_live(shared, work, last, best, lowest_safe, to);
    if (changes > 0)
        sync_cluster(); // all records and the worst keys are written
    if (work.block == 0 && warp == 0) {
        int32_t expiry = 0;
        if (changes > 0) {
            const uint32_t worst = gather_worst(shared, work);
            const competing_key own = load_competing(shared, worst, call, segment, last);
            expiry = roll_last(call, last, own, best.count, to);
        }
        list_arriving(last, expiry, live, to);
    }
    if (changes > 0)
        sync_cluster(); // until then the first block may read the worst keys of the others
}

/* ---- the kernel of the table ---- */

enum {
    fixed_items = 8, // an estimate: the work of a cluster beside its keys takes as long as this
                     // many keys per thread
};

/* A cluster that holds all keys; blocks 0: no cluster does. */
struct cluster_shape {
    uint32_t blocks, items;
};

/* Few keys per thread are fast as long as all clusters run at once. */
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
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm90(problem));
    if (refused != NULL)
        return refused;
    if (problem->fused.last_positions == 0 || problem->fused.last_positions > most_positions ||
        !is_present(&problem->fused.last_keys.list))
        return "a selection for all positions";
    if (problem->scope != FDMA_SCOPE_CAUSAL)
        return "global scope";
    if (problem->gap > 0 || is_present(&problem->starts))
        return "a gap or packed sequences";
    if (keeps_recent(problem) && is_present(&problem->key_valid))
        return "recent keys with padding";
    return shape_of(problem).blocks == 0 ? "more keys than a cluster of blocks holds" : NULL;
}

static last_output describe_output(const fdma_problem *problem) {
    const fdma_last_keys *const last = &problem->fused.last_keys;
    return {(int32_t *)last->list.data, last->list.shape[2], (int2 *)last->count.data,
            (key_record *)last->record.data, numbers_of<const float>(&problem->bias)};
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
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sinks(problem, rules, &call));
    if (cluster.blocks > portable_blocks)
        FDMA_TRY(
            fdma_permit_large_clusters("select", (const void *)select_last, problem->exec.device));
    const launch_shape shape = {dim3(segments * cluster.blocks), dim3(threads),
                                sizeof(top_memory) + cluster.items * threads * sizeof(uint32_t),
                                start_early, cluster.blocks};
    return launch("select", select_last, shape, problem, call, describe_output(problem),
                  (const int32_t *)problem->kv_used.data, (int32_t)problem->fused.last_positions,
                  cluster.blocks, cluster.items);
}

FDMA_CUDA_TABLE(fdma_cuda_sm90_top, {"cuda/sm90/top", operation_select, fdma_missing_sm90, refuses,
                                     workspace_of<lay_out>, run, true, trait_writes_last_keys});
