/* The blocks of lanes of a tile attend to one key block: products on AMX. Tiles and vectors work at
 * the same time: the softmax of each group alternates with pieces of other products, first of the
 * scores that the next softmax needs, then of O += V P for the block of lanes before. */
#pragma once

#include "cpu/forward/weigh.h"

/* Sums of 2 x 2 tiles, a step of words at a time. */
typedef struct tile_sums {
    const float *upper, *lower; /* rows of words, `length` floats apart */
    const float *lanes;
    float *sums;
    int64_t length, row_step; /* row_step: from a step of words of a row to the next */
    int64_t left;             /* steps */
} tile_sums;

/* Products whose pieces are computed between softmaxes. */
typedef struct product_queue {
    tile_sums at;    /* these are in tile registers */
    bool are_scores; /* `at` */
    const tile_step *step;

    /* S of a step of keys and a block of lanes, from a lane on; block_lanes: all are computed */
    int score_block;
    int32_t score_first;
    int score_lane;
    float *scores;

    /* O += V P of a block of lanes, from a channel and a lane on; dim: all are computed */
    int out_block;
    int64_t out_channel;
    int out_lane;
    int64_t out_words; /* words of weights */
    const float *weights;
} product_queue;

static void begin_scores(product_queue *queue) {
    const tile_step *const step = queue->step;
    const int64_t row = padded_row(step->dim);
    const float *const k = step->tile->k_rows + queue->score_first * row;
    queue->at = (tile_sums){
        .upper = k,
        .lower = k + amx_rows * row,
        .lanes = block_queries(step, queue->score_block) + queue->score_lane,
        .sums = queue->scores + queue->score_lane,
        .length = row,
        .row_step = amx_words,
        .left = step->dim / terms / amx_words,
    };
    queue->score_lane += 2 * amx_lanes;
    queue->are_scores = true;
    clear_sums();
}

static void begin_out(product_queue *queue) {
    const tile_step *const step = queue->step;
    const int64_t d = queue->out_channel;
    const float *const values = step->tile->values + d / strip_channels * strip_length;
    queue->at = (tile_sums){
        .upper = values,
        .lower = values + strip_length,
        .lanes = queue->weights + queue->out_lane,
        .sums = block_out(step, queue->out_block) + d * block_lanes + queue->out_lane,
        .length = amx_words,
        .row_step = amx_words * strip_channels,
        .left = queue->out_words / amx_words,
    };
    queue->are_scores = false;
    queue->out_channel = d + 2 * amx_rows;
    if (queue->out_channel == step->dim && queue->out_lane + 2 * amx_lanes < block_lanes) {
        queue->out_channel = 0;
        queue->out_lane += 2 * amx_lanes;
    }
    if (step->begun)
        load_sums(queue->at.sums);
    else
        clear_sums();
}

/* Computes the next piece, if any is left: four products of tiles. */
INLINE void multiply_piece(product_queue *queue) {
    tile_sums *const at = &queue->at;
    if (at->left == 0) {
        if (queue->score_lane < block_lanes)
            begin_scores(queue);
        else if (queue->out_channel < queue->step->dim)
            begin_out(queue);
        else
            return;
    }
    multiply_tiles(at->upper, at->lower, at->length, at->lanes);
    at->upper += at->row_step;
    at->lower += at->row_step;
    at->lanes += amx_words * block_lanes;
    if (--at->left == 0)
        store_sums(at->sums);
}

INLINE void multiply_pieces(product_queue *queue, int64_t count) {
    for (int64_t piece = 0; piece < count; piece++)
        multiply_piece(queue);
}

static void finish_scores(product_queue *queue) {
    while (queue->score_lane < block_lanes || (queue->are_scores && queue->at.left > 0))
        multiply_piece(queue);
}

static void finish_products(product_queue *queue) {
    finish_scores(queue);
    while (queue->out_channel < queue->step->dim || queue->at.left > 0)
        multiply_piece(queue);
}

static int32_t step_of_group(const key_group *group) { return group->first / key_step * key_step; }

static void queue_scores(product_queue *queue, int block, int32_t first) {
    const tile_step *const step = queue->step;
    float *const other = step->tile->products + key_step * block_lanes;
    queue->score_block = block;
    queue->score_first = first;
    queue->score_lane = 0;
    queue->scores = step->products == other ? step->tile->products : other;
}

