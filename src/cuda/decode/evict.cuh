/* Finds the row of each new token of fdma_decode(), for a thread block that takes one (b, g). A
 * thread has every `threads`-th row, and token threadIdx.x, and keeps the worst of its keys. For
 * each token the block compares the worst keys of all threads. */
#pragma once

#include "cuda/decode/cache.cuh"
#include "cuda/device/order.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/score/score.cuh"

/* The rank of a key: the least is evicted. An empty row is less than every key, because its order
 * is signed_order_none. Of several empty rows the first one is least. */
typedef signed_ranked_key competitor;

static constexpr competitor no_key = INT64_MAX;

__device__ static int32_t order_of(competitor key) { return (int32_t)(key >> 32); }

__device__ static int32_t position_of(competitor key) { return (int32_t)(key & UINT32_MAX); }

__device__ static bool is_empty_row(competitor key) { return order_of(key) == signed_order_none; }

/* The competitor of a row. An empty row has its number as position. */
__device__ static competitor row_competitor(float score, int32_t position, int32_t row) {
    return position < 0 ? signed_ranked_key_of(signed_order_none, row)
                        : signed_ranked_key_of(signed_order_of(score), position);
}

/* The rows of a thread in shared memory, which has `score` and `position` of all rows. A thread has
 * at most 32 rows. */
template <int threads> struct staged_rows {
    float *score;
    int32_t *position;
    uint32_t removed; // a bit for each row of this thread

    __device__ staged_rows(const decode_plan &plan, void *shared)
        : score((float *)shared), position((int32_t *)shared + plan.rows), removed(0) {}

    /* Starts to load the rows; rank() then waits for them. */
    __device__ void load(const float *all_scores, const int32_t *all_positions, int32_t rows) {
#pragma unroll 4
        for (int32_t row = threadIdx.x; row < rows; row += threads) {
            cp_async_4(shared_address(score + row), all_scores + row);
            cp_async_4(shared_address(position + row), all_positions + row);
        }
        cp_async_commit_group();
    }

    __device__ void rank(int32_t) { cp_async_wait_group<0>(); }

    template <typename visitor> __device__ void each(int32_t rows, const visitor &visit) const {
        uint32_t left = removed;
#pragma unroll 4
        for (int32_t row = threadIdx.x; row < rows; row += threads, left >>= 1)
            visit(row, (left & 1) != 0 ? no_key : row_competitor(score[row], position[row], row));
    }

    /* Removes a row, because its key is evicted or it is no longer empty. Its thread calls this. */
    __device__ void clear(int32_t row) { removed |= 1u << row / threads; }
};

/* The same in the workspace, for any number of rows. */
template <int threads> struct listed_rows {
    competitor *keys; // [rows]

    __device__ listed_rows(const decode_plan &plan, void *)
        : keys(plan.row_keys + (int64_t)blockIdx.x * plan.rows) {}

    __device__ void load(const float *score, const int32_t *position, int32_t rows) {
#pragma unroll 8
        for (int32_t row = threadIdx.x; row < rows; row += threads)
            keys[row] = row_competitor(score[row], position[row], row);
    }

    __device__ void rank(int32_t) {}

    template <typename visitor> __device__ void each(int32_t rows, const visitor &visit) const {
#pragma unroll 8
        for (int32_t row = threadIdx.x; row < rows; row += threads)
            visit(row, keys[row]);
    }

    __device__ void clear(int32_t row) { keys[row] = no_key; }
};

struct worst_key {
    competitor key;        // no_key: none competes
    int32_t index;         // a row, or rows + a token
    int32_t oldest_recent; // the least position from `newest` on
    int32_t recent;        // keys from there on
};

template <int threads> struct evict_memory {
    static constexpr int warps = threads / 32;
    worst_key worst[2][warps];
    int32_t count[2][warps];
    int32_t order[most_new_tokens]; // of the tokens
    int32_t slot[most_new_tokens];  // the row that a token took, or -1
    int32_t sink_end;               // with pages, the sinks are the keys before this position
};

