/* differences.h - derivatives by central differences, with the error that they have. */
#pragma once

#include "fixture.h"

#include <float.h>

/* A function of the tensors in the caller's context: its value, a sum, and the sum of the
 * magnitudes of its terms. */
typedef struct loss {
    double value, size;
} loss;

typedef loss (*loss_function)(const void *context);

static inline loss loss_sum(loss x, loss y) { return (loss){x.value + y.value, x.size + y.size}; }

/* <x, y> of contiguous float64 tensors. Elements at which y is not finite count as 0, such as the
 * lse of an empty row. */
static inline loss weighted_sum(fdma_tensor x, fdma_tensor y) {
    loss sum = {0, 0};
    for (int64_t i = 0; i < count_of(x); i++) {
        const double term = ((const double *)x.data)[i] * ((const double *)y.data)[i];
        if (isfinite(term))
            sum = loss_sum(sum, (loss){term, fabs(term)});
    }
    return sum;
}

static inline double slope_at(loss_function f, const void *context, double *x, double step) {
    const double before = *x;
    *x = before + step;
    const double up = f(context).value;
    *x = before - step;
    const double down = f(context).value;
    *x = before;
    return (up - down) / (2 * step);
}

/* Checks that `gradient` holds the derivative of f in each element of a float64 tensor. Two steps
 * tell how far the better of them is off: its error is a quarter of the other's, a third of what
 * lies between them, and what rounding of f makes of it. */
static inline void check_differences(loss_function f, const void *context, fdma_tensor tensor,
                                     fdma_tensor gradient) {
    const double step = 0x1p-12, size = f(context).size;
    double largest = 0;
    for (int64_t i = 0; i < count_of(tensor); i++) {
        double *const x = (double *)tensor.data + i;
        const double coarse = slope_at(f, context, x, step);
        const double fine = slope_at(f, context, x, step / 2);
        const double rounding = 64 * DBL_EPSILON * (1 + size) / step;
        const double got = ((const double *)gradient.data)[i];
        CHECK_NEAR(got, fine, fabs(coarse - fine) + rounding);
        largest = fmax(largest, fabs(got));
    }
    CHECK(largest > 0 || count_of(tensor) == 0); /* else nothing is shown */
}
