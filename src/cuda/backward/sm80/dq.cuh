/* The pass that makes dq. A tile of query rows visits the keys of its list, as in forward. Its
 * sums have the order of the list, so they are bit-equal from run to run, and need no buffer in
 * float32. */
#pragma once

#include "cuda/backward/sm80/tile.cuh"
#include "cuda/mma/attention.cuh"

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

/* Starts a thread block on its tile: the inputs, positions and codes of its rows, and the copies of
 * q and dout. The tiles of a kv head are neighbours, and the last ones come first, as in
 * forward. */
template <typename config, typename memory>
__device__ static row_range start_tile(memory &shared, const backward_plan &plan, int32_t tiles,
                                       bool aligned) {
    const forward_plan &forward = plan.forward;
    const int32_t tile = tiles - 1 - (int32_t)(blockIdx.x % tiles);
    const row_range range =
        row_range_of(forward, (int32_t)(blockIdx.x / tiles), tile * config::rows);
    if (threadIdx.x == 0)
        shared.inputs = tile_inputs_of(forward, range, config::rows, aligned);
    write_positions<config::rows>(shared.position, forward, range, key_count(forward, range.b));
    if constexpr (config::drops)
        write_row_codes(shared.codes, forward, range, key_count(forward, range.b));
    load_queries<config, config::row_warps, config::threads>((char *)shared.q, forward.q, forward,
                                                             range, aligned);
    load_queries<config, config::row_warps, config::threads>((char *)shared.dout, plan.dout,
                                                             forward, range, aligned);
    return range;
}

