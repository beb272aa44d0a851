/* The passes that make dk, dv and dbias. The rows of a thread block are keys: k and v stay in
 * shared memory and their sums in registers, while steps of queries are streamed past them. When a
 * slot changes its key, the sums of the old key are written and new sums begin. */
#pragma once

#include "cuda/backward/sm80/tile.cuh"
#include "cuda/mma/attention.cuh"

/* ---- the keys of a thread block, and its steps ---- */

/* The work of a thread block of the key passes: the key of each of its rows in each query block,
 * and the steps in which queries are streamed past them. */

enum key_pass {
    pass_diagonal, // keys that arrive inside a query block, for this query block
    pass_slots,    // keys in slots, for a partition, or for all queries if not is_rolling
};

/* The inputs of a thread block. Shared memory holds them to save registers. */
struct key_inputs {
    int64_t head; // of all sequences
    int32_t b, g;
    int32_t origin; // the position of query 0
    int32_t partition;
    int32_t first_slot;             // of row 0: a slot, or an entry of the list
    int32_t end_slot;               // the end of the entries; not used if changes_keys
    int32_t query_block, end_block; // the query blocks to visit
    int32_t first_query;            // no query before it sees a key of these rows
    bool changes_keys;              // rows are slots, whose keys change between query blocks
    bool by_position;               // a key may come after some of the queries
    row_source k, v, q, dout;       // q and dout: of the first head of the group
    logit_params logits;
};

/* A step is some consecutive queries of one head. The steps of a query block go head by head. */
struct query_step {
    int32_t query_block, h; // h: in the group
    int32_t query;          // the first of this step
    int32_t first_query;    // of every head in this query block
};

__device__ static query_step first_step(const key_inputs &inputs, int32_t step) {
    const int32_t first = max(inputs.query_block * list_queries, inputs.first_query / step * step);
    return {inputs.query_block, 0, first, first};
}

__device__ static query_step step_after(const query_step &now, int32_t step, int32_t group,
                                        int32_t q_len) {
    const int32_t end = min((now.query_block + 1) * list_queries, q_len);
    query_step next = now;
    next.query += step;
    if (next.query < end)
        return next;
    next.query = now.first_query;
    next.h++;
    if (next.h < group)
        return next;
    const int32_t first = (now.query_block + 1) * list_queries;
    return {now.query_block + 1, 0, first, first};
}

/* The key of row n in a query block, or a number that fails is_key(). */
__device__ static int32_t key_of_row(const backward_plan &plan, const key_inputs &inputs,
                                     int32_t query_block, int32_t n) {
    const forward_plan &forward = plan.forward;
    const int32_t slot = inputs.first_slot + n;
    if (inputs.changes_keys)
        return key_in_slot(plan, inputs.head, query_block, slot);
    if (slot >= inputs.end_slot)
        return -1;
    return forward.list == NULL ? slot : list_entry(forward, inputs.head, query_block, slot);
}

/* The first query that may see a key from list entry first_slot on, if entries ascend and sequences
 * are not packed. It is in range even if the selection is corrupt. */
__device__ static int32_t first_query(const backward_plan &plan, const key_inputs &inputs) {
    if (!inputs.by_position || inputs.first_slot >= inputs.end_slot)
        return 0;
    const int32_t entry = key_of_row(plan, inputs, inputs.query_block, 0);
    const int32_t key = entry < 0 ? ~entry : entry;
    const int32_t query = key - inputs.origin;
    return min(max(query, 0), plan.forward.q_len - 1);
}

/* Thread block n of a diagonal pass takes tile n % tiles of the keys that arrive in query block
 * n / tiles. */
__device__ static void start_diagonal(const backward_plan &plan, key_inputs *inputs, int32_t n,
                                      int32_t rows) {
    const int32_t tiles = list_queries / rows;
    inputs->query_block = n / tiles;
    inputs->end_block = inputs->query_block + 1;
    const int2 count = list_counts(plan, inputs->head, inputs->query_block);
    inputs->first_slot = count.x + n % tiles * rows;
    inputs->end_slot = count.y;
    inputs->by_position = true;
    inputs->first_query = first_query(plan, *inputs);
    if (inputs->first_slot >= inputs->end_slot)
        inputs->end_block = inputs->query_block;
}

