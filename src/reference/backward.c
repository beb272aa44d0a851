/* Gradients of attention, row by row. */
#include "reference/reference.h"

#include <math.h>
#include <string.h>

/* Sums of one (b, g), dk and dv [kv_len, head_dim]; and the dq of one row. */
typedef struct key_sums {
    double *dk, *dv, *dbias, *dq;
} key_sums;

static key_sums take_sums(const fdma_problem *problem, fdma_arena *arena) {
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    return (key_sums){
        .dk = fdma_arena_take(arena, keys * dim * sizeof(double)),
        .dv = fdma_arena_take(arena, keys * dim * sizeof(double)),
        .dbias = fdma_arena_take(arena, keys * sizeof(double)),
        .dq = fdma_arena_take(arena, dim * sizeof(double)),
    };
}

size_t fdma_reference_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

/* Adds one row to the sums of the keys that it keeps, and stores its dq. */
static void add_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                    const key_sums *sums) {
    const int64_t g = h / problem->group, dim = problem->head_dim;
    const int64_t q = offset_of(&problem->q, b, i, h), dout = offset_of(&problem->dout, b, i, h);
    const double lse = fdma_load(&problem->lse, offset_of(&problem->lse, b, h, i));
    const double dlse = is_present(&problem->dlse)
                            ? fdma_load(&problem->dlse, offset_of(&problem->dlse, b, h, i))
                            : 0;
    const double delta =
        dot(&problem->dout, dout, &problem->out, offset_of(&problem->out, b, i, h), dim) - dlse;
    memset(sums->dq, 0, (size_t)dim * sizeof *sums->dq);
    for (int64_t j = 0; j < problem->kv_len && lse != -(double)INFINITY; j++) {
        if (!is_kept(problem, b, g, j, query_position(problem, i)))
            continue;
        const int64_t k = offset_of(&problem->k, b, j, g), v = offset_of(&problem->v, b, j, g);
        double slope;
        const double p = exp(fdma_reference_logit(problem, b, i, h, j, &slope) - lse);
        const double ds = p * (dot(&problem->dout, dout, &problem->v, v, dim) - delta);
        const double scaled = ds * slope * problem->scale;
        sums->dbias[j] += ds;
        for (int64_t d = 0; d < dim; d++) {
            sums->dv[j * dim + d] += p * fdma_load(&problem->dout, dout + d);
            sums->dk[j * dim + d] += scaled * fdma_load(&problem->q, q + d);
            sums->dq[d] += scaled * fdma_load(&problem->k, k + d);
        }
    }
    for (int64_t d = 0; d < dim; d++)
        store_gradient(&problem->dq, offset_of(&problem->dq, b, i, h) + d, sums->dq[d],
                       problem->accumulate);
}

static void store_keys(const fdma_problem *problem, int64_t b, int64_t g, const key_sums *sums) {
    const int64_t dim = problem->head_dim;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const int64_t dk = offset_of(&problem->dk, b, j, g), dv = offset_of(&problem->dv, b, j, g);
        for (int64_t d = 0; d < dim; d++) {
            store_gradient(&problem->dk, dk + d, sums->dk[j * dim + d], problem->accumulate);
            store_gradient(&problem->dv, dv + d, sums->dv[j * dim + d], problem->accumulate);
        }
        if (is_present(&problem->dbias))
            fdma_store(&problem->dbias, offset_of(&problem->dbias, b, g, j), sums->dbias[j]);
    }
}

fdma_status fdma_reference_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const key_sums sums = take_sums(problem, &arena);
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    const int64_t group = problem->q_len > 0 ? problem->group : 0; // without queries it may be vast
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            memset(sums.dk, 0, keys * dim * sizeof *sums.dk);
            memset(sums.dv, 0, keys * dim * sizeof *sums.dv);
            memset(sums.dbias, 0, keys * sizeof *sums.dbias);
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                for (int64_t i = 0; i < problem->q_len; i++)
                    add_row(problem, b, i, h, &sums);
            store_keys(problem, b, g, &sums);
        }
    return FDMA_OK;
}
