/* One block of a tile's lanes and one key block in the backward pass: probabilities P and their
 * gradients dS = P (dP - delta), then the three sums dq += dS k, dk += dS q and dv += P dout. These
 * are the five products of arXiv:2205.14135, algorithm 4. */
#pragma once

#include "cpu/backward/tile.h"
#include "cpu/forward/forward.h"

typedef struct backward_step {
    tile_step logits; /* as in forward, over the same keys */
    tile_step dp;     /* the same with dout and v for q and k */
    const backward_tile *tile;
    bool has_dbias;
    float *dk[key_block], *dv[key_block], *dbias[key_block]; /* sums of the listed keys */
} backward_step;

/* e^x. Float32 needs exp_of(), which is exact for logits far below lse; weights that are rounded to
 * bfloat16 do not. */
INLINE vf weight_of(vf x) { return terms == 1 ? exp_of(x) : exp2_of(vf_mul(x, vf_set(log2e))); }

/* P = e^(logits - lse) of a group, 0 where a row does not keep the key, even if its lse is inf or
 * NaN. */
INLINE void find_probabilities(const backward_step *step, const key_group *group, int block,
                               int from) {
    const backward_tile *const tile = step->tile;
    const int32_t first = group->first;
    product_block s;
    find_logits(s, from, &step->logits, first, block);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        const vf lse = vf_load(tile->lse + block * block_lanes + m * vf_width);
        UNROLL
        for (int key = 0; key < group_keys; key++)
            s[key][m] = vf_sub(s[key][m], lse);
    }
    if (group->masked)
        mask_lanes(s, from, step->logits.keys, first, block);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < group_keys; key++) {
            const vf p = weight_of(s[key][m]);
            vf_store(tile->p + (first + key) * block_lanes + m * vf_width, p);
            if (terms == 2)
                vf_store_terms(words_at(tile->p_words, first + key, block) + m * vf_width / terms,
                               p);
        }
    }
}

/* The derivative of the softcap, 1 - tanh^2, from the capped logits of find_logits(). */
NOINLINE void find_slopes(const backward_step *step, int32_t first) {
    const float *const capped = step->tile->logits.capped;
    float *const slope = step->tile->slope + first * block_lanes;
    const vf inverse = vf_set(1 / step->logits.cap);
    for (int x = 0; x < group_keys * block_lanes; x += vf_width) {
        const vf scaled = vf_mul(vf_load(capped + x), inverse);
        const vf square = vf_mul(scaled, scaled);
        vf_store(slope + x, vf_sub(vf_set(1), square));
    }
}

INLINE void find_group_probabilities(const backward_step *step, const key_group *group, int block) {
    if (group->upper)
        find_probabilities(step, group, block, half_vectors);
    else
        find_probabilities(step, group, block, 0);
    if (step->logits.cap > 0)
        find_slopes(step, group->first);
}

/* Marks dropped pairs with a minus sign on their probability, which find_ds() reads, and clears
 * their words. */
NOINLINE void drop_probabilities(const backward_step *step, int block, const group_list *groups) {
    const backward_tile *const tile = step->tile;
    for (int32_t n = 0; n < groups->count * group_keys; n++) {
        const key_group *const group = &groups->group[n / group_keys];
        const int32_t key = group->first + n % group_keys;
        for (int m = group->upper ? half_vectors : 0; m < tile_vectors; m++) {
            float *const at = tile->p + key * block_lanes + m * vf_width;
            float *const word = words_at(tile->p_words, key, block) + m * vf_width / terms;
            const vu kept = undropped_lanes(&step->logits, key, block * block_lanes + m * vf_width);
            const vu p = vu_of(vf_load(at));
            vf_store(at, vf_of_bits(p | (~kept & 0x80000000U)));
            if (terms == 2)
                vf_store_terms(word, vf_of_bits(p & kept));
            else
                vf_store(word, vf_of_bits(p & kept));
        }
    }
}

NOINLINE void find_block_probabilities(const backward_step *step, int block,
                                       const group_list *groups) {
    int32_t multiplied = 0; // the products of the keys before it are in memory
    if (step->logits.tile->pair_bias != NULL)
        load_pair_bias(&step->logits, block, groups);
    for (int32_t n = 0; n < groups->count; n++) {
        multiplied = multiply_ahead(&step->logits, &groups->group[n], block, multiplied);
        find_group_probabilities(step, &groups->group[n], block);
    }
    if (step->logits.threshold != 0)
        drop_probabilities(step, block, groups);
}