template <typename config, typename memory>
__device__ static void store_first_entries(memory &shared) {
    __syncthreads(); // the inputs are written
    for (int32_t n = 0; n < 2; n++)
        store_entry(shared.key, n, own_entry<config>(shared.inputs.keys, n));
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    sum_queries(const __grid_constant__ backward_plan plan, const int32_t tiles,
                const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    query_memory<config> &shared = *(query_memory<config> *)bytes;
    const row_range range = start_tile<config>(shared, plan, tiles, aligned);
    float dq[1][config::head_dim / 8][4];
    store_first_entries<config>(shared);
    const row_stats stats = load_row_stats<config>(plan, range);
    clear_sums(dq);
    __syncthreads();
    load_keys(shared, plan.forward, 0);
    sum_blocks(shared, stats, dq, plan);
    cp_async_wait_group<0>(); // if the list is empty, copies of rows may still be in flight
    write_dq<config>(dq, plan, range, stats, aligned);
}

/* ---- calls with attn_mask ---- */

/* The pass of a call with attn_mask, which makes all gradients from the lists of kept keys. A tile
 * of query rows visits the keys of its list, as in forward. Its dq stays in registers. dk and dv of
 * a key block, over the rows of the tile, are added to float32 sums in device memory. Other tiles
 * add to them too, in an order that changes from run to run, so the last bits may change. If no
 * other tile has a gradient of the same elements of dattn_bias, the tile writes these elements,
 * zeros and gradients. A key block's zeros come just before its gradients, which are then stored
 * while the L2 cache has their lines, so device memory is written once.
 *
 * A warp has 16 keys of the block, and computes their weights for all rows of the tile: rows of the
 * accumulators are keys, columns are queries. dq uses the same numbers transposed, from shared
 * memory. */

template <typename type, bool drops_> struct listed_config {
    using element = type;
    static constexpr bool has_pairs = true;
    static constexpr bool drops = drops_; // with dropout
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int row_tiles = 1;
    static constexpr int row_warps = 4;
    static constexpr int rows = row_warps * mma_rows; // queries
    static constexpr int keys = 64;                   // of a key block
    static constexpr int warp_columns = head_dim / vec_channels;
    static constexpr int threads = row_warps * warp_lanes;
    static constexpr int blocks = 2; // on a multiprocessor
    static_assert(rows == keys, "warps have as many keys of a block as queries of the tile");
};

/* The data that depends only on the rows of a tile. */
template <typename config> struct listed_rows {
    alignas(16) float lse[config::rows], delta[config::rows];
    int64_t dpairs[config::rows]; // offset of the row in dattn_bias, in elements
    pair_rows<config::rows> pairs;
};

template <typename config> struct listed_memory {
    using element = typename config::element;
    alignas(128) element q[config::rows * config::head_dim];
    alignas(128) element dout[config::rows * config::head_dim];
    alignas(128) element k[2][config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    alignas(128) element ds[config::keys * config::rows]; // gradients of logits: rows are keys
    key_records<config::keys> records[2];
    alignas(16) int32_t key[3][config::keys]; // list entries: of this key block and the next two
    alignas(16) uint32_t bits[2][config::keys / 32][config::rows]; // of this block and the next
    int32_t position[config::rows];
    typename codes_of<config, config::drops>::type codes; // of dropout
    listed_rows<config> of_row;
    tile_inputs inputs;
};

/* The row of the tile for this lane's column x of the accumulators' column tile n. */
__device__ static int row_of_column(int n, int x) {
    return n / 2 * 16 + threadIdx.x % 4 * 4 + x * 2 + n % 2;
}

template <typename config>
__device__ static void write_rows(listed_rows<config> &to, const backward_plan &plan,
                                  const row_range &range, const tile_list &list) {
    const forward_plan &forward = plan.forward;
    write_pair_rows(to.pairs, forward, range, list);
    const int r = threadIdx.x;
    if (r >= config::rows)
        return;
    const pair_row row = pair_row_of(forward, range, range.first + r);
    const int64_t at = ((int64_t)row.b * forward.q_heads + row.h) * plan.rows + row.i;
    const bool there = range.first + r < range.total;
    to.lse[r] = there ? plan.row_lse[at] : INFINITY;
    to.delta[r] = there ? plan.row_delta[at] : 0;
    to.dpairs[r] = plan.dpairs.data == NULL ? 0 : plan.dpairs.offset(row.b, row.h, row.i, 0);
}

/* Starts copying k of key block n, its records and the bits of the tile's rows. */
template <typename config>
__device__ static void load_keys(listed_memory<config> &shared, const forward_plan &plan,
                                 int32_t n) {
    const int32_t *const keys = shared.key[n % 3];
    const tile_inputs &inputs = shared.inputs;
    copy_block<config>((char *)shared.k[n % 2], keys, inputs.k, inputs.keys.kv_len);
    copy_records(shared.records[n % 2], inputs.keys, keys);
    constexpr int words = config::keys / 32;
    const int64_t from = words_before(plan, (int64_t)n * config::keys);
    for (int i = threadIdx.x; i < config::rows * words; i += config::threads)
        cp_async_4(shared_address(&shared.bits[n % 2][i / config::rows][i % config::rows]),
                   shared.of_row.pairs.bits[i % config::rows] + from + i / config::rows);
    if constexpr (config::drops)
        write_key_codes(shared.codes, plan, inputs.range, keys, n);
    cp_async_commit_group();
}

template <typename config>
__device__ static void load_values(listed_memory<config> &shared, int32_t n) {
    copy_block<config>((char *)shared.v, shared.key[n % 3], shared.inputs.v,
                       shared.inputs.keys.kv_len);
    cp_async_commit_group();
}

/* Clears q and dout of empty rows. These have no gradient, but their contents may not be finite,
 * and 0 * NaN is NaN. */
template <typename config> __device__ static void clear_empty(listed_memory<config> &shared) {
    constexpr int row_words = config::head_dim / 2;
    for (int n = threadIdx.x; n < config::rows * row_words; n += config::threads) {
        const int c = n / row_words, r = c / 16 * 16 + row_order<config>(c % 16);
        if (shared.of_row.lse[r] == INFINITY) {
            ((uint32_t *)shared.q)[n] = 0;
            ((uint32_t *)shared.dout)[n] = 0;
        }
    }
}

/* The pairs that dropout drops, of rows and a lane's keys at entries `own` and own + 8 of block n:
 * a bit for each, 16 per key. */
template <typename config>
__device__ static uint32_t find_dropped(const listed_memory<config> &shared, int32_t n, int own,
                                        uint32_t threshold) {
    uint32_t dropped = 0;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int x = 0; x < config::rows / 4; x++) {
            const int row = row_of_column(x / 2, x % 2);
            const uint32_t mixed =
                dropout_mix(shared.codes.row[row], shared.codes.key[n % 2][own + r * 8]);
            dropped |= (uint32_t)drops(mixed, shared.position[row] % 2 != 0, threshold)
                       << (r * 16 + x);
        }
    return dropped;
}

/* Puts the gradients of the consecutive rows from `row` on, for one key, into dattn_bias. Each has
 * a bit in `kept`, set if the row keeps the key. */
template <typename config>
__device__ static void put_rows(const listed_memory<config> &shared, const backward_plan &plan,
                                int row, int32_t key, float (&ds)[consecutive_rows],
                                uint32_t kept) {
    if (plan.dpairs.data == NULL)
        return;
    const row_range &range = shared.inputs.range;
    const int32_t rows = range.total - range.first - row;
    if (rows < consecutive_rows) // rows past the last one have its bits
        kept &= rows > 0 ? (1u << rows) - 1 : 0;
    kept = sum_sharing_rows(ds, kept, plan.sharing_rows);
#pragma unroll
    for (int y = 0; y < consecutive_rows; y++)
        if (kept >> y & 1)
            put_pair_gradient<typename config::element>(
                plan, shared.of_row.dpairs[row + y] + key * plan.dpairs.key, ds[y]);
}

/* Replaces the products s and dp of a lane's two keys, at entries `own` and own + 8 of block n, by
 * weights, as dv needs them, and by the gradients of scale * <q, k>. Writes dattn_bias, and adds to
 * the keys' dbias. dropped: as from find_dropped(). */
template <typename config>
__device__ static void find_gradients(const listed_memory<config> &shared,
                                      const backward_plan &plan, int32_t n, int own,
                                      uint32_t dropped, float (&s)[1][config::keys / 8][4],
                                      float (&dp)[1][config::keys / 8][4], float (&dbias)[2]) {
    const forward_plan &forward = plan.forward;
    const logit_params logits = shared.inputs.logits;
    const bool has_bias = forward.pair_bias.data != NULL;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int column = own + r * 8;
        const float key_bias = shared.records[n % 2].bias[column];
        const int32_t key = shared.key[n % 3][column];
        float ds[consecutive_rows];
        uint32_t kept_rows = 0;
#pragma unroll
        for (int x = 0; x < config::rows / 4; x++) {
            const int y = x % consecutive_rows, c = x / consecutive_rows * 2 + y % 2, e = y / 2;
            const int row = row_of_column(c, e);
            float &weight = s[0][c][r * 2 + e], &gradient = dp[0][c][r * 2 + e];
            const bool kept = shared.bits[n % 2][column / 32][row] >> column % 32 & 1;
            float t = weight, slope = 1, bias = key_bias;
            if (logits.softcap_scale != 0) {
                t = tanh_of(weight * logits.softcap_scale);
                slope = 1 - t * t;
            }
            if (has_bias && kept)
                bias += log2_e * bias_at<typename config::element>(forward.pair_bias,
                                                                   shared.of_row.pairs.bias[row] +
                                                                       key * forward.pair_bias.key);
            const float p = ex2_approx(fmaf(t, logits.scale, bias) - shared.of_row.lse[row]);
            const bool drops = dropped >> (r * 16 + c * 2 + e) & 1;
            const float dout_v = drops ? 0 : gradient * forward.dropout_scale;
            ds[y] = kept ? p * (dout_v - shared.of_row.delta[row]) : 0;
            weight = kept && !drops ? p : 0;
            gradient = ds[y] * slope;
            dbias[r] += ds[y];
            kept_rows = (y == 0 ? 0 : kept_rows) | (uint32_t)kept << y;
            if (y + 1 == consecutive_rows)
                put_rows(shared, plan, row - y, key, ds, kept_rows);
        }
    }
}

