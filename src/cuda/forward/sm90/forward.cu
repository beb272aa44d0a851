/* Forward on Hopper (compute capability 9.0 alone): a persistent thread block on each
 * multiprocessor takes tile after tile of rows. One warpgroup (producer) gathers q, k and v into
 * shared memory, and two (consumers) turn key blocks into out and lse. While one consumer computes
 * its softmax, the other uses the tensor cores. forward.cuh has shared memory and its barriers.
 * This file has
 *
 *   producer   rows of q, k and v, and the mask of each key block; each lane handles one key
 *   softmax    weights, row_max and row_sum of a consumer's rows, two per thread
 *   dropout    in the weights of a consumer; core/dropout.h has the codes
 *   consumer   S, weights, O; then the epilogue, out and lse
 *   attend     the kernel, and its choice for a plan
 *
 * Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2. */
#include <type_traits>

#include "cuda/forward/sm90/forward.cuh"

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

/* The rows of k or v for the (b, g) of a tile. */
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

struct own_key {
    int32_t key; // no_key: nothing to read
    key_record record;
};

template <class config> struct producer {
    forward_memory<config> *memory;
    tile_order order;
    float bias_scale; // turns a bias of logits into a bias of products
    pipeline_state<config::kv_stages> kv;
    pipeline_state<config::mask_stages> mask;
    pipeline_state<1> q;
    pipeline_state<tile_headers> header;
    int32_t warp, own_column; // own_column: of this lane's key in a key block

    /* With attn_bias the entries of a block are in the order of mask_index(): a consumer's thread
     * has four successive ones of each 16. */
    __device__ int32_t fetch_entry(const tile_list &keys, int32_t block) const {
        const int32_t entry = config::has_pairs ? mask_index(own_column) : own_column;
        return entry_at(keys, block * config::key_rows + entry);
    }

    __device__ static int32_t key_of(const tile_list &keys, int32_t entry) {
        return is_key(entry, keys.kv_len) ? entry : no_key;
    }

    __device__ key_record fetch_record(const tile_list &keys, int32_t key) const {
        // without records consumers may skip the bias, so the expiry masks an absent key
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

    /* Replaces a key that has expired by the tile's first position, so that it is not read. */
    __device__ static void drop_expired(const row_tile &tile, own_key *own) {
        if (own->key != no_key && own->record.expiry <= tile.first)
            *own = {no_key, masked_record()};
    }

    /* The first position at which rows keep a key, as far as its expiry allows. */
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
        if constexpr (config::has_pairs)
            write_pair_key(plan, to, own_column, own.key);
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

    /* Publishes the header of a tile, without waiting for the copies of its queries. The consumers
     * start once these are complete too. */
    __device__ void publish_tile(const tile_header &of) {
        if (threadIdx.x == 0) {
            memory->header[header.stage] = of;
            mbarrier_arrive(&memory->q_ready);
        }
        cp_async_mbarrier_arrive_noinc(&memory->q_ready);
        q.advance();
        header.advance();
    }

    /* Loads k one key block ahead of v. List entries are fetched two key blocks ahead of k, and
     * records one. A pass of the loop uses the results of earlier fetches before it starts new
     * ones, because waiting for a load would also wait for those issued since. */
    __device__ void load_tile(const forward_plan &plan, const key_strides &strides, int32_t index) {
        const row_tile tile = tile_at<config>(plan, order, index);
        const tile_list keys = tile_list_of(plan, tile.b, tile.g, tile.query, tile.last);
        const tile_keys k = keys_of_tile(strides.k, plan.k_carried, plan.k, tile);
        const tile_keys v = keys_of_tile(strides.v, plan.v_carried, plan.v, tile);
        const int32_t entries = max(keys.entries, 0);
        const block_count count = count_blocks<config>(entries);
        const int32_t blocks = count.whole + count.has_short;
        // this warp's rows of the last key block, which is short, are not read
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

    /* Loads the tiles of this thread block. Tiles are assigned to the grid in alternating
     * directions, so that every thread block gets tiles with much and with little work. */
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

/* The keys of a key block that a thread's two rows keep by attn_mask, a bit each. */
template <class config> struct mask_bits {
    static constexpr int words = config::key_rows / 32;
    uint32_t word[2][words];
};

struct no_mask_bits {};

/* The location in kept_lists of the bits of a thread's rows; the bits of 128 entries are
 * together. */
struct mask_rows {
    const uint32_t *first; // of this thread's first row, for the next key block
    int32_t second;        // distance to its second row, in words
    int32_t step;          // distance from 128 entries to the next 128, in words
};

template <class config> struct consumer {
    using element = typename config::element;
    static constexpr int product_registers = config::key_rows / 2;
    static constexpr int out_registers = config::channels / 2;

    using block_weights = uint32_t[config::key_rows / wgmma_k][4]; // pairs, as wgmma takes them
    using bits_of_block = std::conditional_t<config::has_mask, mask_bits<config>, no_mask_bits>;
    using pairs_of_block =
        std::conditional_t<config::has_pairs, pair_biases<config>, no_pair_biases>;

    forward_memory<config> *memory;
    tile_order order;
    float softcap_scale; // multiplies products inside tanh
    float pair_factor;   // turns attn_bias into a bias of products
    pipeline_state<config::kv_stages> kv;
    pipeline_state<config::mask_stages> mask;
    pipeline_state<1> q;
    pipeline_state<tile_headers> header;
    int32_t index;       // of the consumer
    int32_t position[2]; // of this thread's rows, relative to the tile's first
    mask_rows rows;      // with attn_mask
    pair_rows pairs;     // with attn_bias
    row_softmax softmax;
    float out[out_registers];
    block_weights weights; // of the block whose values are multiplied next

    /* Waits for the next stage of k or v, which completes all stages before it too. */
    __device__ void wait_rows(void) {
        wait(&memory->kv_ready[kv.stage], kv.parity);
        fence_proxy_async(); // wgmma reads through another proxy than cp.async writes
    }

    /* Named barriers 1 and 2 pass the tensor cores from consumer to consumer. */
    __device__ void acquire_tensor_cores(void) {
        if (config::takes_turns)
            bar_sync(1 + index, 2 * warpgroup_threads);
    }

    __device__ void release_tensor_cores(void) {
        if (config::takes_turns)
            bar_arrive(2 - index, 2 * warpgroup_threads);
    }

    /* Issues S = Q K^T for the keys of a stage. Without softcap the result is logits / scale: the
     * bias is added as 16 more channels. With attn_mask, and without turns, it is added even if
     * there is none, because the compiler would serialise the products if that depended on the
     * plan. */
    template <int registers>
    __device__ void issue_s(const forward_plan &plan, float (&products)[registers], int keys) {
        // opaque: no registers to keep it in
        const bool keeps_q = config::channels <= 128 && config::takes_turns;
        const uint32_t q = shared_address(memory->q) + index * config::warpgroup_rows * line_bytes;
        const uint32_t ones[4] = {ones_of_bias(), ones_of_bias(), 0, 0};
        wait(&memory->mask_ready[mask.stage], mask.parity);
        wgmma_fence();
        issue_abt<element, config::channels, config::rows, config::key_rows>(
            products, keeps_q ? q : opaque(q), shared_address(memory->kv[keys]));
        if (!config::has_softcap &&
            (config::has_mask || !config::takes_turns || plan.records != NULL))
            multiply<__nv_bfloat16>(
                products, ones,
                octets_at(shared_address(memory->mask[mask.stage].octet), sizeof(bias_octet)));
        wgmma_commit_group();
    }

    /* This lane's two of 16 channels: 1 in the channels of the bias terms, otherwise 0. */
    __device__ static uint32_t ones_of_bias(void) {
        const int channel = threadIdx.x % 4 * 2;
        return element_type<__nv_bfloat16>::pack(channel < bias_terms ? 1 : 0,
                                                 channel + 1 < bias_terms ? 1 : 0);
    }

    /* Issues O += P V for the values of a stage. */
    template <int keys = config::key_rows> __device__ void issue_out(int values) {
        wgmma_fence();
        issue_ab<element, config::key_rows, keys / wgmma_k>(out, weights,
                                                            shared_address(memory->kv[values]));
        wgmma_commit_group();
    }

    /* Sets logits to -inf where a row does not keep a key, in the groups of 16 keys that some row
     * does not keep entirely. */
    template <int registers>
    __device__ void apply_mask(const forward_plan &plan, const block_mask<config> *from,
                               float (&products)[registers]) {
        const uint32_t partial = *(const uint32_t *)from->is_partial;
        if (partial == 0)
            return;
        if constexpr (!config::takes_turns)
            find_positions(plan); // there are no registers to keep them in
#pragma unroll
        for (int i = 0; i < registers; i += 8) {
            const int keys = 2 * i, warp = keys / config::warp_keys;
            if ((partial >> (warp * 8 + keys % config::warp_keys / 16) & 1) == 0)
                continue;
            const int4 four = *(const int4 *)&from->kept[2 * i + threadIdx.x % 4 * 4];
            const int32_t ranges[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const int32_t p = position[k / 2 % 2], range = ranges[k / 4 * 2 + k % 2];
                const bool kept = (int16_t)range <= p && p < range >> 16;
                products[i + k] = kept ? products[i + k] : -INFINITY;
            }
        }
    }

    /* Starts to load the bits of this thread's rows for the next block. */
    __device__ bits_of_block load_bits(void) {
        bits_of_block bits;
        if constexpr (config::has_mask) {
            constexpr int words = mask_bits<config>::words;
            const uint32_t *const own[2] = {rows.first, rows.first + rows.second};
#pragma unroll
            for (int r = 0; r < 2; r++)
                if constexpr (words == 4) {
                    const uint4 all = *(const uint4 *)own[r];
                    bits.word[r][0] = all.x, bits.word[r][1] = all.y;
                    bits.word[r][2] = all.z, bits.word[r][3] = all.w;
                } else {
                    const uint2 all = *(const uint2 *)own[r];
                    bits.word[r][0] = all.x, bits.word[r][1] = all.y;
                }
            const bool is_within = words < 4 && (uintptr_t)rows.first % 16 == 0;
            rows.first += is_within ? words : rows.step - (4 - words);
        }
        return bits;
    }

    /* Sets logits to -inf where the bits of a row are 0. */
    template <int registers>
    __device__ void apply_bits(const mask_bits<config> &bits, float (&products)[registers]) {
#pragma unroll
        for (int w = 0; w < registers / 16; w++) {
            if (__all_sync(~0u, (bits.word[0][w] & bits.word[1][w]) == ~0u))
                continue;
            // with attn_bias, bits are in the order of mask_index()
            const int shift = threadIdx.x % 4 * (config::has_pairs ? 4 : 2);
            const uint32_t own[2] = {bits.word[0][w] >> shift, bits.word[1][w] >> shift};
#pragma unroll
            for (int k = 0; k < 16; k++) {
                const int bit =
                    config::has_pairs ? k / 8 * 16 + k / 4 % 2 * 2 + k % 2 : k / 4 * 8 + k % 2;
                const bool kept = own[k / 2 % 2] >> bit & 1;
                products[w * 16 + k] = kept ? products[w * 16 + k] : -INFINITY;
            }
        }
    }

    /* Starts to load attn_bias of a key block, if there are registers for all of it. */
    __device__ void load_pairs(const forward_plan &plan, pairs_of_block &to) {
        if constexpr (config::loads_pairs_ahead) {
            const block_mask<config> *const from = &memory->mask[mask.stage];
            if (plan.pair_bias.data == NULL)
                return;
            wait(&memory->mask_ready[mask.stage], mask.parity);
#pragma unroll
            for (int i = 0; i < config::key_rows / 16; i++)
                load_group(plan, pairs, from, i, &to.word[0][4 * i], &to.word[1][4 * i]);
        }
    }

    /* Adds attn_bias to the products of a key block. With softcap they are exponents of 2. */
    template <int registers>
    __device__ void add_pairs(const forward_plan &plan, const block_mask<config> *from,
                              const pairs_of_block &biases, float (&products)[registers]) {
        pair_rows own;
        if constexpr (!config::loads_pairs_ahead) {
            const row_tile tile = memory->header[opaque(header.stage)].tile;
            own = find_pair_rows<element>(plan, order.group, tile, first_row_of(tile));
        }
#pragma unroll
        for (int i = 0; i < registers / 8; i++) {
            const bool is_vector = reads_vectors(from, i);
            float *const of_group = &products[8 * i];
            if constexpr (config::loads_pairs_ahead) {
                add_group<element>(plan.pair_bias, pair_factor, is_vector, &biases.word[0][4 * i],
                                   &biases.word[1][4 * i], of_group);
            } else {
                uint32_t words[2][4];
                load_group(plan, own, from, i, words[0], words[1]);
                add_group<element>(plan.pair_bias, pair_factor, is_vector, words[0], words[1],
                                   of_group);
                __syncwarp(); // keeps the loads of the next keys behind
            }
        }
    }

    /* Turns products into logits, as exponents of 2, by softcap and bias. */
    template <int registers>
    __device__ void soften(const forward_plan &plan, const block_mask<config> *from,
                           float (&products)[registers]) {
        const float cap = plan.softcap * log2_e, unit = plan.scale * log2_e;
#pragma unroll
        for (int i = 0; i < registers; i += 8) {
            const float4 b = *(const float4 *)&from->bias[2 * i + threadIdx.x % 4 * 4];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float low = k < 4 ? b.x : b.z, high = k < 4 ? b.y : b.w;
                const float bias = k % 2 == 0 ? low : high;
                if (config::has_pairs && plan.softcap == 0)
                    products[i + k] = fmaf(unit, products[i + k], bias);
                else
                    products[i + k] = fmaf(cap, tanh_of(products[i + k] * softcap_scale), bias);
            }
        }
    }

    /* Turns S of a key block into its weights, `next`. Returns true if row_max was raised, so that
     * out must be multiplied by `rescale`. The first block of a tile always raises it. */
    template <int registers>
    __device__ bool weigh(const forward_plan &plan, bool is_first, const bits_of_block &bits,
                          const pairs_of_block &biases, float (&products)[registers],
                          uint32_t (&next)[registers / 8][4], float (&rescale)[2]) {
        const block_mask<config> *const from = &memory->mask[mask.stage];
        const float unit = config::has_softcap ? 1 : plan.scale * log2_e;
        if constexpr (config::has_softcap)
            soften(plan, from, products);
        if constexpr (config::has_pairs)
            if (plan.pair_bias.data != NULL)
                add_pairs(plan, from, biases, products);
        // after the biases, because -inf + inf is NaN
        if constexpr (config::has_mask)
            apply_bits(bits, products);
        else
            apply_mask(plan, from, products);
        if constexpr (!config::drops)
            release_mask();
        if (!is_first && softmax.weigh<element, warp_raises>(products, unit, next))
            return false;
#pragma unroll
        for (int i = 0; i < registers; i++)
            products[i] = __fmul_rn(products[i], unit); // rounded: see most_row_max
        softmax.raise(products, rescale);
        softmax.weigh<element, none_raises>(products, 1, next);
        return true;
    }

    __device__ void release_mask(void) {
        mbarrier_arrive(&memory->mask_free[mask.stage]);
        mask.advance();
    }

    /* Clears the next weights of dropped pairs, once row_sum includes them. */
    template <int steps>
    __device__ void drop(const forward_plan &plan, uint32_t (&next)[steps][4]) {
        if constexpr (config::drops) {
            const drop_code *const codes = &memory->code[own_row()];
            drop_pairs({codes[0], codes[8]}, memory->mask[mask.stage].code, plan.dropout.threshold,
                       next);
            release_mask();
        }
    }

    /* Copies the next weights once out no longer reads the current ones. They need separate
     * registers, because they are computed while out is multiplied. */
    template <int steps> __device__ void set_weights(const uint32_t (&next)[steps][4]) {
#pragma unroll
        for (int i = 0; i < steps * 4; i++)
            weights[i / 4][i % 4] = mov_b32(next[i / 4][i % 4]);
    }

    __device__ void rescale_out(const float (&rescale)[2]) {
#pragma unroll
        for (int i = 0; i < out_registers; i++)
            out[i] *= rescale[i / 2 % 2];
    }

    /* This thread's first row of the tile; its second row is eight rows later. */
    __device__ int32_t own_row(void) const {
        const int32_t warp = threadIdx.x % warpgroup_threads / 32;
        return index * config::warpgroup_rows + warp * 16 + threadIdx.x % 32 / 4;
    }

    /* own_row() among the rows of the kv head. */
    __device__ int32_t first_row_of(const row_tile &tile) const {
        return tile.first_row + own_row();
    }

    /* Rows past the last one have the bits of the last one. */
    __device__ mask_rows mask_rows_of(const forward_plan &plan, const row_tile &tile) const {
        const tile_list list = tile_list_of(plan, tile.b, tile.g, tile.query, tile.last);
        const uint32_t *own[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t row = min(first_row_of(tile) + 8 * i, tile.end_row - 1);
            own[i] = kept_bits(plan, list, 0, row % plan.group, row / plan.group);
        }
        return {own[0], (int32_t)(own[1] - own[0]), plan.kept.mask_heads * list_queries * 4};
    }

    /* A quad needs the codes of its two rows: each of its first two lanes writes one. */
    __device__ void write_row_codes(const forward_plan &plan, const row_tile &tile) {
        const int32_t row = own_row() + threadIdx.x % 4 * 8;
        __syncwarp(); // until all have read the codes of the previous tile
        if (threadIdx.x % 4 < 2)
            memory->code[row] = drop_code_of(plan, tile, tile.first_row + row);
        __syncwarp();
    }

    __device__ void find_positions(const forward_plan &plan) {
        const row_tile &tile = memory->header[header.stage].tile;
#pragma unroll
        for (int i = 0; i < 2; i++)
            position[i] =
                position_in_tile(plan, tile, order.group.divide(first_row_of(tile) + 8 * i));
    }

    __device__ void start_tile(const forward_plan &plan) {
        const row_tile tile = memory->header[header.stage].tile;
        if constexpr (config::takes_turns)
            find_positions(plan);
        if constexpr (config::has_mask)
            rows = mask_rows_of(plan, tile);
        if constexpr (config::loads_pairs_ahead)
            pairs = find_pair_rows<element>(plan, order.group, tile, first_row_of(tile));
        if constexpr (config::drops)
            write_row_codes(plan, tile);
        softmax = row_softmax();
        if (config::takes_turns)
            clear_out();
    }

    __device__ void clear_out(void) {
#pragma unroll
        for (int i = 0; i < out_registers; i++)
            out[i] = 0;
    }

    /* Frees the keys of a block once its S is complete, and q after the last block. */
    __device__ void release_keys(int keys, bool is_last) {
        release(&memory->kv_free[keys]);
        if (is_last)
            mbarrier_arrive(&memory->q_free);
    }

    __device__ void attend_first(const forward_plan &plan, bool is_last) {
        float products[product_registers], rescale[2];
        pairs_of_block biases;
        load_pairs(plan, biases);
        wait_rows();
        issue_s(plan, products, kv.stage);
        const bits_of_block bits = load_bits();
        wgmma_wait_group<0>();
        release_keys(kv.stage, is_last);
        kv.advance();
        if constexpr (config::takes_turns) {
            block_weights next;
            weigh(plan, true, bits, biases, products, next, rescale);
            drop(plan, next);
            set_weights(next);
        } else {
            weigh(plan, true, bits, biases, products, weights, rescale);
            clear_out();
        }
    }

    /* attend_next() where another thread block uses the tensor cores during the softmax. Weights
     * take the registers of S, which is multiplied again if row_max must be raised. All warps of
     * the consumer take part in that. */
    __device__ void attend_alone(const forward_plan &plan, bool is_last) {
        float products[product_registers], rescale[2];
        const block_mask<config> *const from = &memory->mask[mask.stage];
        const float unit = plan.scale * log2_e;
        const int keys = kv.stage;
        kv.advance();
        const int values = kv.stage;
        wait_rows();
        kv.advance();
        issue_out(values);
        wgmma_wait_group<0>();
        release(&memory->kv_free[values]);
        issue_s(plan, products, keys);
        wgmma_wait_group<0>();
        apply_mask(plan, from, products);
        if (!softmax.weigh<element, consumer_raises>(products, unit, weights, 1 + index)) {
            issue_s(plan, products, keys);
            wgmma_wait_group<0>();
            apply_mask(plan, from, products);
#pragma unroll
            for (int i = 0; i < product_registers; i++)
                products[i] = __fmul_rn(products[i], unit); // rounded: see most_row_max
            softmax.raise(products, rescale);
            softmax.weigh<element, none_raises>(products, 1, weights);
            rescale_out(rescale);
        }
        release_mask();
        release_keys(keys, is_last);
    }

    /* S of a key block together with O += P V of the previous block, then its weights. The softmax
     * overlaps with this consumer's out and with the products of the other consumer. */
    template <int block_keys = config::key_rows>
    __device__ void attend_next(const forward_plan &plan, bool is_last) {
        float products[block_keys / 2], rescale[2];
        uint32_t next[block_keys / wgmma_k][4];
        const int keys = kv.stage;
        kv.advance();
        const int values = kv.stage;
        const bits_of_block bits = load_bits();
        pairs_of_block biases;
        load_pairs(plan, biases);
        wait_rows();
        kv.advance();
        acquire_tensor_cores();
        issue_s(plan, products, keys);
        issue_out(values);
        release_tensor_cores();
        wgmma_wait_group<1>(); // for S
        release_keys(keys, is_last);
        if (weigh(plan, false, bits, biases, products, next, rescale)) {
            wgmma_wait_group<0>();
            rescale_out(rescale);
        }
        drop(plan, next);
        wgmma_wait_group<0>();
        release(&memory->kv_free[values]);
        set_weights(next);
    }

    template <int keys> __device__ void attend_last(void) {
        wait_rows();
        issue_out<keys>(kv.stage);
        wgmma_wait_group<0>();
        release(&memory->kv_free[kv.stage]);
        kv.advance();
    }

    __device__ float finish_row(const forward_plan &plan, const row_tile &tile) const;
    __device__ void finish_tile(const forward_plan &plan) const;

    __device__ void run(const forward_plan &plan) {
        if (config::takes_turns && index == 1)
            bar_arrive(1, 2 * warpgroup_threads); // gives the tensor cores to consumer 0 first
        for (;;) {
            wait(&memory->q_ready, q.parity);
            fence_proxy_async();
            q.advance();
            const int32_t entries = memory->header[header.stage].entries;
            if (entries < 0)
                return;
            const block_count blocks = count_blocks<config>(entries);
            start_tile(plan);
            attend_first(plan, entries <= config::key_rows);
            for (int32_t block = 1; block < blocks.whole; block++)
                if constexpr (config::takes_turns)
                    attend_next(plan, block == blocks.whole - 1 && !blocks.has_short);
                else
                    attend_alone(plan, block == blocks.whole - 1);
            if (config::takes_turns && blocks.has_short) {
                attend_next<config::short_keys>(plan, true);
                attend_last<config::short_keys>();
            } else {
                attend_last<config::key_rows>();
            }
            finish_tile(plan);
            header.advance();
        }
    }
};

/* The sums of two values over a quad: the first sum in its even lanes, the second in its odd
 * lanes. */
__device__ static float quad_sum_pair(const float (&values)[2]) {
    const bool is_odd = (threadIdx.x & 1) != 0;
    float sum = is_odd ? values[1] : values[0];
    sum += __shfl_xor_sync(~0u, is_odd ? values[0] : values[1], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

/* Writes lse of a row: of this thread's first row in even lanes, of its second row in odd lanes.
 * Returns the factor of the row of out. */
template <class config>
__device__ float consumer<config>::finish_row(const forward_plan &plan,
                                              const row_tile &tile) const {
    const int lane = threadIdx.x % 4;
    const int32_t row = first_row_of(tile) + 8 * (lane % 2), query = order.group.divide(row);
    const int32_t h = tile.g * plan.group + order.group.remainder(row);
    const row_result result = result_of(lane % 2 == 0 ? softmax.row_max[0] : softmax.row_max[1],
                                        quad_sum_pair(softmax.row_sum), sink_exponent(plan, h));
    if (plan.lse.data != NULL && query < plan.q_len && lane < 2)
        plan.lse.at(tile.b, h)[query] = result.lse;
    return config::drops ? result.scale * plan.dropout_scale : result.scale;
}

/* The epilogue of a tile: divides by row_sum, and writes out and lse. Empty rows are 0, not 0 *
 * NaN. */
template <class config>
__device__ void consumer<config>::finish_tile(const forward_plan &plan) const {
    const row_tile tile = memory->header[header.stage].tile;
    const float own_scale = finish_row(plan, tile);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = first_row_of(tile) + 8 * i, query = order.group.divide(row);
        const int32_t h = tile.g * plan.group + order.group.remainder(row);
        const float scale = __shfl_sync(~0u, own_scale, threadIdx.x % 32 / 2 * 2 + i);
        const uint32_t not_empty = scale == 0 ? 0 : ~0u;
        const int32_t own = pair_channel(), end = query < plan.q_len ? plan.head_dim - own : 0;
        element *const to = (element *)plan.out.data + tile.b * plan.out.batch +
                            query * plan.out.row + h * plan.out.head + own;
#pragma unroll
        for (int c = 0; c < config::channels; c += pair_channels) {
            uint32_t words[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float *const pair = &out[(c / 8 + n) * 4 + 2 * i];
                words[n] =
                    not_empty & element_type<element>::pack(pair[0] * scale, pair[1] * scale);
            }
            transpose_pair(words);
            if (c < end)
                *(uint2 *)(to + c) = make_uint2(words[0], words[1]);
        }
    }
}

/* Clears the masks: wgmma multiplies the memory after the last biases by 0, so it must not be inf
 * or NaN. */
template <class config> __device__ static void clear_masks(forward_memory<config> *memory) {
    const uint32_t words = sizeof memory->mask / sizeof(uint32_t);
    for (uint32_t i = threadIdx.x; i < words; i += config::threads)
        ((uint32_t *)memory->mask)[i] = 0;
    fence_proxy_async();
}

template <class config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    attend(const __grid_constant__ forward_plan plan, const __grid_constant__ key_strides strides,
           const tile_order order, const float softcap_scale, const float bias_scale) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    forward_memory<config> *const memory = (forward_memory<config> *)bytes;
    // __shfl_sync tells the compiler that all threads of a warp have the same value
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0);
    clear_masks(memory);
    if (threadIdx.x == 0)
        init_barriers(memory);
    __syncthreads();
    griddepcontrol_wait(); // for the lists
    if (warpgroup == 0) {
        setmaxnreg_dec<config::producer_registers>();
        producer<config> self;
        self.memory = memory;
        self.order = order;
        self.bias_scale = bias_scale;
        self.warp = threadIdx.x / 32;
        self.own_column = self.warp * config::warp_keys + threadIdx.x % config::warp_keys;
        self.run(plan, strides);
    } else {
        setmaxnreg_inc<config::consumer_registers>();
        consumer<config> self;
        self.memory = memory;
        self.order = order;
        self.softcap_scale = softcap_scale;
        self.pair_factor = config::has_softcap ? log2_e : bias_scale * log2_e;
        // computed again: a value from before setmaxnreg would pass through memory
        self.index = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0) - 1;
        self.run(plan);
    }
}

