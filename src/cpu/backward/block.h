/* One block of a tile's lanes at work on a block of keys: probabilities and their gradients, then
 * the three sums that those go into. The five products of arXiv:2205.14135, algorithm 4. */
#ifndef FDMA_CPU_BACKWARD_BLOCK_H
#define FDMA_CPU_BACKWARD_BLOCK_H

#include "cpu/backward/keys.h"

typedef struct backward_work {
    tile_work logits; /* forward's, over the same keys */
    const backward_tile *tile;
    bool has_dbias;
    float *dk[key_block], *dv[key_block], *dbias[key_block]; /* sums of the listed keys */
    uint8_t *is_used; /* [key_block / key_step][backward_blocks]: blocks that keep some of a step */
} backward_work;

/* A key's words of the lanes of a block. */
INLINE float *words_at(float *words, int32_t key, int block) {
    return words + key * held_words + (by_steps ? block * lane_words : 0);
}

/* e^x. Logits far below lse want it exact; what will be rounded to a shorter type does not. */
INLINE vf weight_of(vf x) { return terms == 1 ? exp_of(x) : exp2_of(vf_mul(x, vf_set(log2e))); }

/* P = e^(logits - lse) of a group of keys; 0 where a row does not keep one, whatever its lse. */
INLINE void find_probabilities(const backward_work *work, int32_t first, int block,
                               coverage covered, int from) {
    const backward_tile *const tile = work->tile;
    const key_list *const list = work->logits.list;
    score_block s;
    find_logits(s, from, &work->logits, first, block, covers_all);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        const vf lse = vf_load(tile->lse + block * block_lanes + m * vf_width);
        UNROLL
        for (int key = 0; key < score_keys; key++)
            s[key][m] = vf_sub(s[key][m], lse);
    }
    if (covered != covers_all)
        cut_lanes(s, from, list->first_lane + first, list->end_lane + first, block * block_lanes);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            const vf p = weight_of(s[key][m]);
            vf_store(tile->p + (first + key) * block_lanes + m * vf_width, p);
            if (terms == 2)
                vf_store_terms(words_at(tile->p_words, first + key, block) + m * vf_width / terms,
                               p);
        }
    }
}

/* softcap' = 1 - tanh^2, of what find_logits has left behind. */
static __attribute__((noinline)) void find_slopes(const backward_work *work, int32_t first) {
    const float *const capped = work->tile->logits.capped;
    float *const slope = work->tile->slope + first * block_lanes;
    const vf inverse = vf_set(1 / work->logits.cap);
    for (int x = 0; x < score_keys * block_lanes; x += vf_width) {
        const vf share = vf_mul(vf_load(capped + x), inverse);
        const vf square = vf_mul(share, share);
        vf_store(slope + x, vf_sub(vf_set(1), square));
    }
}

/* Sums over lanes of what logits are given, for dbias. */
INLINE void add_dbias(const backward_work *work, score_block s, int32_t first, int from) {
    UNROLL
    for (int key = 0; key < score_keys; key++) {
        vf sum = s[key][from];
        UNROLL
        for (int m = from + 1; m < tile_vectors; m++)
            sum = vf_add(sum, s[key][m]);
        vf_store(work->dbias[first + key], vf_add(vf_load(work->dbias[first + key]), sum));
    }
}

/* dS = P (dP - D) of a group of keys, and in place of it what the softcap leaves of it. */
INLINE void find_steps(score_block s, const backward_work *work, int32_t first, int block,
                       coverage covered, int from) {
    const backward_tile *const tile = work->tile;
    const int64_t at = first * block_lanes;
    score_group_from(s, from, &tile->shares, work->logits.dim, first, block,
                     tile->carried + block * block_lanes);
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            const vf p = vf_load(tile->p + at + key * block_lanes + m * vf_width);
            const vf step = vf_mul(p, s[key][m]);
            // where a row does not keep a key, whose own gradients may be NaN
            s[key][m] =
                covered == covers_all ? step : vf_pick_greater(vf_set(FLT_MIN), p, vf_set(0), step);
        }
    }
    if (work->has_dbias)
        add_dbias(work, s, first, from);
    if (work->logits.cap > 0) {
        UNROLL
        for (int m = from; m < tile_vectors; m++) {
            UNROLL
            for (int key = 0; key < score_keys; key++)
                s[key][m] =
                    vf_mul(s[key][m], vf_load(tile->slope + at + key * block_lanes + m * vf_width));
        }
    }
}

/* Stores the steps of a group in words of keys and, where these differ, of lanes. */
INLINE void store_steps(score_block s, const backward_tile *tile, int32_t first, int block,
                        int from) {
    UNROLL
    for (int m = from; m < tile_vectors; m++) {
        UNROLL
        for (int key = 0; key < score_keys; key++) {
            if (terms == 2)
                vf_store_terms(words_at(tile->ds_words, first + key, block) + m * vf_width / terms,
                               s[key][m]);
            if (key % terms == terms - 1)
                vf_store(tile->logits.weights + (first + key) / terms * block_lanes + m * vf_width,
                         vf_join(s[key - terms + 1][m], s[key][m]));
        }
    }
}

INLINE void take_step(const backward_work *work, int32_t first, int block, coverage covered,
                      int from) {
    score_block s;
    find_steps(s, work, first, block, covered, from);
    store_steps(s, work->tile, first, block, from);
}

