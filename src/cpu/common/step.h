/* One step of a tile: its key block, the next one, and the groups of keys that a block of lanes
 * keeps. Most groups are kept by every lane and need no mask, or by none and are skipped. */
#pragma once

#include "cpu/common/keys.h"

/* A group of group_keys listed keys. Some lane keeps at least one of them. */
typedef struct key_group {
    int32_t first; /* its index in the list */
    bool upper;    /* all keys come after the lower half of the lanes, which is left out */
    bool masked;   /* some lane does not keep all of them */
} key_group;

typedef struct group_list {
    key_group group[key_groups];
    int32_t count;
} group_list;

INLINE uint64_t kept_lanes(const key_list *list, int32_t n, int block) {
    const int lane = block * block_lanes, shift = lane % word_bits;
    const uint64_t *const words = list->kept + n * kept_words + lane / word_bits;
    uint64_t bits = words[0] >> shift;
    if (shift + block_lanes > word_bits)
        bits |= words[1] << (word_bits - shift);
    return bits & lowest_bits(block_lanes);
}

/* classify_groups() with a mask. */
static void classify_by_mask(const key_list *list, int block, group_list *groups) {
    const uint64_t all = lowest_bits(block_lanes), lower = lowest_bits(half_vectors * vf_width);
    groups->count = 0;
    for (int32_t first = 0; first < whole_steps(list->count); first += group_keys) {
        uint64_t some = 0, every = all;
        for (int32_t n = first; n < first + group_keys; n++) {
            const uint64_t bits = kept_lanes(list, n, block);
            some |= bits;
            every &= bits;
        }
        if (some != 0)
            groups->group[groups->count++] =
                (key_group){.first = first,
                            .upper = half_vectors > 0 && (some & lower) == 0,
                            .masked = every != all};
    }
}

/* The groups with a key that some lane of the block keeps, in the order of the list. */
static void classify_groups(const key_list *list, int block, group_list *groups) {
    if (list->kept != NULL) {
        classify_by_mask(list, block, groups);
        return;
    }
    const int32_t lane = block * block_lanes, end = lane + block_lanes;
    const int32_t middle = lane + half_vectors * vf_width;
    groups->count = 0;
    for (int32_t first = 0; first < whole_steps(list->count); first += group_keys) {
        key_group group = {.first = first};
        bool kept = !list->masked[first / group_keys];
        for (int32_t n = first; !kept && n < first + group_keys; n++)
            kept = list->first_lane[n] < min(end, list->end_lane[n]) && list->end_lane[n] > lane;
        for (int32_t n = first; list->masked[first / group_keys] && n < first + group_keys; n++)
            group.masked |= list->first_lane[n] > lane || list->end_lane[n] < end;
        group.upper = half_vectors > 0 && list->first_lane[first] >= middle;
        if (kept)
            groups->group[groups->count++] = group;
    }
}

/* Keys of adjacent groups that have the same `upper`. */
typedef struct key_run {
    int32_t first, end;
    bool upper;
} key_run;

/* The run that begins at group *n, which becomes the first group after it. */
static inline key_run next_run(const group_list *groups, int32_t *n) {
    const key_group *group = &groups->group[(*n)++];
    key_run run = {group->first, group->first + group_keys, group->upper};
    for (; *n < groups->count; ++*n) {
        group = &groups->group[*n];
        if (group->first != run.end || group->upper != run.upper)
            break;
        run.end += group_keys;
    }
    return run;
}

typedef struct tile_step {
    const tile_state *tile;
    float *weights;  /* of the block of lanes at work */
    float *products; /* of the step of keys at work, for products that leave them in memory */
    const key_list *keys;
    const key_list *next; /* prefetched during the step; NULL: none */
    int64_t dim;
    float scale;
    float unit;         /* logits are multiplied by it, and so is the bias of `keys` */
    float cap;          /* 0: no softcap */
    uint32_t threshold; /* dropout threshold; 0: off */
    int blocks;         /* blocks of lanes with rows */
    const fdma_problem *problem;
    const row_range *rows;
    bool begun; /* another key block came before */
} tile_step;

/* Products, logits or weights of a group, in registers. */
typedef vf product_block[group_keys][tile_vectors];

/* The rows of the next key block to prefetch while a group is multiplied with a block of lanes: k
 * with the first block, v with the second. */
INLINE const void *const *rows_ahead(const tile_step *step, int32_t first, int block) {
    if (step->next == NULL || block > 1)
        return NULL;
    return (block == 0 ? step->next->k_source : step->next->v_source) + first;
}

INLINE void load_group(product_block s, int from, const float *p, int64_t length) {
    UNROLL
    for (int key = 0; key < group_keys; key++)
        load_vectors(s[key], p + key * length, from, tile_vectors);
}

INLINE const float *block_queries(const tile_step *step, int block) {
    return step->tile->q + block * (step->dim / terms) * block_lanes;
}

static inline float *block_out(const tile_step *step, int block) {
    return step->tile->out + block * step->dim * block_lanes;
}