template <class config> static forward_kernel kernel_with(void) {
    using memory = forward_memory<config>;
    static_assert(sizeof(memory) <= memory::most_bytes, "too many stages for shared memory");
    return {attend<config>,  config::rows,   config::row_bytes,
            config::threads, config::blocks, sizeof(memory)};
}

template <typename element, int most_channels, bool mask>
static forward_kernel kernel_for_logits(const forward_plan &plan) {
    const bool softcap = plan.softcap != 0, drops = plan.dropout.threshold != 0;
    const bool pairs = plan.pair_bias.data != NULL;
    if ((softcap && drops) || (pairs && (softcap || drops)))
        return kernel_with<forward_config<element, most_channels, true, mask, true, true>>();
    if (pairs)
        return kernel_with<forward_config<element, most_channels, false, mask, false, true>>();
    if (softcap)
        return kernel_with<forward_config<element, most_channels, true, mask, false, false>>();
    if (drops)
        return kernel_with<forward_config<element, most_channels, false, mask, true, false>>();
    // with longer lists a tile's first and last key block count less
    const int64_t most_listed = 640;
    if constexpr (most_channels == 64 && !mask)
        if (plan.list_tile > 0 && plan.list_tile <= most_listed)
            return kernel_with<
                forward_config<element, most_channels, false, false, false, false, 2>>();
    return kernel_with<forward_config<element, most_channels, false, mask, false, false>>();
}

template <typename element, int most_channels>
static forward_kernel kernel_for_elements(const forward_plan &plan) {
    return plan.kept.list != NULL ? kernel_for_logits<element, most_channels, true>(plan)
                                  : kernel_for_logits<element, most_channels, false>(plan);
}

template <int most_channels>
forward_kernel fdma_cuda_sm90_kernel(const forward_plan &plan, bool is_float16) {
    return is_float16 ? kernel_for_elements<float16, most_channels>(plan)
                      : kernel_for_elements<__nv_bfloat16, most_channels>(plan);
}

template forward_kernel fdma_cuda_sm90_kernel<FDMA_HEAD_DIM>(const forward_plan &plan,
                                                             bool is_float16);