/* Products that take steps of keys take groups without probabilities along. */
static void skip_probabilities(const backward_work *work, int32_t first, int block) {
    const backward_tile *const tile = work->tile;
    skip_group(&work->logits, first);
    if (!by_steps)
        return;
    memset(tile->p + first * block_lanes, 0, sizeof(float) * score_keys * block_lanes);
    for (int32_t key = first; key < first + score_keys; key++) {
        memset(words_at(tile->p_words, key, block), 0, sizeof(float) * lane_words);
        memset(words_at(tile->ds_words, key, block), 0, sizeof(float) * lane_words);
    }
}

/* Probabilities of a block's listed keys; `runs`: which of them have some. */
static __attribute__((noinline)) void find_block_probabilities(const backward_work *work, int block,
                                                               key_runs *runs) {
    const key_list *const list = work->logits.list;
    const int32_t middle = block * block_lanes + half_vectors * vf_width;
    int32_t scored = 0;
    runs->count = 0;
    for (int32_t first = 0; first < whole_steps(list->count); first += score_keys) {
        const bool is_late = half_vectors > 0 && list->first_lane[first] >= middle;
        const coverage covered = cover_block(list, first, block);
        if (covered == covers_none) {
            skip_probabilities(work, first, block);
            continue;
        }
        if (first >= scored) {
            scored = first / key_step * key_step + key_step;
            score_step(&work->tile->logits, work->logits.dim, scored - key_step, block);
        }
        if (is_late)
            find_probabilities(work, first, block, covered, half_vectors);
        else
            find_probabilities(work, first, block, covered, 0);
        if (work->logits.cap > 0)
            find_slopes(work, first);
        add_group(runs, first, is_late);
        work->is_used[first / key_step * backward_blocks + block] = 1;
    }
}

static __attribute__((noinline)) void find_block_steps(const backward_work *work, int block,
                                                       const key_runs *runs) {
    const tile_state *const shares = &work->tile->shares;
    for (const key_run *run = runs->run; run < runs->run + runs->count; run++) {
        for (int32_t first = run->first; first < run->end; first += score_keys) {
            if (first % key_step == 0)
                score_step(shares, work->logits.dim, first, block);
            const coverage covered = cover_block(work->logits.list, first, block);
            if (run->is_late)
                take_step(work, first, block, covered, half_vectors);
            else
                take_step(work, first, block, covered, 0);
        }
    }
}

/* The sums over lanes of one run of keys, a strip of channels at a time. */
INLINE void add_run_strip(float *const *sums, const key_run *run, const float *words,
                          const float *rows, int64_t d, int vectors) {
    const int begin = run->is_late ? half_vectors * vf_width / terms : 0;
    for (int32_t first = run->first; first < run->end; first += lane_keys)
        add_lanes(sums + first, d, words + first * held_words, held_words, rows, vectors, begin,
                  lane_words);
}

/* dk or dv of the keys that a block of lanes has probabilities for. */
static __attribute__((noinline)) void add_block_lanes(float *const *sums, const key_runs *runs,
                                                      const float *words, const float *rows,
                                                      int64_t width) {
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length)
        for (const key_run *run = runs->run; run < runs->run + runs->count; run++) {
            if (width - d >= row_strip)
                add_run_strip(sums, run, words, rows, d, tile_vectors);
            else if (width - d == 3 * vf_width)
                add_run_strip(sums, run, words, rows, d, 3);
            else if (width - d == 2 * vf_width)
                add_run_strip(sums, run, words, rows, d, 2);
            else
                add_run_strip(sums, run, words, rows, d, 1);
        }
}

/* The same for all blocks of a tile at a time. */
static __attribute__((noinline)) void add_all_lanes(const backward_work *work, float *const *sums,
                                                    const float *words, const float *rows,
                                                    int64_t width) {
    const int64_t block_length = block_rows(work->logits.dim);
    for (int64_t d = 0; d < width; d += row_strip, rows += row_strip_length) {
        const int64_t left = (width - d) / vf_width;
        const int vectors = left < tile_vectors ? (int)left : (int)tile_vectors;
        for (int32_t first = 0; first < whole_steps(work->logits.list->count); first += key_step)
            add_tile_lanes(sums + first, d, words + first * held_words, held_words, rows,
                           block_length, vectors, work->logits.blocks,
                           work->is_used + first / key_step * backward_blocks);
    }
}

/* All that a list of keys adds to a tile, and the tile to its keys. */
static void work_on_keys(const backward_work *work, int64_t width) {
    const backward_tile *const tile = work->tile;
    const int64_t rows = block_rows(work->logits.dim);
    key_runs runs;
    memset(work->is_used, 0, key_block / key_step * backward_blocks);
    for (int block = 0; block < work->logits.blocks; block++) {
        find_block_probabilities(work, block, &runs);
        if (!by_steps)
            add_block_lanes(work->dv, &runs, tile->p_words, tile->dout_rows + block * rows, width);
        find_block_steps(work, block, &runs);
        add_runs(&work->logits, block, &runs);
        if (!by_steps)
            add_block_lanes(work->dk, &runs, tile->ds_words, tile->q_rows + block * rows, width);
    }
    if (by_steps) {
        add_all_lanes(work, work->dv, tile->p_words, tile->dout_rows, width);
        add_all_lanes(work, work->dk, tile->ds_words, tile->q_rows, width);
    }
}

#endif
