/* test_score.c - dt_bias in the score and in its gradients, by every kernel, against float64
 * arithmetic in this file, which uses neither the reference nor any other kernel. */
#include "operation_cases.h"

/* The sum of a key's products for one head and its dt_bias, and the sum of their magnitudes. */
typedef struct exact_sum {
    double value, size;
} exact_sum;

static double element_of(fdma_tensor tensor, int64_t at) {
    return load_double(tensor.data, tensor.dtype, at);
}

static exact_sum sum_of(const fdma_tensor *v, fdma_tensor dt_proj, fdma_tensor dt_bias, int64_t key,
                        int64_t g) {
    const int64_t width = v->shape[2] * v->shape[3];
    exact_sum dt = {element_of(dt_bias, g), fabs(element_of(dt_bias, g))};
    for (int64_t c = 0; c < width; c++) {
        const double term = element_of(*v, key * width + c) * element_of(dt_proj, g * width + c);
        dt.value += term;
        dt.size += fabs(term);
    }
    return dt;
}

static double softplus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

static double rounding_of(exact_sum dt, int64_t width) {
    return (double)(width + 8) * (double)FLT_EPSILON * dt.size;
}

/* ---- score ---- */

static void check_score(const call *original) {
    call x;
    call_copy(&x, original);
    const fdma_score_args *const args = &x.args.score;
    const int64_t heads = args->v.shape[2], width = heads * args->v.shape[3];
    const int64_t kv_len = args->v.shape[1];
    CHECK_OK(call_run(&x));
    for (int64_t n = 0; n < heads * kv_len; n++) {
        const int64_t g = n / kv_len, j = n % kv_len;
        const exact_sum dt = sum_of(&args->v, args->dt_proj, args->dt_bias, j, g);
        const double a = element_of(args->a, g), plus = softplus(dt.value);
        const double rounding = rounding_of(dt, width) + 8 * (double)FLT_EPSILON * (1 + plus);
        if (args->key_valid.rank == 0 || ((const uint8_t *)args->key_valid.data)[j])
            CHECK_NEAR(element_of(args->score, n), a * plus, fabs(a) * rounding);
    }
}

static void dt_bias_is_added(void) { check_cases(operation_score, 1, check_score); }

static void check_zeros(const call *original) {
    call zeros, none;
    call_copy(&zeros, original);
    call_copy(&none, original);
    const fdma_tensor held = *call_tensor_named(&zeros, "dt_bias");
    fdma_tensor *const ddt_bias = call_tensor_named(&zeros, "ddt_bias");
    *call_tensor_named(&zeros, "dt_bias") =
        new_tensor(held.dtype, held.shape[0], -1, -1, -1); // zeros
    *call_tensor_named(&none, "dt_bias") = (fdma_tensor){0};
    if (ddt_bias != NULL)
        *ddt_bias = *call_tensor_named(&none, "ddt_bias") = (fdma_tensor){0};
    call_own_outputs(&none);
    CHECK_OK(call_run(&zeros));
    CHECK_OK(call_run(&none));
    check_same_outputs(&zeros, &none);
}

static void none_is_zero(void) {
    check_cases(operation_score, 3, check_zeros);
    check_cases(operation_score_backward, 1, check_zeros);
}

/* Softplus of -inf is 0, of inf inf. Every key of a head has its dt_bias. */
static void check_special(const call *original) {
    static const float special[] = {-INFINITY, INFINITY, NAN};
    call x;
    call_copy(&x, original);
    const fdma_score_args *const args = &x.args.score;
    const int64_t heads = args->v.shape[2], kv_len = args->v.shape[1];
    for (int64_t g = 0; g < heads; g++)
        store_float(args->dt_bias.data, args->dt_bias.dtype, g, special[g % TEST_COUNT(special)]);
    CHECK_OK(call_run(&x));
    for (int64_t n = 0; n < heads * kv_len; n++) {
        const int64_t g = n / kv_len, j = n % kv_len;
        const double z = element_of(args->score, n), a = element_of(args->a, g);
        if (args->key_valid.rank > 0 && !((const uint8_t *)args->key_valid.data)[j])
            CHECK(z == -(double)INFINITY);
        else if (g % TEST_COUNT(special) == 0)
            CHECK(z == 0);
        else
            CHECK(g % TEST_COUNT(special) == 1 ? z == a * (double)INFINITY : isnan(z));
    }
}

static void special_dt_bias(void) { check_cases(operation_score, 4, check_special); }

/* ---- its gradients ---- */

enum { unread = 5 }; /* these keys have no gradient, and their v is NaN */

static void spoil_keys(const fdma_score_backward_args *args) {
    const int64_t heads = args->v.shape[2], width = heads * args->v.shape[3];
    const int64_t kv_len = args->v.shape[1];
    for (int64_t key = unread - 1; key < args->v.shape[0] * kv_len; key += unread) {
        for (int64_t g = 0; g < heads; g++)
            ((float *)args->dbias.data)[(key / kv_len * heads + g) * kv_len + key % kv_len] = 0;
        for (int64_t c = 0; c < width; c++)
            store_float(args->v.data, args->v.dtype, key * width + c, NAN);
    }
}

static void check_head(const fdma_score_backward_args *args, int64_t g) {
    const int64_t kv_len = args->v.shape[1], heads = args->v.shape[2];
    const int64_t keys = args->v.shape[0] * kv_len, width = heads * args->v.shape[3];
    const double a = element_of(args->a, g);
    double want = 0, tolerance = 0;
    for (int64_t key = 0; key < keys; key++) {
        const int64_t at = (key / kv_len * heads + g) * kv_len + key % kv_len;
        const double dbias = element_of(args->dbias, at);
        if (dbias == 0)
            continue;
        const exact_sum dt = sum_of(&args->v, args->dt_proj, args->dt_bias, key, g);
        const double grown = args->bias_form == FDMA_BIAS_EXP ? exp(a * softplus(dt.value)) : 1;
        const double ddt = dbias * grown * a / (1 + exp(-dt.value));
        const double rounding = (fabs(a) + 1) * rounding_of(dt, width);
        want += ddt;
        tolerance += fabs(ddt) * (rounding + (double)(keys + 16) * (double)FLT_EPSILON);
    }
    tolerance += step_of(args->ddt_bias.dtype) * fabs(want) + gradient_floor(args->ddt_bias.dtype);
    CHECK_NEAR(element_of(args->ddt_bias, g), want, tolerance);
}

/* The other gradients are the same with and without the gradient of dt_bias. */
static void check_gradient(const call *original) {
    call x, without;
    call_copy(&x, original);
    const fdma_score_backward_args *const args = &x.args.score_backward;
    spoil_keys(args);
    call_own_outputs(&x);
    call_copy(&without, &x);
    call_own_outputs(&without);
    without.args.score_backward.ddt_bias = (fdma_tensor){0};
    CHECK_OK(call_run(&x));
    CHECK_OK(call_run(&without));
    for (int64_t g = 0; g < args->v.shape[2]; g++)
        check_head(args, g);
    x.args.score_backward.ddt_bias = (fdma_tensor){0};
    check_same_outputs(&without, &x);
}

static void its_gradient_is_the_sum_over_keys(void) {
    check_cases(operation_score_backward, 1, check_gradient);
}

static const test_entry tests[] = {
    TEST(dt_bias_is_added),
    TEST(none_is_zero),
    TEST(special_dt_bias),
    TEST(its_gradient_is_the_sum_over_keys),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
