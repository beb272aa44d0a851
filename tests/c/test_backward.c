/* test_backward.c - checks gradients of the kernel "reference" against finite differences of its
 * forward, in float64: fdma_backward(), fdma_score_backward() and fdma_attention_backward(), on the
 * tiny cases of tests/cases.def. Half of the cases have a dt_bias. Also checks the plain evaluation
 * against the reference. */
#include "cases.h"
#include "differences.h"
#include "gradient.h"

/* By its index, a tiny case may have a scale, dropout, or no dlse. */
typedef struct tiny_case {
    problem x;
    int with_dlse, with_dt_bias;
} tiny_case;

static int is_tiny(int index) { return strncmp(cases[index].name, "tiny/", 5) == 0; }

static tiny_case tiny_of(int index, fdma_dtype dtype) {
    tiny_case tiny = {
        .x = case_problem(index, dtype), .with_dlse = index % 4 != 1, .with_dt_bias = index % 2};
    tiny.x.scale = index % 3 == 0 ? 0.7 : 0;
    tiny.x.dropout = index % 3 != 1 ? 0.3 : 0;
    tiny.x.seed = (uint64_t)index;
    if (cases[index].bias_form == FDMA_BIAS_NONE)
        tiny.x.bias = (fdma_tensor){0};
    else if (dtype == FDMA_FLOAT64)
        tiny.x.bias = widened(tiny.x.bias);
    return tiny;
}

/* ---- backward ---- */

typedef struct forward_loss {
    const gradient_problem *p;
    fdma_forward_args args;
} forward_loss;

/* <dout, out> + <dlse, lse> for the current inputs. */
static loss loss_of_forward(const void *context) {
    const forward_loss *f = context;
    loss sum = {0, 0};
    CHECK_OK(fdma_forward(&f->args));
    sum = weighted_sum(f->p->dout, f->args.out);
    return f->p->dlse.rank > 0 ? loss_sum(sum, weighted_sum(f->p->dlse, f->args.lse)) : sum;
}

static forward_loss forward_loss_of(const gradient_problem *p) {
    const problem *x = &p->x;
    forward_loss f = {.p = p, .args = problem_args(x, "reference")};
    f.args.lse = new_output(FDMA_FLOAT64, x->batch, x->q_heads, x->q_len, -1);
    CHECK_OK(run_forward(&f.args));
    return f;
}

static void check_backward(const tiny_case *tiny) {
    const gradient_problem p = gradient_of(&tiny->x, tiny->with_dlse);
    const gradients got = gradient_run(&p, "reference", 1);
    const forward_loss f = forward_loss_of(&p);
    const fdma_tensor inputs[] = {p.x.q, p.x.k, p.x.v, p.x.bias};
    for (int t = 0; t < TEST_COUNT(inputs) && inputs[t].rank > 0; t++)
        check_differences(loss_of_forward, &f, inputs[t], got.all[t]);
}

static void backward_is_the_derivative_of_forward(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        if (is_tiny(index)) {
            test_context("%s", cases[index].name);
            const tiny_case tiny = tiny_of(index, FDMA_FLOAT64);
            check_backward(&tiny);
            test_free_all();
        }
    }
}

/* Other tests use its error as a tolerance, so that error must itself be small. */
static void the_plain_evaluation_is_near_the_reference(void) {
    for (int i = 0; i < TEST_COUNT(cases) * test_dtype_count; i++) {
        const int index = i / test_dtype_count;
        const fdma_dtype dtype = test_dtypes[i % test_dtype_count];
        if (is_tiny(index)) {
            test_context("%s %s", cases[index].name, dtype_name(dtype));
            const tiny_case tiny = tiny_of(index, dtype);
            const gradient_problem p = gradient_of(&tiny.x, tiny.with_dlse);
            const gradients want = reference_gradients(&p), got = plain_gradients(&p);
            const problem *x = &p.x;
            const int64_t terms = x->q_len * x->q_heads + x->kv_len + x->head_dim;
            const int roundings = x->dropout > 0 ? 6 : 4; // to the dtype
            const double relative =
                (double)terms * (double)FLT_EPSILON + roundings * step_of(dtype);
            for (int t = 0; t < TEST_COUNT(want.all); t++)
                check_near(got.all[t], want.all[t], relative);
            test_free_all();
        }
    }
}

/* ---- score ---- */

typedef struct scored {
    problem x;
    fdma_tensor dt_proj, a, dt_bias, dbias, bias;
    fdma_bias_form form;
} scored;

