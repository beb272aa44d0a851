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

/* The rows of a thread in registers, up to `threads` * most of a block. */
template <int threads, int most> struct held_rows {
    competitor keys[most];

    /* Starts to load the rows; rank() then waits for them. */
    __device__ void load(const float *score, const int32_t *position, int32_t rows) {
#pragma unroll
        for (int n = 0; n < most; n++) {
            const int32_t row = n * threads + threadIdx.x;
            if (n * threads < rows)
                keys[n] = signed_ranked_key_of(row < rows ? __float_as_int(score[row]) : 0,
                                               row < rows ? position[row] : 0);
        }
    }

    __device__ void rank(int32_t rows) {
#pragma unroll
        for (int n = 0; n < most; n++) {
            const int32_t row = n * threads + threadIdx.x;
            if (n * threads < rows)
                keys[n] = row < rows ? row_competitor(__int_as_float(order_of(keys[n])),
                                                      position_of(keys[n]), row)
                                     : no_key;
        }
    }

    template <typename visitor> __device__ void each(int32_t rows, const visitor &visit) const {
#pragma unroll
        for (int n = 0; n < most; n++)
            if (n * threads < rows)
                visit(n * threads + threadIdx.x, keys[n]);
    }

    /* Removes a row, because its key is evicted or it is no longer empty. */
    __device__ void clear(int32_t row) {
#pragma unroll
        for (int n = 0; n < most; n++)
            keys[n] = n * threads + (int32_t)threadIdx.x == row ? no_key : keys[n];
    }
};

/* held_rows in the workspace, for any number of rows. */
template <int threads> struct listed_rows {
    competitor *keys; // [rows]

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
    if (!is_empty_row(key) && position_of(key) >= newest)
        worst->oldest_recent = min(worst->oldest_recent, position_of(key));
    else if ((!is_sink || is_empty_row(key)) && key < worst->key) {
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
    worst_key worst = {no_key, -1, INT32_MAX};
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
            __reduce_min_sync(~0u, own.oldest_recent)};
}

template <int threads, typename keys>
__device__ static worst_key find_worst(evict_memory<threads> &shared, evict_state<keys> &state) {
    const int lane = threadIdx.x % 32;
    const worst_key own = worst_of_warp(state.worst);
    state.buffer ^= 1;
    if (lane == 0)
        shared.worst[state.buffer][threadIdx.x / 32] = own;
    __syncthreads();
    return worst_of_warp(shared.worst[state.buffer][lane % evict_memory<threads>::warps]);
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
    if (state.newest < INT32_MAX) // the oldest recent key competes from now on
        state.newest = min(worst.oldest_recent, INT32_MAX - 2) + 1;
    state.is_stale = is_owner || state.worst.oldest_recent < state.newest;
    if (!state.is_stale && token == threadIdx.x)
        add_own_token(shared, state, plan);
}

/* Gives every token of a stream its row. The rows of the cache are loaded. For each key, the thread
 * that has it calls `marks`: evict_row(row, token), evict_token(token, by) and add_token(token,
 * is_kept). */
template <int threads, typename keys, typename mark>
__device__ static void add_tokens(evict_memory<threads> &shared, evict_state<keys> &state,
                                  const decode_plan &plan, const decode_stream &stream,
                                  const float *new_score, const mark &marks) {
    static_assert(threads >= most_new_tokens, "every token has a thread");
    const int32_t token = threadIdx.x;
    state.stream = stream;
    state.newest = INT32_MAX;
    state.arrived = state.buffer = 0;
    state.is_alive = false;
    state.is_stale = true;
    if (token < plan.new_len)
        shared.order[token] = signed_order_of(new_score[token]);
    __syncthreads(); // also for the caller's writes: a row may be another thread's there
    if (plan.pages.number != NULL) { // the same for all threads
        const int32_t end = plan.sinks > 0 ? find_sink_end(shared, state, plan) : 0;
        if (token == 0)
            shared.sink_end = end;
        __syncthreads();
    }
    while (state.arrived < stream.tokens) {
        if (state.is_stale)
            find_own_worst(shared, state, plan);
        const worst_key worst = find_worst(shared, state);
        if (plan.recent > 1 && !is_empty_row(worst.key) && state.newest == INT32_MAX) {
            // the (recent - 1)-th last position of the stream, unless padding lies between
            const int32_t others = plan.recent - 1;
            const int32_t likely = max(token_position(stream, state.arrived) - others, 1);
            state.newest = newest_position(shared, state, plan.rows, others, likely);
            state.is_stale = true;
        } else {
            add_token(shared, state, plan, worst, marks);
        }
    }
}

/* ---- place_tokens() ---- */

/* The first of the two kernels of fdma_decode() on 9.0: a thread block computes the scores of the
 * new tokens of one (b, g), and decides which rows they take. It adds in the order of
 * score/score.cu, so the bits are the same. */