/* dbias += dS, summed over the lanes of a block. */
INLINE void add_dbias(const backward_step *step, product_block ds, int32_t first, int from) {
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        vf sum = ds[key][from];
        UNROLL
        for (int m = from + 1; m < tile_vectors; m++)
            sum = vf_add(sum, ds[key][m]);
        vf_store(step->dbias[first + key], vf_add(vf_load(step->dbias[first + key]), sum));
    }
}

/* Keeps dS of a group for dattn_bias. The lanes before `from` keep none of its keys. */
INLINE void store_pair_ds(product_block ds, const backward_tile *tile, int32_t first, int from) {
    UNROLL
    for (int key = 0; key < group_keys; key++) {
        float *const to = tile->pair_ds + (first + key) * block_lanes;
        for (int m = 0; m < from; m++)
            vf_store(to + m * vf_width, vf_set(0));
        store_vectors(to, ds[key], from, tile_vectors);
    }
}

/* dS = P (dP - delta) of a group; dP is 0 for dropped pairs. Under a softcap dS is then multiplied
 * by its derivative. */
INLINE void find_ds(product_block s, const backward_step *step, const key_group *group, int block,
                    int from, bool drops) {
    const backward_tile *const tile = step->tile;
    const int64_t at = group->first * block_lanes;
    multiply_group_from(s, from, &step->dp, group->first, block,
                        tile->minus_delta + block * block_lanes);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < group_keys; key++) {
            vf p = vf_load(tile->p + at + key * block_lanes + m * vf_width);
            if (drops) {
                const vf minus_delta =
                    vf_load(tile->minus_delta + block * block_lanes + m * vf_width);
                s[key][m] = vf_pick_greater(vf_set(0), p, minus_delta, s[key][m]);
                p = vf_abs(p);
            }
            const vf ds = vf_mul(p, s[key][m]);
            // a key that the row does not keep may make dP NaN
            s[key][m] = group->masked ? vf_pick_greater(vf_set(FLT_MIN), p, vf_set(0), ds) : ds;
        }
    }
    if (step->has_dbias)
        add_dbias(step, s, group->first, from);
    if (tile->pair_ds != NULL)
        store_pair_ds(s, tile, group->first, from);
    if (step->logits.cap > 0) {
        UNROLL
        for (int m = from; m < tile_vectors; m++) {
            UNROLL
            for (int key = 0; key < group_keys; key++)
                s[key][m] =
                    vf_mul(s[key][m], vf_load(tile->slope + at + key * block_lanes + m * vf_width));
        }
    }
}

/* Stores dS of a group in words of keys and, if they differ, in words of lanes. */
INLINE void store_ds(product_block ds, const backward_tile *tile, int32_t first, int block,
                     int from) {
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < group_keys; key++) {
            if (terms == 2)
                vf_store_terms(words_at(tile->ds_words, first + key, block) + m * vf_width / terms,
                               ds[key][m]);
            if (key % terms == terms - 1)
                vf_store(tile->logits.weights + (first + key) / terms * block_lanes + m * vf_width,
                         vf_join(ds[key - terms + 1][m], ds[key][m]));
        }
    }
}

INLINE void find_group_ds(const backward_step *step, const key_group *group, int block,
                          bool drops) {
    product_block ds;
    if (group->upper) {
        find_ds(ds, step, group, block, half_vectors, drops);
        store_ds(ds, step->tile, group->first, block, half_vectors);
    } else {
        find_ds(ds, step, group, block, 0, drops);
        store_ds(ds, step->tile, group->first, block, 0);
    }
}

INLINE void find_all_ds(const backward_step *step, int block, const group_list *groups,
                        bool drops) {
    int32_t multiplied = 0;
    for (int32_t n = 0; n < groups->count; n++) {
        multiplied = multiply_ahead(&step->dp, &groups->group[n], block, multiplied);
        find_group_ds(step, &groups->group[n], block, drops);
    }
    if (step->tile->pair_ds != NULL)
        add_pair_gradients(&step->logits, block, groups, step->tile->pair_ds);
}

NOINLINE void find_plain_ds(const backward_step *step, int block, const group_list *groups) {
    find_all_ds(step, block, groups, false);
}

NOINLINE void find_dropped_ds(const backward_step *step, int block, const group_list *groups) {
    find_all_ds(step, block, groups, true);
}