/* Thread block n of a slot pass takes slot block n % blocks in partition n / blocks. */
__device__ static void start_slots(const backward_plan &plan, key_inputs *inputs, int32_t n,
                                   int32_t rows) {
    const int32_t blocks = plan.slots / rows, query_blocks = plan.rows / list_queries;
    inputs->first_slot = n % blocks * rows;
    inputs->changes_keys = plan.is_rolling;
    if (plan.is_rolling) {
        inputs->partition = n / blocks;
        inputs->query_block = inputs->partition * plan.partition_lists;
        inputs->end_block = min(inputs->query_block + plan.partition_lists, query_blocks);
        return;
    }
    inputs->end_slot = shared_entries(plan.forward, inputs->b, inputs->head);
    inputs->by_position = plan.forward.by_position;
    if (plan.forward.sequences.ranges != NULL) {
        const int32_t end = min(inputs->first_slot + rows, inputs->end_slot);
        const block_range seen = seeing_blocks(plan.forward, inputs->head, inputs->first_slot, end);
        inputs->query_block = seen.first;
        inputs->end_block = seen.end;
        return;
    }
    inputs->first_query = first_query(plan, *inputs);
    inputs->query_block = inputs->first_query / list_queries;
    inputs->end_block = inputs->first_slot < inputs->end_slot ? query_blocks : 0;
}

__device__ static key_inputs key_inputs_of(const backward_plan &plan, key_pass pass, int64_t head,
                                           int32_t n, int32_t rows, bool aligned) {
    const forward_plan &forward = plan.forward;
    const int32_t b = (int32_t)(head / forward.kv_heads), g = (int32_t)(head % forward.kv_heads);
    const int32_t h = g * forward.group;
    key_inputs inputs = {};
    inputs.head = head;
    inputs.b = b;
    inputs.g = g;
    inputs.origin = query_position(forward, b, 0);
    inputs.k = key_source_of(forward, forward.k, forward.k_carried, b, g, aligned);
    inputs.v = key_source_of(forward, forward.v, forward.v_carried, b, g, aligned);
    inputs.q = source_of(forward.q, b, h, forward.head_dim, aligned);
    inputs.dout = source_of(plan.dout, b, h, forward.head_dim, aligned);
    inputs.logits = logit_params_of(forward);
    if (pass == pass_diagonal)
        start_diagonal(plan, &inputs, n, rows);
    else
        start_slots(plan, &inputs, n, rows);
    return inputs;
}

/* ---- from products to weights and their gradients ---- */

/* The shared memory of a thread block of the key passes, and the step from the products of its keys
 * and queries to weights and gradients of logits. */

/* Dropout's codes of the keys, and of the queries of two stages. */
template <typename config, bool drops> struct step_codes {
    using type = no_codes;
};
template <typename config> struct step_codes<config, true> {
    struct type {
        uint32_t key[config::rows];
        row_code query[2][config::keys];
    };
};

template <typename config> struct key_memory {
    using element = typename config::element;
    alignas(128) element k[config::rows * config::head_dim];
    alignas(128) element v[config::rows * config::head_dim];
    alignas(128) element q[2][config::keys * config::head_dim];
    alignas(128) element dout[2][config::keys * config::head_dim];
    alignas(16) float lse[2][config::keys], delta[2][config::keys];
    int32_t key[2][config::rows]; // of this query block; at its end also of the next
    int32_t expiry[config::rows];
    int32_t from[config::rows]; // the first position at which the key may be kept
    float bias[config::rows];
    typename step_codes<config, config::drops>::type codes; // of dropout
    query_step step[2];                                     // of each stage
    key_inputs inputs;
};
struct key_rows {
    float bias[2];
    int32_t from[2], expiry[2];
};

/* A bit for each of a lane's elements, set if dropout drops it. */
template <typename config>
__device__ static uint32_t find_dropped(const key_memory<config> &shared, int stage,
                                        int32_t position, uint32_t threshold) {
    const int lane = threadIdx.x % warp_lanes;
    const int row = threadIdx.x / warp_lanes % config::row_warps * mma_rows + lane / 4;
    const uint32_t keys[2] = {shared.codes.key[row], shared.codes.key[row + 8]};
    const bool is_paired = position % 2 == 0; // a lane's two queries share their code
    uint32_t dropped = 0;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const row_code *const codes = &shared.codes.query[stage][n * 8 + lane % 4 * 2];
        const row_code even = codes[0], odd = codes[1];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t mixed = dropout_mix(even, keys[r]);
            const uint32_t next = is_paired ? mixed : dropout_mix(odd, keys[r]);
            dropped |= (uint32_t)drops(mixed, !is_paired, threshold) << (n * 4 + r * 2);
            dropped |= (uint32_t)drops(next, is_paired, threshold) << (n * 4 + r * 2 + 1);
        }
    }
    return dropped;
}

