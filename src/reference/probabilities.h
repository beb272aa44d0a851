/* The probability of every query and key, from the lse that forward has written. */
#pragma once

#include "reference/logit.h"

static void write_probabilities(const fdma_problem *problem, int64_t b, int64_t h, int64_t i) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    const real lse = load(&problem->lse, offset_of(&problem->lse, b, h, i));
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const bool kept = lse != -infinity && is_kept(problem, b, g, j, p);
        const real probability = kept ? exp(logit_of(problem, b, i, h, j).value - lse) : 0;
        store(&problem->probability, offset_of(&problem->probability, b, h, i) + j, probability);
    }
}

static fdma_status run_probabilities(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                write_probabilities(problem, b, h, i);
    return FDMA_OK;
}