static void find_block_ds(const backward_step *step, int block, const group_list *groups) {
    if (step->logits.threshold != 0)
        find_dropped_ds(step, block, groups);
    else
        find_plain_ds(step, block, groups);
}

#if !defined(FDMA_POINT_AMX)

INLINE void add_strip(float *const *sums, const group_list *groups, const float *words,
                      const float *rows, int64_t d, int vectors) {
    for (int32_t n = 0; n < groups->count; n++) {
        const int32_t first = groups->group[n].first;
        const int begin = groups->group[n].upper ? half_vectors * vf_width / terms : 0;
        add_lanes(sums + first, d, words + first * held_words, held_words, rows, vectors, begin,
                  lane_words);
    }
}

/* dv += P dout, or dk += dS q, of the keys that a block of lanes keeps. */
NOINLINE void add_block_lanes(float *const *sums, const group_list *groups, const float *words,
                              const float *rows, int64_t width) {
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length)
        if (width - d >= row_strip)
            add_strip(sums, groups, words, rows, d, tile_vectors);
        else if (width - d == 3 * vf_width)
            add_strip(sums, groups, words, rows, d, 3);
        else if (width - d == 2 * vf_width)
            add_strip(sums, groups, words, rows, d, 2);
        else
            add_strip(sums, groups, words, rows, d, 1);
}

static void add_key_block(const backward_step *step, int64_t width) {
    const backward_tile *const tile = step->tile;
    const int64_t rows = block_rows(step->logits.dim);
    group_list groups;
    for (int block = 0; block < step->logits.blocks; block++) {
        classify_groups(step->logits.keys, block, &groups);
        find_block_probabilities(step, block, &groups);
        add_block_lanes(step->dv, &groups, tile->p_words, tile->dout_rows + block * rows, width);
        find_block_ds(step, block, &groups);
        add_groups(&step->logits, block, &groups); // dq
        add_block_lanes(step->dk, &groups, tile->ds_words, tile->q_rows + block * rows, width);
    }
}

#else // AMX sums over all blocks of lanes of a tile at once

/* Clears the words of the groups that no lane of a block keeps: the products take whole steps. */
static void clear_skipped_words(const backward_step *step, int block, const group_list *groups) {
    const key_group *group = groups->group, *const end = group + groups->count;
    clear_skipped(&step->logits, groups);
    for (int32_t first = 0; first < whole_steps(step->logits.keys->count); first += group_keys) {
        if (group < end && group->first == first) {
            group++;
            continue;
        }
        for (int32_t key = first; key < first + group_keys; key++) {
            memset(words_at(step->tile->p_words, key, block), 0, sizeof(float) * lane_words);
            memset(words_at(step->tile->ds_words, key, block), 0, sizeof(float) * lane_words);
        }
    }
}

/* dv += P dout, or dk += dS q, of all listed keys. */
NOINLINE void add_all_lanes(const backward_step *step, float *const *sums, const float *words,
                            const float *rows, int64_t width, bool keeps[][backward_blocks]) {
    const int64_t block_length = block_rows(step->logits.dim);
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length) {
        const int vectors = (int)min((width - d) / vf_width, tile_vectors);
        for (int32_t first = 0; first < whole_steps(step->logits.keys->count); first += key_step)
            add_lanes(sums + first, d, words + first * held_words, held_words, rows, block_length,
                      vectors, step->logits.blocks, keeps[first / key_step]);
    }
}

static void add_key_block(const backward_step *step, int64_t width) {
    const backward_tile *const tile = step->tile;
    bool keeps[key_block / key_step][backward_blocks] = {{false}}; // a block keeps a key of a step
    group_list groups;
    begin_products();
    for (int block = 0; block < step->logits.blocks; block++) {
        classify_groups(step->logits.keys, block, &groups);
        for (int32_t n = 0; n < groups.count; n++)
            keeps[groups.group[n].first / key_step][block] = true;
        clear_skipped_words(step, block, &groups);
        find_block_probabilities(step, block, &groups);
        find_block_ds(step, block, &groups);
        add_groups(&step->logits, block, &groups); // dq
    }
    add_all_lanes(step, step->dv, tile->p_words, tile->dout_rows, width, keeps);
    add_all_lanes(step, step->dk, tile->ds_words, tile->q_rows, width, keeps);
    end_products();
}

#endif