template <typename config>
__device__ static void drop_elements(float (&x)[1][config::keys / 8][4], uint32_t dropped,
                                     float factor) {
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[0][n][e] = dropped >> (n * 4 + e) & 1 ? 0 : x[0][n][e] * factor;
}
template <typename config>
__device__ static key_rows load_key_rows(const key_memory<config> &shared) {
    const int warp = threadIdx.x / warp_lanes % config::row_warps;
    key_rows rows;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int n = warp * mma_rows + opaque(threadIdx.x) % warp_lanes / 4 + s * 8;
        rows.bias[s] = shared.bias[n];
        rows.from[s] = shared.from[n];
        rows.expiry[s] = shared.expiry[n];
    }
    return rows;
}

/* lse and delta of a lane's two columns, which are queries. */
struct column_stats {
    float2 lse, delta;
};

template <typename config>
__device__ static column_stats stats_of(const key_memory<config> &shared, int stage, int n) {
    const int pair = n * 4 + threadIdx.x % 4;
    return {((const float2 *)shared.lse[stage])[pair], ((const float2 *)shared.delta[stage])[pair]};
}

__device__ static void weigh(float &s, float &dp, const column_stats &stats, int x) {
    s = ex2_approx(s - (x % 2 == 0 ? stats.lse.x : stats.lse.y));
    dp = s * (dp - (x % 2 == 0 ? stats.delta.x : stats.delta.y));
}

__device__ static bool is_kept(const key_rows &rows, int r, int32_t position, bool by_position) {
    return position < rows.expiry[r] && (!by_position || rows.from[r] <= position);
}

/* Clears the weight and the gradient where a query does not keep the key. Logits of -inf would not
 * do, because a query of NaN would still reach the key. `position` is the position of column 0. */
template <typename config>
__device__ static void mask_weights(float (&s)[1][config::keys / 8][4],
                                    float (&dp)[1][config::keys / 8][4], const key_rows &rows,
                                    int32_t position, bool by_position) {
    const int32_t last = position + config::keys - 1, lane = threadIdx.x % warp_lanes;
    const bool masked = rows.expiry[0] <= last || rows.expiry[1] <= last ||
                        (by_position && (rows.from[0] > position || rows.from[1] > position));
    if (!__any_sync(~0u, masked))
        return;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int32_t p = position + n * 8 + lane % 4 * 2 + x % 2;
            const bool kept = is_kept(rows, x / 2, p, by_position);
            s[0][n][x] = kept ? s[0][n][x] : 0;
            dp[0][n][x] = kept ? dp[0][n][x] : 0;
        }
}

/* Replaces s by weights, and dp by the gradients of logits. */
template <typename config>
__device__ static void weigh_step(const key_memory<config> &shared, int stage, const key_rows &rows,
                                  int32_t position, float (&s)[1][config::keys / 8][4],
                                  float (&dp)[1][config::keys / 8][4], float (&step_dbias)[2]) {
    const float scale = shared.inputs.logits.scale;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const column_stats stats = stats_of(shared, stage, n);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            s[0][n][x] = fmaf(s[0][n][x], scale, rows.bias[x / 2]);
            weigh(s[0][n][x], dp[0][n][x], stats, x);
        }
    }
    mask_weights<config>(s, dp, rows, position, shared.inputs.by_position);
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            step_dbias[x / 2] += dp[0][n][x];
}

/* weigh_step() with softcap. It goes element by element, which avoids a second copy of the
 * products. dp becomes the gradient of the logit before softcap. */
template <typename config>
__device__ static void weigh_softcap(const key_memory<config> &shared, int stage,
                                     const key_rows &rows, int32_t position,
                                     float (&s)[1][config::keys / 8][4],
                                     float (&dp)[1][config::keys / 8][4], float (&step_dbias)[2]) {
    const logit_params logits = shared.inputs.logits;
    const bool by_position = shared.inputs.by_position;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const column_stats stats = stats_of(shared, stage, n);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float t = tanh_of(s[0][n][x] * logits.softcap_scale);
            const int32_t p = position + n * 8 + threadIdx.x % 4 * 2 + x % 2;
            const bool kept = is_kept(rows, x / 2, p, by_position);
            s[0][n][x] = fmaf(t, logits.scale, rows.bias[x / 2]);
            weigh(s[0][n][x], dp[0][n][x], stats, x);
            step_dbias[x / 2] += kept ? dp[0][n][x] : 0;
            s[0][n][x] = kept ? s[0][n][x] : 0;
            dp[0][n][x] = kept ? dp[0][n][x] * (1 - t * t) : 0;
        }
    }
}

