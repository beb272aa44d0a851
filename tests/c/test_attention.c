/* test_attention.c - fdma_attention() against its three steps, and fdma_score() at known points. */
#include "calls.h"

#include <float.h>

typedef struct attention_case {
    call_sizes sizes;
    int64_t window;
    int causal;
    fdma_scope scope;
    int padded;
    int64_t recent, sinks;
} attention_case;

static const attention_case cases[] = {
    {{2, 60, 60, 4, 2, 32, 0, 0, 0, 0}, 13, 1, FDMA_SCOPE_CAUSAL, 0, 0, 0},
    {{1, 33, 90, 3, 1, 64, 0, 0, 0, 0}, 90, 1, FDMA_SCOPE_CAUSAL, 0, 0, 0},
    {{2, 41, 70, 4, 4, 16, 0, 0, 0, 0}, 20, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0},
    {{1, 50, 50, 2, 1, 40, 0, 0, 0, 0}, 9, 1, FDMA_SCOPE_GLOBAL, 1, 0, 3},
    {{2, 50, 50, 2, 1, 24, 0, 0, 0, 0}, 1, 1, FDMA_SCOPE_CAUSAL, 1, 4, 1},
    {{1, 50, 80, 2, 2, 32, 0, 0, 0, 0}, 12, 1, FDMA_SCOPE_CAUSAL, 0, 9, 2},
    {{1, 40, 60, 2, 1, 16, 0, 0, 0, 0}, 9, 1, FDMA_SCOPE_DEFAULT, 0, 0, 0},
    {{1, 40, 60, 2, 1, 16, 0, 0, 0, 0}, 9, 0, FDMA_SCOPE_DEFAULT, 0, 0, 0},
};

/* The scope that the default means. */
static fdma_scope scope_of(const attention_case *n) {
    if (n->scope != FDMA_SCOPE_DEFAULT)
        return n->scope;
    return n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
}

static double gap_of(const attention_case *n) {
    return n->sinks > 0 && scope_of(n) == FDMA_SCOPE_CAUSAL ? 0.5 : 0;
}

/* Gives a call tensors and memory, except for tensors that the bias form and the case do not
 * use. */
static void fill_call(call *x, const attention_case *n, fdma_dtype dtype, fdma_bias_form form) {
    uint64_t state = 41;
    call_make(x, &n->sizes, dtype, true);
    fdma_tensor *const bias = call_tensor_named(x, "bias");
    fdma_tensor *const valid = call_tensor_named(x, "key_valid");
    if (bias != NULL && form == FDMA_BIAS_NONE)
        *bias = (fdma_tensor){0};
    if (!n->padded)
        *valid = (fdma_tensor){0};
    call_alloc(x, &state);
    for (int64_t i = 0; i < count_of(*valid); i++)
        ((uint8_t *)valid->data)[i] = random_below(&state, 4) > 0;
}

static void make_fused(call *x, const attention_case *n, fdma_dtype dtype, fdma_bias_form form,
                       const char *kernel) {
    *x = (call){.operation = operation_attention,
                .args.attention = {.window = n->window,
                                   .recent = n->recent,
                                   .sinks = n->sinks,
                                   .scope = n->scope,
                                   .bias_form = form,
                                   .causal = n->causal,
                                   .softcap = 3,
                                   .gap = gap_of(n),
                                   .exec = {.kernel = kernel}}};
    fill_call(x, n, dtype, form);
}

typedef struct three_steps {
    call score, select, forward;
} three_steps;

