/* z = a * softplus(<v, dt_proj> + dt_bias) of each key and kv head, and its bias. */
#pragma once

#include "reference/real.h"

static real dt_of(const fdma_problem *problem, int64_t b, int64_t j, int64_t g) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const int64_t dim = problem->head_dim;
    real dt = 0;
    for (int64_t other = 0; other < problem->kv_heads; other++)
        for (int64_t d = 0; d < dim; d++)
            dt += load(v, offset_of(v, b, j, other) + d) *
                  load(dt_proj, g * dt_proj->stride[0] + other * dim + d);
    return is_present(&problem->dt_bias) ? dt + load(&problem->dt_bias, g) : dt;
}

/* The bias is computed from the score as rounded to the score's dtype. */
static fdma_status run_score(const fdma_problem *problem) {
    const fdma_tensor *const score = &problem->score, *const bias = &problem->bias;
    const fdma_dtype dtype = is_present(score) ? score->dtype : bias->dtype;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t j = 0; j < problem->kv_len; j++) {
                const real exact = is_valid_key(problem, b, j)
                                       ? load(&problem->a, g) * softplus(dt_of(problem, b, j, g))
                                       : -infinity;
                const real z = dtype == FDMA_FLOAT32 ? (real)(float)exact : exact;
                if (is_present(score))
                    store(score, offset_of(score, b, g, j), z);
                if (is_present(bias))
                    store(bias, offset_of(bias, b, g, j),
                          problem->bias_form == FDMA_BIAS_EXP ? exp(z) : z);
            }
    return FDMA_OK;
}