static scored scored_of(const tiny_case *tiny, fdma_bias_form form) {
    const problem *const x = &tiny->x;
    uint64_t state = 19;
    scored s = {.x = *x, .form = form};
    const int64_t heads = x->kv_heads;
    s.dt_proj = new_tensor(FDMA_FLOAT64, heads, heads * x->head_dim, -1, -1);
    s.a = new_tensor(FDMA_FLOAT64, heads, -1, -1, -1);
    s.dbias = new_tensor(FDMA_FLOAT64, x->batch, heads, x->kv_len, -1);
    s.bias = new_tensor(FDMA_FLOAT64, x->batch, heads, x->kv_len, -1);
    fill_random(s.dt_proj, &state, 0.5F);
    fill_random(s.a, &state, 1);
    fill_random(s.dbias, &state, 1);
    if (tiny->with_dt_bias)
        s.dt_bias = new_tensor(FDMA_FLOAT64, heads, -1, -1, -1);
    fill_random(s.dt_bias, &state, 1);
    return s;
}

static void score_now(const scored *s) {
    fdma_score_args args = {.size = sizeof args,
                            .v = s->x.v,
                            .dt_proj = s->dt_proj,
                            .a = s->a,
                            .dt_bias = s->dt_bias,
                            .key_valid = s->x.key_valid,
                            .bias = s->bias,
                            .bias_form = s->form,
                            .exec = {.kernel = "reference"}};
    size_t bytes = 0;
    CHECK_OK(fdma_score_workspace(&args, &bytes));
    if (CHECK_INT(bytes, 0)) /* so that a thousand calls use no memory for it */
        CHECK_OK(fdma_score(&args));
}

static loss loss_of_score(const void *context) {
    const scored *s = context;
    score_now(s);
    return weighted_sum(s->dbias, s->bias);
}

typedef struct score_gradients {
    fdma_tensor dv, ddt_proj, da, ddt_bias;
} score_gradients;

/* An output if there is a dt_bias, else absent. */
static fdma_tensor like_dt_bias(const scored *s) {
    return s->dt_bias.rank > 0 ? new_output(FDMA_FLOAT64, s->x.kv_heads, -1, -1, -1)
                               : (fdma_tensor){0};
}

static score_gradients score_backward_of(const scored *s) {
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = s->dbias,
        .v = s->x.v,
        .dt_proj = s->dt_proj,
        .a = s->a,
        .dt_bias = s->dt_bias,
        .key_valid = s->x.key_valid,
        // zeros, because the call adds to dv
        .dv = new_tensor(FDMA_FLOAT64, s->x.batch, s->x.kv_len, s->x.kv_heads, s->x.head_dim),
        .ddt_proj = new_output(FDMA_FLOAT64, s->x.kv_heads, s->x.kv_heads * s->x.head_dim, -1, -1),
        .da = new_output(FDMA_FLOAT64, s->x.kv_heads, -1, -1, -1),
        .ddt_bias = like_dt_bias(s),
        .bias_form = s->form,
        .exec = {.kernel = "reference"},
    };
    CHECK_OK(run_score_backward(&args));
    return (score_gradients){args.dv, args.ddt_proj, args.da, args.ddt_bias};
}

static void check_score_backward(const tiny_case *tiny, fdma_bias_form form) {
    const scored x = scored_of(tiny, form);
    const score_gradients got = score_backward_of(&x);
    check_differences(loss_of_score, &x, x.x.v, got.dv);
    check_differences(loss_of_score, &x, x.dt_proj, got.ddt_proj);
    check_differences(loss_of_score, &x, x.a, got.da);
    check_differences(loss_of_score, &x, x.dt_bias, got.ddt_bias);
}

static void for_each_form(void (*check)(const tiny_case *tiny, fdma_bias_form form)) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        for (int form = FDMA_BIAS_EXP; form < FDMA_BIAS_NONE && is_tiny(index); form++) {
            test_context("%s, form %d", cases[index].name, form);
            const tiny_case tiny = tiny_of(index, FDMA_FLOAT64);
            check(&tiny, (fdma_bias_form)form);
            test_free_all();
        }
    }
}

static void score_backward_is_the_derivative_of_score(void) { for_each_form(check_score_backward); }

/* ---- all in one call ---- */

typedef struct whole_loss {
    scored s;
    forward_loss f;
} whole_loss;

/* The selection stays fixed. */
static loss loss_of_whole(const void *context) {
    const whole_loss *w = context;
    score_now(&w->s);
    return loss_of_forward(&w->f);
}

