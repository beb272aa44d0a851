/* The rules of a selection (rules.cuh), on any device from compute capability 8.0. */
#include "core/integers.h"
#include "cuda/select/rules.cuh"

enum {
    number_threads = 1024,
    number_warps = number_threads / warp_lanes,
    number_items = 8,
    number_tile = number_threads * number_items, // keys of a block
    move_threads = 256,
};

/* ---- the valid keys of a sequence ---- */

/* The keys of a tile that a thread has: bit r of `valid` is set if key first + r * warp_lanes is
 * valid. The keys of a warp are consecutive. */
struct tile_keys {
    uint32_t first, valid;
};

__device__ static tile_keys load_tile(const uint8_t *valid, uint32_t tile, uint32_t kv_len) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    tile_keys keys = {tile * number_tile + warp * warp_lanes * number_items + lane, 0};
#pragma unroll
    for (int r = 0; r < number_items; r++) {
        const uint32_t j = keys.first + r * warp_lanes;
        keys.valid |= (uint32_t)(j < kv_len && valid[j] != 0) << r;
    }
    return keys;
}

/* The number of valid keys in the lower warps of the tile; *total: in all its warps. */
__device__ static uint32_t count_lower(const tile_keys &keys, uint32_t *total) {
    __shared__ uint32_t scratch[number_warps];
    const uint32_t count = __reduce_add_sync(all_lanes, __popc(keys.valid));
    return sum_lower_warps<number_warps>(scratch, count, total);
}

/* Each block writes sink_end of one sequence: it reads tiles until it has found all sinks. */
static __global__ void __launch_bounds__(number_threads)
    find_sinks(const select_call call, uint32_t *sink_end) {
    const uint8_t *const valid = call.valid + blockIdx.x * call.valid_batch;
    uint32_t found = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (uint32_t tile = 0; tile * number_tile < call.kv_len && found < call.sinks; tile++) {
        const tile_keys keys = load_tile(valid, tile, call.kv_len);
        uint32_t total, next = found + count_lower(keys, &total);
#pragma unroll
        for (int r = 0; r < number_items; r++) {
            const bool is_valid = (keys.valid >> r & 1) != 0;
            const uint32_t number = number_flag(is_valid, &next);
            if (is_valid && number + 1 == call.sinks)
                sink_end[blockIdx.x] = keys.first + r * warp_lanes + 1;
        }
        found += total;
    }
    if (threadIdx.x == 0 && found < call.sinks)
        sink_end[blockIdx.x] = call.kv_len;
}

static __global__ void __launch_bounds__(number_threads)
    count_valid(const select_call call, const rules_space rules) {
    const uint32_t b = blockIdx.x / rules.tiles, tile = blockIdx.x % rules.tiles;
    uint32_t total;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    count_lower(load_tile(call.valid + b * call.valid_batch, tile, end_of_sequences(call)), &total);
    if (threadIdx.x == 0)
        rules.tile_count[blockIdx.x] = total;
}

static __global__ void __launch_bounds__(number_threads)
    number_keys(const select_call call, const rules_space rules) {
    __shared__ uint32_t scratch[number_warps];
    const uint32_t b = blockIdx.x / rules.tiles, tile = blockIdx.x % rules.tiles;
    const size_t sequence = (size_t)b * call.kv_len;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const tile_keys keys =
        load_tile(call.valid + b * call.valid_batch, tile, end_of_sequences(call));
    uint32_t sum = 0, before, total;
    for (uint32_t lower = threadIdx.x; lower < tile; lower += number_threads)
        sum += rules.tile_count[b * rules.tiles + lower];
    sum_lower_warps<number_warps>(scratch, __reduce_add_sync(all_lanes, sum), &before);
    uint32_t next = before + count_lower(keys, &total);
    if (threadIdx.x == 0 && tile + 1 == rules.tiles)
        rules.count[b] = before + total;
#pragma unroll
    for (int r = 0; r < number_items; r++) {
        const uint32_t j = keys.first + r * warp_lanes;
        const bool is_valid = (keys.valid >> r & 1) != 0;
        const uint32_t number = number_flag(is_valid, &next);
        if (is_valid || (call.ranges != NULL && j < call.kv_len))
            rules.number[sequence + j] = number;
        if (is_valid)
            rules.position[sequence + number] = j;
    }
}