/* weigh_step() with attn_mask or attn_bias, with or without softcap. keys: of the block's rows. */
template <typename config>
__device__ static void weigh_pairs(const key_memory<config> &shared, const forward_plan &plan,
                                   const int32_t *keys, int stage, const key_rows &rows,
                                   int32_t position, float (&s)[1][config::keys / 8][4],
                                   float (&dp)[1][config::keys / 8][4], float (&step_dbias)[2]) {
    const logit_params logits = shared.inputs.logits;
    const int32_t b = shared.inputs.b;
    const int32_t h = shared.inputs.g * plan.group + shared.step[stage].h;
    const int own =
        threadIdx.x / warp_lanes % config::row_warps * mma_rows + threadIdx.x % warp_lanes / 4;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const column_stats stats = stats_of(shared, stage, n);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int32_t key = keys[own + x / 2 * 8], offset = n * 8 + threadIdx.x % 4 * 2 + x % 2;
            const int32_t i = shared.step[stage].query + offset;
            const bool kept = i < plan.q_len && is_key(key, plan.kv_len) &&
                              is_kept(rows, x / 2, position + offset, shared.inputs.by_position) &&
                              is_unmasked(plan.mask, b, h, i, key);
            const float cap = logits.softcap_scale;
            const float t = cap == 0 ? s[0][n][x] : tanh_of(s[0][n][x] * cap);
            if (!kept) {
                s[0][n][x] = dp[0][n][x] = 0;
                continue;
            }
            const float pair = pair_exponent<typename config::element>(plan, {b, h, i, 0}, key);
            s[0][n][x] = fmaf(t, logits.scale, rows.bias[x / 2] + pair);
            weigh(s[0][n][x], dp[0][n][x], stats, x);
            step_dbias[x / 2] += dp[0][n][x];
            dp[0][n][x] *= cap == 0 ? 1 : 1 - t * t;
        }
    }
}

/* Replaces products by weights, and by gradients of <q, k> times scale. */
template <typename config>
__device__ static void find_weights(const key_memory<config> &shared, const forward_plan &plan,
                                    const int32_t *keys, int stage, const key_rows &rows,
                                    int32_t position, float (&s)[1][config::keys / 8][4],
                                    float (&dp)[1][config::keys / 8][4], float (&dbias)[2]) {
    float step_dbias[2] = {}; // so that errors grow with the number of steps, not of queries
    if constexpr (config::has_pairs)
        weigh_pairs(shared, plan, keys, stage, rows, position, s, dp, step_dbias);
    else if (shared.inputs.logits.softcap_scale == 0)
        weigh_step(shared, stage, rows, position, s, dp, step_dbias);
    else
        weigh_softcap(shared, stage, rows, position, s, dp, step_dbias);
    dbias[0] += step_dbias[0];
    dbias[1] += step_dbias[1];
}

/* Sums of a warp's keys. A lane has rows lane / 4 and lane / 4 + 8. */
template <typename config> struct key_sums {
    float dk[1][config::warp_columns][4], dv[1][config::warp_columns][4];
    float dbias[2]; // of this lane's columns
};

/* Starts copying row n of two blocks whose sources have the same length and alignment. */
template <int head_dim>
__device__ static void copy_two_rows(char *to, char *other_to, int n, const char *from,
                                     const char *other_from, const row_source &source, bool there) {
    if (source.aligned) {
        copy_row<head_dim>(to, n, from, source.vecs, there, true);
        copy_row<head_dim>(other_to, n, other_from, source.vecs, there, true);
    } else {
        copy_row_unaligned<head_dim>(to, n, from, source.vecs, there);
        copy_row_unaligned<head_dim>(other_to, n, other_from, source.vecs, there);
    }
}

