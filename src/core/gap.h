/* The rule `gap` of a selection, for hosts and devices: a key leaves once its score is more than
 * `gap` below the best score so far. */
#pragma once

#include "core/integers.h"

#include <math.h>

/* True if a score is more than `gap` below the best one. In double precision a float32 minus the
 * gap is rounded once, so that every kernel decides alike. NaN counts as -inf, and no finite gap
 * excludes -inf while the best score is -inf. */
INTEGER_FUNCTION int falls_below(double score, double best, double gap) {
    return (isnan(score) ? -INFINITY : score) < best - gap;
}