/* ---- the rule `recent` ---- */

/* The numbers of a sequence's valid keys. NULL: a key's number is its position. */
struct key_numbers {
    const uint32_t *number, *position;
    uint32_t count;
};

__device__ static key_numbers find_numbers(const select_call &call, const rules_space &rules,
                                           int64_t b) {
    if (rules.number == NULL)
        return {NULL, NULL, call.kv_len};
    return {rules.number + b * call.kv_len, rules.position + b * call.kv_len, rules.count[b]};
}

__device__ static uint32_t number_of(const key_numbers &keys, uint32_t position) {
    return keys.number != NULL ? keys.number[position] : position;
}

__device__ static uint32_t position_of(const key_numbers &keys, uint32_t number) {
    return keys.position != NULL ? keys.position[number] : number;
}

/* The number of the first valid key at or after the end of a sequence. */
__device__ static uint32_t number_at_end(const select_call &call, const key_numbers &keys,
                                         uint32_t end) {
    return end < call.kv_len ? number_of(keys, end) : keys.count;
}

/* A key that leaves the selection by score at position by_score leaves recent valid keys later. */
struct moved_key {
    uint32_t number, arriving; // its number, and the number of the key that arrives as it leaves
    bool leaves;               // before its sequence ends
};

/* Moves the expiry by_score of key j. The expiry of a key that is not valid stays. */
__device__ static moved_key move_expiry(const select_call &call, const rules_space &rules,
                                        uint32_t segment, uint32_t j, uint32_t by_score) {
    const select_segment here = segment_of(call, segment);
    const uint32_t end = call.ranges != NULL ? (uint32_t)call.ranges[j].y : call.kv_len;
    if ((here.valid != NULL && here.valid[j] == 0) || j >= end) {
        if (here.slot != NULL)
            here.slot[j] = -1;
        return {};
    }
    if (by_score == end)
        return {};
    const key_numbers keys = find_numbers(call, rules, segment / call.kv_heads);
    const uint32_t arriving = number_of(keys, by_score) + call.recent;
    const bool leaves = arriving < number_at_end(call, keys, end);
    here.expiry[j] = (int32_t)(leaves ? position_of(keys, arriving) : end);
    return {number_of(keys, j), arriving, leaves};
}

/* Each thread takes a key. */
static __global__ void __launch_bounds__(move_threads)
    move_expiries(const select_call call, const rules_space rules, uint32_t segments,
                  uint32_t *parent) {
    const int64_t segment = head_of_block();
    const uint32_t j = blockIdx.x * move_threads + threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (j >= call.kv_len || segment >= segments)
        return;
    const select_segment here = segment_of(call, (uint32_t)segment);
    const moved_key key = move_expiry(call, rules, (uint32_t)segment, j, (uint32_t)here.expiry[j]);
    if (key.leaves && here.slot != NULL)
        parent[segment * call.kv_len + key.arriving] = key.number;
}

/* ---- the rule `gap` ---- */

/* The order of a score, with the first position of its sequence in the upper half. The greater of
 * two is in the later sequence or, in one sequence, has the better key. No key has order 0. */
typedef uint64_t placed_order;

__device__ static placed_order greater(placed_order x, placed_order y) { return x > y ? x : y; }

/* The placed order of key j, or of no key if j is not valid or past the end. */
__device__ static placed_order placed_order_of(const select_call &call,
                                               const select_segment &segment, uint32_t j) {
    if (j >= call.kv_len)
        return 0;
    const uint32_t first = call.ranges != NULL ? (uint32_t)call.ranges[j].x : 0;
    const bool is_valid = segment.valid == NULL || segment.valid[j] != 0;
    return (placed_order)first << 32 | (is_valid ? order_of(segment.score[j]) : order_none);
}

/* The score of an order; -inf for NaN and for no key. */
__device__ static float score_of(placed_order placed) {
    return __uint_as_float(score_bits_of_order((uint32_t)placed));
}

__device__ static placed_order raise_by_lanes(placed_order own) {
    const uint32_t lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (uint32_t step = 1; step < warp_lanes; step *= 2) {
        const placed_order lower = __shfl_up_sync(all_lanes, own, step);
        own = lane >= step ? greater(own, lower) : own;
    }
    return own;
}

