/* test_attention.c - fdma_attention() against its three steps, and fdma_score() at known points. */
#include "calls.h"

#include <float.h>

static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};

typedef struct sizes {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim, window;
    int causal;
    fdma_scope scope;
    int padded;
} sizes;

static const sizes cases[] = {
    {2, 60, 60, 4, 2, 32, 13, 1, FDMA_SCOPE_CAUSAL, 0},
    {1, 33, 90, 3, 1, 64, 90, 1, FDMA_SCOPE_CAUSAL, 0},
    {2, 41, 70, 4, 4, 16, 20, 0, FDMA_SCOPE_GLOBAL, 1},
    {1, 50, 50, 2, 1, 40, 9, 1, FDMA_SCOPE_GLOBAL, 1},
    {2, 50, 50, 2, 1, 24, 1, 1, FDMA_SCOPE_CAUSAL, 1},
    {1, 40, 60, 2, 1, 16, 9, 1, FDMA_SCOPE_DEFAULT, 0},
    {1, 40, 60, 2, 1, 16, 9, 0, FDMA_SCOPE_DEFAULT, 0},
};

/* What the default stands for. */
static fdma_scope scope_of(const sizes *n) {
    if (n->scope != FDMA_SCOPE_DEFAULT)
        return n->scope;
    return n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
}

static fdma_tensor new_scores(const sizes *n) {
    return new_output(FDMA_FLOAT32, n->batch, n->kv_heads, n->kv_len, -1);
}

static fdma_selection new_selection(const sizes *n) {
    return (fdma_selection){
        .size = sizeof(fdma_selection),
        .expiry = new_output(FDMA_INT32, n->batch, n->kv_heads, n->kv_len, -1),
        .slot = new_output(FDMA_INT32, n->batch, n->kv_heads, n->kv_len, -1),
    };
}

static fdma_attention_args new_args(const sizes *n, fdma_dtype dtype, fdma_bias_form form,
                                    const char *kernel) {
    uint64_t state = 41;
    fdma_attention_args args = {
        .size = sizeof args,
        .q = new_tensor(dtype, n->batch, n->q_len, n->q_heads, n->head_dim),
        .k = new_tensor(dtype, n->batch, n->kv_len, n->kv_heads, n->head_dim),
        .v = new_tensor(dtype, n->batch, n->kv_len, n->kv_heads, n->head_dim),
        .dt_proj = new_tensor(dtype, n->kv_heads, n->kv_heads * n->head_dim, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, n->kv_heads, -1, -1, -1),
        .out = new_output(dtype, n->batch, n->q_len, n->q_heads, n->head_dim),
        .lse = new_output(FDMA_FLOAT32, n->batch, n->q_heads, n->q_len, -1),
        .window = n->window,
        .scope = n->scope,
        .bias_form = form,
        .causal = n->causal,
        .softcap = 3,
        .exec = {.kernel = kernel},
    };
    fill_random(args.q, &state, 2);
    fill_random(args.k, &state, 2);
    fill_random(args.v, &state, 2);
    fill_random(args.dt_proj, &state, 0.5F);
    fill_random(args.a, &state, 1);
    if (n->padded) {
        args.key_valid = new_tensor(FDMA_UINT8, n->batch, n->kv_len, -1, -1);
        for (int64_t i = 0; i < count_of(args.key_valid); i++)
            ((uint8_t *)args.key_valid.data)[i] = random_below(&state, 4) > 0;
    }
    return args;
}

/* The three calls with the fields of `args`, into outputs of their own. */
static void three_steps(const fdma_attention_args *args, const sizes *n,
                        fdma_attention_args *steps) {
    const int biased = args->bias_form != FDMA_BIAS_NONE;
    static fdma_selection selection;
    selection = new_selection(n);
    *steps = *args;
    steps->selection = &selection;
    steps->score = new_scores(n);
    steps->bias = biased ? new_scores(n) : (fdma_tensor){0};
    steps->out = new_output(args->q.dtype, n->batch, n->q_len, n->q_heads, n->head_dim);
    steps->lse = new_output(FDMA_FLOAT32, n->batch, n->q_heads, n->q_len, -1);
    fdma_score_args score = {.size = sizeof score,
                             .v = args->v,
                             .dt_proj = args->dt_proj,
                             .a = args->a,
                             .key_valid = args->key_valid,
                             .score = steps->score,
                             .bias = steps->bias,
                             .bias_form = args->bias_form,
                             .exec = {.kernel = args->exec.kernel}};
    fdma_select_args select = {.size = sizeof select,
                               .score = steps->score,
                               .key_valid = args->key_valid,
                               .selection = &selection,
                               .window = args->window,
                               .scope = scope_of(n),
                               .exec = score.exec};
    fdma_forward_args forward = {.size = sizeof forward,
                                 .q = args->q,
                                 .k = args->k,
                                 .v = args->v,
                                 .bias = steps->bias,
                                 .key_valid = args->key_valid,
                                 .out = steps->out,
                                 .lse = steps->lse,
                                 .selection = &selection,
                                 .scale = args->scale,
                                 .softcap = args->softcap,
                                 .causal = args->causal,
                                 .exec = score.exec};
    CHECK_OK(run_score(&score));
    CHECK_OK(run_select(&select));
    CHECK_OK(run_forward(&forward));
}