/* Starts copying k and v of the rows whose key has changed, and loads their records. */
template <typename config>
__device__ static void load_rows(key_memory<config> &shared, const backward_plan &plan,
                                 const int32_t *before, const int32_t *keys) {
    using layout = row_layout<config::head_dim>;
    const key_inputs &inputs = shared.inputs;
    const int32_t kv_len = plan.forward.kv_len;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::rows;
         n += config::threads / layout::copiers) {
        if (before != NULL && before[n] == keys[n])
            continue;
        const bool there = is_key(keys[n], kv_len);
        const char *const k = row_of_key(inputs.k, there ? keys[n] : 0);
        const char *const v = row_of_key(inputs.v, there ? keys[n] : 0);
        copy_two_rows<config::head_dim>((char *)shared.k, (char *)shared.v, n, k, v, inputs.k,
                                        there);
    }
    cp_async_commit_group();
    const int32_t n = thread;
    if (n >= config::rows)
        return;
    key_record record = {INT32_MAX, 0};
    const bool there = is_key(keys[n], kv_len);
    if (there && plan.forward.records != NULL)
        record = plan.forward.records[inputs.head * kv_len + keys[n]];
    shared.expiry[n] = record.expiry;
    if (inputs.by_position)
        shared.from[n] = there ? first_position(plan.forward, keys[n]) : 0;
    shared.bias[n] = there ? record.bias : -INFINITY; // sums of a row without a key are not used
    if constexpr (config::drops)
        shared.codes.key[n] = key_code_of(plan.forward, inputs.b, inputs.g, keys[n]);
}

/* Starts copying the rows of q, dout, lse and delta of a step; q and dout are zero past the end. */
template <typename config>
__device__ static void load_step(key_memory<config> &shared, const backward_plan &plan,
                                 const query_step &step, int stage) {
    using layout = row_layout<config::head_dim>;
    const key_inputs &inputs = shared.inputs;
    const forward_plan &forward = plan.forward;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::keys;
         n += config::threads / layout::copiers) {
        const bool there = step.query + n < forward.q_len;
        const int32_t i = there ? step.query + n : 0;
        const char *const q = row_at(inputs.q, i) + 2 * step.h * forward.q.head;
        const char *const dout = row_at(inputs.dout, i) + 2 * step.h * plan.dout.head;
        copy_two_rows<config::head_dim>((char *)shared.q[stage], (char *)shared.dout[stage], n, q,
                                        dout, inputs.q, there);
    }
    const int n = thread;
    if (n < config::keys) {
        const int64_t head =
            (int64_t)inputs.b * forward.q_heads + inputs.g * forward.group + step.h;
        const int64_t row = head * plan.rows + step.query + n;
        cp_async_4(shared_address(&shared.lse[stage][n]), &plan.row_lse[row]);
        cp_async_4(shared_address(&shared.delta[stage][n]), &plan.row_delta[row]);
        if constexpr (config::drops)
            shared.codes.query[stage][n] =
                row_code_of(forward, inputs.b, inputs.g * forward.group + step.h,
                            inputs.origin + step.query + n);
    }
    cp_async_commit_group();
}

/* Clears q and dout of empty rows. These have no gradient, but their contents may not be finite,
 * and 0 * NaN is NaN. */
template <typename config>
__device__ static void clear_empty(key_memory<config> &shared, int stage) {
    constexpr int row_words = config::head_dim / 2;
    const float *const lse = shared.lse[stage];
    bool some = false;
#pragma unroll
    for (int from = 0; from < config::keys; from += warp_lanes)
        some |= lse[from + threadIdx.x % warp_lanes % config::keys] == INFINITY;
    if (!__any_sync(~0u, some)) // the same in every warp
        return;
    for (int n = threadIdx.x; n < config::keys * row_words; n += config::threads)
        if (lse[n / row_words] == INFINITY) {
            ((uint32_t *)shared.q[stage])[n] = 0;
            ((uint32_t *)shared.dout[stage])[n] = 0;
        }
    __syncthreads();
}
template <typename config>
__device__ static void add_step(key_memory<config> &shared, const backward_plan &plan,
                                key_sums<config> &sums, int current, int stage) {
    constexpr int head_dim = config::head_dim;
    const int warp = opaque(threadIdx.x) / warp_lanes;
    const int first = warp % config::row_warps * mma_rows * head_dim;
    const int column_warp = warp / config::row_warps;
    float s[1][config::keys / 8][4], dp[1][config::keys / 8][4];
    mma_abt<config>(s, down_first<head_dim>(shared.k + first).unhoisted(),
                    right_first<head_dim>(shared.q[stage]).unhoisted());
    mma_abt<config>(dp, down_first<head_dim>(shared.v + first).unhoisted(),
                    right_first<head_dim>(shared.dout[stage]).unhoisted());
    const int32_t position = shared.inputs.origin + shared.step[stage].query;
    uint32_t dropped = 0;
    if constexpr (config::drops) {
        dropped = find_dropped(shared, stage, position, plan.forward.dropout.threshold);
        drop_elements<config>(dp, dropped, plan.forward.dropout_scale);
    }
    find_weights(shared, plan.forward, shared.key[current], stage, load_key_rows(shared), position,
                 s, dp, sums.dbias);
    if constexpr (config::drops)
        drop_elements<config>(s, dropped, 1); // dv is multiplied by dropout_scale at the end
    mma_ab<config>(sums.dv, s,
                   down_first<head_dim>(shared.dout[stage], column_warp * 2).unhoisted());
    mma_ab<config>(sums.dk, dp, down_first<head_dim>(shared.q[stage], column_warp * 2).unhoisted());
}