template <typename keys> struct evict_state {
    keys rows;
    decode_stream stream;
    int32_t newest;  // keys from this position on are recent: they do not compete
    bool is_guess;   // `newest` has not been compared with their number
    int32_t arrived; // tokens so far
    int32_t buffer;  // which of the two in shared memory is in use
    bool is_alive;   // the token of this thread has arrived and is not evicted
    bool is_stale;   // `worst` must be found again
    worst_key worst; // of the keys of this thread
};

template <int threads, typename keys>
__device__ static int32_t count_from(evict_memory<threads> &shared, evict_state<keys> &state,
                                     int32_t rows, int32_t position) {
    uint32_t count = state.is_alive && token_position(state.stream, threadIdx.x) >= position;
    state.rows.each(rows, [&](int32_t, competitor key) {
        count += key != no_key && !is_empty_row(key) && position_of(key) >= position;
    });
    count = __reduce_add_sync(~0u, count);
    state.buffer ^= 1;
    shared.count[state.buffer][threadIdx.x / 32] = (int32_t)count;
    __syncthreads();
    int32_t all = 0;
    for (int warp = 0; warp < evict_memory<threads>::warps; warp++)
        all += shared.count[state.buffer][warp];
    return all;
}

/* The position from which on there are `count` keys. Tries `likely`, at least 1, first. */
template <int threads, typename keys>
__device__ static int32_t newest_position(evict_memory<threads> &shared, evict_state<keys> &state,
                                          int32_t rows, int32_t count, int32_t likely) {
    int32_t low = 0, high = INT32_MAX - 1; // from `low` on there are `count` keys or more
    for (int32_t middle = likely; low < high; middle = low + (high - low) / 2 + 1) {
        const int32_t found = count_from(shared, state, rows, middle);
        low = found >= count ? middle : low;
        high = found > count ? high : found == count ? middle : middle - 1;
    }
    return low;
}

/* The end of the sinks: the oldest keys of the rows and, if there are too few, the first tokens.
 * They also have the first rows, unless a sink was lost with a page. */
template <int threads, typename keys>
__device__ static int32_t find_sink_end(evict_memory<threads> &shared, evict_state<keys> &state,
                                        const decode_plan &plan) {
    const int32_t others = count_from(shared, state, plan.rows, 0) - plan.sinks;
    return others > 0 ? newest_position(shared, state, plan.rows, others, plan.sinks)
                      : token_position(state.stream, -others);
}

template <int threads>
__device__ static bool is_sink(const evict_memory<threads> &shared, const decode_plan &plan,
                               competitor key, int32_t row) {
    return plan.pages.number == NULL ? row < plan.sinks : position_of(key) < shared.sink_end;
}

/* Lets a key compete, unless it is recent or a sink. */
__device__ static void add_key(worst_key *worst, int32_t newest, competitor key, int32_t index,
                               bool is_sink) {
    if (!is_empty_row(key) && position_of(key) >= newest) {
        worst->oldest_recent = min(worst->oldest_recent, position_of(key));
        worst->recent++;
    } else if ((!is_sink || is_empty_row(key)) && key < worst->key) {
        worst->key = key;
        worst->index = index;
    }
}

template <int threads, typename keys>
__device__ static void add_own_token(const evict_memory<threads> &shared, evict_state<keys> &state,
                                     const decode_plan &plan) {
    const int32_t token = threadIdx.x;
    const competitor key =
        signed_ranked_key_of(shared.order[token], token_position(state.stream, token));
    if (state.is_alive)
        add_key(&state.worst, state.newest, key, plan.rows + token,
                is_sink(shared, plan, key, shared.slot[token]));
}

