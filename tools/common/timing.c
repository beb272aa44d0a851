/* See common/timing.h. */
#define _POSIX_C_SOURCE 200809L

#include "common/timing.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

void add_sample(samples *set, double value) {
    if (set->count < SAMPLE_LIMIT)
        set->values[set->count++] = value;
}

static int ascending(const void *left, const void *right) {
    const double a = *(const double *)left;
    const double b = *(const double *)right;
    return (a > b) - (a < b);
}

double quantile(const samples *set, double fraction) {
    samples sorted = *set;
    if (sorted.count == 0)
        return (double)NAN;
    qsort(sorted.values, (size_t)sorted.count, sizeof sorted.values[0], ascending);
    const double position = fraction * (sorted.count - 1);
    const int below = (int)position;
    const int above = below + 1 < sorted.count ? below + 1 : below;
    return sorted.values[below] +
           (position - below) * (sorted.values[above] - sorted.values[below]);
}

double median(const samples *set) { return quantile(set, 0.5); }

double spread(const samples *set) {
    return (quantile(set, 0.9) - quantile(set, 0.1)) / median(set);
}