static void run_steps(three_steps *steps, call *fused, const attention_case *n) {
    const fdma_attention_args *const args = &fused->args.attention;
    const fdma_dtype dtype = args->q.dtype;
    const fdma_exec exec = {.kernel = args->exec.kernel};
    *steps = (three_steps){
        .score = {.operation = operation_score,
                  .args.score = {.bias_form = args->bias_form, .exec = exec}},
        .select = {.operation = operation_select,
                   .args.select = {.window = n->window,
                                   .recent = n->recent,
                                   .sinks = n->sinks,
                                   .scope = scope_of(n),
                                   .gap = gap_of(n),
                                   .exec = exec}},
        .forward = {.operation = operation_forward,
                    .args.forward = {.softcap = args->softcap, .causal = n->causal, .exec = exec}},
    };
    call *const calls[] = {&steps->score, &steps->select, &steps->forward};
    for (int i = 0; i < TEST_COUNT(calls); i++) {
        fill_call(calls[i], n, dtype, args->bias_form);
        call_take_inputs(calls[i], fused);
    }
    CHECK_OK(call_run(&steps->score));
    steps->select.args.select.score = steps->score.args.score.score;
    CHECK_OK(call_run(&steps->select));
    steps->forward.args.forward.bias = steps->score.args.score.bias;
    steps->forward.selection = steps->select.selection;
    CHECK_OK(call_run(&steps->forward));
}

static void check_as_steps(call *fused, three_steps *steps) {
    call *const calls[] = {&steps->score, &steps->select, &steps->forward};
    const tensor_table table = fdma_tensors[operation_attention];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const fdma_tensor actual = *call_tensor(fused, entry);
        fdma_tensor want = {0};
        if (!is_output(entry) || actual.rank == 0)
            continue;
        for (int i = TEST_COUNT(calls) - 1; i >= 0; i--) /* only the first has it as an output */
            if (call_tensor_named(calls[i], entry->name) != NULL)
                want = *call_tensor_named(calls[i], entry->name);
        if (!CHECK(want.rank > 0 && same_tensor(actual, want)))
            printf("    %s\n", entry->name);
    }
}

/* Runs the fused call with every output, with only `out`, and with some. The workspace holds the
 * outputs that are not asked for. */
static void compare_with_steps(const attention_case *n, fdma_dtype dtype, fdma_bias_form form,
                               const char *kernel) {
    three_steps steps;
    call fused, bare, some;
    make_fused(&fused, n, dtype, form, kernel);
    run_steps(&steps, &fused, n);
    CHECK_OK(call_run(&fused));
    check_as_steps(&fused, &steps);
    CHECK_INT(fused.selection.window, n->window);
    CHECK_INT(fused.selection.recent, n->recent);
    CHECK_INT(fused.selection.sinks, n->sinks);
    CHECK(fused.selection.gap == gap_of(n));
    CHECK_INT(fused.selection.kv_len, n->sizes.kv_len);
    CHECK_INT(fused.selection.scope, scope_of(n));

    make_fused(&bare, n, dtype, form, kernel);
    bare.args.attention.lse = bare.args.attention.score = (fdma_tensor){0};
    bare.args.attention.bias = (fdma_tensor){0};
    call_drop_selection(&bare);
    CHECK_OK(call_run(&bare));
    check_as_steps(&bare, &steps);

    make_fused(&some, n, dtype, form, kernel);
    some.args.attention.bias = some.selection.slot = (fdma_tensor){0};
    CHECK_OK(call_run(&some));
    check_as_steps(&some, &steps);
}

