/* test_reference.c - compares the kernels "reference" in float64 and "reference/float32" in float32
 * with golden vectors, and the selections of every kernel with the same vectors.
 * tests/golden/make_golden.py computes these from the definitions, without the library. */
#include "calls.h"

#include <float.h>

typedef struct golden_case {
    const char *name;
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window;  /* -1: dense */
    int causal;      /* as in fdma_forward_args */
    int one_ranking; /* FDMA_SCOPE_GLOBAL */
    fdma_bias_form bias_form;
    double softcap, scale;
    const double *q, *k, *v, *dt_proj;
    const double *a, *score, *bias, *z; /* bias belongs to `score`; z is fdma_score()'s */
    const double *out, *lse;
    const int32_t *valid; /* [batch, kv_len] */
    const int32_t *expiry, *slot;
} golden_case;

#include "../golden/golden.inc"

typedef struct precision {
    const char *kernel;
    fdma_dtype dtype;
    double
        rounding; /* error of two evaluations for each term of a sum, relative to the magnitude */
} precision;

static const precision precisions[] = {
    {"reference", FDMA_FLOAT64, DBL_EPSILON},
    {"reference/float32", FDMA_FLOAT32, (double)FLT_EPSILON / 64},
};

/* The difference between two evaluations: a few roundings for each term of the sums, at the
 * magnitudes of the inputs (|q|, |k|, |v|, |logit| < 64). */
static double rounding_of(const precision *real, int64_t terms) {
    return 64 * (double)(terms + 8) * real->rounding;
}

static fdma_tensor tensor_of(fdma_dtype dtype, const double *values, int32_t rank,
                             const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    tensor.data = test_alloc(bytes_of(tensor));
    for (int64_t i = 0; i < count_of(tensor); i++) {
        store_float(tensor.data, dtype, i, (float)values[i]);
        CHECK(load_double(tensor.data, dtype, i) == values[i] || isnan(values[i]));
    }
    return tensor;
}

static fdma_tensor valid_of(const golden_case *golden) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, golden->batch, golden->kv_len, -1, -1);
    for (int64_t i = 0; i < count_of(valid); i++)
        ((uint8_t *)valid.data)[i] = (uint8_t)golden->valid[i];
    return valid;
}

static fdma_selection select_golden(const golden_case *golden, const char *kernel) {
    const int64_t shape[3] = {golden->batch, golden->kv_heads, golden->kv_len};
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = new_output(FDMA_INT32, shape[0], shape[1], shape[2], -1),
        .slot = new_output(FDMA_INT32, shape[0], shape[1], shape[2], -1),
    };
    fdma_select_args args = {
        .size = sizeof args,
        .score = tensor_of(FDMA_FLOAT32, golden->score, 3, shape),
        .key_valid = valid_of(golden),
        .selection = &selection,
        .window = golden->window,
        .scope = golden->one_ranking ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL,
        .exec = {.kernel = kernel},
    };
    CHECK_OK(run_select(&args));
    return selection;
}

static void check_values(fdma_tensor actual, const double *want, double tolerance) {
    for (int64_t i = 0; i < count_of(actual); i++) {
        const double got = load_double(actual.data, actual.dtype, i);
        if (isnan(want[i]))
            CHECK(isnan(got));
        else
            CHECK_NEAR(got, want[i], tolerance);
    }
}

/* bias = exp(z) or z. The tolerance is relative to it: exp(z) may be large. */
static void check_bias(const golden_case *golden, fdma_tensor bias, double tolerance) {
    for (int64_t i = 0; i < count_of(bias); i++) {
        const double z = golden->z[i];
        const double want = golden->bias_form == FDMA_BIAS_EXP ? exp(z) : z;
        CHECK_NEAR(load_double(bias.data, bias.dtype, i), want, tolerance * fmax(1, fabs(want)));
    }
}

static void score_is_golden(void) {
    for (int i = 0; i < TEST_COUNT(golden_cases) * TEST_COUNT(precisions); i++) {
        const golden_case *golden = &golden_cases[i / TEST_COUNT(precisions)];
        const precision *real = &precisions[i % TEST_COUNT(precisions)];
        const int64_t kv_shape[4] = {golden->batch, golden->kv_len, golden->kv_heads,
                                     golden->head_dim};
        const int64_t row = golden->kv_heads * golden->head_dim;
        const int64_t proj_shape[2] = {golden->kv_heads, row};
        const int64_t *n = kv_shape;
        const int biased = golden->bias_form != FDMA_BIAS_NONE;
        test_context("%s %s", real->kernel, golden->name);
        fdma_score_args args = {
            .size = sizeof args,
            .v = tensor_of(real->dtype, golden->v, 4, kv_shape),
            .dt_proj = tensor_of(real->dtype, golden->dt_proj, 2, proj_shape),
            .a = tensor_of(real->dtype, golden->a, 1, proj_shape),
            .key_valid = valid_of(golden),
            .score = new_output(real->dtype, n[0], n[2], n[1], -1),
            .bias = biased ? new_output(real->dtype, n[0], n[2], n[1], -1) : (fdma_tensor){0},
            .bias_form = golden->bias_form,
            .exec = {.kernel = real->kernel},
        };
        CHECK_OK(run_score(&args));
        check_values(args.score, golden->z, rounding_of(real, row));
        check_bias(golden, args.bias, rounding_of(real, row));
    }
}

