/* test_cuda_score_backward.c - the gradients of scores on a CUDA device against the reference in
 * float64: kv heads in one block and in several, a float32 dt_proj beside 16-bit values, with and
 * without dt_bias, rows that are not aligned, added gradients, keys without a gradient, infinities
 * and NaN. */
#include "device.h"

typedef struct score_case {
    fdma_dtype dtype;
    int64_t batch, kv_len, heads, head_dim;
    int is_wide;   /* dt_proj, a and dt_bias in float32 */
    int is_padded; /* rows with one more element than needed: 1 for v, 2 for dv, 3 for both */
    fdma_bias_form form;
} score_case;

/* Tensors of a case on the host. Outputs hold their contents before the call. If kv_len is even
 * there is a dt_bias. */
typedef struct score_problem {
    score_case shape;
    fdma_tensor dbias, v, dt_proj, a, dt_bias, key_valid, dv, ddt_proj, da, ddt_bias;
} score_problem;

static const score_case cases[] = {
    {FDMA_BFLOAT16, 1, 1, 1, 8, 0, 0, FDMA_BIAS_LINEAR},
    {FDMA_BFLOAT16, 2, 130, 1, 64, 1, 0, FDMA_BIAS_LINEAR},
    {FDMA_FLOAT16, 2, 700, 2, 64, 0, 0, FDMA_BIAS_EXP},
    {FDMA_FLOAT16, 1, 257, 3, 24, 1, 3, FDMA_BIAS_LINEAR},
    {FDMA_BFLOAT16, 1, 300, 8, 128, 0, 0, FDMA_BIAS_LINEAR},
    {FDMA_FLOAT16, 1, 129, 8, 64, 1, 0, FDMA_BIAS_LINEAR},
    {FDMA_BFLOAT16, 2, 128, 9, 8, 0, 1, FDMA_BIAS_LINEAR},
    {FDMA_BFLOAT16, 1, 200, 32, 16, 1, 0, FDMA_BIAS_EXP},
    {FDMA_FLOAT16, 1, 140, 32, 16, 0, 0, FDMA_BIAS_LINEAR},
    {FDMA_FLOAT16, 2, 100, 33, 8, 1, 0, FDMA_BIAS_LINEAR},
    {FDMA_BFLOAT16, 1, 90, 70, 8, 0, 2, FDMA_BIAS_LINEAR},
    /* more keys than a block takes at once */
    {FDMA_BFLOAT16, 1, 8400, 8, 256, 0, 0, FDMA_BIAS_LINEAR},
    {FDMA_FLOAT16, 1, 700, 33, 256, 1, 0, FDMA_BIAS_LINEAR},
};

static float *dbias_at(const score_problem *p, int64_t b, int64_t g, int64_t j) {
    return (float *)p->dbias.data + (b * p->shape.heads + g) * p->shape.kv_len + j;
}

static int has_gradient(const score_problem *p, int64_t b, int64_t j) {
    int any = 0;
    for (int64_t g = 0; g < p->shape.heads; g++)
        any |= *dbias_at(p, b, g, j) != 0;
    return any && ((const uint8_t *)p->key_valid.data)[b * p->shape.kv_len + j];
}

/* Random numbers [batch, kv_len, heads, head_dim]. */
static fdma_tensor values_of(const score_case *shape, int is_padded, uint64_t *state) {
    const int64_t row = shape->heads * shape->head_dim + (is_padded ? 1 : 0);
    fdma_tensor whole = new_tensor(shape->dtype, shape->batch, shape->kv_len, row, -1);
    fill_random(whole, state, 1);
    const int64_t sizes[] = {shape->batch, shape->kv_len, shape->heads, shape->head_dim};
    fdma_tensor v = fdma_dense_tensor(whole.data, shape->dtype, 4, sizes);
    v.stride[0] = shape->kv_len * row;
    v.stride[1] = row;
    return v;
}