static void one_call_is_three(void) {
    static const fdma_bias_form forms[] = {FDMA_BIAS_EXP, FDMA_BIAS_LINEAR, FDMA_BIAS_NONE};
    for (int i = 0; i < TEST_COUNT(cases) * 3 * 3; i++) {
        const fdma_dtype dtype = test_dtypes[i % 3];
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

/* a = 0, as at the start of training: every score ties, so the window is a sliding one. */
static void untrained_scores_slide(void) {
    const kernel_list kernels = kernels_of("forward");
    const attention_case n = {{1, 40, 40, 2, 1, 8, 0, 0, 0, 0}, 6, 1, FDMA_SCOPE_CAUSAL, 0, 0, 0};
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        call x;
        test_context("%s", kernels.name[kernel]);
        make_fused(&x, &n, FDMA_FLOAT32, FDMA_BIAS_EXP, kernels.name[kernel]);
        memset(x.args.attention.a.data, 0, bytes_of(x.args.attention.a));
        CHECK_OK(call_run(&x));
        for (int64_t j = 0; j < n.sizes.kv_len; j++) {
            const int64_t out_at = j + n.window;
            CHECK_INT(((int32_t *)x.selection.expiry.data)[j],
                      out_at < n.sizes.kv_len ? out_at : n.sizes.kv_len);
            CHECK_INT(((int32_t *)x.selection.slot.data)[j], j % n.window);
        }
    }
}

/* One head of 8 channels. Every key has this dt and `a`. */
static fdma_score_args score_at(const char *kernel, float dt, float a) {
    enum { keys = 5 };
    fdma_score_args args = {
        .size = sizeof args,
        .v = new_tensor(FDMA_FLOAT32, 1, keys, 1, 8),
        .dt_proj = new_tensor(FDMA_FLOAT32, 1, 8, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 1, -1, -1, -1),
        .score = new_output(FDMA_FLOAT32, 1, 1, keys, -1),
        .bias = new_output(FDMA_FLOAT32, 1, 1, keys, -1),
        .bias_form = FDMA_BIAS_EXP,
        .exec = {.kernel = kernel},
    };
    for (int64_t j = 0; j < keys; j++)
        ((float *)args.v.data)[j * 8 + 2] = dt;
    ((float *)args.dt_proj.data)[2] = 1;
    ((float *)args.a.data)[0] = a;
    CHECK_OK(run_score(&args));
    return args;
}

/* dt = 0: softplus(0) = log 2, so every score is a[g] log 2. dt = +-200: softplus is the identity
 * or 0; exp must not overflow on the way. By definition exp(z) beyond float32 is infinity. */
static void score_at_known_points(const char *kernel, fdma_dtype dtype) {
    static const float points[] = {0, 200, -200, 0x1p-20F};
    const double denormal_step = 0x1p-149, step = (double)FLT_EPSILON;
    if (dtype != FDMA_FLOAT32)
        return;
    for (int i = 0; i < TEST_COUNT(points); i++) {
        const double x = (double)points[i];
        const double z = -0.5 * (fmax(x, 0) + log1p(exp(-fabs(x))));
        const fdma_score_args args = score_at(kernel, points[i], -0.5F);
        test_context("%s, dt = %g", kernel, x);
        for (int64_t j = 0; j < count_of(args.score); j++) {
            CHECK_NEAR(load_double(args.score.data, dtype, j), z,
                       4 * step * fabs(z) + denormal_step);
            CHECK_NEAR(load_double(args.bias.data, dtype, j), exp(z),
                       4 * step * exp(z) * (1 + fabs(z)) + denormal_step);
        }
    }
    const fdma_score_args beyond = score_at(kernel, 50, 2);
    CHECK_NEAR((double)((float *)beyond.score.data)[0], 100, 100 * step);
    CHECK_NEAR((double)((float *)beyond.bias.data)[0], (double)INFINITY, 0);
}

/* Padding is not read: its z is -inf, and its bias is what the form makes of -inf. */
static void invalid_keys_score_nothing(const char *kernel, fdma_dtype dtype) {
    const attention_case n = {{1, 1, 20, 1, 2, 16, 0, 0, 0, 0}, 1, 1, FDMA_SCOPE_CAUSAL, 1, 0, 0};
    call x = {.operation = operation_score, .args.score = {.exec = {.kernel = kernel}}};
    fill_call(&x, &n, dtype, FDMA_BIAS_EXP);
    const fdma_score_args *const args = &x.args.score;
    const uint8_t *valid = args->key_valid.data;
    for (int64_t i = 0; i < count_of(args->v); i++)
        if (!valid[i / 32])
            store_float(args->v.data, dtype, i, NAN);
    CHECK_OK(call_run(&x));
    for (int64_t i = 0; i < count_of(args->score); i++) {
        const float score = ((float *)args->score.data)[i], bias = ((float *)args->bias.data)[i];
        if (valid[i % n.sizes.kv_len])
            CHECK(isfinite(score) && bias > 0);
        else
            CHECK(score == -INFINITY && bias == 0);
    }
}

static const test_entry tests[] = {
    TEST(one_call_is_three),
    TEST(untrained_scores_slide),
    EACH_KERNEL("score", score_at_known_points),
    EACH_KERNEL("score", invalid_keys_score_nothing),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