/* Adds row s of the sums, times scale, to `to`: a gradient, which no other thread block changes
 * meanwhile, or a boundary sum, to which two blocks may add at once. */
template <typename config, bool to_boundary>
__device__ static void add_sums(void *to, bool aligned, int32_t head_dim,
                                const float (&sums)[1][config::warp_columns][4], int s,
                                int column_warp, float scale) {
    using element = typename config::element;
    const int first = channel_of<config::column_warps>(0, column_warp);
#pragma unroll
    for (int d = 0; d < config::warp_columns; d++) {
        const int beyond = tile_channel<config::column_warps>(d);
        const float x = sums[0][d][s * 2] * scale, y = sums[0][d][s * 2 + 1] * scale;
        if (first + beyond >= head_dim)
            continue;
        if (to_boundary) {
            atomicAdd((float *)to + first + beyond, x);
            atomicAdd((float *)to + first + beyond + 1, y);
        } else {
            put_pair<element>({(element *)to + first, aligned, true}, beyond, x, y);
        }
    }
}

template <typename config>
__device__ static void write_rows(const key_memory<config> &shared, const backward_plan &plan,
                                  key_sums<config> &sums, const int32_t *keys, const int32_t *next,
                                  bool aligned) {
    using element = typename config::element;
    const key_inputs &inputs = shared.inputs;
    const uint32_t thread = opaque(threadIdx.x);
    const int warp = thread / warp_lanes % config::row_warps;
    const int column_warp = thread / warp_lanes / config::row_warps;
    const bool is_first = column_warp == 0 && thread % 4 == 0; // of the lanes of a row
    const int32_t dim = plan.forward.head_dim;
    const float scale = plan.forward.scale, dv_scale = plan.forward.dropout_scale;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int n = warp * mma_rows + thread % warp_lanes / 4 + s * 8;
        const int32_t key = keys[n], slot = inputs.first_slot + n;
        const float dbias = quad_sum(sums.dbias[s]);
        const bool other = next[n] != key, there = other && is_key(key, plan.forward.kv_len);
        const int32_t boundary = there && inputs.changes_keys
                                     ? boundary_of(plan, inputs.head, inputs.partition, slot, key)
                                     : 0;
        if (boundary > 0) {
            const int64_t row = boundary_row(plan, inputs.head, boundary, slot);
            add_sums<config, true>(plan.boundary.dk + row * dim, true, dim, sums.dk, s, column_warp,
                                   scale);
            add_sums<config, true>(plan.boundary.dv + row * dim, true, dim, sums.dv, s, column_warp,
                                   config::drops ? dv_scale : 1);
            if (is_first)
                atomicAdd(plan.boundary.dbias + row, dbias);
        } else if (there) {
            element *const dk = dk_of_key<element>(plan, inputs.b, inputs.g, key);
            add_sums<config, false>(dk, aligned, dim, sums.dk, s, column_warp, scale);
            element *const dv = dv_of_key<element>(plan, inputs.b, inputs.g, key);
            add_sums<config, false>(dv, aligned, dim, sums.dv, s, column_warp,
                                    config::drops ? dv_scale : 1);
            if (is_first && plan.dbias.data != NULL)
                *dbias_of_key(plan, inputs.b, inputs.g, key) += dbias;
        }
#pragma unroll
        for (int d = 0; d < config::warp_columns; d++)
#pragma unroll
            for (int x = s * 2; x < s * 2 + 2; x++) {
                sums.dk[0][d][x] = other ? 0 : sums.dk[0][d][x];
                sums.dv[0][d][x] = other ? 0 : sums.dv[0][d][x];
            }
        sums.dbias[s] = other ? 0 : sums.dbias[s];
    }
}

