/* The online softmax of a tile, in base 2, with the running maximum raised only past a margin. */
#ifndef FDMA_CPU_KERNELS_SOFTMAX_H
#define FDMA_CPU_KERNELS_SOFTMAX_H

#include "cpu/kernels/keys.h"

/* Logits may exceed the running maximum by this much (log2 units) before it is raised: weights stay
 * below 2^8, and out is almost never rescaled. */
static const float margin = 8;

/* 2^x; relative error 1e-7. Minimax polynomial of degree 5 on [0, 1). */
static inline vf exp2_of(vf x) {
    const vf f = vf_fraction(x);
    vf p = vf_fma(f, vf_set(0x1.ec3014p-10f), vf_set(0x1.26902p-7f));
    p = vf_fma(p, f, vf_set(0x1.c95458p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebd5ap-3f));
    p = vf_fma(p, f, vf_set(0x1.62e4f6p-1f));
    p = vf_fma(p, f, vf_set(0x1.fffffep-1f));
    return vf_scale2(p, x);
}

/* tanh(x): an odd polynomial below 0.625 (Cephes' coefficients), by exponentials above. */
static inline vf tanh_of(vf x) {
    const vf size = vf_abs(x), square = vf_mul(x, x);
    vf p = vf_fma(square, vf_set(-5.70498872745e-3f), vf_set(2.06390887954e-2f));
    p = vf_fma(p, square, vf_set(-5.37397155531e-2f));
    p = vf_fma(p, square, vf_set(1.33314422036e-1f));
    p = vf_fma(p, square, vf_set(-3.33332819422e-1f));
    const vf low = vf_fma(vf_mul(p, square), x, x);
    const vf power = exp2_of(vf_mul(size, vf_set(-2 * 1.4426950408889634f)));
    const vf high = vf_div(vf_sub(vf_set(1), power), vf_add(vf_set(1), power));
    return vf_pick_greater(size, vf_set(0.625f), vf_copy_sign(high, x), low);
}

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
        factor[m] = exp2_of(vf_sub(old, raised));
        vf_store(tile->max + lane, raised);
        vf_store(tile->sum + lane, vf_mul(vf_load(tile->sum + lane), factor[m]));
    }
    scale_lanes(tile->out + block * dim * block_lanes, dim, factor);
    scale_lanes(tile->weights + block * key_block * block_lanes, weighed, factor);
}

#endif