/* The greatest value in a thread block, and in its lower warps. */
struct block_best {
    placed_order lower, all;
};

__device__ static block_best best_of_warps(placed_order of_warp) {
    __shared__ placed_order scratch[number_warps];
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    block_best best = {0, 0};
    __syncthreads(); // every thread has read the values of the previous call
    if (lane == warp_lanes - 1)
        scratch[warp] = of_warp;
    __syncthreads();
    for (uint32_t w = 0; w < number_warps; w++) {
        best.lower = w < warp ? greater(best.lower, scratch[w]) : best.lower;
        best.all = greater(best.all, scratch[w]);
    }
    return best;
}

/* The best up to each key of a tile, without lower warps and tiles. The keys of a warp are
 * consecutive, as in load_tile(). */
__device__ static void raise_tile(const select_call &call, const select_segment &segment,
                                  uint32_t first, placed_order (&best)[number_items]) {
    placed_order before = 0;
#pragma unroll
    for (int r = 0; r < number_items; r++) {
        best[r] = placed_order_of(call, segment, first + r * warp_lanes);
        best[r] = greater(raise_by_lanes(best[r]), before);
        before = __shfl_sync(all_lanes, best[r], warp_lanes - 1);
    }
}

__device__ static uint32_t first_key_of_lane(uint32_t tile) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    return tile * number_tile + warp * warp_lanes * number_items + lane;
}

static __global__ void __launch_bounds__(number_threads)
    find_tile_best(const select_call call, const rules_space rules) {
    const uint32_t segment = blockIdx.x / rules.best_tiles, tile = blockIdx.x % rules.best_tiles;
    placed_order best[number_items];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    raise_tile(call, segment_of(call, segment), first_key_of_lane(tile), best);
    const block_best of_tile = best_of_warps(best[number_items - 1]);
    if (threadIdx.x == 0)
        rules.tile_best[blockIdx.x] = of_tile.all;
}

static __global__ void __launch_bounds__(number_threads)
    find_best(const select_call call, const rules_space rules) {
    const uint32_t segment = blockIdx.x / rules.best_tiles, tile = blockIdx.x % rules.best_tiles;
    const uint32_t first = first_key_of_lane(tile);
    placed_order best[number_items], before = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (uint32_t lower = threadIdx.x; lower < tile; lower += number_threads)
        before = greater(before, rules.tile_best[segment * rules.best_tiles + lower]);
    before = best_of_warps(raise_by_lanes(before)).all;
    raise_tile(call, segment_of(call, segment), first, best);
    before = greater(before, best_of_warps(best[number_items - 1]).lower);
#pragma unroll
    for (int r = 0; r < number_items; r++)
        if (first + r * warp_lanes < call.kv_len)
            rules.best[(size_t)segment * call.kv_len + first + r * warp_lanes] =
                score_of(greater(best[r], before));
}

/* The first position at which valid key j is not among the `recent` newest, or `end`. */
__device__ static uint32_t end_of_recent(const select_call &call, const key_numbers &keys,
                                         uint32_t j, uint32_t end, uint32_t recent) {
    if (recent == 0)
        return j;
    const uint32_t arriving = number_of(keys, j) + recent;
    return arriving < number_at_end(call, keys, end) ? position_of(keys, arriving) : end;
}

/* Each thread takes a key. `recent` is at most kv_len. */
static __global__ void __launch_bounds__(move_threads)
    keep_near_best(const select_call call, const rules_space rules, uint32_t segments,
                   uint32_t recent, double gap) {
    const int64_t segment = head_of_block();
    const uint32_t j = blockIdx.x * move_threads + threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (j >= call.kv_len || segment >= segments)
        return;
    const select_segment here = segment_of(call, (uint32_t)segment);
    const uint32_t expiry = (uint32_t)here.expiry[j];
    if (expiry <= j || is_sink(call, here, j))
        return;
    const uint32_t end = call.ranges != NULL ? (uint32_t)call.ranges[j].y : call.kv_len;
    const key_numbers keys = find_numbers(call, rules, segment / call.kv_heads);
    const float *const best = rules.best + segment * call.kv_len;
    uint32_t first = end_of_recent(call, keys, j, end, recent), last = expiry;
    while (first < last) { // the first position with a score that is too low is in between
        const uint32_t middle = first + (last - first) / 2;
        if (falls_below((double)here.score[j], (double)best[middle], gap))
            last = middle;
        else
            first = middle + 1;
    }
    if (last == expiry)
        return;
    here.expiry[j] = (int32_t)last;
    if (last == j && here.slot != NULL)
        here.slot[j] = -1;
}

