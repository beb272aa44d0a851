/* See check/tolerance.h. */
#include "check/tolerance.h"

#include "common/arrays.h"

#include <math.h>

static bool is_same_special(double actual, double expected) {
    return isnan(expected) ? isnan(actual) : actual == expected;
}

static double larger(double x, double y) { return y > x ? y : x; } // compilers call fmax()

check_error check_compare(const char *tensor, const check_result *result, fdma_tensor actual) {
    const double *found = check_widen(actual);
    double largest = 0, error = 0, plain_error = 0;
    bool comparable = element_count(&actual) == result->count;
    for (int64_t i = 0; i < result->count && comparable; i++) {
        const double expected = result->reference[i];
        if (!isfinite(expected) || !isfinite(found[i])) {
            comparable = is_same_special(found[i], expected);
            continue;
        }
        largest = larger(largest, fabs(expected));
        error = larger(error, fabs(found[i] - expected));
        if (!isfinite(result->plain[i]))
            plain_error = INFINITY; // the tolerance would then hide any error
        plain_error = larger(plain_error, fabs(result->plain[i] - expected));
        plain_error = larger(plain_error, result->scatter != NULL ? result->scatter[i] : 0);
    }
    const double tolerance = 2 * plain_error + rounding_step(actual.dtype, largest);
    const bool judged = comparable && tolerance < INFINITY;
    return (check_error){
        .ratio = judged ? error / tolerance : INFINITY,
        .compared = result->count,
        .tensor = tensor,
    };
}

check_error check_compare_exact(const char *tensor, fdma_tensor actual, fdma_tensor expected) {
    const double *a = check_widen(actual), *b = check_widen(expected);
    const int64_t count = element_count(&actual);
    bool equal = count == element_count(&expected);
    for (int64_t i = 0; i < count && equal; i++)
        equal = a[i] == b[i] || (isnan(a[i]) && isnan(b[i]));
    return (check_error){
        .ratio = equal ? 0 : (double)INFINITY, .compared = count, .tensor = tensor};
}

check_error check_worse(check_error x, check_error y) {
    check_error worse = x.ratio >= y.ratio ? x : y;
    worse.compared = x.compared + y.compared;
    return worse;
}