template <int threads, typename keys>
__device__ static void find_own_worst(const evict_memory<threads> &shared, evict_state<keys> &state,
                                      const decode_plan &plan) {
    worst_key worst = {no_key, -1, INT32_MAX, 0};
    if (plan.sinks == 0 && state.newest == INT32_MAX) // all keys compete, which takes less work
        state.rows.each(plan.rows, [&](int32_t row, competitor key) {
            const bool is_worse = key < worst.key;
            worst.key = is_worse ? key : worst.key;
            worst.index = is_worse ? row : worst.index;
        });
    else
        state.rows.each(plan.rows, [&](int32_t row, competitor key) {
            add_key(&worst, state.newest, key, row, is_sink(shared, plan, key, row));
        });
    state.worst = worst;
    add_own_token(shared, state, plan);
}

__device__ static worst_key worst_of_warp(const worst_key &own) {
    const int32_t order = __reduce_min_sync(~0u, order_of(own.key));
    const uint32_t position = __reduce_min_sync(
        ~0u, order_of(own.key) == order ? (uint32_t)position_of(own.key) : UINT32_MAX);
    const competitor key = signed_ranked_key_of(order, (int32_t)position);
    const uint32_t lanes = __ballot_sync(~0u, own.key == key);
    return {key, __shfl_sync(~0u, own.index, __ffs(lanes) - 1),
            __reduce_min_sync(~0u, own.oldest_recent),
            (int32_t)__reduce_add_sync(~0u, (uint32_t)own.recent)};
}

template <int threads, typename keys>
__device__ static worst_key find_worst(evict_memory<threads> &shared, evict_state<keys> &state) {
    constexpr int warps = evict_memory<threads>::warps;
    const int lane = threadIdx.x % 32;
    const worst_key own = worst_of_warp(state.worst);
    state.buffer ^= 1;
    if (lane == 0)
        shared.worst[state.buffer][threadIdx.x / 32] = own;
    __syncthreads();
    worst_key worst = worst_of_warp(shared.worst[state.buffer][lane % warps]);
    worst.recent /= 32 / warps; // as many lanes have read each
    return worst;
}

/* The row that the next token takes from the worst key; -1: none. */
template <int threads, typename keys>
__device__ static int32_t row_of_token(const evict_memory<threads> &shared,
                                       const evict_state<keys> &state, const decode_plan &plan,
                                       const worst_key &worst) {
    const bool is_worst = plan.recent == 0 && !is_empty_row(worst.key) &&
                          shared.order[state.arrived] < order_of(worst.key);
    if (worst.key == no_key || is_worst)
        return -1;
    return worst.index < plan.rows ? worst.index : shared.slot[worst.index - plan.rows];
}

template <int threads, typename keys, typename mark>
__device__ static void add_token(evict_memory<threads> &shared, evict_state<keys> &state,
                                 const decode_plan &plan, const worst_key &worst,
                                 const mark &marks) {
    const int32_t token = state.arrived, row = row_of_token(shared, state, plan, worst);
    const bool is_row = worst.index < plan.rows;
    const int32_t owner = is_row ? worst.index % threads : worst.index - plan.rows;
    const bool is_owner = row >= 0 && owner == threadIdx.x;
    if (is_owner && is_row) {
        state.rows.clear(row);
        if (!is_empty_row(worst.key))
            marks.evict_row(row, token);
    } else if (is_owner) {
        state.is_alive = false;
        marks.evict_token(owner, token);
    }
    if (token == threadIdx.x) {
        shared.slot[token] = row;
        state.is_alive = row >= 0;
        marks.add_token(token, row >= 0);
    }
    state.arrived++;
    if (state.newest < INT32_MAX && !state.is_guess) // the oldest recent key competes from now on
        state.newest = min(worst.oldest_recent, INT32_MAX - 2) + 1;
    state.is_stale = is_owner || state.worst.oldest_recent < state.newest;
    if (!state.is_stale && token == threadIdx.x)
        add_own_token(shared, state, plan);
}