/* Moves to the keys of the next query block at the end of one. `upcoming` is the next key of row
 * threadIdx.x, or no key after the last query block. Returns true if `current` must change. */
template <typename config>
__device__ static bool change_keys(key_memory<config> &shared, const backward_plan &plan,
                                   key_sums<config> &sums, int current, int32_t upcoming,
                                   bool aligned) {
    const uint32_t n = opaque(threadIdx.x);
    bool other = false;
    if (n < config::rows) {
        shared.key[current ^ 1][n] = upcoming;
        other = upcoming != shared.key[current][n];
    }
    if (!__syncthreads_or(other))
        return false;
    write_rows(shared, plan, sums, shared.key[current], shared.key[current ^ 1], aligned);
    load_rows(shared, plan, shared.key[current], shared.key[current ^ 1]);
    return true; // the next step waits for these copies
}

template <typename config>
__device__ static int32_t own_key(const key_memory<config> &shared, const backward_plan &plan,
                                  int32_t query_block) {
    const uint32_t n = opaque(threadIdx.x);
    return n < config::rows && query_block < shared.inputs.end_block
               ? key_of_row(plan, shared.inputs, query_block, n)
               : -1;
}

/* The step after the one in a stage. Shared memory holds steps to save registers. */
template <typename config>
__device__ static query_step next_step(const key_memory<config> &shared, const backward_plan &plan,
                                       int stage) {
    return step_after(shared.step[stage], config::keys, plan.forward.group, plan.forward.q_len);
}

template <typename config>
__device__ static void load_next(key_memory<config> &shared, const backward_plan &plan, int stage) {
    const query_step next = next_step(shared, plan, stage);
    if (threadIdx.x == 0)
        shared.step[stage ^ 1] = next;
    if (next.query_block < shared.inputs.end_block)
        load_step(shared, plan, next, stage ^ 1);
}

template <typename config>
__device__ static void sum_steps(key_memory<config> &shared, const backward_plan &plan,
                                 key_sums<config> &sums, bool aligned) {
    const int32_t end = shared.inputs.end_block;
    int32_t query_block = shared.step[0].query_block,
            upcoming = own_key(shared, plan, query_block + 1);
    int stage = 0, current = 0;
    load_step(shared, plan, shared.step[0], stage);
    while (query_block < end) {
        cp_async_wait_group<0>();
        __syncthreads(); // this step has arrived, and every warp has read the previous one
        load_next(shared, plan, stage);
        clear_empty(shared, stage);
        add_step(shared, plan, sums, current, stage);
        const int32_t next = next_step(shared, plan, stage).query_block;
        if (next > query_block) {
            if (shared.inputs.changes_keys || next == end)
                current ^= change_keys(shared, plan, sums, current, upcoming, aligned);
            upcoming = own_key(shared, plan, next + 1);
        }
        query_block = next;
        stage ^= 1;
    }
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    sum_keys(const __grid_constant__ backward_plan plan, const key_pass pass, const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    key_memory<config> &shared = *(key_memory<config> *)bytes;
    const int64_t head = head_of_block();
    if (head >= (int64_t)plan.forward.batch * plan.forward.kv_heads)
        return;
    if (threadIdx.x == 0) {
        shared.inputs = key_inputs_of(plan, pass, head, blockIdx.x, config::rows, aligned);
        shared.step[0] = first_step(shared.inputs, config::keys);
    }
    __syncthreads();
    if (shared.inputs.query_block >= shared.inputs.end_block)
        return;
    const int32_t key = own_key(shared, plan, shared.inputs.query_block);
    if (threadIdx.x < config::rows)
        shared.key[0][threadIdx.x] = key;
    __syncthreads();
    key_sums<config> sums;
    clear_sums(sums.dk);
    clear_sums(sums.dv);
    sums.dbias[0] = sums.dbias[1] = 0;
    load_rows(shared, plan, NULL, shared.key[0]);
    sum_steps(shared, plan, sums, aligned);
}
