/* The merge of two partial results, and its gradients. */
#pragma once

#include "reference/real.h"

typedef struct merge_factors {
    real lse;
    real of[2]; /* exp(lse of a partial result - lse); 0 for an empty one, whose out is not read */
} merge_factors;

static merge_factors factors_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    real each[2];
    for (int n = 0; n < 2; n++)
        each[n] = load(&problem->partial[n].lse, offset_of(&problem->partial[n].lse, b, h, i));
    if (isnan(each[0]) || isnan(each[1]))
        return (merge_factors){(real)NAN, {(real)NAN, (real)NAN}};
    const real largest = fmax(each[0], each[1]);
    if (largest == -infinity)
        return (merge_factors){.lse = largest};
    const real lse = largest + log(exp(each[0] - largest) + exp(each[1] - largest));
    return (merge_factors){
        lse,
        {rounded(problem->dtype, exp(each[0] - lse)), rounded(problem->dtype, exp(each[1] - lse))}};
}

static real merged_at(const fdma_problem *problem, const merge_factors *factors, int64_t b,
                      int64_t i, int64_t h, int64_t d) {
    real sum = 0;
    for (int n = 0; n < 2; n++) {
        const fdma_tensor *const out = &problem->partial[n].out;
        if (factors->of[n] != 0)
            sum += rounded(problem->dtype, factors->of[n] * load(out, offset_of(out, b, i, h) + d));
    }
    return rounded(problem->dtype, sum);
}

static fdma_status run_merge(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++) {
                const merge_factors factors = factors_of(problem, b, i, h);
                for (int64_t d = 0; d < problem->head_dim; d++)
                    store(&problem->out, offset_of(&problem->out, b, i, h) + d,
                          merged_at(problem, &factors, b, i, h, d));
                if (is_present(&problem->lse))
                    store(&problem->lse, offset_of(&problem->lse, b, h, i), factors.lse);
            }
    return FDMA_OK;
}

static void split_gradient(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const merge_factors factors = factors_of(problem, b, i, h);
    const fdma_tensor *const dout = &problem->dout, *const dlse = &problem->dlse;
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const partial = &problem->partial[n];
        const real factor = factors.of[n];
        real dfactor = is_present(dlse) ? load(dlse, offset_of(dlse, b, h, i)) : 0;
        for (int64_t d = 0; d < problem->head_dim; d++) {
            const real gradient = load(dout, offset_of(dout, b, i, h) + d);
            if (factor != 0)
                dfactor +=
                    gradient * rounded(problem->dtype,
                                       load(&partial->out, offset_of(&partial->out, b, i, h) + d) -
                                           merged_at(problem, &factors, b, i, h, d));
            store(&partial->dout, offset_of(&partial->dout, b, i, h) + d,
                  factor != 0 ? factor * gradient : 0);
        }
        store(&partial->dlse, offset_of(&partial->dlse, b, h, i),
              factor != 0 ? factor * dfactor : 0);
    }
}

static fdma_status run_merge_backward(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                split_gradient(problem, b, i, h);
    return FDMA_OK;
}