/* Gives every token of a stream its row. The rows of the cache are loaded, and the caller has
 * written the orders of the tokens. For each key, the thread that has it calls `marks`:
 * evict_row(row, token), evict_token(token, by) and add_token(token, is_kept). */
template <int threads, typename keys, typename mark>
__device__ static void add_tokens(evict_memory<threads> &shared, evict_state<keys> &state,
                                  const decode_plan &plan, const decode_stream &stream,
                                  const mark &marks) {
    static_assert(threads >= most_new_tokens, "every token has a thread");
    const int32_t token = threadIdx.x, others = plan.recent - 1;
    state.stream = stream;
    state.is_guess = others > 0;
    // the (recent - 1)-th last position of the stream, unless padding lies between
    state.newest = state.is_guess ? max(token_position(stream, 0) - others, 1) : INT32_MAX;
    state.arrived = state.buffer = 0;
    state.is_alive = false;
    state.is_stale = true;
    __syncthreads();                 // for the caller's writes: a row may be another thread's there
    if (plan.pages.number != NULL) { // the same for all threads
        const int32_t end = plan.sinks > 0 ? find_sink_end(shared, state, plan) : 0;
        if (token == 0)
            shared.sink_end = end;
        __syncthreads();
    }
    while (state.arrived < stream.tokens) {
        if (state.is_stale)
            find_own_worst(shared, state, plan);
        state.is_stale = false;
        const worst_key worst = find_worst(shared, state);
        if (state.is_guess && !is_empty_row(worst.key)) { // an empty row would be evicted anyway
            state.is_guess = false;
            state.is_stale = worst.recent != others;
        }
        if (state.is_stale) {
            const int32_t likely = max(token_position(stream, state.arrived) - others, 1);
            state.newest = newest_position(shared, state, plan.rows, others, likely);
        } else {
            add_token(shared, state, plan, worst, marks);
        }
    }
}

/* ---- place_tokens() ---- */

/* The first of the two kernels of fdma_decode() on 9.0: a thread block computes the scores of the
 * new tokens of one (b, g), and decides which rows they take. It multiplies and adds in the order
 * of score/score.cu, with the same limbs, so the bits are the same. */

/* For a call of few heads, or of many rows, a thread has few rows; otherwise a multiprocessor has
 * many blocks. */
static constexpr int few_heads_warps = 16, many_heads_warps = 8;
static constexpr int many_heads_rows = 4096;                       // more of them are many rows
static constexpr int most_staged_rows = few_heads_warps * 32 * 32; // as staged_rows can have
static constexpr int mma_tokens = 8; // the upper half of the rows of mma, to save registers
static constexpr int mma_channels = 16;
static constexpr int sum_channels = 64; // summed by a tensor core, as in score.cu
static constexpr int most_sums = 128;   // of a dot product

/* The inputs of the scores. The channels of all heads are adjacent in a row of v, and two channels
 * of v or of dt_proj can be loaded at once. */
struct token_scores {
    const void *dt_proj, *a, *dt_bias; // dt_proj NULL: the scores are given
    int64_t dt_row;
    int32_t channels;
    bool wide_dt_proj, wide_a, wide_dt_bias; // are float32; otherwise of v's type
};

/* A lane's operands of the products of sum_channels channels, for mma_tokens tokens: a pair of
 * channels in each register, or in each float2. The weights are column 0 of the right operand. */
struct token_operands {
    static constexpr int pairs = sum_channels / 8;
    uint32_t tokens[pairs];
    float2 weights[pairs];
};

/* Starts to load the operands of a lane, whose first channel is `channel`. `token` points to the
 * row of the lane's token, or is NULL. */
