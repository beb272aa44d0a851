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
#include "cuda/device/view.cuh"
#include "cuda/plan/plan.cuh"
#include "cuda/select/cluster.cuh"
#include "cuda/select/rules.cuh"

enum {
    // A wide digit is counted as a whole but found in two halves, so that a thread reads at most
    // one count of other blocks for each half.
    half_bits = 6,
    halves = 1 << half_bits,
    wide_bits = 2 * half_bits,
    wide_digits = 1 << wide_bits,
    position_bits = 28,
    ranked_bits = key_bits + position_bits, // a whole number of digits
    load_items = 8,                         // scores whose loads a thread has in flight together
    most_positions = 16,                    // most last positions that a call may have
    most_changes = most_positions - 1,
};

static_assert(ranked_bits % wide_bits == 0, "every digit is wide");
static_assert(halves * most_blocks <= threads, "a thread reads at most one count");
static_assert(wide_digits == 4 * threads, "a thread clears and adds four counts");

static constexpr ranked_key above_all = (ranked_key)1 << ranked_bits;

__device__ static uint32_t position_of(ranked_key key) {
    return (uint32_t)key & ((1U << position_bits) - 1);
}

/* A key that may leave at one of the last positions. */
struct worst_key {
    uint32_t order, position;
};

/* The orders of a block's keys follow in memory; see orders_of(). */
struct alignas(16) top_memory {
    uint32_t count[wide_digits];  // keys of this block by digit
    uint32_t upper_count[halves]; // by the upper half of the digit
    uint32_t upper_sum[halves];   // in all blocks
    uint32_t lower_sum[halves];   // in all blocks, by the lower half, among digits with the chosen
                                  // upper half
    uint32_t scratch[warps];
    uint32_t live; // live keys of this block
    uint32_t worst_count;
    worst_key worst[most_changes];  // of this block
    worst_key listed[most_changes]; // in the first block: of all blocks
};

struct last_positions {
    int32_t first, end; // end: the keys that exist
    int32_t competing;  // keys up to this one compete by score at position `first`; below 0: none
};

/* The indices of a thread. Its key r is key index + r * warp_lanes of its block. */
struct top_work {
    uint32_t block, blocks;
    uint32_t items; // keys of a thread
    uint32_t index;
};

__device__ static uint32_t *orders_of(top_memory &shared) { return (uint32_t *)(&shared + 1); }

__device__ static uint32_t position_of(const top_work &work, uint32_t r) {
    return work.block * work.items * threads + work.index + r * warp_lanes;
}

/* Key r of a thread; 0 if it does not compete. */
__device__ static ranked_key ranked_at(top_memory &shared, const top_work &work, uint32_t r) {
    const uint32_t order = orders_of(shared)[work.index + r * warp_lanes];
    return order == order_none ? 0 : ranked_key_of(order, position_of(work, r), position_bits);
}

__device__ static last_positions last_of(const select_call &call, const int32_t *kv_used, int64_t b,
                                         int32_t count) {
    const int32_t end = count_used(kv_used, b, (int32_t)call.kv_len);
    const int32_t first = max(end - count, 0);
    return {first, end, min(first - (int32_t)call.recent, end - 1)};
}

/* ---- counting ---- */

__device__ static void clear_counts(top_memory &shared) {
    __syncthreads(); // every thread has read the sums
    ((uint4 *)shared.count)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < halves)
        shared.upper_sum[threadIdx.x] = shared.lower_sum[threadIdx.x] = 0;
    __syncthreads();
}

/* Counts the digits at `shift` of the keys whose higher digits are `prefix`. */
__device__ static void count_keys(top_memory &shared, const top_work &work, ranked_key prefix,
                                  int shift) {
    clear_counts(shared);
#pragma unroll 4
    for (uint32_t r = 0; r < work.items; r++) {
        const ranked_key key = ranked_at(shared, work, r);
        if (key != 0 && key >> shift >> wide_bits == prefix)
            atomicAdd(&shared.count[key >> shift & (wide_digits - 1)], 1);
    }
}

/* Loads the orders of load_items keys of a thread, from key `first` on. No load depends on another,
 * so all of them are in flight together. */
__device__ static void load_orders(const select_call &call, const select_segment &segment,
                                   const top_work &work, const last_positions &last, uint32_t first,
                                   uint32_t (&order)[load_items]) {
    float score[load_items];
    bool competes[load_items];
#pragma unroll
    for (int i = 0; i < load_items; i++) {
        const uint32_t j = position_of(work, first + i);
        competes[i] = first + i < work.items && (int32_t)j <= last.competing;
        score[i] = competes[i] ? segment.score[j] : 0;
    }
    if (segment.valid != NULL) {
#pragma unroll
        for (int i = 0; i < load_items; i++)
            competes[i] = competes[i] && segment.valid[position_of(work, first + i)] != 0;
    }
#pragma unroll
    for (int i = 0; i < load_items; i++) {
        const bool is_sink = position_of(work, first + i) < segment.sink_end;
        const uint32_t present = is_sink ? order_sink : order_of(score[i]);
        order[i] = competes[i] ? present : order_none;
    }
}

