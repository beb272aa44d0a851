/* Attention, row by row: the softmax over all kept keys at once. */
#include "reference/reference.h"

#include <math.h>

double fdma_reference_logit(const fdma_problem *problem, int64_t b, int64_t i, int64_t h, int64_t j,
                            double *slope) {
    const int64_t g = h / problem->group;
    double s = problem->scale * dot(&problem->q, offset_of(&problem->q, b, i, h), &problem->k,
                                    offset_of(&problem->k, b, j, g), problem->head_dim);
    const double t = problem->softcap > 0 ? tanh(s / problem->softcap) : 0;
    if (problem->softcap > 0)
        s = problem->softcap * t;
    if (slope != NULL)
        *slope = 1 - t * t;
    if (is_present(&problem->bias))
        s += fdma_load(&problem->bias, offset_of(&problem->bias, b, g, j));
    return s;
}

/* The weights of one row: weights[j] = exp(s[j] - row_max), 0 where the key is not kept. Returns
 * their sum: 0 for an empty row, NaN if a kept logit is NaN or +inf. */
static double weigh_keys(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                         double *weights, double *row_max) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    double sum = 0;
    *row_max = -(double)INFINITY;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const bool kept = is_kept(problem, b, g, j, p);
        weights[j] = kept ? fdma_reference_logit(problem, b, i, h, j, NULL) : -(double)INFINITY;
        *row_max = isnan(weights[j]) || weights[j] > *row_max ? weights[j] : *row_max;
        if (isnan(*row_max))
            return *row_max;
    }
    for (int64_t j = 0; j < problem->kv_len; j++) {
        // -inf - -inf is NaN
        weights[j] = weights[j] == -(double)INFINITY ? 0 : exp(weights[j] - *row_max);
        sum += weights[j];
    }
    return sum;
}

/* Of one row. */
typedef struct row_scratch {
    double *weights; /* [kv_len] */
    double *out;     /* [head_dim] */
} row_scratch;

static row_scratch take_row(const fdma_problem *problem, fdma_arena *arena) {
    return (row_scratch){
        .weights = fdma_arena_take(arena, (size_t)problem->kv_len * sizeof(double)),
        .out = fdma_arena_take(arena, (size_t)problem->head_dim * sizeof(double)),
    };
}

static void attend_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    double row_max;
    const double row_sum = weigh_keys(problem, b, i, h, row->weights, &row_max);
    for (int64_t d = 0; d < problem->head_dim; d++)
        row->out[d] = isnan(row_sum) ? row_sum : 0;
    for (int64_t j = 0; j < problem->kv_len && row_sum > 0; j++) {
        if (!is_kept(problem, b, g, j, p))
            continue;
        const double probability = row->weights[j] / row_sum;
        const int64_t v = offset_of(&problem->v, b, j, g);
        for (int64_t d = 0; d < problem->head_dim; d++)
            row->out[d] += probability * fdma_load(&problem->v, v + d);
    }
    for (int64_t d = 0; d < problem->head_dim; d++)
        fdma_store(&problem->out, offset_of(&problem->out, b, i, h) + d, row->out[d]);
    if (is_present(&problem->lse))
        fdma_store(&problem->lse, offset_of(&problem->lse, b, h, i), row_max + log(row_sum));
}

size_t fdma_reference_forward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_row(problem, &arena);
    return fdma_arena_size(&arena);
}

fdma_status fdma_reference_forward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                attend_row(problem, b, i, h, &row);
    return FDMA_OK;
}
