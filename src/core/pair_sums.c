#include "core/pair_sums.h"

#include "core/element.h"

fdma_problem fdma_take_pair_sums(const fdma_problem *problem, fdma_arena *arena) {
    fdma_problem summed = *problem;
    if (!has_short_pairs(problem))
        return summed;
    const size_t count = (size_t)count_elements(&problem->dattn_bias);
    float *const sums = fdma_arena_take(arena, count * sizeof *sums);
    summed.dattn_bias = dense_pairs(&problem->dattn_bias, sums, FDMA_FLOAT32);
    fdma_set_aside(&summed.exec, arena);
    return summed;
}

void fdma_round_pair_sums(const fdma_problem *summed, const fdma_problem *problem) {
    const fdma_tensor *const to = &problem->dattn_bias;
    if (!has_short_pairs(problem))
        return;
    const float *from = summed->dattn_bias.data;
    for (int64_t x0 = 0; x0 < to->shape[0] && !is_empty(to); x0++)
        for (int64_t x1 = 0; x1 < to->shape[1]; x1++)
            for (int64_t x2 = 0; x2 < to->shape[2]; x2++, from += to->shape[3])
                fdma_store_row(to, offset_of(to, x0, x1, x2), from, to->shape[3]);
}
