/* check_compare.c - the rule: at most twice the error of the plain evaluation against the oracle,
 * and one rounding step of the output; infinities and NaN exactly where the oracle has them. */
#include "check/check.h"
#include "common/arrays.h"

#include <math.h>

static int is_same_special(double actual, double want) {
    return isnan(want) ? isnan(actual) : actual == want;
}

static double larger(double x, double y) { return y > x ? y : x; } /* fmax() is a call */

check_verdict check_compare(const char *tensor, const check_result *result, fdma_tensor actual) {
    const double *got = check_widen(actual);
    double largest = 0, error = 0, plain_error = 0;
    int misplaced = element_count(&actual) != result->count;
    for (int64_t i = 0; i < result->count && !misplaced; i++) {
        const double want = result->oracle[i];
        if (!isfinite(want) || !isfinite(got[i])) {
            misplaced |= !is_same_special(got[i], want);
            continue;
        }
        largest = larger(largest, fabs(want));
        error = larger(error, fabs(got[i] - want));
        if (!isfinite(result->plain[i])) {
            plain_error = INFINITY; /* which no result may hide behind */
        }
        plain_error = larger(plain_error, fabs(result->plain[i] - want));
        plain_error = larger(plain_error, result->scatter != NULL ? result->scatter[i] : 0);
    }
    const double tolerance = 2 * plain_error + check_step(actual.dtype, largest);
    const int judged = !misplaced && tolerance < INFINITY;
    return (check_verdict){
        .excess = judged ? error / tolerance : INFINITY,
        .compared = result->count,
        .tensor = tensor,
    };
}

check_verdict check_compare_exact(const char *tensor, fdma_tensor actual, fdma_tensor want) {
    const double *a = check_widen(actual), *b = check_widen(want);
    const int64_t count = element_count(&actual);
    int differ = count != element_count(&want);
    for (int64_t i = 0; i < count && !differ; i++) {
        differ = !(a[i] == b[i]);
    }
    return (check_verdict){
        .excess = differ ? (double)INFINITY : 0, .compared = count, .tensor = tensor};
}
