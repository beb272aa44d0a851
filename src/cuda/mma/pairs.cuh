/* attn_mask and attn_bias in a warp's logits. They are read for each pair of a row and a key. */
#pragma once

#include "cuda/mma/keys.cuh"

/* A row of attention: query i of head h of a sequence, and its position. */
struct pair_row {
    int32_t b, h, i, position;
};

/* Row `row` of a range; past its end, the last one. */
__device__ static pair_row pair_row_of(const forward_plan &plan, const row_range &range,
                                       int32_t row) {
    const int32_t own = min(row, range.total - 1);
    const int32_t i = own / plan.group, h = range.g * plan.group + own % plan.group;
    return {range.b, h, i, query_position(plan, range.b, i)};
}

/* The keys of a block that a row keeps by attn_mask, a bit each. */
template <int keys> struct row_bits {
    static constexpr int words = keys < 32 ? 1 : keys / 32;
    uint32_t word[words];

    __device__ bool has(int column) const { return word[column / 32] >> column % 32 & 1; }
};

/* The distance, in words, from a row's bits of the first 32 entries of a list to its bits of the 32
 * entries that include `entry`. */
__device__ static int64_t words_before(const forward_plan &plan, int64_t entry) {
    const int64_t step = (int64_t)plan.kept.mask_heads * list_queries * (list_queries / 32);
    return entry / list_queries * step + entry % list_queries / 32;
}

/* The bits of a row for key block n. `first`: its bits for the first key block. */
template <int keys>
__device__ static row_bits<keys> load_bits(const forward_plan &plan, const uint32_t *first,
                                           int32_t n) {
    const int64_t entry = (int64_t)n * keys;
    const uint32_t *const words = first + words_before(plan, entry);
    row_bits<keys> bits;
#pragma unroll
    for (int w = 0; w < row_bits<keys>::words; w++)
        bits.word[w] = keys < 32 ? words[w] >> entry % 32 : words[w];
    return bits;
}

/* The inputs of add_pairs() for the rows of a tile. */
template <int rows> struct pair_rows {
    int64_t bias[rows];         // offset of the row in attn_bias, in elements
    const uint32_t *bits[rows]; // of attn_mask, for the first key block
};

template <int rows>
__device__ static void write_pair_rows(pair_rows<rows> &to, const forward_plan &plan,
                                       const row_range &range, const tile_list &list) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        const pair_row row = pair_row_of(plan, range, range.first + r);
        to.bias[r] =
            plan.pair_bias.data == NULL ? 0 : plan.pair_bias.offset(row.b, row.h, row.i, 0);
        to.bits[r] = list.bits == NULL ? NULL : kept_bits(plan, list, 0, row.h, row.i);
    }
}

/* True if a row keeps the key of a column: by its bit, or without attn_mask by the records. `first`
 * as from first_positions(). */
template <int keys>
__device__ static bool keeps_pair(const forward_plan &plan, int32_t position, const tile_list &list,
                                  const row_bits<keys> &bits, const key_records<keys> &records,
                                  const int32_t *entries, const int32_t *first, int column) {
    if (list.bits != NULL)
        return bits.has(column);
    return is_key(entries[column], list.kv_len) && position < records.expiry[column] &&
           (!plan.by_position || first[column] <= position);
}

template <typename element>
__device__ static float pair_exponent(const forward_plan &plan, const pair_row &row, int32_t key) {
    return log2_e * pair_bias<element>(plan.pair_bias, row.b, row.h, row.i, key);
}

/* Adds attn_bias to the logits of a warp's rows for key block n, and sets them to -inf where the
 * row does not keep the key. first_row: the warp's first row in the tile. */
template <typename config>
__device__ static void add_pairs(float (&s)[config::row_tiles][config::keys / 8][4],
                                 const forward_plan &plan, const tile_list &list,
                                 const pair_rows<config::rows> &of_row, const int32_t *position,
                                 int32_t first_row, const key_records<config::keys> &records,
                                 const int32_t *entries, int32_t n) {
    using element = typename config::element;
    constexpr int rows = 2 * config::row_tiles;
    const int32_t *const first = first_positions(records, entries, list);
    const bool has_bias = plan.pair_bias.data != NULL;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int row = first_row + lane / 4 * rows + r;
        const int64_t bias = of_row.bias[row];
        row_bits<config::keys> bits = {};
        if (list.bits != NULL)
            bits = load_bits<config::keys>(plan, of_row.bits[row], n);
#pragma unroll
        for (int x = 0; x < config::keys / 4; x++) {
            const int column = x / 2 * 8 + lane % 4 * 2 + x % 2;
            float &logit = s[r / 2][x / 2][r % 2 * 2 + x % 2];
            if (!keeps_pair(plan, position[row], list, bits, records, entries, first, column))
                logit = -INFINITY;
            else if (has_bias)
                logit += log2_e * bias_at<element>(plan.pair_bias,
                                                   bias + entries[column] * plan.pair_bias.key);
        }
    }
}