__device__ static void load_keys(top_memory &shared, const top_work &work, const select_call &call,
                                 const select_segment &segment, const last_positions &last) {
    clear_counts(shared);
    for (uint32_t first = 0; first < work.items; first += load_items) {
        uint32_t order[load_items];
        load_orders(call, segment, work, last, first, order);
#pragma unroll
        for (int i = 0; i < load_items; i++) {
            if (first + i >= work.items)
                break;
            orders_of(shared)[work.index + (first + i) * warp_lanes] = order[i];
            if (order[i] != order_none)
                atomicAdd(&shared.count[order[i] >> (key_bits - wide_bits)], 1);
        }
    }
}

/* Sums the counts of this block's digits by their upper halves. */
__device__ static void count_upper(top_memory &shared) {
    constexpr uint32_t adders = halves / 4; // threads of a half
    __syncthreads();
    const uint4 four = ((const uint4 *)shared.count)[threadIdx.x];
    uint32_t sum = four.x + four.y + four.z + four.w;
#pragma unroll
    for (uint32_t lanes = adders / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(all_lanes, sum, lanes);
    if (threadIdx.x % adders == 0)
        shared.upper_count[threadIdx.x / adders] = sum;
}

/* Adds the counts of all blocks to sum[]; they have the same address in each block. */
__device__ static void add_blocks(const top_work &work, const uint32_t *count,
                                  uint32_t (&sum)[halves]) {
    const uint32_t block = threadIdx.x / halves, half = threadIdx.x % halves;
    if (block < work.blocks)
        atomicAdd(&sum[half], load_at(block, &count[half]));
}

/* ---- choosing ---- */

/* One half of a digit: the number of keys above it, and of keys with it. */
struct chosen_half {
    uint32_t half, above, keys;
    uint32_t all; // keys that were counted
};

/* Chooses the half of the `left`-th best key; all warps compute the same. If there are fewer keys,
 * none is chosen. A lane has two halves, descending by lane, because the best come first. */
__device__ static chosen_half choose_half(const uint32_t (&sum)[halves], uint32_t left) {
    static_assert(halves == 2 * warp_lanes, "a lane has two");
    const uint32_t lower = halves - 2 - 2 * (threadIdx.x % warp_lanes);
    const uint32_t high = sum[lower + 1], low = sum[lower];
    const uint32_t above = sum_lower_lanes(high + low);
    const bool is_high = left <= above + high, is_low = !is_high;
    const uint32_t lanes = __ballot_sync(all_lanes, left <= above + high + low);
    const uint32_t all = __shfl_sync(all_lanes, above + high + low, warp_lanes - 1);
    if (lanes == 0)
        return {0, 0, 0, all};
    const int owner = __ffs((int)lanes) - 1;
    return {__shfl_sync(all_lanes, lower + is_high, owner),
            __shfl_sync(all_lanes, above + (is_low ? high : 0), owner),
            __shfl_sync(all_lanes, is_low ? low : high, owner), all};
}

/* The best keys are those from `lowest` on, `count` of them. */
struct best_keys {
    ranked_key lowest;
    uint32_t count;
};

/* Finds the `wanted` best of all keys that compete, or all if there are fewer. Every thread of the
 * cluster gets the same result. is_counted: the highest digits have been counted. */
__device__ static best_keys find_bound(top_memory &shared, const top_work &work, uint32_t wanted,
                                       bool is_counted) {
    ranked_key prefix = 0;
    uint32_t left = wanted;
    if (wanted == 0)
        return {above_all, 0};
    for (int shift = ranked_bits - wide_bits;; shift -= wide_bits) {
        if (!is_counted)
            count_keys(shared, work, prefix, shift);
        is_counted = false;
        count_upper(shared);
        sync_cluster();
        add_blocks(work, shared.upper_count, shared.upper_sum);
        __syncthreads();
        const chosen_half upper = choose_half(shared.upper_sum, left);
        add_blocks(work, &shared.count[upper.half * halves], shared.lower_sum);
        barrier_cluster_arrive(); // this thread has read the counts of other blocks
        __syncthreads();
        const chosen_half lower = choose_half(shared.lower_sum, left - upper.above);
        barrier_cluster_wait();
        if (upper.all < left)
            return {1, upper.all};
        left -= upper.above + lower.above;
        prefix = prefix << wide_bits | upper.half << half_bits | lower.half;
        if (lower.keys == left)                                   // no two whole keys are equal
            return {max(prefix << shift, (ranked_key)1), wanted}; // 0 means no key
    }
}

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
