/* The consumers of sm90's forward kernel: two warpgroups of 64 rows each that turn key blocks into
 * out and lse. While one computes its softmax, the other has the tensor cores.
 * Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2. */
#pragma once

#include <type_traits>

#include "cuda/forward/sm90/dropout.cuh"
#include "cuda/forward/sm90/softmax.cuh"

/* Which keys of a key block a thread's two rows keep by attn_mask, a bit each. */
template <class config> struct mask_bits {
    static constexpr int words = config::key_rows / 32;
    uint32_t word[2][words];
};

/* Without attn_mask there are none. */
struct no_mask_bits {};

/* Where a thread finds the bits of its rows: in kept_lists, 128 entries after the other. */
struct mask_rows {
    const uint32_t *first; // of this thread's first row, for the next key block
    int32_t second;        // words from there to its second row
    int32_t step;          // words from 128 entries to the next
};

template <class config> struct consumer {
    using element = typename config::element;
    static constexpr int product_registers = config::key_rows / 2;
    static constexpr int out_registers = config::channels / 2;

    using block_weights = uint32_t[config::key_rows / wgmma_k][4]; // pairs, as wgmma takes them
    using bits_of_block = std::conditional_t<config::has_mask, mask_bits<config>, no_mask_bits>;

    forward_memory<config> *memory;
    tile_order order;
    float softcap_scale; // multiplies products inside tanh
    pipeline_state<config::kv_stages> kv;
    pipeline_state<config::mask_stages> mask;
    pipeline_state<1> q;
    pipeline_state<tile_headers> header;
    int32_t index;       // of the consumer
    int32_t position[2]; // of this thread's rows, relative to the tile's first
    mask_rows rows;      // with attn_mask
    row_softmax softmax;
    float out[out_registers];
    block_weights weights; // of the block whose values come next

    /* Waits for the next stage of k or v, and thereby for all stages before it. */
    __device__ void wait_rows(void) {
        wait(&memory->kv_ready[kv.stage], kv.parity);
        fence_proxy_async(); // wgmma reads through another proxy than cp.async writes
    }

    /* Named barriers 1 and 2 hand the tensor cores from consumer to consumer. */
    __device__ void acquire_tensor_cores(void) { bar_sync(1 + index, 2 * warpgroup_threads); }

    __device__ void release_tensor_cores(void) { bar_arrive(2 - index, 2 * warpgroup_threads); }

    /* Issues S = Q K^T for the keys of a stage. Without softcap the result is logits / scale: the
     * bias is added as 16 more channels. With attn_mask it is added even if there is none, as the
     * compiler would serialise the products if that depended on the plan. */
    template <int registers>
    __device__ void issue_s(const forward_plan &plan, float (&products)[registers], int keys) {
        const uint32_t q = shared_address(memory->q) + index * config::warpgroup_rows * line_bytes;
        const uint32_t ones[4] = {ones_of_bias(), ones_of_bias(), 0, 0};
        wait(&memory->mask_ready[mask.stage], mask.parity);
        wgmma_fence();
        issue_abt<element, config::channels, config::rows, config::key_rows>(
            products, config::channels > 128 ? opaque(q) : q, // opaque: no registers to keep it in
            shared_address(memory->kv[keys]));
        if (!config::has_softcap && (config::has_mask || plan.records != NULL))
            multiply<__nv_bfloat16>(
                products, ones,
                octets_at(shared_address(memory->mask[mask.stage].octet), sizeof(bias_octet)));
        wgmma_commit_group();
    }

    /* This lane's two of 16 channels: 1 in the channels of the bias terms, else 0. */
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

    /* Sets logits to -inf where a row does not keep a key, in those groups of 16 keys of which some
     * row does not keep all. */
    template <int registers>
    __device__ void apply_mask(const block_mask<config> *from, float (&products)[registers]) {
        const uint32_t partial = *(const uint32_t *)from->is_partial;
        if (partial == 0)
            return;
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

    /* Starts to read which keys of the next block this thread's rows keep. */
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

    /* Sets logits to -inf where the bits say that a row does not keep a key. */
    template <int registers>
    __device__ void apply_bits(const mask_bits<config> &bits, float (&products)[registers]) {
#pragma unroll
        for (int w = 0; w < registers / 16; w++) {
            if (__all_sync(~0u, (bits.word[0][w] & bits.word[1][w]) == ~0u))
                continue;
            const uint32_t own[2] = {bits.word[0][w] >> threadIdx.x % 4 * 2,
                                     bits.word[1][w] >> threadIdx.x % 4 * 2};
#pragma unroll
            for (int k = 0; k < 16; k++) {
                const bool kept = own[k / 2 % 2] >> (k / 4 * 8 + k % 2) & 1;
                products[w * 16 + k] = kept ? products[w * 16 + k] : -INFINITY;
            }
        }
    }

    /* Turns products into logits, as exponents of 2, by softcap and bias. */
    template <int registers>
    __device__ void soften(const forward_plan &plan, const block_mask<config> *from,
                           float (&products)[registers]) {
        const float cap = plan.softcap * log2_e;
#pragma unroll
        for (int i = 0; i < registers; i += 8) {
            const float4 b = *(const float4 *)&from->bias[2 * i + threadIdx.x % 4 * 4];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float low = k < 4 ? b.x : b.z, high = k < 4 ? b.y : b.w;
                products[i + k] =
                    fmaf(cap, tanh_of(products[i + k] * softcap_scale), k % 2 == 0 ? low : high);
            }
        }
    }

    /* Turns S of a key block into its weights, `next`. Returns true if row_max was raised,
     * so that out must be multiplied by `rescale`. The first block of a tile always raises it. */
    template <int registers>
    __device__ bool weigh(const forward_plan &plan, bool is_first, const bits_of_block &bits,
                          float (&products)[registers], uint32_t (&next)[registers / 8][4],
                          float (&rescale)[2]) {
        const block_mask<config> *const from = &memory->mask[mask.stage];
        const float unit = config::has_softcap ? 1 : plan.scale * log2_e;
        if constexpr (config::has_softcap)
            soften(plan, from, products);
        // after the bias, as -inf + inf is NaN
        if constexpr (config::has_mask)
            apply_bits(bits, products);
        else
            apply_mask(from, products);
        if constexpr (!config::drops)
            release_mask();
        if (!is_first && softmax.weigh<element, true>(products, unit, next))
            return false;
#pragma unroll
        for (int i = 0; i < registers; i++)
            products[i] = __fmul_rn(products[i], unit); // rounded: see most_row_max
        softmax.raise(products, rescale);
        softmax.weigh<element, false>(products, 1, next);
        return true;
    }

    __device__ void release_mask(void) {
        mbarrier_arrive(&memory->mask_free[mask.stage]);
        mask.advance();
    }

    /* Clears the next weights where dropout drops the pair: after row_sum has them. */
    template <int steps>
    __device__ void drop(const forward_plan &plan, uint32_t (&next)[steps][4]) {
        if constexpr (config::drops) {
            const drop_code *const codes = &memory->code[own_row()];
            drop_pairs({codes[0], codes[8]}, memory->mask[mask.stage].code, plan.dropout.threshold,
                       next);
            release_mask();
        }
    }

    /* Copies the next weights once out no longer reads the current ones. They need registers of
     * their own, since they are computed while out is multiplied. */
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

    /* The same among the rows of the kv head. */
    __device__ int32_t first_row_of(const row_tile &tile) const {
        return tile.first_row + own_row();
    }

    /* Rows past the last one have the bits of that. */
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
        __syncwarp(); // until all have read those of the tile before
        if (threadIdx.x % 4 < 2)
            memory->code[row] = drop_code_of(plan, tile, tile.first_row + row);
        __syncwarp();
    }

    __device__ void start_tile(const forward_plan &plan) {
        const row_tile tile = memory->header[header.stage].tile;
#pragma unroll
        for (int i = 0; i < 2; i++)
            position[i] =
                position_in_tile(plan, tile, order.group.divide(first_row_of(tile) + 8 * i));
        if constexpr (config::has_mask)
            rows = mask_rows_of(plan, tile);
        if constexpr (config::drops)
            write_row_codes(plan, tile);
        softmax = row_softmax();
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

    /* S and the weights of the first key block. */
    __device__ void attend_first(const forward_plan &plan, bool is_last) {
        float products[product_registers], rescale[2];
        block_weights next;
        wait_rows();
        issue_s(plan, products, kv.stage);
        const bits_of_block bits = load_bits();
        wgmma_wait_group<0>();
        release_keys(kv.stage, is_last);
        kv.advance();
        weigh(plan, true, bits, products, next, rescale);
        drop(plan, next);
        set_weights(next);
    }

    /* S of a key block together with O += P V of the block before it, then its weights. The
     * softmax overlaps with this consumer's out and with the products of the other consumer. */
    template <int block_keys = config::key_rows>
    __device__ void attend_next(const forward_plan &plan, bool is_last) {
        float products[block_keys / 2], rescale[2];
        uint32_t next[block_keys / wgmma_k][4];
        const int keys = kv.stage;
        kv.advance();
        const int values = kv.stage;
        const bits_of_block bits = load_bits();
        wait_rows();
        kv.advance();
        acquire_tensor_cores();
        issue_s(plan, products, keys);
        issue_out(values);
        release_tensor_cores();
        wgmma_wait_group<1>(); // for S
        release_keys(keys, is_last);
        if (weigh(plan, false, bits, products, next, rescale)) {
            wgmma_wait_group<0>();
            rescale_out(rescale);
        }
        drop(plan, next);
        wgmma_wait_group<0>();
        release(&memory->kv_free[values]);
        set_weights(next);
    }

    /* Out of the last key block. */
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
        if (index == 1)
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
                attend_next(plan, block == blocks.whole - 1 && !blocks.has_short);
            if (blocks.has_short) {
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

/* The sums of two values over a quad: of the first one in its even lanes, of the second one in its
 * odd lanes. */
__device__ static float quad_sum_pair(const float (&values)[2]) {
    const bool is_odd = (threadIdx.x & 1) != 0;
    float sum = is_odd ? values[1] : values[0];
    sum += __shfl_xor_sync(~0u, is_odd ? values[0] : values[1], 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

/* Writes lse of a row: of this thread's first one in even lanes, of its second one in odd lanes.
 * Returns what the row of out is multiplied by. */
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