enum { most_cluster_rows = 4096 }; // of a cache

static constexpr int token_warps = 8, token_threads = 32 * token_warps;
static constexpr int mma_tokens = 16, mma_channels = 16;
static constexpr int sum_channels = 64; // summed by a tensor core, as in score.cu
static constexpr int most_sums = 128;   // of a dot product

/* The inputs of the scores. The channels of all heads are adjacent in a row of v. dt_proj has v's
 * type, and two channels of either can be loaded at once. */
struct token_scores {
    const void *dt_proj, *a, *dt_bias; // dt_proj NULL: the scores are given
    int64_t dt_row;
    int32_t channels;
    bool wide_a, wide_dt_bias; // are float32; otherwise of v's type
};

/* The products of sum_channels channels from `channel` on, for the tokens from `first` on. They are
 * column 0 of the result. */
template <typename element>
__device__ static void multiply_channels(float (&sums)[4], const char *tokens, int64_t stride,
                                         int32_t count, const char *weights, int32_t channel,
                                         int32_t channels) {
    constexpr int steps = sum_channels / mma_channels;
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    uint32_t left[steps][4], right[steps][2];
#pragma unroll
    for (int step = 0; step < steps; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t c = channel + step * mma_channels + half * 8 + column;
            const bool there = c < channels;
            right[step][half] = there && row == 0 ? *(const uint32_t *)(weights + 2 * c) : 0;
#pragma unroll
            for (int down = 0; down < 2; down++) {
                const int32_t token = row + down * 8;
                left[step][half * 2 + down] =
                    there && token < count ? *(const uint32_t *)(tokens + 2 * (token * stride + c))
                                           : 0;
            }
        }
#pragma unroll
    for (int step = 0; step < steps; step++)
        mma_m16n8k16<element>(sums, left[step], right[step][0], right[step][1]);
}

struct token_memory {
    float sums[most_sums][mma_tokens];
    int32_t expiry[most_new_tokens];
    evict_memory<token_threads> evict;
};

template <typename element>
__device__ static void score_tokens(token_memory &shared, const head_view &v,
                                    const token_scores &from, float *score, int32_t new_len,
                                    int32_t b, int32_t g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char *const weights = (const char *)from.dt_proj + 2 * g * from.dt_row;
    const float a = load_of_head<element>(from.a, from.wide_a, g);
    const float dt_bias =
        from.dt_bias != NULL ? load_of_head<element>(from.dt_bias, from.wide_dt_bias, g) : 0;
    const int32_t count = (from.channels + sum_channels - 1) / sum_channels;
    for (int32_t first = 0; first < new_len; first += mma_tokens) {
        for (int32_t n = warp; n < count; n += token_warps) {
            float products[4] = {};
            multiply_channels<element>(products, rows_of(v, b, 0) + 2 * first * v.row, v.row,
                                       new_len - first, weights, n * sum_channels, from.channels);
            if (lane % 4 == 0) {
                shared.sums[n][lane / 4] = products[0];
                shared.sums[n][lane / 4 + 8] = products[2];
            }
        }
        __syncthreads();
        const int32_t token = first + threadIdx.x;
        if (threadIdx.x < mma_tokens && token < new_len) {
            float dot = 0;
            for (int32_t n = 0; n < count; n++)
                dot += shared.sums[n][threadIdx.x];
            score[token] = a * softplus(dot + dt_bias);
        }
        __syncthreads();
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

template <typename element>
static __global__ void __launch_bounds__(token_threads)
    place_tokens(const __grid_constant__ decode_plan plan, const __grid_constant__ head_view v,
                 const __grid_constant__ token_scores from) {
    __shared__ token_memory shared;
    const int32_t b = blockIdx.x / plan.kv_heads, g = blockIdx.x % plan.kv_heads;
    evict_state<held_rows<token_threads, most_cluster_rows / token_threads>> state;
    griddepcontrol_wait(); // for the output of the caller's kernels
    griddepcontrol_launch_dependents();
    const decode_stream stream = stream_of(plan, b);
    float *const score = plan.new_score.at(b, g);
    if (threadIdx.x == 0)
        plan.streams[blockIdx.x] = stream;
    if (stream.tokens == 0)
        return;
    state.rows.load(plan.score.at(stream.sequence, g), plan.position.at(stream.sequence, g),
                    plan.rows);
    if (from.dt_proj != NULL)
        score_tokens<element>(shared, v, from, score, plan.new_len, b, g);
    state.rows.rank(plan.rows);
    add_tokens(shared.evict, state, plan, stream, score, token_marks{shared.expiry});
    const int64_t token = threadIdx.x, at = (int64_t)blockIdx.x * plan.new_len + token;
    if (token < stream.tokens) {
        plan.slot[at] = shared.evict.slot[token];
        plan.expiry[at] = shared.expiry[token];
    }
}