static void selections_are_golden(void) {
    const kernel_list kernels = kernels_of("select");
    for (int i = 0; i < TEST_COUNT(golden_cases); i++) {
        const golden_case *golden = &golden_cases[i];
        for (int kernel = 0; kernel < kernels.count && golden->window >= 0; kernel++) {
            test_context("%s %s", kernels.name[kernel], golden->name);
            const fdma_selection got = select_golden(golden, kernels.name[kernel]);
            CHECK_BYTES(got.expiry.data, golden->expiry, bytes_of(got.expiry));
            CHECK_BYTES(got.slot.data, golden->slot, bytes_of(got.slot));
        }
    }
}

static void forward_is_golden(void) {
    for (int i = 0; i < TEST_COUNT(golden_cases) * TEST_COUNT(precisions); i++) {
        const golden_case *golden = &golden_cases[i / TEST_COUNT(precisions)];
        const precision *real = &precisions[i % TEST_COUNT(precisions)];
        const int64_t q_shape[4] = {golden->batch, golden->q_len, golden->q_heads,
                                    golden->head_dim};
        const int64_t kv_shape[4] = {golden->batch, golden->kv_len, golden->kv_heads,
                                     golden->head_dim};
        const int64_t bias_shape[3] = {golden->batch, golden->kv_heads, golden->kv_len};
        const int selected = golden->window >= 0;
        test_context("%s %s", real->kernel, golden->name);
        const fdma_selection selection =
            selected ? select_golden(golden, "reference") : (fdma_selection){0};
        fdma_forward_args args = {
            .size = sizeof args,
            .q = tensor_of(real->dtype, golden->q, 4, q_shape),
            .k = tensor_of(real->dtype, golden->k, 4, kv_shape),
            .v = tensor_of(real->dtype, golden->v, 4, kv_shape),
            .bias = tensor_of(real->dtype, golden->bias, 3, bias_shape),
            .key_valid = valid_of(golden),
            .out = new_output(real->dtype, q_shape[0], q_shape[1], q_shape[2], q_shape[3]),
            .lse = new_output(real->dtype, q_shape[0], q_shape[2], q_shape[1], -1),
            .selection = selected ? &selection : NULL,
            .scale = golden->scale,
            .softcap = golden->softcap,
            .causal = golden->causal,
            .exec = {.kernel = real->kernel},
        };
        if (golden->bias_form == FDMA_BIAS_NONE)
            args.bias = (fdma_tensor){0};
        CHECK_OK(run_forward(&args));
        check_values(args.out, golden->out, rounding_of(real, golden->kv_len + golden->head_dim));
        check_values(args.lse, golden->lse, rounding_of(real, golden->kv_len + golden->head_dim));
    }
}

/* One query, one key: the softmax is 1 for any logit. */
static void one_key_is_its_value(void) {
    uint64_t state = 1;
    fdma_forward_args args = {
        .size = sizeof args,
        .q = new_tensor(FDMA_FLOAT64, 1, 1, 1, 8),
        .k = new_tensor(FDMA_FLOAT64, 1, 1, 1, 8),
        .v = new_tensor(FDMA_FLOAT64, 1, 1, 1, 8),
        .out = new_output(FDMA_FLOAT64, 1, 1, 1, 8),
        .lse = new_output(FDMA_FLOAT64, 1, 1, 1, -1),
        .scale = 2,
        .exec = {.kernel = "reference"},
    };
    fill_random(args.q, &state, 4);
    fill_random(args.k, &state, 4);
    fill_random(args.v, &state, 4);
    CHECK_OK(run_forward(&args));
    CHECK_BYTES(args.out.data, args.v.data, bytes_of(args.v));
    double logit = 0;
    for (int d = 0; d < 8; d++)
        logit += 2 * ((const double *)args.q.data)[d] * ((const double *)args.k.data)[d];
    CHECK_NEAR(((const double *)args.lse.data)[0], logit, rounding_of(&precisions[0], 8));
}

static const test_entry tests[] = {
    TEST(score_is_golden),
    TEST(selections_are_golden),
    TEST(forward_is_golden),
    TEST(one_key_is_its_value),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
