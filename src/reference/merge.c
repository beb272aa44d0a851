/* Merging and its gradients, row by row. */
#include "reference/reference.h"

#include <math.h>

/* The weights of the two partial results in their sum. */
typedef struct merge_weights {
    double lse;
    double of[2]; /* 0 for an empty one */
} merge_weights;

static merge_weights weights_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    double each[2];
    for (int n = 0; n < 2; n++)
        each[n] = fdma_load(&problem->partial[n].lse, offset_of(&problem->partial[n].lse, b, h, i));
    if (isnan(each[0]) || isnan(each[1]))
        return (merge_weights){(double)NAN, {(double)NAN, (double)NAN}};
    const double most = fmax(each[0], each[1]);
    if (most == -(double)INFINITY)
        return (merge_weights){.lse = most};
    const double lse = most + log(exp(each[0] - most) + exp(each[1] - most));
    return (merge_weights){lse, {exp(each[0] - lse), exp(each[1] - lse)}};
}

static double merged_at(const fdma_problem *problem, const merge_weights *weights, int64_t b,
                        int64_t i, int64_t h, int64_t d) {
    double sum = 0;
    for (int n = 0; n < 2; n++) {
        const fdma_tensor *const out = &problem->partial[n].out;
        if (weights->of[n] != 0)
            sum += weights->of[n] * fdma_load(out, offset_of(out, b, i, h) + d);
    }
    return sum;
}

fdma_status fdma_reference_merge(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++) {
                const merge_weights weights = weights_of(problem, b, i, h);
                for (int64_t d = 0; d < problem->head_dim; d++)
                    fdma_store(&problem->out, offset_of(&problem->out, b, i, h) + d,
                               merged_at(problem, &weights, b, i, h, d));
                if (is_present(&problem->lse))
                    fdma_store(&problem->lse, offset_of(&problem->lse, b, h, i), weights.lse);
            }
    return FDMA_OK;
}

static void split_gradient(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const merge_weights weights = weights_of(problem, b, i, h);
    const fdma_tensor *const dout = &problem->dout, *const dlse = &problem->dlse;
    const int64_t row = offset_of(dout, b, i, h);
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const partial = &problem->partial[n];
        double sum = is_present(dlse) ? fdma_load(dlse, offset_of(dlse, b, h, i)) : 0;
        for (int64_t d = 0; d < problem->head_dim; d++) {
            const double gradient = fdma_load(dout, row + d), weight = weights.of[n];
            if (weight != 0)
                sum += gradient * (fdma_load(&partial->out, offset_of(&partial->out, b, i, h) + d) -
                                   merged_at(problem, &weights, b, i, h, d));
            fdma_store(&partial->dout, offset_of(&partial->dout, b, i, h) + d,
                       weight != 0 ? weight * gradient : 0);
        }
        fdma_store(&partial->dlse, offset_of(&partial->dlse, b, h, i),
                   weights.of[n] != 0 ? weights.of[n] * sum : 0);
    }
}

fdma_status fdma_reference_merge_backward(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                split_gradient(problem, b, i, h);
    return FDMA_OK;
}
