/* Elementary functions of vectors. */
#pragma once

#include "core/problem.h"
#include "cpu/simd/simd.h"

static const float log2e = 1.4426950408889634f;

/* 2^x with a relative error below 2e-7, exact where x is an integer: a minimax polynomial of
 * degree 5 on [0, 1). */
static inline vf exp2_of(vf x) {
    const vf f = vf_fraction(x);
    vf p = vf_fma(f, vf_set(0x1.e97516p-10f), vf_set(0x1.27784ep-7f));
    p = vf_fma(p, f, vf_set(0x1.c91ce8p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebdb56p-3f));
    p = vf_fma(p, f, vf_set(0x1.62e4bap-1f));
    p = vf_fma(p, f, vf_set(1));
    return vf_scale2(p, x);
}

/* tanh(x): an odd polynomial where |x| < 0.625 (coefficients of Cephes), exponentials elsewhere.
 * The relative error is below 2.5e-7. */
static inline vf tanh_of(vf x) {
    const vf size = vf_abs(x), square = vf_mul(x, x);
    vf p = vf_fma(square, vf_set(-5.70498872745e-3f), vf_set(2.06390887954e-2f));
    p = vf_fma(p, square, vf_set(-5.37397155531e-2f));
    p = vf_fma(p, square, vf_set(1.33314422036e-1f));
    p = vf_fma(p, square, vf_set(-3.33332819422e-1f));
    const vf low = vf_fma(vf_mul(p, square), x, x);
    const vf power = exp2_of(vf_mul(size, vf_set(-2 * 1.4426950408889634f)));
    const vf high = vf_div(vf_sub(vf_set(1), power), vf_add(vf_set(1), power));
    return vf_pick_greater(size, vf_set(0.625f), vf_copy_sign(high, x), low);
}

/* e^x with a relative error below 2.5e-7 for x > -87, and 0 below. The error of rounding x *
 * log2(e) is corrected to first order. A minimax polynomial of degree 6 for 2^f on [0, 1). */
static inline vf exp_of(vf x) {
    const vf factor = vf_set(log2e), rest = vf_set(0x1.4ae0cp-26f); // rest: log2(e) - factor
    const vf y = vf_mul(x, factor);
    const vf lost = vf_fma(x, rest, vf_rounding_error(x, factor, y));
    // inf - inf is NaN
    const vf finite = vf_pick_greater(vf_set(1e30f), vf_abs(x), lost, vf_set(0));
    const vf f = vf_fraction(y);
    vf p = vf_fma(f, vf_set(0x1.c54186p-13f), vf_set(0x1.46d646p-10f));
    p = vf_fma(p, f, vf_set(0x1.3d0b92p-7f));
    p = vf_fma(p, f, vf_set(0x1.c68912p-5f));
    p = vf_fma(p, f, vf_set(0x1.ebfd58p-3f));
    p = vf_fma(p, f, vf_set(0x1.62e42cp-1f));
    p = vf_fma(p, f, vf_set(1));
    return vf_scale2(vf_fma(vf_mul(p, finite), vf_set(0x1.62e43p-1f), p), y);
}

/* log(1 + t) for t in [0, 1] with a relative error below 2.5e-7: t times a minimax
 * polynomial of degree 9. */
static inline vf log1p_of(vf t) {
    vf p = vf_fma(t, vf_set(-0x1.a9336cp-9f), vf_set(0x1.453f12p-6f));
    p = vf_fma(p, t, vf_set(-0x1.d29ccep-5f));
    p = vf_fma(p, t, vf_set(0x1.b25362p-4f));
    p = vf_fma(p, t, vf_set(-0x1.397562p-3f));
    p = vf_fma(p, t, vf_set(0x1.92f696p-3f));
    p = vf_fma(p, t, vf_set(-0x1.ff0f88p-3f));
    p = vf_fma(p, t, vf_set(0x1.554c8p-2f));
    p = vf_fma(p, t, vf_set(-0x1.ffffbep-2f));
    p = vf_fma(p, t, vf_set(1));
    return vf_mul(p, t);
}

/* log(1 + e^x) */
static inline vf softplus_of(vf x) {
    return vf_add(vf_max(vf_set(0), x), log1p_of(exp_of(vf_sub(vf_set(0), vf_abs(x)))));
}
