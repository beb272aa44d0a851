/* The online softmax of a tile. The running maximum of a row is raised only when its weights have
 * outgrown a margin. */
#pragma once

#include "cpu/common/math.h"
#include "cpu/common/product.h"

/* The weights of a lane in one group may add up to this before its maximum is raised, so that out
 * is almost never rescaled. */
static const float most_weight = 2048;

/* Forward multiplies logits by this: by log2(e) where weights are rounded to bfloat16, to save a
 * multiplication for each weight. Float32 needs the exact difference of two logits. */
static const float logit_unit = terms == 2 ? 1.4426950408889634f : 1;

/* e^x of a difference of logits times logit_unit. */
INLINE vf power_of(vf x) { return exp2_of(terms == 2 ? x : vf_mul(x, vf_set(log2e))); }

/* scale * s + bias. Scaling q instead would round every channel once more. */
INLINE void scale_and_bias(product_block s, int from, float scale, const float *bias) {
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        const vf b = vf_set(bias[key]);
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = vf_fma(s[key][m], vf_set(scale), b);
    }
}

/* cap * tanh(products * scale / cap), in memory: the softcap is rare, and its code is kept out of
 * the loops that need all registers. */
NOINLINE void cap_stored(float *products, float scale, float cap) {
    for (int64_t x = 0; x < group_keys * block_lanes; x += vf_width) {
        const vf scaled = vf_mul(vf_load(products + x), vf_set(scale_over_cap(scale, cap)));
        vf_store(products + x, vf_mul(vf_set(cap), tanh_of(scaled)));
    }
}

INLINE void cap_products(product_block s, int from, float *stored, float scale, float cap) {
    UNROLL
    for (int key = 0; key < group_keys; key++)
        store_vectors(stored + key * block_lanes, s[key], from, tile_vectors);
    cap_stored(stored, scale, cap);
    load_group(s, from, stored, block_lanes);
}

static tile_step first_step(const fdma_problem *problem, const row_range *rows,
                            const tile_state *tile) {
    return (tile_step){
        .tile = tile,
        .weights = tile->weights,
        .products = tile->products,
        .dim = tile_dim(problem),
        .scale = (float)problem->scale,
        .unit = 1,
        .cap = softcap_of(problem),
        .threshold = problem->dropout.threshold,
        .blocks = (int)(used_lanes(rows) / block_lanes),
        .problem = problem,
        .rows = rows,
    };
}

INLINE void add_pair_bias(product_block s, int from, const float *bias, float unit) {
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] =
                vf_fma(vf_load(bias + key * block_lanes + m * vf_width), vf_set(unit), s[key][m]);
    }
}

/* The logits of the group that begins at `first`, times step->unit, before any mask. */
INLINE void find_logits(product_block s, int from, const tile_step *step, int32_t first,
                        int block) {
    const float cap = step->cap, scale = step->scale;
    multiply_group(s, from, step, first, block);
    if (cap > 0)
        cap_products(s, from, step->tile->capped, scale, cap);
    scale_and_bias(s, from, (cap > 0 ? 1 : scale) * step->unit, step->keys->bias + first);
    if (step->tile->pair_bias != NULL)
        add_pair_bias(s, from, step->tile->pair_bias + first * block_lanes, step->unit);
}

/* mask_lanes() with a mask. */
INLINE void mask_by_bits(product_block s, int from, const key_list *keys, int32_t first,
                         int block) {
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        const uint64_t bits = kept_lanes(keys, first + key, block);
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = vf_keep_bits(s[key][m], (uint32_t)(bits >> (m * vf_width)));
    }
}

/* Makes the logits of the group that begins at `first` -inf in lanes that do not keep the key. */
INLINE void mask_lanes(product_block s, int from, const key_list *keys, int32_t first, int block) {
    if (keys->kept != NULL) {
        mask_by_bits(s, from, keys, first, block);
        return;
    }
    const int32_t *const first_lane = keys->first_lane + first;
    const int32_t *const end_lane = keys->end_lane + first;
    const int32_t lane = block * block_lanes;
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        UNROLL
        for (int m = from; m < tile_vectors; m++)
            s[key][m] = vf_keep(s[key][m], first_lane[key] - lane - m * vf_width,
                                end_lane[key] - lane - m * vf_width);
    }
}

/* Turns differences of logits and maximum into weights, for a vector of lanes, and stores them in
 * words of keys. Returns their sum. */
INLINE vf weigh_vector(product_block s, int m, float *weights) {
    UNROLL
    for (int key = 0; key < group_keys; key++)
        s[key][m] = power_of(s[key][m]);
    vf total = s[0][m];
    UNROLL
    for (int key = 1; key < group_keys; key++)
        total = vf_add(total, s[key][m]);
    UNROLL
    for (int key = terms - 1; key < group_keys; key += terms)
        vf_store(weights + key / terms * block_lanes + m * vf_width,
                 vf_join_weights(s[key - terms + 1][m], s[key][m]));
    return total;
}

/* Turns logits into weights, P = e^(S - max), stores them in words of keys, and sums them up in
 * `total`. */
INLINE void weigh(product_block s, int from, const float *max, float *weights, vf *total) {
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        const vf top = vf_load(max + m * vf_width);
        UNROLL
        for (int key = 0; key < group_keys; key++)
            s[key][m] = vf_sub(s[key][m], top);
        total[m] = weigh_vector(s, m, weights);
    }
}

/* True if weights have outgrown the maximum of a lane. Their sum shows it, so that the usual case
 * computes no maximum. */
INLINE bool has_outgrown(const vf *total, int from) {
    bool outgrown = false;
    UNROLL
    for (int m = from; m < tile_vectors; m++)
        outgrown |= vf_any_greater(total[m], vf_set(most_weight));
    return outgrown;
}

static void scale_at(float *at, vf factor) { vf_store(at, vf_mul(vf_load(at), factor)); }

static void scale_out(float *out, int64_t dim, const vf *factor) {
    for (int64_t d = 0; d < dim; d++)
        for (int m = 0; m < tile_vectors; m++)
            scale_at(out + d * block_lanes + m * vf_width, factor[m]);
}

static void scale_weights(float *weights, int32_t words, const vf *factor) {
    for (int32_t n = 0; n < words; n++)
        for (int m = 0; m < tile_vectors; m++) {
            float *const at = weights + n * block_lanes + m * vf_width;
            const vf word = vf_load(at);
            vf_store(at,
                     vf_join(vf_mul(vf_even(word), factor[m]), vf_mul(vf_odd(word), factor[m])));
        }
}

/* Raises the maximum of a block of lanes to `top` where that is greater, and rescales everything
 * that was summed under the old one: out, the sums, and the weights of the first `weighed` keys. */
static void raise_max(const tile_step *step, int block, const vf *top, int32_t weighed) {
    const tile_state *const tile = step->tile;
    vf factor[tile_vectors];
    for (int m = 0; m < tile_vectors; m++) {
        const int64_t lane = block * block_lanes + m * vf_width;
        const vf old = vf_load(tile->max + lane);
        const vf raised = vf_max(top[m], old);
        factor[m] = power_of(vf_sub(old, raised));
        vf_store(tile->max + lane, raised);
        scale_at(tile->sum + lane, factor[m]);
        scale_at(tile->block_sum + m * vf_width, factor[m]);
    }
    if (step->begun) // before, out is not set
        scale_out(block_out(step, block), step->dim, factor);
    scale_weights(step->weights, weighed / terms, factor);
}
