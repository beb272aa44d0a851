/* The online softmax of a tile, with the running maximum raised only past a margin. */
#ifndef FDMA_CPU_KERNELS_SOFTMAX_H
#define FDMA_CPU_KERNELS_SOFTMAX_H

#include "cpu/kernels/keys.h"
#include "cpu/kernels/math.h"

static const float log2e = 1.4426950408889634f;

/* A lane's weights in a group of keys may add up to this before its maximum is raised, so that out
 * is almost never rescaled. */
static const float most_weight = 2048;

static void scale_lanes(float *entries, int64_t count, const vf *factor) {
    for (int64_t n = 0; n < count; n++)
        for (int m = 0; m < tile_vectors; m++) {
            float *const at = entries + n * block_lanes + m * vf_width;
            vf_store(at, vf_mul(vf_load(at), factor[m]));
        }
}

/* Raises the maximum of a block's lanes to `top` where that is greater, and rescales what has been
 * summed under the old one: out, sum, and the first `weighed` keys' weights. */
static __attribute__((noinline)) void raise_max(const tile_state *tile, int64_t dim, int block,
                                                const vf *top, int64_t weighed) {
    vf factor[tile_vectors];
    for (int m = 0; m < tile_vectors; m++) {
        const int64_t lane = block * block_lanes + m * vf_width;
        const vf old = vf_load(tile->max + lane);
        const vf raised = vf_max(top[m], old);
        factor[m] = exp2_of(vf_mul(vf_sub(old, raised), vf_set(log2e)));
        vf_store(tile->max + lane, raised);
        vf_store(tile->sum + lane, vf_mul(vf_load(tile->sum + lane), factor[m]));
    }
    scale_lanes(tile->out + block * dim * block_lanes, dim, factor);
    scale_lanes(tile->weights, weighed, factor);
}

#endif