static void check_equal(fdma_tensor actual, fdma_tensor want) {
    CHECK_BYTES(actual.data, want.data, bytes_of(want));
}

/* With every output asked for, with only `out`, and in between: the rest lives in the workspace. */
static void compare_with_steps(const sizes *n, fdma_dtype dtype, fdma_bias_form form,
                               const char *kernel) {
    fdma_attention_args args = new_args(n, dtype, form, kernel), steps;
    three_steps(&args, n, &steps);

    fdma_selection selection = new_selection(n);
    args.score = new_scores(n);
    args.bias = form == FDMA_BIAS_NONE ? (fdma_tensor){0} : new_scores(n);
    args.selection = &selection;
    CHECK_OK(run_attention(&args));
    check_equal(args.out, steps.out);
    check_equal(args.lse, steps.lse);
    check_equal(args.score, steps.score);
    check_equal(args.bias, steps.bias);
    check_equal(selection.expiry, steps.selection->expiry);
    check_equal(selection.slot, steps.selection->slot);
    CHECK_INT(selection.window, n->window);
    CHECK_INT(selection.kv_len, n->kv_len);
    CHECK_INT(selection.scope, scope_of(n));

    fdma_attention_args bare = new_args(n, dtype, form, kernel);
    bare.lse = (fdma_tensor){0};
    CHECK_OK(run_attention(&bare));
    check_equal(bare.out, steps.out);

    fdma_attention_args partial = new_args(n, dtype, form, kernel);
    fdma_selection no_slots = new_selection(n);
    no_slots.slot = (fdma_tensor){0};
    partial.selection = &no_slots;
    partial.score = new_scores(n);
    CHECK_OK(run_attention(&partial));
    check_equal(partial.out, steps.out);
    check_equal(partial.score, steps.score);
    check_equal(no_slots.expiry, steps.selection->expiry);
}

static void one_call_is_three(void) {
    static const fdma_bias_form forms[] = {FDMA_BIAS_EXP, FDMA_BIAS_LINEAR, FDMA_BIAS_NONE};
    for (int i = 0; i < TEST_COUNT(cases) * 3 * 3; i++) {
        const fdma_dtype dtype = dtypes[i % 3];
        const kernel_list kernels = kernels_for("forward", dtype);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            const fdma_bias_form form = forms[i / 3 % 3];
            test_context("%s %s, bias form %d, case %d", kernels.name[kernel], dtype_name(dtype),
                         (int)form, i / 9);
            compare_with_steps(&cases[i / 9], dtype, form, kernels.name[kernel]);
            test_free_all();
        }
    }
}

/* a = 0, as at the start of a training: every score ties, and the window is a sliding one. */
static void untrained_scores_slide(void) {
    const kernel_list kernels = kernels_of("forward");
    const sizes n = {1, 40, 40, 2, 1, 8, 6, 1, FDMA_SCOPE_CAUSAL, 0};
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        fdma_attention_args args = new_args(&n, FDMA_FLOAT32, FDMA_BIAS_EXP, kernels.name[kernel]);
        fdma_selection selection = new_selection(&n);
        args.selection = &selection;
        memset(args.a.data, 0, bytes_of(args.a));
        CHECK_OK(run_attention(&args));
        for (int64_t j = 0; j < n.kv_len; j++) {
            const int64_t out_at = j + n.window;
            CHECK_INT(((int32_t *)selection.expiry.data)[j], out_at < n.kv_len ? out_at : n.kv_len);
            CHECK_INT(((int32_t *)selection.slot.data)[j], j % n.window);
        }
    }
}

/* dt_proj = 0: softplus(0) = log 2, so every score is a[g] log 2. dt of +-200: softplus is the
 * identity, or nothing; exp must not overflow on the way. */
