/* A tile of the backward pass. It has buffers for dout as forward has for q, and both a second time
 * row by row, for the sums over lanes that give dk and dv. */
#pragma once

#include "cpu/common/product.h"

enum {
    lane_words = block_lanes / terms,
    /* Channels that a sum over lanes holds in registers; rows are cut into strips of this many. */
    row_strip = block_lanes,
    row_strip_length = lane_words * row_strip,
    /* Words of lanes that are held of a key: as many as one call of add_lanes() sums over. */
    held_words = summed_blocks * lane_words,
};

typedef struct backward_tile {
    tile_state logits; /* of q and k. Its out is dq, its weights are dS, in words of keys */
    tile_state dp;     /* the same buffers, except that q and k_rows hold dout and v */
    float *q_rows;     /* [blocks][strips][lane_words][row_strip]: words of lanes */
    float *dout_rows;
    float *p;           /* [key_block][block_lanes]: probabilities; of dropped pairs, minus them */
    float *p_words;     /* [key_block][held_words]: in words of lanes, 0 for dropped pairs; p where
                           terms is 1 and there is no dropout */
    float *ds_words;    /* [key_block][held_words]: dS; logits.weights where terms is 1 */
    float *slope;       /* [key_block][block_lanes]: of the softcap */
    float *pair_ds;     /* [key_block][block_lanes]: dS before the softcap; NULL: not wanted */
    float *lse;         /* [lanes]; inf in lanes that are left out */
    float *minus_delta; /* [lanes]: (dlse - <dout, out>) / dropout_scale() */
    uint8_t *left_out;  /* [lanes]: the lane has no row, or an empty one */
} backward_tile;

/* Floats of one block of lanes in q_rows. */
static int64_t block_rows(int64_t dim) { return divide_up(dim, row_strip) * row_strip_length; }

/* The words of a key for a block of lanes, in p_words or ds_words. */
INLINE float *words_at(float *words, int32_t key, int block) {
    return words + key * held_words + block % summed_blocks * lane_words;
}

static backward_tile take_backward_tile(fdma_arena *arena, const fdma_problem *problem,
                                        int64_t lanes) {
    const int64_t dim = tile_dim(problem);
    const int64_t rows = lanes / block_lanes * block_rows(dim);
    const int64_t products = key_block * block_lanes, words = key_block * held_words;
    const bool drops = problem->dropout.threshold != 0;
    backward_tile tile;
    tile.logits = take_tile(arena, problem, lanes);
    tile.dp = tile.logits;
    tile.dp.q = take_floats(arena, dim * lanes / terms);
    tile.dp.k_rows = take_floats(arena, key_block * padded_row(dim));
    tile.q_rows = take_floats(arena, rows);
    tile.dout_rows = take_floats(arena, rows);
    tile.p = take_floats(arena, products);
    tile.p_words = terms == 1 && !drops ? tile.p : take_floats(arena, words);
    tile.ds_words = terms == 1 ? tile.logits.weights : take_floats(arena, words);
    tile.slope = take_floats(arena, problem->softcap > 0 ? products : 0);
    tile.pair_ds = NULL;
    if (is_present(&problem->dattn_bias))
        tile.pair_ds = take_floats(arena, products);
    tile.lse = take_floats(arena, lanes);
    tile.minus_delta = take_floats(arena, lanes);
    tile.left_out = fdma_arena_take(arena, (size_t)lanes);
    return tile;
}

static double dlse_of_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    return is_present(&problem->dlse) ? (double)*float_at(&problem->dlse, b, h, i) : 0;
}

/* delta = <dout, out> - dlse of a row, in double precision: if a row has all its weight on one key,
 * dP - delta cancels to the last bits. */
static double delta_of_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const double product =
        product_of_rows(head_row(&problem->dout, b, i, h), head_row(&problem->out, b, i, h),
                        problem->dtype, problem->head_dim);
    return product - dlse_of_row(problem, b, i, h);
}