/* The scores of the step that follows group n: of the same block or the next one. */
static void queue_next_scores(product_queue *queue, int block, const group_list *groups, int32_t n,
                              const group_list *next) {
    const int32_t now = step_of_group(&groups->group[n]);
    while (n < groups->count && step_of_group(&groups->group[n]) == now)
        n++;
    if (n < groups->count)
        queue_scores(queue, block, step_of_group(&groups->group[n]));
    else if (next->count > 0)
        queue_scores(queue, block + 1, step_of_group(&next->group[0]));
}

/* Makes the scores of a step the ones that multiply_group() loads. */
static void take_scores(product_queue *queue, tile_step *step, int block, int32_t first) {
    if (queue->score_block != block || queue->score_first != first) {
        finish_scores(queue);
        queue_scores(queue, block, first);
    }
    finish_scores(queue);
    step->products = queue->scores;
}

/* True if the logits of a group are its products times a factor. */
static bool is_plain(const tile_step *step, const key_group *group) {
    return !group->masked && step->cap == 0 && step->tile->pair_bias == NULL &&
           !is_present(&step->problem->bias);
}

/* Weighs such a group, with pieces after each half of its vectors. After a whole group the CPU
 * computes less of both at the same time. */
INLINE void weigh_plain(product_queue *queue, const tile_step *step, const key_group *group,
                        int block, int64_t pieces) {
    const tile_state *const tile = step->tile;
    const float *const max = tile->max + block * block_lanes;
    float *const weights = step->weights + group->first / terms * block_lanes;
    const vf factor = vf_set(step->scale * step->unit);
    vf total[tile_vectors];
    product_block s;
    multiply_group(s, 0, step, group->first, block);
    UNROLL
    for (int m = 0; m < tile_vectors; m++) {
        const vf below = vf_sub(vf_set(0), vf_load(max + m * vf_width));
        UNROLL
        for (int key = 0; key < group_keys; key++)
            s[key][m] = vf_fma(s[key][m], factor, below);
        total[m] = weigh_vector(s, m, weights);
        if (m == tile_vectors / 2 - 1)
            multiply_pieces(queue, pieces / 2);
    }
    if (has_outgrown(total, 0))
        raise_group(step, group, block);
    else
        add_vectors(tile->block_sum, total, 0, tile_vectors);
    multiply_pieces(queue, pieces - pieces / 2);
}

/* Weights of the kept groups, while pieces of other products are computed: as many as there are on
 * average for each group. */
NOINLINE void weigh_groups(product_queue *queue, tile_step *step, int block,
                           const group_list *groups, const group_list *next) {
    const int64_t pieces = divide_up(step->dim, block_lanes);
    for (int32_t n = 0; n < groups->count; n++) {
        const key_group *const group = &groups->group[n];
        if (n == 0 || step_of_group(group) != step_of_group(group - 1)) {
            take_scores(queue, step, block, step_of_group(group));
            queue_next_scores(queue, block, groups, n, next);
        }
        const bool is_first = !step->begun && n == 0;
        if (!is_first && is_plain(step, group)) {
            weigh_plain(queue, step, group, block, pieces);
        } else {
            weigh_group(step, group, block, is_first);
            multiply_pieces(queue, pieces);
        }
    }
}

static void queue_out(product_queue *queue, int block, const group_list *groups) {
    if (groups->count == 0) {
        if (!queue->step->begun)
            clear_out(queue->step, block);
        return;
    }
    queue->out_block = block;
    queue->out_channel = 0;
    queue->out_lane = 0;
    queue->out_words = step_of_group(&groups->group[groups->count - 1]) / terms + amx_words;
    queue->weights = queue->step->weights;
}

static void attend_blocks(tile_step *step) {
    group_list groups[2];
    product_queue queue = {
        .step = step, .score_block = -1, .score_lane = block_lanes, .out_channel = step->dim};
    classify_groups(step->keys, 0, &groups[0]);
    for (int block = 0; block < step->blocks; block++) {
        const group_list *const now = &groups[block % 2];
        group_list *const next = &groups[1 - block % 2];
        next->count = 0;
        if (block + 1 < step->blocks)
            classify_groups(step->keys, block + 1, next);
        step->weights = step->tile->weights + block % 2 * block_weights;
        begin_block(step, block, now);
        weigh_groups(&queue, step, block, now, next);
        end_block(step, block, now);
        finish_products(&queue);
        queue_out(&queue, block, now);
    }
    finish_products(&queue);
}