/* Writes gradients as elements. dq reads the transposed matrix. */
template <typename config>
__device__ static void store_gradients(listed_memory<config> &shared, int own,
                                       const float (&ds)[1][config::keys / 8][4]) {
    using type = element_type<typename config::element>;
    using layout = row_layout<config::rows>;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(uint32_t *)((char *)shared.ds + layout::offset(own + r * 8, n) +
                          threadIdx.x % 4 * 4) = type::pack(ds[0][n][r * 2], ds[0][n][r * 2 + 1]);
}

/* dq += dS K for a warp's 16 rows. */
template <typename config>
__device__ static void add_dq(float (&dq)[1][config::head_dim / 8][4],
                              const listed_memory<config> &shared, int32_t n) {
    const int lane = threadIdx.x % warp_lanes, warp = opaque(threadIdx.x) / warp_lanes;
    const lane_address<config::rows> ds_at(shared.ds, lane % 8 + lane / 16 * 8,
                                           lane / 8 % 2 + warp * 2);
    const auto k_at = down_first<config::head_dim>(shared.k[n % 2]);
#pragma unroll
    for (int from = 0; from < config::keys; from += 16) {
        uint32_t rows[4];
        ldmatrix_x4_trans(rows, ds_at.at(from, 0));
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d += 2) {
            uint32_t keys[4];
            ldmatrix_x4_trans(keys, k_at.at(from, d));
            mma_m16n8k16<typename config::element>(dq[0][d], rows, keys[0], keys[1]);
            mma_m16n8k16<typename config::element>(dq[0][d + 1], rows, keys[2], keys[3]);
        }
    }
}

template <typename config>
__device__ static void add_to_sums(float *sums, const int32_t *keys, int32_t kv_len,
                                   const float (&own)[1][config::warp_columns][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t key = keys[r * 8];
        if (!is_key(key, kv_len))
            continue;
        float *const to = sums + (int64_t)key * (2 * config::head_dim) + threadIdx.x % 4 * 4;
#pragma unroll
        for (int d = 0; d < config::warp_columns; d += 2)
            add_four(to + d * 8, own[0][d][r * 2], own[0][d][r * 2 + 1], own[0][d + 1][r * 2],
                     own[0][d + 1][r * 2 + 1]);
    }
}