template <typename element>
__device__ static void load_operands(token_operands &to, const element *token,
                                     const token_scores &from, int32_t g, int32_t channel) {
    const bool has_weights = threadIdx.x % 32 < 4;
    const int64_t at = g * from.dt_row + channel;
    const int32_t left = from.channels - channel;
#pragma unroll
    for (int n = 0; n < token_operands::pairs; n++)
        to.tokens[n] =
            token != NULL && n * 8 < left ? *(const uint32_t *)(token + channel + n * 8) : 0;
    if (from.wide_dt_proj) {
        const float *const weights = (const float *)from.dt_proj + at;
#pragma unroll
        for (int n = 0; n < token_operands::pairs; n++)
            to.weights[n] = has_weights && n * 8 < left ? *(const float2 *)(weights + n * 8)
                                                        : make_float2(0, 0);
    } else {
        const element *const weights = (const element *)from.dt_proj + at;
#pragma unroll
        for (int n = 0; n < token_operands::pairs; n++) {
            alignas(4) element pair[2];
            *(uint32_t *)pair =
                has_weights && n * 8 < left ? *(const uint32_t *)(weights + n * 8) : 0;
            to.weights[n] = make_float2(to_float(pair[0]), to_float(pair[1]));
        }
    }
}

/* Adds the products, with all limbs of the weights. */
template <typename element>
__device__ static void multiply_operands(float (&sums)[4], token_operands &operands, float scale,
                                         bool is_wide) {
    constexpr int pairs = token_operands::pairs;
#pragma unroll
    for (int n = 0; n < pairs; n++)
        operands.weights[n] =
            make_float2(operands.weights[n].x / scale, operands.weights[n].y / scale);
#pragma unroll 1
    for (int limb = 0; limb < (is_wide ? weight_limbs : 1); limb++) {
        uint32_t weights[pairs];
#pragma unroll
        for (int n = 0; n < pairs; n++) {
            const float low = take_limb<element>(operands.weights[n].x);
            const float high = take_limb<element>(operands.weights[n].y);
            weights[n] = element_type<element>::pack(low, high);
        }
#pragma unroll
        for (int n = 0; n < pairs; n += 2) {
            const uint32_t tokens[] = {operands.tokens[n], 0, operands.tokens[n + 1], 0};
            mma_m16n8k16<element>(sums, tokens, weights[n], weights[n + 1]);
        }
    }
}

template <int warps> struct token_memory {
    float sums[most_sums][mma_tokens];
    float most_of_warp[warps];
    int32_t expiry[most_new_tokens];
    evict_memory<32 * warps> evict;
};

/* The divisor of the weights of a kv head. */
template <typename element, int warps>
__device__ static float find_scale(token_memory<warps> &shared, const token_scores &from,
                                   int32_t g) {
    if (is_bfloat16<element>() || !from.wide_dt_proj)
        return 1;
    const float *const weights = (const float *)from.dt_proj + g * from.dt_row;
    float most = 0;
    for (int32_t channel = threadIdx.x; channel < from.channels; channel += 32 * warps)
        most = fmaxf(most, fabsf(weights[channel]));
    for (int lane = 16; lane > 0; lane /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0)
        shared.most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < warps; warp++)
        most = fmaxf(most, shared.most_of_warp[warp]);
    return weight_scale(most);
}

/* The dot product of a token and the weights, from the products of its channels. */
template <typename element, int warps>
__device__ static float dot_of_token(const token_memory<warps> &shared, const decode_plan &plan,
                                     const head_view &v, const token_scores &from, float scale,
                                     int32_t b, int32_t g, int32_t token) {
    float dot = 0;
#pragma unroll 8
    for (int32_t n = 0; n * sum_channels < from.channels; n++)
        dot += shared.sums[n][token % mma_tokens];
    dot *= scale;
    if (!isnan(dot) || !from.wide_dt_proj)
        return dot;
    const int32_t head_dim = from.channels / plan.kv_heads;
    return dot_sequentially((const element *)v.data + b * v.batch + token * v.row, head_dim,
                            plan.kv_heads, head_dim, (const float *)from.dt_proj + g * from.dt_row);
}