static fdma_attention_backward_args whole_args(const whole_loss *w) {
    const problem *x = &w->s.x;
    const int64_t heads = x->kv_heads, width = heads * x->head_dim;
    const fdma_tensor to[5] = {
        new_output(FDMA_FLOAT64, x->batch, x->q_len, x->q_heads, x->head_dim),
        new_output(FDMA_FLOAT64, x->batch, x->kv_len, heads, x->head_dim),
        new_output(FDMA_FLOAT64, x->batch, x->kv_len, heads, x->head_dim),
        new_output(FDMA_FLOAT64, heads, width, -1, -1),
        new_output(FDMA_FLOAT64, heads, -1, -1, -1),
    };
    fdma_attention_backward_args args =
        fused_args(w->f.p, w->s.dt_proj, w->s.a, w->s.form, to, "reference");
    args.dt_bias = w->s.dt_bias;
    args.ddt_bias = like_dt_bias(&w->s);
    return args;
}

/* Selects by the scores, as fdma_attention() does, and attends. */
static void attend_whole(whole_loss *w, gradient_problem *p, int with_dlse) {
    problem *x = &w->s.x;
    fdma_attention_args args = {
        .size = sizeof args,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .dt_proj = w->s.dt_proj,
        .a = w->s.a,
        .dt_bias = w->s.dt_bias,
        .key_valid = x->key_valid,
        .out = new_output(FDMA_FLOAT64, x->batch, x->q_len, x->q_heads, x->head_dim),
        .lse = new_output(FDMA_FLOAT64, x->batch, x->q_heads, x->q_len, -1),
        .bias = new_output(FDMA_FLOAT64, x->batch, x->kv_heads, x->kv_len, -1),
        .selection = &x->selection,
        .window = x->window,
        .scope = x->scope,
        .bias_form = w->s.form,
        .scale = x->scale,
        .softcap = x->softcap,
        .causal = x->causal,
        .exec = {.kernel = "reference"},
        .dropout = x->dropout,
        .seed = x->seed,
    };
    CHECK_OK(run_attention(&args));
    score_now(&w->s);
    CHECK(same_tensor(w->s.bias, args.bias));
    x->bias = w->s.bias; /* forward reads the output of score */
    *p = gradient_of(x, with_dlse);
    CHECK(same_tensor(p->out, args.out) && same_tensor(p->lse, args.lse));
    w->f = forward_loss_of(p);
}

static void check_whole(const tiny_case *tiny, fdma_bias_form form) {
    if (tiny->x.window < 0)
        return;
    whole_loss w = {.s = scored_of(tiny, form)};
    gradient_problem p;
    attend_whole(&w, &p, tiny->with_dlse);
    fdma_attention_backward_args args = whole_args(&w);
    CHECK_OK(run_attention_backward(&args));
    check_differences(loss_of_whole, &w, w.s.x.q, args.dq);
    check_differences(loss_of_whole, &w, w.s.x.k, args.dk);
    check_differences(loss_of_whole, &w, w.s.x.v, args.dv);
    check_differences(loss_of_whole, &w, w.s.dt_proj, args.ddt_proj);
    check_differences(loss_of_whole, &w, w.s.a, args.da);
    check_differences(loss_of_whole, &w, w.s.dt_bias, args.ddt_bias);
    /* If the call is given the bias of forward, it does not compute it again: the results are the
     * same. */
    score_now(&w.s);
    fdma_attention_backward_args given = whole_args(&w);
    given.bias = w.s.bias;
    CHECK_OK(run_attention_backward(&given));
    CHECK(same_tensor(given.dq, args.dq) && same_tensor(given.dv, args.dv));
    CHECK(same_tensor(given.ddt_proj, args.ddt_proj) && same_tensor(given.da, args.da));
    CHECK(same_tensor(given.ddt_bias, args.ddt_bias));
}

static void attention_backward_is_the_derivative_of_attention(void) { for_each_form(check_whole); }

/* Scores that only rank keys have no gradient, but q, k and v have. */
static void ranking_alone_has_no_gradient(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        if (!is_tiny(index) || cases[index].sizes.window < 0)
            continue;
        test_context("%s", cases[index].name);
        const tiny_case tiny = tiny_of(index, FDMA_FLOAT64);
        whole_loss w = {.s = scored_of(&tiny, FDMA_BIAS_NONE)};
        w.s.x.bias = (fdma_tensor){0};
        gradient_problem p = gradient_of(&w.s.x, 1);
        w.f.p = &p;
        fdma_attention_backward_args args = whole_args(&w);
        args.ddt_proj = args.da = args.ddt_bias = (fdma_tensor){0};
        CHECK_OK(run_attention_backward(&args));
        const gradients want = gradient_run(&p, "reference", 1);
        CHECK(same_tensor(args.dq, want.dq) && same_tensor(args.dk, want.dk));
        CHECK(same_tensor(args.dv, want.dv));
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(backward_is_the_derivative_of_forward),
    TEST(the_plain_evaluation_is_near_the_reference),
    TEST(score_backward_is_the_derivative_of_score),
    TEST(attention_backward_is_the_derivative_of_attention),
    TEST(ranking_alone_has_no_gradient),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
