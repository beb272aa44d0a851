/* The pass that makes dq. A tile of query rows visits the keys of its list, as in forward. Its
 * sums have the order of the list, so they are bit-equal from run to run, and need no buffer in
 * float32. */
#pragma once

#include "cuda/backward/sm80/pairs.cuh"
#include "cuda/backward/sm80/tile.cuh"
#include "cuda/mma/dropout.cuh"

template <typename config> struct query_memory {
    using element = typename config::element;
    alignas(128) element q[config::rows * config::head_dim];
    alignas(128) element dout[config::rows * config::head_dim];
    alignas(128) element k[2][config::keys * config::head_dim];
    alignas(128) element v[2][config::keys * config::head_dim];
    key_records<config::keys> records[2];
    alignas(16) int32_t key[3][config::keys]; // list entries: of this key block and the next two
    int32_t position[config::rows];
    typename codes_of<config, config::drops>::type codes; // of dropout
    tile_inputs inputs;
};

/* lse and delta of a lane's two rows: s stands for row lane / 4 * 2 + s of the warp. */
struct row_stats {
    float lse[2], delta[2];
};

template <typename config>
__device__ static row_stats load_row_stats(const backward_plan &plan, const row_range &range) {
    const int lane = threadIdx.x % warp_lanes, warp = threadIdx.x / warp_lanes;
    row_stats stats;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int32_t row = range.first + warp * mma_rows + lane / 4 * 2 + s;
        const int32_t i = row / plan.forward.group, of_group = row % plan.forward.group;
        const int64_t h =
            (int64_t)range.b * plan.forward.q_heads + range.g * plan.forward.group + of_group;
        const bool there = row < range.total;
        stats.lse[s] = there ? plan.row_lse[h * plan.rows + i] : INFINITY;
        stats.delta[s] = there ? plan.row_delta[h * plan.rows + i] : 0;
    }
    return stats;
}

/* Starts copying key block n. Its entries are in shared memory. */
template <typename config>
__device__ static void load_keys(query_memory<config> &shared, const forward_plan &plan,
                                 int32_t n) {
    const int32_t *const keys = shared.key[n % 3];
    const tile_inputs &inputs = shared.inputs;
    copy_block<config>((char *)shared.k[n % 2], keys, inputs.k, inputs.keys.kv_len);
    copy_block<config>((char *)shared.v[n % 2], keys, inputs.v, inputs.keys.kv_len);
    copy_records(shared.records[n % 2], inputs.keys, keys);
    if constexpr (config::drops)
        write_key_codes(shared.codes, plan, inputs.range, keys, n);
    cp_async_commit_group();
}

/* Replaces dp by (dp - delta) times the slope of softcap, and s by the tanh of softcap. */
template <typename config>
__device__ static void find_slopes(float (&s)[1][config::keys / 8][4],
                                   float (&dp)[1][config::keys / 8][4], const row_stats &stats,
                                   float softcap_scale) {
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            dp[0][n][x] -= stats.delta[x / 2];
    if (softcap_scale == 0)
        return;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float t = tanh_of(s[0][n][x] * softcap_scale);
            s[0][n][x] = t;
            dp[0][n][x] *= 1 - t * t;
        }
}

/* Replaces dp by the gradient of scale * <q, k>. */
template <typename config>
__device__ static void
find_gradients(query_memory<config> &shared, int32_t n, float (&s)[1][config::keys / 8][4],
               float (&dp)[1][config::keys / 8][4], const row_stats &stats, bool by_position) {
    const key_records<config::keys> &keys = shared.records[n % 2];
    const int first = opaque(threadIdx.x) / warp_lanes * mma_rows;
    find_slopes<config>(s, dp, stats, shared.inputs.logits.softcap_scale);
    find_logits<config>(s, keys.bias, {0, shared.inputs.logits.scale});
    mask_logits<config>(s, keys.expiry,
                        first_positions(keys, shared.key[n % 3], shared.inputs.keys),
                        shared.position + first, by_position);
#pragma unroll
    for (int c = 0; c < config::keys / 8; c++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            dp[0][c][x] *= ex2_approx(s[0][c][x] - stats.lse[x / 2]);
}

/* find_gradients() with attn_mask or attn_bias. It goes element by element, because dattn_bias
 * takes the gradient before it is multiplied by the slope of softcap. */
template <typename config>
__device__ static void find_pair_gradients(query_memory<config> &shared, const backward_plan &plan,
                                           int32_t n, float (&s)[1][config::keys / 8][4],
                                           float (&dp)[1][config::keys / 8][4],
                                           const row_stats &stats) {
    const tile_inputs &inputs = shared.inputs;
    const key_records<config::keys> &records = shared.records[n % 2];
    const int32_t *const entries = shared.key[n % 3];
    const int32_t *const first = first_positions(records, entries, inputs.keys);
    const int lane = threadIdx.x % warp_lanes;
    const int32_t first_row = inputs.range.first + threadIdx.x / warp_lanes * mma_rows;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const pair_row row = pair_row_of(plan.forward, inputs.range, first_row + lane / 4 * 2 + r);
        row_bits<config::keys> bits = {};
        if (inputs.keys.bits != NULL)
            bits = load_bits<config::keys>(
                plan.forward, kept_bits(plan.forward, inputs.keys, 0, row.h, row.i), n);
        const bool is_empty = stats.lse[r] == INFINITY;
#pragma unroll
        for (int x = 0; x < config::keys / 4; x++) {
            const int column = x / 2 * 8 + lane % 4 * 2 + x % 2;
            float &product = s[0][x / 2][r * 2 + x % 2], &gradient = dp[0][x / 2][r * 2 + x % 2];
            const float cap = inputs.logits.softcap_scale;
            const float t = cap == 0 ? product : tanh_of(product * cap);
            if (is_empty || !keeps_pair(plan.forward, row.position, inputs.keys, bits, records,
                                        entries, first, column)) {
                gradient = 0;
                continue;
            }
            const int32_t key = entries[column];
            const float bias = records.bias[column] +
                               pair_exponent<typename config::element>(plan.forward, row, key);
            const float p = ex2_approx(fmaf(t, inputs.logits.scale, bias) - stats.lse[r]);
            const float ds = p * (gradient - stats.delta[r]);
            if (plan.dpairs.data != NULL)
                put_pair_gradient<typename config::element>(
                    plan, plan.dpairs.offset(row.b, row.h, row.i, key), ds);
            gradient = cap == 0 ? ds : ds * (1 - t * t);
        }
    }
}