/* True if a row attends to no key, so that its lse is the sink logit. Checks only rows with values
 * that are not finite, because 0 times these is NaN; in other rows a P of 0 makes every product
 * 0. */
static bool is_empty_beside_sink(const fdma_problem *problem, const row_range *rows, int64_t lane,
                                 float lse, double delta) {
    const int64_t row = rows->first + lane, h = rows->g * problem->group + row % problem->group;
    const void *const q = row_of_lane(problem, &problem->q, rows, lane);
    if (lse != sink_of_row(problem, rows->g, row))
        return false;
    if (isfinite(delta) && isfinite(product_of_rows(q, q, problem->dtype, problem->head_dim)))
        return false;
    return is_empty_row(problem, rows->b, h, row / problem->group);
}

/* Loads lse and delta of every row, except empty ones. Delta is divided by dropout_scale(), because
 * gradients are multiplied by it at the end. */
static void load_lse_and_delta(const fdma_problem *problem, const row_range *rows,
                               const backward_tile *tile) {
    const double scale = dropout_scale(problem->dropout.threshold);
    for (int64_t lane = 0; lane < used_lanes(rows); lane++) {
        const float lse =
            lane < rows->count ? *float_of_lane(problem, &problem->lse, rows, lane) : -INFINITY;
        tile->left_out[lane] = true;
        tile->lse[lane] = INFINITY;
        tile->minus_delta[lane] = 0;
        if (lse == -INFINITY)
            continue;
        const int64_t row = rows->first + lane, h = rows->g * problem->group + row % problem->group;
        const double delta = delta_of_row(problem, rows->b, row / problem->group, h);
        if (is_empty_beside_sink(problem, rows, lane, lse, delta))
            continue;
        tile->left_out[lane] = false;
        tile->lse[lane] = lse;
        tile->minus_delta[lane] = (float)(-delta / scale);
    }
}

/* Arranges the rows of a tensor of q's shape in words of lanes, divided into strips of channels. */
static void load_lane_rows(const fdma_problem *problem, const fdma_tensor *tensor,
                           const row_range *rows, const backward_tile *tile, float *to) {
    const int64_t dim = problem->head_dim, length = block_rows(tile_dim(problem));
    for (int64_t lane = 0; lane < used_lanes(rows); lane += terms) {
        const void *row[terms];
        float *const line =
            to + lane / block_lanes * length + lane % block_lanes / terms * row_strip;
        for (int64_t n = 0; n < terms; n++)
            row[n] = tile->left_out[lane + n] ? tile->logits.zeros
                                              : row_of_lane(problem, tensor, rows, lane + n);
        for (int64_t d = 0; d < tile_dim(problem); d += vf_width) {
            const int64_t count = channels_at(d, dim);
            const vf word = terms == 2 ? vf_load_pairs(row[0], row[terms - 1], d, count)
                                       : load_channels(row[0], problem->dtype, d, count);
            vf_store(line + d / row_strip * row_strip_length + d % row_strip, word);
        }
    }
}

static void load_backward_tile(const fdma_problem *problem, const row_range *rows,
                               const backward_tile *tile) {
    const uint8_t *const left_out = tile->left_out;
    const float *const zeros = tile->logits.zeros;
    load_lse_and_delta(problem, rows, tile);
    pack_rows(problem, &problem->q, rows, tile->logits.q, left_out, zeros);
    pack_rows(problem, &problem->dout, rows, tile->dp.q, left_out, zeros);
    load_lane_rows(problem, &problem->q, rows, tile, tile->q_rows);
    load_lane_rows(problem, &problem->dout, rows, tile, tile->dout_rows);
}

static void write_dq(const fdma_problem *problem, const row_range *rows,
                     const backward_tile *tile) {
    const vf scale = vf_set((float)(problem->scale * dropout_scale(problem->dropout.threshold)));
    for (int64_t first = 0; first < rows->count; first += vf_width)
        write_lanes(problem, &problem->dq, rows, tile->logits.out, first, scale,
                    problem->accumulate);
}
