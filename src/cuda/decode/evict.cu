/* The first kernel of fdma_decode(): a thread block decides for one (b, g) which row each new token
 * takes. A thread has every evict_threads-th row, and token threadIdx.x. It knows the worst of its
 * keys, and for each token the block compares those of all threads. */
#include "cuda/decode/evict.cuh"

#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"

static constexpr int evict_threads = 256;
static constexpr int evict_warps = evict_threads / 32;
static_assert(evict_threads >= most_new_tokens, "every token has a thread");

/* How a key competes: by the order of its score, then by its position. The least is evicted. An
 * empty row is less than every key, and among them the first row is least. */
static constexpr int32_t empty_order = INT32_MIN, nan_order = INT32_MIN + 1;
static constexpr int32_t no_order = INT32_MAX; // of no key

/* The worst key of a thread or of a block. */
struct worst_key {
    int32_t order, position; // of an empty row: its number
    int32_t key;             // a row, or rows + a token; -1: none competes
    int32_t oldest_recent;   // the least position from `newest` on
};

struct evict_memory {
    worst_key worst[2][evict_warps];
    int32_t count[2][evict_warps];
    int32_t slot[most_new_tokens];  // the row that a token took, or -1
    int32_t taken[most_new_tokens]; // the row that it took from no other token
};

/* What a thread knows of its (b, g). */
struct evict_state {
    const float *score, *new_score;
    const int32_t *position;
    decode_stream stream;
    int32_t newest;  // keys at this position and later are recent: they do not compete
    int32_t arrived; // tokens so far
    int32_t buffer;  // of the two in shared memory
    uint64_t takers; // a bit for each token that has taken a row of this thread
    bool is_alive;   // the token of this thread has arrived and is not evicted
    worst_key worst; // of the keys of this thread
};

/* A score as an integer that is ordered like it. NaN is lowest, and both zeros are equal. */
__device__ static int32_t score_order(float score) {
    const int32_t bits = __float_as_int(score), size = bits & INT32_MAX;
    return isnan(score) ? nan_order : bits < 0 ? -size : size;
}

__device__ static bool is_taken(const evict_memory &shared, const evict_state &state, int32_t row) {
    for (uint64_t takers = state.takers; takers != 0; takers &= takers - 1)
        if (shared.taken[__ffsll(takers) - 1] == row)
            return true;
    return false;
}

__device__ static int32_t count_from(const evict_memory &shared, const evict_state &state,
                                     int32_t rows, int32_t position) {
    int32_t count = state.is_alive && token_position(state.stream, threadIdx.x) >= position;
    for (int32_t row = threadIdx.x; row < rows; row += evict_threads)
        count += state.position[row] >= position && !is_taken(shared, state, row);
    return count;
}

/* How many keys of the (b, g) are at a position or later. */
__device__ static int32_t count_all_from(evict_memory &shared, evict_state &state, int32_t rows,
                                         int32_t position) {
    const uint32_t count = count_from(shared, state, rows, position);
    int32_t all = 0;
    state.buffer ^= 1;
    shared.count[state.buffer][threadIdx.x / 32] = (int32_t)__reduce_add_sync(~0u, count);
    __syncthreads();
    for (int warp = 0; warp < evict_warps; warp++)
        all += shared.count[state.buffer][warp];
    return all;
}

/* The position from which on there are `count` keys: the `count`-th last one of the stream, unless
 * padding stands in between. */
__device__ static int32_t newest_position(evict_memory &shared, evict_state &state, int32_t rows,
                                          int32_t count) {
    const int32_t likely = token_position(state.stream, state.arrived) - count;
    if (likely >= 0 && count_all_from(shared, state, rows, likely) == count)
        return likely;
    int32_t low = 0, high = INT32_MAX; // from `low` on there are `count` keys or more
    while (low < high) {
        const int32_t middle = low + (high - low) / 2 + 1;
        const bool enough = count_all_from(shared, state, rows, middle) >= count;
        low = enough ? middle : low;
        high = enough ? high : middle - 1;
    }
    return low;
}

/* Has a key that is not empty compete. */
__device__ static void add_key(worst_key *worst, int32_t newest, int32_t order, int32_t position,
                               int32_t key, bool is_sink) {
    if (position >= newest) {
        worst->oldest_recent = min(worst->oldest_recent, position);
    } else if (!is_sink &&
               (order < worst->order || (order == worst->order && position < worst->position))) {
        worst->order = order;
        worst->position = position;
        worst->key = key;
    }
}

