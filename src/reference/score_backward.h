/* The gradients of scores and of their bias, one key after another. */
#pragma once

#include "reference/score.h"

/* Sums over all keys; dv is of one key. */
typedef struct score_gradients {
    real *ddt_proj; /* [kv_heads, kv_heads * head_dim] */
    real *da;       /* [kv_heads] */
    real *ddt_bias; /* [kv_heads] */
    real *dv;       /* [kv_heads * head_dim] */
} score_gradients;

static score_gradients take_score_sums(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t heads = problem->kv_heads, width = heads * problem->head_dim;
    return (score_gradients){take_reals(arena, heads * width), take_reals(arena, heads),
                             take_reals(arena, heads), take_reals(arena, width)};
}

static size_t score_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_score_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

static void add_score(const fdma_problem *problem, int64_t b, int64_t j, int64_t g, real dbias,
                      const score_gradients *sums) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const int64_t dim = problem->head_dim, width = problem->kv_heads * dim;
    const real dt = dt_of(problem, b, j, g), a = load(&problem->a, g);
    const real dz = problem->bias_form == FDMA_BIAS_EXP ? dbias * exp(a * softplus(dt)) : dbias;
    const real ddt = rounded(problem->dtype, dz * a / (1 + exp(-dt)));
    sums->da[g] += dz * softplus(dt);
    sums->ddt_bias[g] += ddt;
    for (int64_t c = 0; c < width; c++) {
        sums->ddt_proj[g * width + c] += ddt * load(v, offset_of(v, b, j, c / dim) + c % dim);
        sums->dv[c] += ddt * load(dt_proj, g * dt_proj->stride[0] + c);
    }
}

/* Adds the terms of one key, unless no gradient reaches it: its v is then not read. */
static void add_scores(const fdma_problem *problem, int64_t b, int64_t j,
                       const score_gradients *sums) {
    const fdma_tensor *const dv = &problem->dv;
    const int64_t dim = problem->head_dim, width = problem->kv_heads * dim;
    bool any = false;
    memset(sums->dv, 0, (size_t)width * sizeof *sums->dv);
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        const real dbias = load(&problem->dbias, offset_of(&problem->dbias, b, g, j));
        if (dbias == 0 || !is_valid_key(problem, b, j))
            continue;
        any = true;
        add_score(problem, b, j, g, dbias, sums);
    }
    for (int64_t c = 0; c < width && any && is_present(dv); c++)
        put(dv, offset_of(dv, b, j, c / dim) + c % dim, rounded(problem->dtype, sums->dv[c]), true);
}

static fdma_status run_score_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const score_gradients sums = take_score_sums(problem, &arena);
    const fdma_tensor *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, width = heads * problem->head_dim;
    memset(sums.ddt_proj, 0, (size_t)(heads * width) * sizeof *sums.ddt_proj);
    memset(sums.da, 0, (size_t)heads * sizeof *sums.da);
    memset(sums.ddt_bias, 0, (size_t)heads * sizeof *sums.ddt_bias);
    const int64_t batch = problem->kv_len > 0 ? problem->batch : 0; // without keys it may be huge
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < problem->kv_len; j++)
            add_scores(problem, b, j, &sums);
    for (int64_t g = 0; g < heads; g++) {
        put(&problem->da, g, sums.da[g], problem->accumulate);
        if (is_present(&problem->ddt_bias))
            put(&problem->ddt_bias, g, sums.ddt_bias[g], problem->accumulate);
        for (int64_t c = 0; c < width; c++)
            put(ddt_proj, g * ddt_proj->stride[0] + c, sums.ddt_proj[g * width + c],
                problem->accumulate);
    }
    return FDMA_OK;
}
