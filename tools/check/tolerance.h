/* The rule by which results are judged. */
#pragma once

#include "check/problem.h"

/* A kernel's difference from the reference. */
typedef struct check_error {
    double ratio;       /* error / tolerance: at most 1 passes; infinite if no tolerance would do */
    int64_t compared;   /* elements */
    const char *tensor; /* the name of the tensor with this ratio */
} check_error;

/*! check_compare() - by the rule: the error may be twice as large as in the plain evaluation, plus
 *  one rounding step of the output; infinities and NaN stand exactly where the reference has
 *  them. */
check_error check_compare(const char *tensor, const check_result *result, fdma_tensor actual);

/*! check_compare_exact() - tensors that must be equal, NaN where the other has NaN. */
check_error check_compare_exact(const char *tensor, fdma_tensor actual, fdma_tensor expected);

/*! check_worse() - the larger of two errors, with the elements of both. */
check_error check_worse(check_error x, check_error y);