/* Looks at all keys of this thread. */
__device__ static void find_own_worst(const evict_memory &shared, evict_state &state,
                                      const decode_plan &plan) {
    worst_key worst = {no_order, INT32_MAX, -1, INT32_MAX};
#pragma unroll 8
    for (int32_t row = threadIdx.x; row < plan.rows; row += evict_threads) {
        const int32_t position = state.position[row];
        const int32_t order = score_order(state.score[row]);
        if (is_taken(shared, state, row))
            continue;
        if (position >= 0)
            add_key(&worst, state.newest, order, position, row, row < plan.sinks);
        else if (worst.order > empty_order)
            worst = {empty_order, row, row, worst.oldest_recent};
    }
    const int32_t token = threadIdx.x;
    if (state.is_alive)
        add_key(&worst, state.newest, score_order(state.new_score[token]),
                token_position(state.stream, token), plan.rows + token,
                shared.slot[token] < plan.sinks);
    state.worst = worst;
}

/* The worst of the keys of 32 lanes, in all of them. */
__device__ static worst_key worst_of_warp(const worst_key &own) {
    const int32_t order = __reduce_min_sync(~0u, own.order);
    const int32_t position = __reduce_min_sync(~0u, own.order == order ? own.position : INT32_MAX);
    const uint32_t lanes = __ballot_sync(~0u, own.order == order && own.position == position);
    return {order, position, __shfl_sync(~0u, own.key, __ffs(lanes) - 1),
            __reduce_min_sync(~0u, own.oldest_recent)};
}

__device__ static worst_key find_worst(evict_memory &shared, evict_state &state) {
    const int lane = threadIdx.x % 32;
    const worst_key own = worst_of_warp(state.worst);
    state.buffer ^= 1;
    if (lane == 0)
        shared.worst[state.buffer][threadIdx.x / 32] = own;
    __syncthreads();
    return worst_of_warp(shared.worst[state.buffer][lane % evict_warps]);
}

/* Records that the next token evicts a key of this thread, or takes an empty row of it. */
__device__ static void take_own_key(evict_memory &shared, evict_state &state,
                                    const decode_plan &plan, int64_t head, const worst_key &worst) {
    const int32_t token = state.arrived;
    if (worst.key < plan.rows) {
        shared.taken[token] = worst.key;
        state.takers |= 1ull << token;
    } else {
        state.is_alive = false;
    }
    if (worst.order > empty_order)
        plan.records[head * plan.keys + worst.key].expiry = token;
    // no query sees what is evicted by the token of the first query, or earlier
    if (token <= plan.new_len - plan.q_len)
        plan.list[head * plan.keys + worst.key] = -1;
}

/* Writes the record of the token of this thread, which has just arrived, or never does. */
__device__ static void write_own_token(const evict_state &state, const decode_plan &plan,
                                       int64_t head, bool is_kept) {
    const int32_t token = threadIdx.x;
    const float score = state.new_score[token];
    const float bias = plan.bias_form == FDMA_BIAS_NONE  ? 0
                       : plan.bias_form == FDMA_BIAS_EXP ? expf(score)
                                                         : score;
    const int64_t key = head * plan.keys + plan.rows + token;
    plan.records[key] = {is_kept ? INT32_MAX : -1, bias * log2_e};
    plan.list[key] = is_kept ? token : -1;
}

/* Decides which row the next token takes. */
__device__ static int32_t place_token(evict_memory &shared, evict_state &state,
                                      const decode_plan &plan, int64_t head, worst_key *worst) {
    const int32_t token = state.arrived, order = score_order(state.new_score[token]);
    *worst = find_worst(shared, state);
    if (plan.recent > 1 && worst->order > empty_order && state.newest == INT32_MAX) {
        state.newest = newest_position(shared, state, plan.rows, plan.recent - 1);
        find_own_worst(shared, state, plan);
        *worst = find_worst(shared, state);
    }
    const bool is_worst = plan.recent == 0 && order < worst->order && worst->order > empty_order;
    if (worst->key < 0 || is_worst)
        return -1;
    return worst->key < plan.rows ? worst->key : shared.slot[worst->key - plan.rows];
}

/* Adds the next token to the keys. */
__device__ static void add_token(evict_memory &shared, evict_state &state, const decode_plan &plan,
                                 int64_t head) {
    const int32_t token = state.arrived;
    worst_key worst;
    const int32_t row = place_token(shared, state, plan, head, &worst);
    const int32_t owner = worst.key < plan.rows ? worst.key % evict_threads : worst.key - plan.rows;
    const bool is_owner = row >= 0 && owner == threadIdx.x, is_new = token == threadIdx.x;
    if (is_owner)
        take_own_key(shared, state, plan, head, worst);
    if (is_new) {
        shared.slot[token] = row;
        state.is_alive = row >= 0;
        write_own_token(state, plan, head, row >= 0);
    }
    state.arrived++;
    if (state.newest < INT32_MAX) // the oldest recent key competes from now on
        state.newest = worst.oldest_recent + 1;
    const bool is_stale = is_owner || is_new || state.worst.oldest_recent < state.newest;
    if (is_stale && state.arrived < state.stream.tokens)
        find_own_worst(shared, state, plan);
}