/* ---- slots handed down ---- */

enum {
    chain_threads = 1024,
    chain_items = 8,
    chain_keys = chain_threads * chain_items, // keys whose chains one block follows itself
};

/* The work of a block: chain_keys consecutive keys of one segment. */
struct chain_work {
    uint32_t segment, first, end; // first, end: numbers of its keys
    size_t keys, shared;          // offset of the segment in chain_space, and in `position`
};

__device__ static chain_work find_work(const select_call &call, const slot_chains &chains) {
    chain_work work;
    work.segment = blockIdx.x % chains.segments; // the first keys of all segments come first
    work.first = blockIdx.x / chains.segments * chain_keys;
    const uint32_t sharers = work.segment / chains.sharing;
    const uint32_t count = chains.count != NULL ? chains.count[sharers] : end_of_sequences(call);
    work.end = min(work.first + chain_keys, count);
    work.keys = (size_t)work.segment * call.kv_len;
    work.shared = (size_t)sharers * call.kv_len;
    return work;
}

__device__ static uint32_t number_of(const select_call &call, const slot_chains &chains,
                                     const chain_work &work, uint32_t n) {
    if (call.ranges == NULL)
        return n;
    const uint32_t j = chains.position != NULL ? chains.position[work.shared + n] : n;
    const uint32_t first = (uint32_t)call.ranges[j].x;
    return n - (chains.number != NULL ? chains.number[work.shared + first] : first);
}

struct root_memory {
    uint32_t root[chain_keys];
};

/* root: the first key of the block with the same slot. Its parent is in an earlier block or, if it
 * is the first key of its slot, is the slot itself. */
static __global__ void __launch_bounds__(chain_threads)
    find_roots(const select_call call, const slot_chains chains) {
    root_memory &shared = shared_memory<root_memory>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    uint32_t *const parent = chains.space.parent + work.keys;
    if (work.first >= work.end)
        return;
    uint32_t root[chain_items]; // entries past the end are their own roots
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t index = r * chain_threads + threadIdx.x, n = work.first + index;
        const uint32_t number = n < work.end ? number_of(call, chains, work, n) : 0;
        if (number < chains.slots && n < work.end)
            parent[n] = number | is_slot;
        const bool follows = number >= chains.slots && parent[n] >= work.first;
        shared.root[index] = root[r] = follows ? parent[n] - work.first : index;
    }
    jump_to_roots(shared.root, root, threadIdx.x, chain_threads);
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t n = work.first + r * chain_threads + threadIdx.x;
        if (n < work.end)
            chains.space.root[work.keys + n] = work.first + root[r];
    }
}

/* Moves the expiries of a segment that one block takes, and makes shared.root the parents. A thread
 * has `items` keys. */
template <int items>
__device__ static void move_in_block(const select_call &call, const slot_chains &chains,
                                     const rules_space &rules, root_memory &shared) {
    const select_segment here = segment_of(call, blockIdx.x);
    uint32_t by_score[items];
#pragma unroll
    for (int r = 0; r < items; r++) {
        const uint32_t j = r * chain_threads + threadIdx.x;
        shared.root[j] = j;
        by_score[r] = j < call.kv_len ? (uint32_t)here.expiry[j] : 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < items; r++) {
        const uint32_t j = r * chain_threads + threadIdx.x;
        const moved_key key =
            j < call.kv_len ? move_expiry(call, rules, blockIdx.x, j, by_score[0]) : moved_key{};
        if (key.leaves)
            shared.root[key.arriving] = key.number;
#pragma unroll
        for (int next = 1; next < items; next++)
            by_score[next - 1] = by_score[next];
    }
    __syncthreads();
}

/* In place of the other kernels where a segment has at most chain_keys keys: a block takes one. The
 * first key of a chain then has the slot of its own number. */