static score_problem make_problem(const score_case *shape) {
    const int64_t heads = shape->heads, width = heads * shape->head_dim;
    const fdma_dtype weights = shape->is_wide ? FDMA_FLOAT32 : shape->dtype;
    uint64_t state = 11;
    score_problem p = {
        .shape = *shape,
        .dbias = new_tensor(FDMA_FLOAT32, shape->batch, heads, shape->kv_len, -1),
        .v = values_of(shape, shape->is_padded & 1, &state),
        .dt_proj = new_tensor(weights, heads, width, -1, -1),
        .a = new_tensor(weights, heads, -1, -1, -1),
        .key_valid = new_tensor(FDMA_UINT8, shape->batch, shape->kv_len, -1, -1),
        .dv = values_of(shape, shape->is_padded & 2, &state),
        .ddt_proj = new_tensor(weights, heads, width, -1, -1),
        .da = new_tensor(weights, heads, -1, -1, -1),
    };
    fill_random(p.dbias, &state, 1);
    fill_random(p.dt_proj, &state, 0.3F);
    fill_random(p.a, &state, 1);
    fill_random(p.ddt_proj, &state, 1);
    fill_random(p.da, &state, 1);
    if (shape->kv_len % 2 == 0) {
        p.dt_bias = new_tensor(weights, heads, -1, -1, -1);
        p.ddt_bias = new_tensor(weights, heads, -1, -1, -1);
        fill_random(p.dt_bias, &state, 2);
        fill_random(p.ddt_bias, &state, 1);
    }
    for (int64_t n = 0; n < shape->batch * shape->kv_len; n++) {
        const int64_t b = n / shape->kv_len, j = n % shape->kv_len;
        ((uint8_t *)p.key_valid.data)[n] = random_below(&state, 10) != 0 || shape->kv_len == 1;
        const int64_t kind = shape->kv_len == 1 ? 0 : random_below(&state, 4);
        for (int64_t g = 0; g < heads; g++) /* gradients in all heads, in some, in none */
            if (kind == 3 || (kind == 2 && random_below(&state, 2) == 0))
                *dbias_at(&p, b, g, j) = 0;
    }
    return p;
}

static fdma_score_backward_args args_of(const score_problem *p, int accumulate) {
    return (fdma_score_backward_args){
        .size = sizeof(fdma_score_backward_args),
        .dbias = p->dbias,
        .v = p->v,
        .dt_proj = p->dt_proj,
        .a = p->a,
        .dt_bias = p->dt_bias,
        .key_valid = p->key_valid,
        .dv = p->dv,
        .ddt_proj = p->ddt_proj,
        .da = p->da,
        .ddt_bias = p->ddt_bias,
        .bias_form = p->shape.form,
        .accumulate = accumulate,
    };
}

static fdma_tensor widen(fdma_tensor x) { return widened(gathered(x)); }

static fdma_score_backward_args run_reference(const score_problem *p, int accumulate) {
    fdma_score_backward_args args = args_of(p, accumulate);
    fdma_tensor *const tensors[] = {&args.dbias, &args.v,        &args.dt_proj,
                                    &args.a,     &args.dt_bias,  &args.dv,
                                    &args.da,    &args.ddt_proj, &args.ddt_bias};
    for (int i = 0; i < TEST_COUNT(tensors); i++)
        if (tensors[i]->rank > 0)
            *tensors[i] = widen(*tensors[i]);
    args.exec.kernel = "reference";
    CHECK_OK(run_score_backward(&args));
    return args;
}

static fdma_tensor copied(fdma_tensor x) {
    const void *const data = x.data;
    x.data = test_alloc(device_extent(x));
    memcpy(x.data, data, device_extent(x));
    return x;
}

static fdma_score_backward_args run_device(const score_problem *p, int accumulate) {
    fdma_score_backward_args args = args_of(p, accumulate);
    if (args.dv.rank > 0)
        args.dv = copied(args.dv);
    args.ddt_proj = copied(args.ddt_proj);
    args.da = copied(args.da);
    if (args.ddt_bias.rank > 0)
        args.ddt_bias = copied(args.ddt_bias);
    CHECK_OK(device_run(operation_score_backward, &args));
    return args;
}

static void check_same_weights(const fdma_score_backward_args *got,
                               const fdma_score_backward_args *want) {
    CHECK_BYTES(got->ddt_proj.data, want->ddt_proj.data, bytes_of(want->ddt_proj));
    CHECK_BYTES(got->da.data, want->da.data, bytes_of(want->da));
    CHECK(same_tensor(got->ddt_bias, want->ddt_bias));
}

static void check_same(const fdma_score_backward_args *got, const fdma_score_backward_args *want) {
    CHECK(same_tensor(gathered(got->dv), gathered(want->dv)));
    check_same_weights(got, want);
}

/* Tolerance: a step of the dtype, relative to the element; and relative to the largest element, the
 * precision of ddt in two parts of 8 bits and `roundings` intermediate roundings to the dtype. */
static void check_near(fdma_tensor actual, fdma_tensor want, int64_t roundings) {
    const fdma_tensor got = widen(actual);
    const double *const x = got.data, *const y = want.data;
    double largest = 0;
    for (int64_t i = 0; i < count_of(want); i++)
        largest = isfinite(y[i]) ? fmax(largest, fabs(y[i])) : largest;
    const double step = step_of(actual.dtype);
    const double rounded = (0x1p-14 + step * (double)roundings) * largest;
    for (int64_t i = 0; i < count_of(want); i++)
        if (isfinite(y[i]))
            CHECK_NEAR(x[i], y[i], step * fabs(y[i]) + rounded);
        else
            CHECK(isnan(y[i]) ? isnan(x[i]) : x[i] == y[i]);
}