/* Writes the records of the rows as they are before any token arrives. */
__device__ static void write_rows(const evict_state &state, const decode_plan &plan,
                                  const float *bias, int64_t head) {
    key_record *const records = plan.records + head * plan.keys;
    int32_t *const list = plan.list + head * plan.keys;
#pragma unroll 4
    for (int32_t row = threadIdx.x; row < plan.rows; row += evict_threads) {
        const bool is_there = state.position[row] >= 0;
        records[row] = {is_there ? INT32_MAX : -1, bias != NULL ? bias[row] * log2_e : 0};
        list[row] = is_there ? row : -1;
    }
}

__device__ static int32_t clamp(int32_t n, int32_t least, int32_t most) {
    return min(max(n, least), most);
}

__device__ static decode_stream stream_of(const decode_plan &plan, int32_t b) {
    const int32_t sequence = plan.index != NULL ? plan.index[b] : b;
    const bool is_skipped = sequence < 0 || sequence >= plan.sequences;
    const int32_t tokens =
        plan.n_tokens != NULL ? clamp(plan.n_tokens[b], 0, plan.new_len) : plan.new_len;
    if (is_skipped || tokens == 0)
        return {};
    const int32_t committed = plan.commit != NULL ? clamp(plan.commit[b], 0, tokens) : tokens;
    return {sequence, tokens, committed, max(plan.seen[sequence], 0)};
}

static __global__ void __launch_bounds__(evict_threads)
    evict_keys(const __grid_constant__ decode_plan plan) {
    __shared__ evict_memory shared;
    const int64_t head = blockIdx.x;
    const int32_t b = blockIdx.x / plan.kv_heads, g = blockIdx.x % plan.kv_heads;
    griddepcontrol_wait(); // for the scores
    griddepcontrol_launch_dependents();
    evict_state state = {};
    state.stream = stream_of(plan, b);
    if (g == 0 && threadIdx.x == 0)
        plan.streams[b] = state.stream;
    if (state.stream.tokens == 0)
        return;
    const int32_t sequence = state.stream.sequence;
    state.score = plan.score.at(sequence, g);
    state.new_score = plan.new_score.at(b, g);
    state.position = plan.position.at(sequence, g);
    state.newest = INT32_MAX;
    find_own_worst(shared, state, plan);
    write_rows(state, plan, plan.bias.data != NULL ? plan.bias.at(sequence, g) : NULL, head);
    if ((int32_t)threadIdx.x >= state.stream.tokens && (int32_t)threadIdx.x < plan.new_len)
        write_own_token(state, plan, head, false);
    while (state.arrived < state.stream.tokens)
        add_token(shared, state, plan, head);
    if ((int32_t)threadIdx.x < state.stream.tokens)
        plan.slot[head * plan.new_len + threadIdx.x] = shared.slot[threadIdx.x];
}

decode_plan fdma_cuda_plan_decode(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_cache *const cache = &problem->cache;
    const int64_t heads = problem->batch * problem->kv_heads;
    decode_plan plan = {};
    plan.k = view_of(&cache->k);
    plan.v = view_of(&cache->v);
    if (problem->bias_form != FDMA_BIAS_NONE)
        plan.bias = numbers_of<float>(&cache->bias);
    plan.score = numbers_of<float>(&cache->table.score);
    plan.position = numbers_of<int32_t>(&cache->table.position);
    plan.new_score = numbers_of<float>(&problem->score);
    plan.seen = (int32_t *)cache->table.seen.data;
    plan.index = (const int32_t *)problem->index.data;
    plan.n_tokens = (const int32_t *)problem->n_tokens.data;
    plan.commit = (const int32_t *)problem->commit.data;
    plan.sequences = (int32_t)cache->sequences;
    plan.batch = (int32_t)problem->batch;
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.rows = (int32_t)problem->carried_len;
    plan.new_len = (int32_t)problem->new_len;
    plan.q_len = (int32_t)problem->q_len;
    plan.sinks = (int32_t)problem->sinks;
    plan.recent = (int32_t)problem->recent;
    plan.bias_form = problem->bias_form;
    plan.keys = problem->carried_len + problem->new_len;
    plan.streams = take<decode_stream>(arena, problem->batch);
    plan.records = take<key_record>(arena, heads * plan.keys);
    plan.list = take<int32_t>(arena, heads * plan.keys);
    plan.slot = take<int32_t>(arena, heads * plan.new_len);
    return plan;
}

fdma_status fdma_cuda_evict(const fdma_problem *problem, const decode_plan &plan) {
    const dim3 heads((unsigned)(problem->batch * problem->kv_heads));
    return launch("decode", evict_keys, {heads, dim3(evict_threads), 0, start_early}, problem,
                  plan);
}