template <bool moves, int items>
static __global__ void __launch_bounds__(chain_threads)
    hand_down_in_block(const select_call call, const slot_chains chains, const rules_space rules) {
    root_memory &shared = shared_memory<root_memory>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (moves)
        move_in_block<items>(call, chains, rules, shared);
    const chain_work work = find_work(call, chains);
    const uint32_t *const parent = chains.space.parent + work.keys;
    uint32_t root[items]; // entries past the end are their own roots
#pragma unroll
    for (int r = 0; r < items; r++) {
        const uint32_t n = r * chain_threads + threadIdx.x;
        const bool follows = n < work.end && number_of(call, chains, work, n) >= chains.slots;
        root[r] = !follows ? n : moves ? shared.root[n] : parent[n];
    }
#pragma unroll
    for (int r = 0; r < items; r++)
        shared.root[r * chain_threads + threadIdx.x] = root[r];
    jump_to_roots(shared.root, root, threadIdx.x, chain_threads);
    const select_segment segment = segment_of(call, work.segment);
    for (uint32_t n = threadIdx.x; n < work.end; n += chain_threads)
        segment.slot[chains.position != NULL ? chains.position[work.shared + n] : n] =
            (int32_t)number_of(call, chains, work, shared.root[n]);
}

/* Each root follows the roots before it to its slot, all roots of a thread at once. Another thread
 * may already have moved a parent that it reads: then the parent is an earlier key of the same
 * slot, or the slot, and the path is shorter. */
static __global__ void __launch_bounds__(chain_threads)
    follow_roots(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    const uint32_t *const root = chains.space.root + work.keys;
    uint32_t *const parent = chains.space.parent + work.keys;
    uint32_t slot[chain_items];
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t n = work.first + r * chain_threads + threadIdx.x;
        const bool is_root = n < work.end && root[n] == n;
        slot[r] = is_root ? parent[n] : is_slot;
    }
    for (bool found = false; !found;) {
        uint32_t next[chain_items];
        found = true;
#pragma unroll
        for (int r = 0; r < chain_items; r++)
            next[r] = (slot[r] & is_slot) != 0 ? slot[r] : ld_relaxed_gpu(&parent[root[slot[r]]]);
#pragma unroll
        for (int r = 0; r < chain_items; r++) {
            if (next[r] != slot[r])
                st_relaxed_gpu(&parent[work.first + r * chain_threads + threadIdx.x], next[r]);
            slot[r] = next[r];
            found &= (slot[r] & is_slot) != 0;
        }
    }
}

static __global__ void __launch_bounds__(chain_threads)
    write_slots(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    const select_segment segment = segment_of(call, work.segment);
    const uint32_t *const position = chains.position;
    for (uint32_t n = work.first + threadIdx.x; n < work.end; n += chain_threads)
        segment.slot[position != NULL ? position[work.shared + n] : n] =
            (int32_t)(chains.space.parent[work.keys + chains.space.root[work.keys + n]] & ~is_slot);
}

template <bool moves>
static fdma_status launch_in_block(const fdma_problem *problem, const select_call &call,
                                   const slot_chains &chains, const rules_space &rules) {
    const bool is_short = call.kv_len <= chain_keys / 2;
    return launch("select",
                  is_short ? hand_down_in_block<moves, chain_items / 2>
                           : hand_down_in_block<moves, chain_items>,
                  {dim3(chains.segments), dim3(chain_threads), sizeof(root_memory), start_early},
                  problem, call, chains, rules);
}

fdma_status fdma_cuda_hand_down_slots(const fdma_problem *problem, const select_call &call,
                                      const slot_chains &chains) {
    const uint32_t blocks = (uint32_t)divide_up(call.kv_len, chain_keys);
    if (blocks == 1)
        return launch_in_block<false>(problem, call, chains, {});
    launch_shape shape = {dim3(chains.segments * blocks), dim3(chain_threads), sizeof(root_memory),
                          start_early};
    FDMA_TRY(launch("select", find_roots, shape, problem, call, chains));
    shape.shared_bytes = 0;
    FDMA_TRY(launch("select", follow_roots, shape, problem, call, chains));
    return launch("select", write_slots, shape, problem, call, chains);
}

/* ---- on the host ---- */

/* True if valid keys are numbered, which some rules need. */
static bool numbers_keys(const fdma_problem *problem) {
    const bool is_packed = is_present(&problem->starts);
    return keeps_recent(problem) || (problem->gap > 0 && problem->recent > 0) ||
           (is_packed && problem->sinks > 0);
}

