/* The producer of sm90's forward kernel: a warpgroup that gathers q, k and v of tile after tile
 * into shared memory, and writes a mask for each key block. Each lane looks after one key of a
 * block. */
#pragma once

#include "cuda/forward/sm90/tile.cuh"

static constexpr int32_t no_key = (int32_t)no_row;

/* The record of a key that no row of the tile keeps. A bias of -inf masks it at no cost, whereas an
 * expiry would make the consumers compare positions. */
__device__ static key_record masked_record(void) { return {INT32_MAX, -INFINITY}; }

/* Splits a bias into bfloat16 terms. For an infinite bias each term is the largest finite number of
 * its sign, and the sum of the three is infinite. NaN is treated as +inf, because either makes a
 * row that keeps the key NaN. */
__device__ static void write_bias(bias_octet *octet, int32_t column, float bias) {
    const bool is_finite = fabsf(bias) <= FLT_MAX;
    float rest = is_finite ? bias : bias < 0 ? -FLT_MAX : FLT_MAX;
#pragma unroll
    for (int term = 0; term < bias_terms; term++) {
        const __nv_bfloat16 upper = from_float_toward_zero<__nv_bfloat16>(rest);
        octet->terms[term][column] = upper;
        rest -= is_finite ? to_float(upper) : 0;
    }
}

/* The rows of k, or of v, of the (b, g) of a tile. */
struct tile_keys {
    const row_strides &strides;
    const head_view &carried, &own;
    int32_t b, g;
    piece_rows rows; // if the pieces are near each other

    __device__ far_rows far(void) const {
        return {rows_of(carried, b, g), rows_of(own, b, g), strides.unit};
    }
};

__device__ static tile_keys keys_of_tile(const row_strides &strides, const head_view &carried,
                                         const head_view &own, const row_tile &tile) {
    return {strides, carried, own, tile.b, tile.g, rows_of(strides, carried, own, tile.b, tile.g)};
}

/* The key that a lane looks after in a key block. */
struct own_key {
    int32_t key; // no_key: there is none to read
    key_record record;
};

