/* The shared memory of a thread block of the key passes, and the step from the products of its keys
 * and queries to weights and gradients of logits. */
#pragma once

#include "cuda/backward/sm80/steps.cuh"
#include "cuda/mma/dropout.cuh"

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