rules_space fdma_cuda_lay_out_rules(const fdma_problem *problem, fdma_arena *arena) {
    rules_space rules = {};
    const int64_t segments = problem->batch * problem->kv_heads;
    if (problem->gap > 0) {
        rules.best_tiles = (uint32_t)divide_up(problem->kv_len, number_tile);
        rules.best = take<float>(arena, segments * problem->kv_len);
        rules.tile_best = take<uint64_t>(arena, segments * rules.best_tiles);
    }
    if (!is_present(&problem->key_valid))
        return rules;
    if (problem->sinks > 0 && !is_present(&problem->starts))
        rules.sink_end = take<uint32_t>(arena, problem->batch);
    if (!numbers_keys(problem))
        return rules;
    rules.tiles = (uint32_t)divide_up(problem->kv_len, number_tile);
    rules.number = take<uint32_t>(arena, problem->batch * problem->kv_len);
    rules.position = take<uint32_t>(arena, problem->batch * problem->kv_len);
    rules.count = take<uint32_t>(arena, problem->batch);
    rules.tile_count = take<uint32_t>(arena, problem->batch * rules.tiles);
    return rules;
}

static fdma_status number_sequences(const fdma_problem *problem, const rules_space &rules,
                                    const select_call &call) {
    const launch_shape shape = {dim3((unsigned)problem->batch * rules.tiles), dim3(number_threads),
                                0, start_early};
    FDMA_TRY(launch("select", count_valid, shape, problem, call, rules));
    return launch("select", number_keys, shape, problem, call, rules);
}

fdma_status fdma_cuda_find_sinks(const fdma_problem *problem, const rules_space &rules,
                                 select_call *call) {
    call->sink_end = rules.sink_end;
    if (call->ranges != NULL && rules.number != NULL) {
        call->number = rules.number;
        return number_sequences(problem, rules, *call);
    }
    if (rules.sink_end == NULL)
        return FDMA_OK;
    const launch_shape shape = {dim3((unsigned)problem->batch), dim3(number_threads), 0,
                                start_early};
    return launch("select", find_sinks, shape, problem, *call, rules.sink_end);
}

fdma_status fdma_cuda_keep_recent(const fdma_problem *problem, const rules_space &rules,
                                  const chain_space &chains, const select_call &by_score) {
    if (by_score.recent == 0)
        return FDMA_OK;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    select_call call = by_score;
    call.slot = numbers_of<int32_t>(&problem->slot);
    if (call.valid != NULL && call.number == NULL)
        FDMA_TRY(number_sequences(problem, rules, call));
    const slot_chains all = {
        chains,        rules.position,          rules.number, rules.count, segments,
        call.kv_heads, (uint32_t)problem->slots};
    if (call.slot.data != NULL && call.kv_len <= chain_keys)
        return launch_in_block<true>(problem, call, all, rules);
    const launch_shape shape = {grid_of(divide_up(call.kv_len, move_threads), segments),
                                dim3(move_threads), 0, start_early};
    FDMA_TRY(launch("select", move_expiries, shape, problem, call, rules, segments, chains.parent));
    if (call.slot.data == NULL)
        return FDMA_OK;
    return fdma_cuda_hand_down_slots(problem, call, all);
}

fdma_status fdma_cuda_keep_near_best(const fdma_problem *problem, const rules_space &rules,
                                     const select_call &by_score) {
    if (problem->gap == 0)
        return FDMA_OK;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    const uint32_t recent = (uint32_t)min(problem->recent, problem->kv_len);
    select_call call = by_score;
    call.slot = numbers_of<int32_t>(&problem->slot);
    if (recent > 0 && !keeps_recent(problem) && call.valid != NULL && call.number == NULL)
        FDMA_TRY(number_sequences(problem, rules, call));
    const launch_shape by_tile = {dim3(segments * rules.best_tiles), dim3(number_threads), 0,
                                  start_early};
    const launch_shape by_key = {grid_of(divide_up(call.kv_len, move_threads), segments),
                                 dim3(move_threads), 0, start_early};
    FDMA_TRY(launch("select", find_tile_best, by_tile, problem, call, rules));
    FDMA_TRY(launch("select", find_best, by_tile, problem, call, rules));
    return launch("select", keep_near_best, by_key, problem, call, rules, segments, recent,
                  problem->gap);
}