template <typename config>
__device__ static void sum_blocks(query_memory<config> &shared, const row_stats &stats,
                                  float (&dq)[1][config::head_dim / 8][4],
                                  const backward_plan &plan) {
    constexpr int head_dim = config::head_dim;
    const tile_list &keys = shared.inputs.keys;
    const int first = threadIdx.x / warp_lanes * mma_rows * head_dim;
    const auto q_at = down_first<head_dim>(shared.q + first);
    const auto dout_at = down_first<head_dim>(shared.dout + first);
    for (int32_t n = 0; n * config::keys < keys.entries; n++) {
        float s[1][config::keys / 8][4], dp[1][config::keys / 8][4];
        cp_async_wait_group<0>();
        __syncthreads(); // block n has arrived, and every warp has read the previous one
        const int32_t upcoming = own_entry<config>(keys, n + 2);
        if ((n + 1) * config::keys < keys.entries)
            load_keys(shared, plan.forward, n + 1);
        mma_abt<config>(s, q_at.unhoisted(), right_first<head_dim>(shared.k[n % 2]));
        mma_abt<config>(dp, dout_at.unhoisted(), right_first<head_dim>(shared.v[n % 2]));
        store_entry(shared.key, n + 2, upcoming);
        if constexpr (config::drops)
            drop_elements(dp, shared.codes, shared.position,
                          opaque(threadIdx.x) / warp_lanes * mma_rows, n,
                          plan.forward.dropout.threshold, plan.forward.dropout_scale);
        if constexpr (config::has_pairs)
            find_pair_gradients(shared, plan, n, s, dp, stats);
        else
            find_gradients(shared, n, s, dp, stats, plan.forward.by_position);
        mma_ab<config>(dq, dp, down_first<head_dim>(shared.k[n % 2]));
    }
}

template <typename config>
__device__ static void write_dq(const float (&dq)[1][config::head_dim / 8][4],
                                const backward_plan &plan, const row_range &range,
                                const row_stats &stats, bool aligned) {
    using element = typename config::element;
    const int lane = threadIdx.x % warp_lanes, warp = threadIdx.x / warp_lanes;
    const float scale = plan.forward.scale;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int32_t row = range.first + warp * mma_rows + lane / 4 * 2 + s;
        if (row >= range.total)
            continue;
        const bool empty = stats.lse[s] == INFINITY;
        const gradient_row<element> to = {(element *)plan.dq.data +
                                              row_offset(plan.dq, plan.forward, range, row),
                                          aligned, plan.accumulate};
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++) {
            const int channel = channel_of<1>(d, 0);
            // not dq * 0: the sums of an empty row may be NaN
            if (channel < plan.forward.head_dim)
                put_pair(to, channel, empty ? 0 : dq[0][d][s * 2] * scale,
                         empty ? 0 : dq[0][d][s * 2 + 1] * scale);
        }
    }
}

template <typename config>
__device__ static void load_rows(query_memory<config> &shared, const backward_plan &plan,
                                 const row_range &range, bool aligned) {
    const forward_plan &forward = plan.forward;
    load_queries<config, config::row_warps, config::threads>((char *)shared.q, forward.q, forward,
                                                             range, aligned);
    load_queries<config, config::row_warps, config::threads>((char *)shared.dout, plan.dout,
                                                             forward, range, aligned);
}

/* One tile. The tiles of a kv head are neighbours, and the last ones come first, as in forward. */
template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    sum_queries(const __grid_constant__ backward_plan plan, const int32_t tiles,
                const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    query_memory<config> &shared = *(query_memory<config> *)bytes;
    const forward_plan &forward = plan.forward;
    const int32_t tile = tiles - 1 - (int32_t)(blockIdx.x % tiles);
    const row_range range =
        row_range_of(forward, (int32_t)(blockIdx.x / tiles), tile * config::rows);
    float dq[1][config::head_dim / 8][4];
    if (threadIdx.x == 0)
        shared.inputs = tile_inputs_of(forward, range, config::rows, aligned);
    write_positions<config::rows>(shared.position, forward, range, key_count(forward, range.b));
    if constexpr (config::drops)
        write_row_codes(shared.codes, forward, range, key_count(forward, range.b));
    load_rows(shared, plan, range, aligned);
    __syncthreads();
    for (int32_t n = 0; n < 2; n++)
        store_entry(shared.key, n, own_entry<config>(shared.inputs.keys, n));
    const row_stats stats = load_row_stats<config>(plan, range);
    clear_sums(dq);
    __syncthreads();
    load_keys(shared, forward, 0);
    sum_blocks(shared, stats, dq, plan);
    cp_async_wait_group<0>(); // if the list is empty, copies of rows may still be in flight
    write_dq<config>(dq, plan, range, stats, aligned);
}
