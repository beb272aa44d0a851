/* A tile of the backward pass: what forward has of q, and the same of dout; and both again row by
 * row, for the sums over lanes that keys get. */
#ifndef FDMA_CPU_BACKWARD_TILE_H
#define FDMA_CPU_BACKWARD_TILE_H

#include "cpu/forward/forward.h"

enum {
    lane_words = block_lanes / terms,
    /* Channels that a sum over lanes holds in registers; rows are cut into strips of as many. */
    row_strip = block_lanes,
    row_strip_length = lane_words * row_strip,
    /* Tiles are smaller than forward's, as they hold four times as much. */
    backward_blocks = tile_blocks > 8 ? tile_blocks / 3
    : tile_blocks > 4                 ? tile_blocks / 2
                                      : 4,
};

/* Words of lanes that are held of a key: products that take steps of keys sum over all lanes of a
 * tile at a time, others over those of one block. */
enum { held_words = by_steps ? backward_blocks * lane_words : lane_words };

typedef struct backward_tile {
    tile_state logits; /* of q and k; out: dq; weights: dS, in words of keys */
    tile_state shares; /* of dout and v: the gradient of the probabilities */
    float *q_rows;     /* [blocks][strips][lane_words][row_strip]: words of lanes */
    float *dout_rows;
    float *p;          /* [key_block][block_lanes]: probabilities */
    float *p_words;    /* [key_block][held_words]: the same in words of lanes; p where terms is 1 */
    float *ds_words;   /* [key_block][held_words]: dS; logits.weights where terms is 1 */
    float *slope;      /* [key_block][block_lanes]: of the softcap */
    float *lse;        /* [lanes]; inf in those that are left out */
    float *carried;    /* [lanes]: <dout, out> - dlse */
    uint8_t *left_out; /* [lanes]: no row, or an empty one */
} backward_tile;

static int64_t row_strips(int64_t dim) { return (dim + row_strip - 1) / row_strip; }

/* Floats of one block's q_rows. */
static int64_t block_rows(int64_t dim) { return row_strips(dim) * row_strip_length; }

static backward_tile take_backward_tile(fdma_arena *arena, const fdma_problem *problem,
                                        int64_t lanes) {
    const int64_t dim = tile_dim(problem);
    const size_t rows = (size_t)(lanes / block_lanes * block_rows(dim)) * sizeof(float);
    const size_t lane_floats = (size_t)lanes * sizeof(float);
    const size_t scores = sizeof(float) * key_block * block_lanes;
    const size_t words = sizeof(float) * key_block * held_words;
    backward_tile tile;
    tile.logits = take_tile(arena, problem, lanes);
    tile.shares = tile.logits;
    tile.shares.q = fdma_arena_take(arena, (size_t)dim * lane_floats / terms);
    tile.shares.k_rows =
        fdma_arena_take(arena, key_block * (size_t)padded_row(dim) * sizeof(float));
    tile.q_rows = fdma_arena_take(arena, rows);
    tile.dout_rows = fdma_arena_take(arena, rows);
    tile.p = fdma_arena_take(arena, scores);
    tile.p_words = terms == 1 ? tile.p : fdma_arena_take(arena, words);
    tile.ds_words = terms == 1 ? tile.logits.weights : fdma_arena_take(arena, words);
    tile.slope = fdma_arena_take(arena, problem->softcap > 0 ? scores : 0);
    tile.lse = fdma_arena_take(arena, lane_floats);
    tile.carried = fdma_arena_take(arena, lane_floats);
    tile.left_out = fdma_arena_take(arena, (size_t)lanes);
    return tile;
}

static float at_lane(const fdma_problem *problem, const fdma_tensor *tensor,
                     const tile_place *place, int64_t lane) {
    const int64_t row = place->first_row + lane;
    const int64_t h = place->g * problem->group + row % problem->group;
    return ((const float *)tensor->data)[place->b * tensor->stride[0] + h * tensor->stride[1] +
                                         row / problem->group];
}

/* <x, y> of two rows in double precision: in a row whose weight is all on one key, what this is
 * taken from cancels to the last bits. Four sums hide the latency of an addition. */
static double product_of_rows(const void *x, const void *y, fdma_dtype dtype, int64_t dim) {
    double sum[4] = {0};
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        float left[vf_width], right[vf_width];
        vf_store(left, load_channels(x, dtype, d, count));
        vf_store(right, load_channels(y, dtype, d, count));
        for (int64_t n = 0; n < count; n++)
            sum[n % 4] += (double)left[n] * (double)right[n];
    }
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

/* lse and dlse - <dout, out> of every row; rows that kept nothing take no part. */
static void load_row_sums(const fdma_problem *problem, const tile_place *place,
                          const backward_tile *tile) {
    for (int64_t lane = 0; lane < used_lanes(place); lane++) {
        const float lse =
            lane < place->rows ? at_lane(problem, &problem->lse, place, lane) : -INFINITY;
        tile->left_out[lane] = lse == -INFINITY;
        tile->lse[lane] = tile->left_out[lane] ? INFINITY : lse;
        tile->carried[lane] = 0;
        if (tile->left_out[lane])
            continue;
        const void *const dout =
            row_at(&problem->dout, row_offset(problem, &problem->dout, place, lane));
        const void *const out =
            row_at(&problem->out, row_offset(problem, &problem->out, place, lane));
        const float dlse =
            is_present(&problem->dlse) ? at_lane(problem, &problem->dlse, place, lane) : 0;
        const double product = product_of_rows(dout, out, problem->dtype, problem->head_dim);
        tile->carried[lane] = (float)((double)dlse - product);
    }
}

/* Rows of q's shape in words of lanes, cut into strips of channels. */
static void load_lane_rows(const fdma_problem *problem, const fdma_tensor *tensor,
                           const tile_place *place, const backward_tile *tile, float *rows) {
    const int64_t dim = problem->head_dim, length = block_rows(tile_dim(problem));
    for (int64_t lane = 0; lane < used_lanes(place); lane += terms) {
        const void *row[terms];
        float *const to =
            rows + lane / block_lanes * length + lane % block_lanes / terms * row_strip;
        for (int64_t n = 0; n < terms; n++)
            row[n] = tile->left_out[lane + n]
                         ? tile->logits.zeros
                         : row_at(tensor, row_offset(problem, tensor, place, lane + n));
        for (int64_t d = 0; d < tile_dim(problem); d += vf_width) {
            const int64_t count = channels_at(d, dim);
            const vf word = terms == 2 ? vf_load_pairs(row[0], row[terms - 1], d, count)
                                       : load_channels(row[0], problem->dtype, d, count);
            vf_store(to + d / row_strip * row_strip_length + d % row_strip, word);
        }
    }
}

static void load_backward_tile(const fdma_problem *problem, const tile_place *place,
                               const backward_tile *tile) {
    const uint8_t *const left_out = tile->left_out;
    const float *const zeros = tile->logits.zeros;
    load_row_sums(problem, place, tile);
    pack_rows(problem, &problem->q, place, tile->logits.q, left_out, zeros);
    pack_rows(problem, &problem->dout, place, tile->shares.q, left_out, zeros);
    load_lane_rows(problem, &problem->q, place, tile, tile->q_rows);
    load_lane_rows(problem, &problem->dout, place, tile, tile->dout_rows);
}

static void write_dq(const fdma_problem *problem, const tile_place *place,
                     const backward_tile *tile) {
    const vf scale = vf_set((float)problem->scale);
    for (int64_t first = 0; first < place->rows; first += vf_width)
        write_lanes(problem, &problem->dq, place, tile->logits.out, first, scale,
                    problem->accumulate);
}

#endif