/* The first key of block n, or kv_len if there is no such block. */
template <typename config>
__device__ static int32_t first_key(const listed_memory<config> &shared, const backward_plan &plan,
                                    int32_t n) {
    const bool is_block = n * config::keys < shared.inputs.keys.entries;
    return is_block ? shared.key[n % 3][0] : plan.forward.kv_len;
}

/* Clears the tile's elements of dattn_bias, from a key of its list or key 0 up to block n.
 * Gradients are stored after the next __syncthreads(). */
template <typename config>
__device__ static void clear_up_to(const listed_memory<config> &shared, const backward_plan &plan,
                                   int32_t from, int32_t n) {
    const row_range &range = shared.inputs.range;
    if (plan.dpair_writing == rows_stored)
        clear_pairs<typename config::element, config::threads>(
            plan.dpairs,
            {shared.of_row.dpairs, min(config::rows, range.total - range.first), plan.sharing_rows,
             plan.aligned_pairs},
            from, first_key(shared, plan, n));
}

/* Sums dq of a warp's rows over all key blocks, and dk, dv and dbias of these blocks. */
template <typename config>
__device__ static void visit_blocks(listed_memory<config> &shared, const backward_plan &plan,
                                    float (&dq)[1][config::head_dim / 8][4]) {
    constexpr int head_dim = config::head_dim;
    const tile_list &list = shared.inputs.keys;
    const row_range &range = shared.inputs.range;
    const int warp = opaque(threadIdx.x) / warp_lanes, lane = threadIdx.x % warp_lanes;
    const int first = warp * mma_rows * head_dim, own = warp * mma_rows + lane / 4;
    const int64_t head = (int64_t)range.b * plan.forward.kv_heads + range.g;
    float *const sums = plan.key_sums + head * plan.forward.kv_len * (2 * head_dim);
    clear_up_to(shared, plan, 0, 1);
    for (int32_t n = 0; n * config::keys < list.entries; n++) {
        const bool has_next = (n + 1) * config::keys < list.entries;
        const int32_t *const keys = shared.key[n % 3];
        float s[1][config::keys / 8][4], dp[1][config::keys / 8][4], dbias[2] = {};
        cp_async_wait_group<0>();
        __syncthreads(); // k and v have arrived, and every warp has read the last block's ds
        const int32_t upcoming = own_entry<config>(list, n + 2);
        if (has_next)
            load_keys(shared, plan.forward, n + 1);
        uint32_t dropped = 0;
        if constexpr (config::drops)
            dropped = find_dropped(shared, n, own, plan.forward.dropout.threshold);
        mma_abt<config>(s, down_first<head_dim>(shared.k[n % 2] + first).unhoisted(),
                        right_first<head_dim>(shared.q).unhoisted());
        mma_abt<config>(dp, down_first<head_dim>(shared.v + first).unhoisted(),
                        right_first<head_dim>(shared.dout).unhoisted());
        find_gradients<config>(shared, plan, n, own, dropped, s, dp, dbias);
        store_gradients(shared, own, dp);
        store_entry(shared.key, n + 2, upcoming);
        __syncthreads(); // ds is complete, and every warp has read v
        if (has_next) {
            load_values(shared, n + 1);
            clear_up_to(shared, plan, first_key(shared, plan, n + 1), n + 2);
        }
        float sum[1][config::warp_columns][4];
        clear_sums(sum);
        mma_ab<config>(sum, s, down_first<head_dim>(shared.dout).unhoisted());
        add_to_sums<config>(sums + head_dim, keys + own, list.kv_len, sum);
        clear_sums(sum);
        mma_ab<config>(sum, dp, down_first<head_dim>(shared.q).unhoisted());
        add_to_sums<config>(sums, keys + own, list.kv_len, sum);
        add_dq(dq, shared, n);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float total = quad_sum(dbias[r]);
            const int32_t key = keys[own + r * 8];
            if (plan.dbias.data != NULL && lane % 4 == 0 && is_key(key, list.kv_len))
                atomicAdd(dbias_of_key(plan, range.b, range.g, key), total);
        }
    }
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    sum_listed(const __grid_constant__ backward_plan plan, const int32_t tiles,
               const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    listed_memory<config> &shared = *(listed_memory<config> *)bytes;
    const row_range range = start_tile<config>(shared, plan, tiles, aligned);
    float dq[1][config::head_dim / 8][4];
    cp_async_commit_group();
    store_first_entries<config>(shared);
    write_rows(shared.of_row, plan, range, shared.inputs.keys);
    clear_sums(dq);
    __syncthreads();
    load_keys(shared, plan.forward, 0);
    load_values(shared, 0);
    cp_async_wait_group<2>();
    __syncthreads(); // q and dout have arrived
    clear_empty(shared);
    visit_blocks(shared, plan, dq);
    cp_async_wait_group<0>();
    write_dq<config>(dq, plan, range, load_row_stats<config>(plan, range), aligned);
}
