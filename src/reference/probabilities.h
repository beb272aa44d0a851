/* The probability of every query and key, from the lse of forward. */
#pragma once

#include "reference/forward.h"

static void write_probabilities(const fdma_problem *problem, int64_t b, int64_t h, int64_t i,
                                const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    const real lse = load(&problem->lse, offset_of(&problem->lse, b, h, i));
    const row_code code = row_code_of(problem, b, h, p);
    load_row(row->q, &problem->q, offset_of(&problem->q, b, i, h), problem->head_dim);
    for (int64_t j = 0; j < problem->kv_len; j++) {
        real probability = 0;
        if (lse != -infinity && attends_to(problem, b, h, i, j)) {
            load_key(row->key, problem, &problem->k, &problem->k_carried, b, j, g);
            probability = exp(logit_of(problem, row->q, row->key, b, h, i, j).value - lse);
            probability =
                after_dropout(problem, is_dropped(problem, code, b, g, j, p), probability);
        }
        store(&problem->probability, offset_of(&problem->probability, b, h, i) + j, probability);
    }
}

static fdma_status run_probabilities(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                write_probabilities(problem, b, h, i, &row);
    return FDMA_OK;
}