static void score_at_known_points(void) {
    const kernel_list kernels = kernels_of("score");
    const double denormal_step = 0x1p-149;
    static const float points[] = {0, 200, -200, 0x1p-20F};
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int i = 0; i < TEST_COUNT(points); i++) {
            const double x = (double)points[i];
            test_context("%s, dt = %g", kernels.name[kernel], x);
            fdma_score_args args = {
                .size = sizeof args,
                .v = new_tensor(FDMA_FLOAT32, 1, 5, 1, 8),
                .dt_proj = new_tensor(FDMA_FLOAT32, 1, 8, -1, -1),
                .a = new_tensor(FDMA_FLOAT32, 1, -1, -1, -1),
                .score = new_output(FDMA_FLOAT32, 1, 1, 5, -1),
                .bias = new_output(FDMA_FLOAT32, 1, 1, 5, -1),
                .bias_form = FDMA_BIAS_EXP,
                .exec = {.kernel = kernels.name[kernel]},
            };
            for (int64_t j = 0; j < 5; j++)
                store_float(args.v.data, FDMA_FLOAT32, j * 8 + 2, points[i]);
            ((float *)args.dt_proj.data)[2] = 1;
            ((float *)args.a.data)[0] = -0.5F;
            CHECK_OK(run_score(&args));
            const double z = -0.5 * (fmax(x, 0) + log1p(exp(-fabs(x))));
            for (int64_t j = 0; j < 5; j++) {
                const double score = (double)((float *)args.score.data)[j];
                CHECK_NEAR(score, z, 4 * (double)FLT_EPSILON * fabs(z) + denormal_step);
                CHECK_NEAR((double)((float *)args.bias.data)[j], exp(z),
                           4 * (double)FLT_EPSILON * exp(z) * (1 + fabs(z)) + denormal_step);
            }
        }
    }
}

/* exp(z) beyond float32 is infinity: part of the definition. */
static void bias_may_overflow(void) {
    const kernel_list kernels = kernels_of("score");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        fdma_score_args args = {
            .size = sizeof args,
            .v = new_tensor(FDMA_FLOAT32, 1, 1, 1, 8),
            .dt_proj = new_tensor(FDMA_FLOAT32, 1, 8, -1, -1),
            .a = new_tensor(FDMA_FLOAT32, 1, -1, -1, -1),
            .score = new_output(FDMA_FLOAT32, 1, 1, 1, -1),
            .bias = new_output(FDMA_FLOAT32, 1, 1, 1, -1),
            .exec = {.kernel = kernels.name[kernel]},
        };
        ((float *)args.v.data)[0] = 50;
        ((float *)args.dt_proj.data)[0] = 1;
        ((float *)args.a.data)[0] = 2;
        CHECK_OK(run_score(&args));
        CHECK_NEAR((double)((float *)args.score.data)[0], 100, 100 * (double)FLT_EPSILON);
        CHECK_NEAR((double)((float *)args.bias.data)[0], (double)INFINITY, 0);
    }
}

/* Padding is not read: z is -inf, and the bias what becomes of it. */
static void invalid_keys_score_nothing(void) {
    const kernel_list kernels = kernels_of("score");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int type = 0; type < TEST_COUNT(dtypes); type++) {
            test_context("%s %s", kernels.name[kernel], dtype_name(dtypes[type]));
            const sizes n = {1, 1, 20, 1, 2, 16, 1, 1, FDMA_SCOPE_CAUSAL, 1};
            const fdma_attention_args made =
                new_args(&n, dtypes[type], FDMA_BIAS_EXP, kernels.name[kernel]);
            fdma_score_args args = {.size = sizeof args,
                                    .v = made.v,
                                    .dt_proj = made.dt_proj,
                                    .a = made.a,
                                    .key_valid = made.key_valid,
                                    .score = new_scores(&n),
                                    .bias = new_scores(&n),
                                    .exec = made.exec};
            const uint8_t *valid = made.key_valid.data;
            for (int64_t i = 0; i < n.kv_len * 32; i++)
                if (!valid[i / 32])
                    store_float(made.v.data, dtypes[type], i, NAN);
            CHECK_OK(run_score(&args));
            for (int64_t i = 0; i < 2 * n.kv_len; i++) {
                const float score = ((float *)args.score.data)[i];
                const float bias = ((float *)args.bias.data)[i];
                if (valid[i % n.kv_len])
                    CHECK(isfinite(score) && bias > 0);
                else
                    CHECK(score == -INFINITY && bias == 0);
            }
        }
    }
}

static const test_entry tests[] = {
    TEST(one_call_is_three), TEST(untrained_scores_slide),     TEST(score_at_known_points),
    TEST(bias_may_overflow), TEST(invalid_keys_score_nothing),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