/* Computes the scores of the new tokens, and their orders. */
template <typename element, int warps>
__device__ static void score_tokens(token_memory<warps> &shared, const decode_plan &plan,
                                    const head_view &v, const token_scores &from, int32_t b,
                                    int32_t g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = find_scale<element>(shared, from, g);
    const float a = load_of_head<element>(from.a, from.wide_a, g);
    const float dt_bias =
        from.dt_bias != NULL ? load_of_head<element>(from.dt_bias, from.wide_dt_bias, g) : 0;
    for (int32_t first = 0; first < plan.new_len; first += mma_tokens) {
        if (first > 0)
            __syncthreads();                  // the last sums have been read
        const int32_t own = first + lane / 4; // the token of this lane
        const element *const row =
            own < plan.new_len ? (const element *)rows_of(v, b, 0) + own * v.row : NULL;
        for (int32_t n = warp; n * sum_channels < from.channels; n += warps) {
            token_operands operands;
            float products[4] = {};
            load_operands(operands, row, from, g, n * sum_channels + lane % 4 * 2);
            multiply_operands<element>(products, operands, scale, from.wide_dt_proj);
            if (lane % 4 == 0)
                shared.sums[n][lane / 4] = products[0];
        }
        __syncthreads();
        const int32_t token = first + threadIdx.x;
        if (threadIdx.x < mma_tokens && token < plan.new_len) {
            const float dot = dot_of_token<element>(shared, plan, v, from, scale, b, g, token);
            const float score = a * softplus(dot + dt_bias);
            plan.new_score.at(b, g)[token] = score;
            shared.evict.order[token] = signed_order_of(score);
        }
    }
}

/* Records when each token is evicted. The result for the rows follows from the tokens' slots. */
struct token_marks {
    int32_t *expiry;

    __device__ void evict_row(int32_t, int32_t) const {}
    __device__ void evict_token(int32_t token, int32_t by) const { expiry[token] = by; }
    __device__ void add_token(int32_t token, bool is_kept) const {
        expiry[token] = is_kept ? INT32_MAX : -1;
    }
};

template <typename element, int warps, template <int threads> class head_rows>
static __global__ void __launch_bounds__(32 * warps, 32 / warps)
    place_tokens(const __grid_constant__ decode_plan plan, const __grid_constant__ head_view v,
                 const __grid_constant__ token_scores from) {
    __shared__ token_memory<warps> shared;
    const int32_t b = blockIdx.x / plan.kv_heads, g = blockIdx.x % plan.kv_heads;
    const int64_t token = threadIdx.x, at = (int64_t)blockIdx.x * plan.new_len + token;
    extern __shared__ __align__(128) char bytes[];
    evict_state<head_rows<32 * warps>> state = {{plan, bytes}};
    griddepcontrol_wait(); // for the output of the caller's kernels
    griddepcontrol_launch_dependents();
    const decode_stream stream = stream_of(plan, b);
    if (stream.tokens > 0) {
        state.rows.load(plan.score.at(stream.sequence, g), plan.position.at(stream.sequence, g),
                        plan.rows);
        if (from.dt_proj != NULL)
            score_tokens<element>(shared, plan, v, from, b, g);
        else if (token < plan.new_len)
            shared.evict.order[token] = signed_order_of(plan.new_score.at(b, g)[token]);
        state.rows.rank(plan.rows);
        add_tokens(shared.evict, state, plan, stream, token_marks{shared.expiry});
    } else if (from.dt_proj != NULL && token < plan.new_len) {
        plan.new_score.at(b, g)[token] = 0;
    }
    if (threadIdx.x == 0)
        plan.streams[blockIdx.x] = stream;
    if (token < plan.new_len) {
        plan.slot[at] = token < stream.tokens ? shared.evict.slot[token] : -1;
        plan.expiry[at] = token < stream.tokens ? shared.expiry[token] : -1;
    }
}