static void check_case(const score_problem *p, int accumulate) {
    const fdma_score_backward_args want = run_reference(p, accumulate);
    const fdma_score_backward_args got = run_device(p, accumulate);
    check_near(got.dv, want.dv, (p->shape.heads - 1) / 32); /* one rounding for 32 heads */
    check_near(got.ddt_proj, want.ddt_proj, 0);
    check_near(got.da, want.da, 0);
    if (got.ddt_bias.rank > 0)
        check_near(got.ddt_bias, want.ddt_bias, 0);
    device_free_both();
}

static void for_each_case(void (*check)(score_problem *p)) {
    for (int n = 0; n < TEST_COUNT(cases); n++) {
        score_problem p = make_problem(&cases[n]);
        test_context("case %d", n);
        check(&p);
    }
}

static void check_overwritten(score_problem *p) { check_case(p, 0); }
static void check_accumulated(score_problem *p) { check_case(p, 1); }

static void gradients_are_the_references(void) { for_each_case(check_overwritten); }
static void gradients_accumulate(void) { for_each_case(check_accumulated); }

static void set_key(const score_problem *p, int64_t b, int64_t j, float value) {
    const int64_t row = b * p->v.stride[0] + j * p->v.stride[1];
    for (int64_t c = 0; c < p->shape.heads * p->shape.head_dim; c++)
        store_float(p->v.data, p->v.dtype, row + c, value);
}

static void check_unread(score_problem *p) {
    const fdma_score_backward_args want = run_device(p, 0);
    int spoilt = 0;
    for (int64_t b = 0; b < p->shape.batch; b++) {
        for (int64_t j = 0; j < p->shape.kv_len; j++) {
            if (!has_gradient(p, b, j)) {
                set_key(p, b, j, NAN);
                spoilt++;
            }
        }
    }
    CHECK(spoilt > 0 || p->shape.kv_len == 1);
    const fdma_score_backward_args got = run_device(p, 0);
    check_same(&got, &want);
    device_free_both();
}

static void unread_keys_do_not_show(void) { for_each_case(check_unread); }

/* An infinite value of a key that has a gradient in one head changes the sums of that head only,
 * even if the gradient before dt_proj is 0. An infinite gradient stays infinite, although the
 * kernel splits it into two numbers. */
static void infinities_stay_with_their_heads(void) {
    static const float values[] = {0.5F, INFINITY, -INFINITY};
    for (int n = 0; n < 4 * TEST_COUNT(values); n++) {
        const int is_wide = n % 2, of_values = n / 4;
        const fdma_dtype dtype = n / 2 % 2 ? FDMA_FLOAT16 : FDMA_BFLOAT16;
        const score_case shape = {dtype, 1, 40, 3, 16, is_wide, 0, FDMA_BIAS_LINEAR};
        score_problem p = make_problem(&shape);
        const int64_t key = 17;
        test_context("%s, wide %d, values %d", dtype_name(dtype), is_wide, of_values);
        ((uint8_t *)p.key_valid.data)[key] = 1;
        for (int64_t g = 0; g < shape.heads; g++)
            *dbias_at(&p, 0, g, key) = g != 1 ? 0 : of_values ? 0.5F : INFINITY;
        store_float(p.dt_proj.data, p.dt_proj.dtype, p.dt_proj.stride[0] + 5, 0.25F);
        store_float(p.v.data, p.v.dtype, key * p.v.stride[1] + 5, values[of_values]);
        check_case(&p, 0);
    }
}

static void check_without_dv(score_problem *p) {
    const fdma_score_backward_args want = run_device(p, 0);
    p->dv = (fdma_tensor){0};
    const fdma_score_backward_args got = run_device(p, 0);
    check_same_weights(&got, &want);
    device_free_both();
}

static void gradients_of_values_are_optional(void) { for_each_case(check_without_dv); }

static void runs_are_equal(void) {
    const score_problem p = make_problem(&cases[9]);
    const fdma_score_backward_args want = run_device(&p, 0);
    for (int n = 0; n < 20; n++) {
        const fdma_score_backward_args got = run_device(&p, 0);
        check_same(&got, &want);
    }
    device_free_both();
}

static const test_entry tests[] = {
    TEST(gradients_are_the_references),     TEST(gradients_accumulate),
    TEST(unread_keys_do_not_show),          TEST(infinities_stay_with_their_heads),
    TEST(gradients_of_values_are_optional), TEST(runs_are_equal),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
