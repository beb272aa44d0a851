/* One step of a tile: the key block that it works on, and the one to come. */
#ifndef FDMA_CPU_COMMON_STEP_H
#define FDMA_CPU_COMMON_STEP_H

#include "cpu/common/groups.h"

typedef struct tile_step {
    const tile_state *tile;
    const key_list *keys;
    const key_list *next; /* prefetched meanwhile; NULL: none */
    int64_t dim;
    float scale;
    float cap;  /* 0: no softcap */
    int blocks; /* of lanes, that hold rows */
    bool begun; /* another key block came before */
} tile_step;

/* Scores, logits or weights of a group, in registers. */
typedef vf score_block[score_keys][tile_vectors];

/* The rows of the next key block to prefetch while a group is multiplied with a block of lanes: k
 * with the first block, v with the second. */
INLINE const void *const *rows_ahead(const tile_step *step, int32_t first, int block) {
    if (step->next == NULL || block > 1)
        return NULL;
    return (block == 0 ? step->next->k_source : step->next->v_source) + first;
}

/* Loads the vectors of a group, whose keys are `length` floats apart. */
INLINE void load_group(score_block s, int from, const float *p, int64_t length) {
    UNROLL
    for (int key = 0; key < score_keys; key++)
        load_vectors(s[key], p + key * length, from, tile_vectors);
}

/* q of a block of lanes. */
INLINE const float *block_queries(const tile_step *step, int block) {
    return step->tile->q + block * (step->dim / terms) * block_lanes;
}

static inline float *block_out(const tile_step *step, int block) {
    return step->tile->out + block * step->dim * block_lanes;
}

#endif
