/* The gradient of the sink logits: a sum over rows, which reads no key. */
#pragma once

#include "cpu/backward/tile.h"
#include "cpu/parallel.h"

/* Minus the sum of the sink's probability times delta, over all rows of query head h. */
static void find_dsink(const void *context, int64_t h, int32_t thread) {
    const fdma_problem *const problem = context;
    const uint32_t modes = flush_subnormals();
    const double sink = (double)*float_at(&problem->sink_logit, h, 0, 0);
    double sum = 0;
    (void)thread;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t i = 0; i < problem->q_len; i++) {
            const double lse = (double)*float_at(&problem->lse, b, h, i);
            double delta = delta_of_row(problem, b, i, h);
            if (lse == sink && !isfinite(delta) && is_empty_row(problem, b, h, i))
                delta = -dlse_of_row(problem, b, i, h); // <dout, out> is 0 for every dout
            if (sink != -INFINITY && lse != -INFINITY)
                sum -= exp(sink - lse) * delta;
        }
    float *const to = float_at(&problem->dsink_logit, h, 0, 0);
    *to = (float)(problem->add_dsinks ? (double)*to + sum : sum);
    restore_modes(modes);
}
