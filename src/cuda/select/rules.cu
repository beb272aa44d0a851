/* The rules of a selection (rules.cuh), on any device from compute capability 8.0. */
#include "cuda/select/rules.cuh"

enum {
    number_threads = 1024,
    number_warps = number_threads / warp_lanes,
    number_items = 8,
    number_tile = number_threads * number_items, // keys of a block
    move_threads = 256,
};

/* ---- the valid keys of a sequence ---- */

/* What a thread has of a tile: bit r of `valid` says whether key first + r * warp_lanes is valid.
 * The keys of a warp are consecutive. */
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

/* How many keys of the tile's lower warps are valid; *total: how many of all its warps. */
__device__ static uint32_t count_lower(const tile_keys &keys, uint32_t *total) {
    __shared__ uint32_t scratch[number_warps];
    const uint32_t count = __reduce_add_sync(all_lanes, __popc(keys.valid));
    return sum_lower_warps<number_warps>(scratch, count, total);
}

/* Each block writes sink_end of one sequence: it goes through tiles until it has met all sinks. */
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

/* The number of the first valid key from the end of a sequence on. */
__device__ static uint32_t number_at_end(const select_call &call, const key_numbers &keys,
                                         uint32_t end) {
    return end < call.kv_len ? number_of(keys, end) : keys.count;
}

/* Each thread moves the expiry of one key. That of a key that is not valid stays. */
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
    const uint32_t end = call.ranges != NULL ? (uint32_t)call.ranges[j].y : call.kv_len;
    if ((here.valid != NULL && here.valid[j] == 0) || j >= end) {
        if (here.slot != NULL)
            here.slot[j] = -1;
        return;
    }
    const uint32_t by_score = (uint32_t)here.expiry[j];
    if (by_score == end)
        return;
    const key_numbers keys = find_numbers(call, rules, segment / call.kv_heads);
    const uint32_t arriving = number_of(keys, by_score) + call.recent;
    const bool leaves = arriving < number_at_end(call, keys, end);
    here.expiry[j] = (int32_t)(leaves ? position_of(keys, arriving) : end);
    if (leaves && here.slot != NULL)
        parent[segment * call.kv_len + arriving] = number_of(keys, j);
}

/* ---- on the host ---- */

rules_space fdma_cuda_lay_out_rules(const fdma_problem *problem, fdma_arena *arena) {
    rules_space rules = {};
    if (!is_present(&problem->key_valid))
        return rules;
    const bool is_packed = is_present(&problem->starts);
    if (problem->sinks > 0 && !is_packed)
        rules.sink_end = take<uint32_t>(arena, problem->batch);
    if (!keeps_recent(problem) && !(is_packed && problem->sinks > 0))
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
    const launch_shape shape = {grid_of(divide_up(call.kv_len, move_threads), segments),
                                dim3(move_threads), 0, start_early};
    FDMA_TRY(launch("select", move_expiries, shape, problem, call, rules, segments, chains.parent));
    if (call.slot.data == NULL)
        return FDMA_OK;
    const slot_chains all = {
        chains,        rules.position,          rules.number, rules.count, segments,
        call.kv_heads, (uint32_t)problem->slots};
    return fdma_cuda_hand_down_slots(problem, call, all);
}