template <class config> struct producer {
    forward_memory<config> *memory;
    tile_order order;
    float bias_scale; // turns a bias of logits into one of products
    pipeline_state<config::kv_stages> kv;
    pipeline_state<config::mask_stages> mask;
    pipeline_state<1> q;
    pipeline_state<tile_headers> header;
    int32_t warp, own_column; // own_column: of this lane's key in a key block

    __device__ int32_t fetch_entry(const tile_list &keys, int32_t block) const {
        return entry_at(keys, block * config::key_rows + own_column);
    }

    __device__ static int32_t key_of(const tile_list &keys, int32_t entry) {
        return is_key(entry, keys.kv_len) ? entry : no_key;
    }

    __device__ key_record fetch_record(const tile_list &keys, int32_t key) const {
        // without records consumers may leave out the bias, so the expiry masks an absent key
        if (keys.records == NULL)
            return {key == no_key ? INT32_MIN : INT32_MAX, 0};
        return key == no_key ? masked_record() : keys.records[key];
    }

    /* Gathers the rows of k or v of a key block into the next stage, unless they are rows of a
     * short key block that consumers do not read. */
    __device__ void load_rows(const forward_plan &plan, const tile_keys &keys, int32_t key,
                              bool is_skipped) {
        const row_strides &strides = keys.strides;
        wait(&memory->kv_free[kv.stage], kv.parity ^ 1);
        if (!is_skipped && strides.is_far)
            gather_keys(keys.far(), far_index_of(strides, (uint32_t)key), plan.head_dim);
        else if (!is_skipped)
            gather_keys(unit_rows{keys.rows.base, strides.unit},
                        index_of(strides, keys.rows, (uint32_t)key), plan.head_dim);
        cp_async_mbarrier_arrive_noinc(&memory->kv_ready[kv.stage]);
        kv.advance();
    }

    template <class source_rows>
    __device__ void gather_keys(const source_rows &source, uint32_t own_row, int head_dim) {
        gather_rows<config::key_rows, config::panels, config::warp_keys>(
            shared_address(memory->kv[kv.stage]), warp * config::warp_keys, source, own_row,
            head_dim);
    }

    /* Drops a key that has expired by the tile's first position, so that it is not read. */
    __device__ static void drop_expired(const row_tile &tile, own_key *own) {
        if (own->key != no_key && own->record.expiry <= tile.first)
            *own = {no_key, masked_record()};
    }

    /* A position from which on rows keep a key, where its expiry does not say otherwise. */
    __device__ static int32_t first_kept(const forward_plan &plan, const row_tile &tile,
                                         const own_key &own) {
        if (plan.causal)
            return own.key;
        const bool is_bound = plan.by_position && own.key != no_key;
        return is_bound ? first_position(plan, own.key) : tile.first;
    }

    /* The positions of the tile at which a key is kept. As either end, past_tile stands for any
     * position after the tile's last. */
    __device__ static position_range kept_positions(const forward_plan &plan, const row_tile &tile,
                                                    const own_key &own) {
        const int32_t end = own.record.expiry;
        const int32_t from = first_kept(plan, tile, own);
        return {(int16_t)(from > tile.last ? past_tile : max(from, tile.first) - tile.first),
                (int16_t)(end > tile.last ? past_tile : max(end, tile.first) - tile.first)};
    }

    __device__ void write_mask(const forward_plan &plan, const row_tile &tile, const own_key &own) {
        wait(&memory->mask_free[mask.stage], mask.parity ^ 1);
        block_mask<config> *const to = &memory->mask[mask.stage];
        const int32_t n = mask_index(own_column);
        if constexpr (config::has_softcap)
            to->bias[n] = own.record.bias;
        else
            write_bias(&to->octet[own_column / octet_keys], own_column % octet_keys,
                       own.record.bias * bias_scale);
        to->kept[n] = kept_positions(plan, tile, own);
        if constexpr (config::drops)
            to->code[n] = key_code_of(plan, tile.b, tile.g, own.key);
        const bool arrives = first_kept(plan, tile, own) > tile.first;
        const uint32_t partial = __ballot_sync(~0u, arrives || own.record.expiry <= tile.last);
        if (threadIdx.x % 32 == 0)
            to->is_partial[warp] = (partial & 0xffff) != 0 | (partial >> 16 != 0) << 1;
        fence_proxy_async(); // wgmma reads the biases
        mbarrier_arrive(&memory->mask_ready[mask.stage]);
        mask.advance();
    }

    __device__ void load_queries(const forward_plan &plan, const tile_header &of) {
        const row_tile &tile = of.tile;
        constexpr int warp_rows = config::rows / warpgroup_warps;
        const int32_t row = tile.first_row + warp * warp_rows + threadIdx.x % 32;
        const int64_t own =
            order.group.divide(row) * plan.q.row + order.group.remainder(row) * plan.q.head;
        wait(&memory->q_free, q.parity ^ 1);
        gather_rows<config::rows, config::panels, warp_rows>(
            shared_address(memory->q), warp * warp_rows,
            unit_rows{rows_of(plan.q, tile.b, tile.g * plan.group), vec_bytes},
            row < tile.end_row ? (uint32_t)(own / vec_channels) : no_row, plan.head_dim);
        publish_tile(of);
    }

    /* Publishes the header of a tile. The consumers start once its queries are copied too: this
     * does not wait for them. */
    __device__ void publish_tile(const tile_header &of) {
        if (threadIdx.x == 0) {
            memory->header[header.stage] = of;
            mbarrier_arrive(&memory->q_ready);
        }
        cp_async_mbarrier_arrive_noinc(&memory->q_ready);
        q.advance();
        header.advance();
    }

    /* Loads k one key block ahead of v. Of the list, entries are fetched two key blocks ahead of k,
     * and records one. A pass of the loop uses what earlier passes fetched before it fetches more,
     * because waiting for a load would also wait for those issued since. */
    __device__ void load_tile(const forward_plan &plan, const key_strides &strides, int32_t index) {
        const row_tile tile = tile_at<config>(plan, order, index);
        const tile_list keys = tile_list_of(plan, tile.b, tile.g, tile.query, tile.last);
        const tile_keys k = keys_of_tile(strides.k, plan.k_carried, plan.k, tile);
        const tile_keys v = keys_of_tile(strides.v, plan.v_carried, plan.v, tile);
        const int32_t entries = max(keys.entries, 0);
        const block_count count = count_blocks<config>(entries);
        const int32_t blocks = count.whole + count.has_short;
        // whether this warp's rows of the last key block, which is short, are not read
        const bool skips = __any_sync(~0u, count.has_short && own_column >= config::short_keys);
        const int32_t first_entry = fetch_entry(keys, 0);
        int32_t before = no_key, next_entry = fetch_entry(keys, 1);
        own_key own = {key_of(keys, first_entry)};
        own.record = fetch_record(keys, own.key);
        for (int32_t block = 0; block < blocks; block++) {
            if (plan.by_position)
                drop_expired(tile, &own);
            const int32_t next = key_of(keys, next_entry);
            const key_record next_record = fetch_record(keys, next);
            next_entry = fetch_entry(keys, block + 2);
            load_rows(plan, k, own.key, skips && block == blocks - 1);
            if (block == 0)
                load_queries(plan, {tile, entries});
            else
                load_rows(plan, v, before, false);
            write_mask(plan, tile, own);
            before = own.key;
            own = {next, next_record};
        }
        load_rows(plan, v, before, skips);
    }

    /* Loads the tiles of this thread block. Tiles are dealt to the grid back and forth, so that
     * every thread block gets heavy and light ones. */
    __device__ void run(const forward_plan &plan, const key_strides &strides) {
        const int32_t grid = gridDim.x, all = order.tiles * order.heads;
        for (int32_t round = 0; round * grid < all; round++) {
            const int32_t n = round % 2 == 0 ? blockIdx.x : grid - 1 - blockIdx.x;
            if (round * grid + n < all)
                load_tile(plan, strides, round * grid + n);
        }
        wait(&memory->q_free, q.parity ^ 1);
        publish_tile({{}, -1});
    }
};
