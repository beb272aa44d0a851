/* Sink logits: one more term in the sum of a row, without a value. */
#pragma once

#include "cpu/common/memory.h"

#include <math.h>

/* The sink logit of row `row` of kv head g; -inf if the call has none. */
static float sink_of_row(const fdma_problem *problem, int64_t g, int64_t row) {
    const int64_t h = g * problem->group + row % problem->group;
    return is_present(&problem->sink_logit) ? *float_at(&problem->sink_logit, h, 0, 0) : -INFINITY;
}

/* The factor of a row's out: 1 / (sum + exp(sink - max)), where `sum` is the sum of the weights
 * exp(logit - max). If the exponential overflows, the factor is 0. It is also 0 in a row without
 * weights. */
static float inverse_of_sum(float max, float sum, float sink) {
    if (isnan(sink) || sink == INFINITY)
        return NAN;
    return sum == 0 ? 0 : (float)(1 / ((double)sum + exp((double)sink - (double)max)));
}

/* The lse of such a row. Without weights it is the sink logit. */
static float lse_of_row(float max, float sum, float sink) {
    if (sum == 0 && sink == -INFINITY)
        return sink;
    const double top = (double)(sum == 0 || sink > max ? sink : max);
    const double weights = sum == 0 ? 0 : (double)sum * exp((double)max - top);
    return (float)(top + log(weights + exp((double)sink - top))); // NaN if sink is NaN or inf
}
