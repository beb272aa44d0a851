/* test_backward.c - the reference's gradients against finite differences of its forward, in
 * float64: of fdma_backward(), fdma_score_backward() and fdma_attention_backward(). */
#include "differences.h"
#include "gradient.h"

typedef struct shape {
    const char *name;
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    fdma_scope scope;
    int causal;
    double softcap, scale;
    int padded, with_dlse, with_bias;
} shape;

static const shape shapes[] = {
    {"causal", 1, 9, 9, 2, 2, 8, -1, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 1, 1},
    {"no bias, no dlse", 1, 7, 7, 2, 1, 8, -1, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 0, 0},
    {"full, more keys", 2, 5, 8, 3, 1, 8, -1, FDMA_SCOPE_GLOBAL, 0, 0, 0.7, 0, 1, 1},
    {"full, more queries", 1, 11, 6, 2, 1, 8, -1, FDMA_SCOPE_GLOBAL, 0, 0, 0, 0, 1, 1},
    {"causal, more queries", 1, 11, 6, 2, 1, 8, -1, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 1, 1},
    {"causal, softcap", 1, 8, 10, 4, 2, 8, -1, FDMA_SCOPE_CAUSAL, 1, 1.5, 0, 0, 1, 1},
    {"padded", 2, 6, 9, 2, 1, 8, -1, FDMA_SCOPE_GLOBAL, 0, 0, 0, 1, 1, 1},
    {"selected", 1, 16, 16, 4, 2, 8, 5, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 1, 1},
    {"selected, later", 2, 7, 19, 3, 1, 8, 6, FDMA_SCOPE_CAUSAL, 1, 0, 1.2, 0, 0, 1},
    {"selected, softcap, padded", 1, 10, 17, 4, 1, 16, 6, FDMA_SCOPE_CAUSAL, 1, 2, 0, 1, 1, 1},
    {"window 1", 1, 12, 12, 2, 1, 8, 1, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 1, 1},
    {"window kv_len - 1", 1, 12, 12, 2, 1, 8, 11, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0, 1, 1},
    {"global, causal", 1, 12, 12, 2, 2, 8, 4, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0, 1, 1},
    {"global, full, more queries", 1, 12, 9, 5, 1, 8, 4, FDMA_SCOPE_GLOBAL, 0, 0.5, 0, 1, 1, 1},
};

static fdma_tensor widened(fdma_tensor tensor) {
    fdma_tensor wide = tensor;
    wide.dtype = FDMA_FLOAT64;
    wide.data = test_alloc(bytes_of(wide));
    for (int64_t i = 0; i < count_of(tensor); i++) {
        ((double *)wide.data)[i] = load_double(tensor.data, tensor.dtype, i);
    }
    return wide;
}

static fdma_tensor new_padding(int64_t batch, int64_t kv_len) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, batch, kv_len, -1, -1);
    for (int64_t i = 0; i < batch * kv_len; i++) {
        ((uint8_t *)valid.data)[i] = i % 5 != 1;
    }
    return valid;
}

static problem problem_of(const shape *n) {
    problem x = {.batch = n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->scope,
                 .causal = n->causal,
                 .softcap = n->softcap,
                 .scale = n->scale,
                 .dtype = FDMA_FLOAT64};
    problem_fill(&x, 5);
    if (n->padded) {
        x.key_valid = new_padding(n->batch, n->kv_len);
    }
    problem_select(&x);
    x.bias = n->with_bias ? widened(x.bias) : (fdma_tensor){0};
    return x;
}

/* ---- backward ---- */

typedef struct forward_loss {
    const gradient_problem *p;
    fdma_forward_args args;
} forward_loss;

/* <dout, out> + <dlse, lse>, of the inputs as they are now. */
static loss loss_of_forward(const void *context) {
    const forward_loss *f = context;
    loss sum = {0, 0};
    CHECK_OK(fdma_forward(&f->args));
    sum = weighted_sum(f->p->dout, f->args.out);
    return f->p->dlse.rank > 0 ? loss_sum(sum, weighted_sum(f->p->dlse, f->args.lse)) : sum;
}

static void check_shape(const shape *n) {
    const problem x = problem_of(n);
    const gradient_problem p = gradient_of(&x, n->with_dlse);
    const gradients got = gradient_run(&p, "reference", 1);
    forward_loss f = {.p = &p, .args = problem_args(&p.x, "reference")};
    f.args.lse = new_output(FDMA_FLOAT64, x.batch, x.q_heads, x.q_len, -1);
    CHECK_OK(run_forward(&f.args));
    check_differences(loss_of_forward, &f, x.q, got.dq);
    check_differences(loss_of_forward, &f, x.k, got.dk);
    check_differences(loss_of_forward, &f, x.v, got.dv);
    if (n->with_bias) {
        check_differences(loss_of_forward, &f, x.bias, got.dbias);
    }
}

static void backward_is_the_derivative_of_forward(void) {
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        test_context("%s", shapes[s].name);
        check_shape(&shapes[s]);
        test_free_all();
    }
}

/* What the row tests hold kernels against is the reference's result, too. */
static void the_formula_of_the_tests_is_the_references(void) {
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        test_context("%s", shapes[s].name);
        const problem x = problem_of(&shapes[s]);
        const gradient_problem p = gradient_of(&x, shapes[s].with_dlse);
        const gradients got = gradient_run(&p, "reference", 1);
        const expected_gradients want = expect_gradients(&p);
        const double unit = (double)(x.q_len * x.q_heads * x.head_dim) * DBL_EPSILON;
        check_elements(got.dq, want.dq, unit, DBL_MIN);
        check_elements(got.dk, want.dk, unit, DBL_MIN);
        check_elements(got.dv, want.dv, unit, DBL_MIN);
        check_elements(got.dbias, want.dbias, unit, DBL_MIN);
        test_free_all();
    }
}

/* ---- score ---- */

typedef struct scored {
    problem x;
    fdma_tensor dt_proj, a, dbias, bias;
    fdma_bias_form form;
} scored;

static scored scored_of(const shape *n, fdma_bias_form form) {
    uint64_t state = 19;
    scored s = {.x = problem_of(n), .form = form};
    const int64_t heads = n->kv_heads;
    s.dt_proj = new_tensor(FDMA_FLOAT64, heads, heads * n->head_dim, -1, -1);
    s.a = new_tensor(FDMA_FLOAT64, heads, -1, -1, -1);
    s.dbias = new_tensor(FDMA_FLOAT64, n->batch, heads, n->kv_len, -1);
    s.bias = new_tensor(FDMA_FLOAT64, n->batch, heads, n->kv_len, -1);
    fill_random(s.dt_proj, &state, 0.5F);
    fill_random(s.a, &state, 1);
    fill_random(s.dbias, &state, 1);
    return s;
}

static void score_now(const scored *s) {
    fdma_score_args args = {.size = sizeof args,
                            .v = s->x.v,
                            .dt_proj = s->dt_proj,
                            .a = s->a,
                            .key_valid = s->x.key_valid,
                            .bias = s->bias,
                            .bias_form = s->form,
                            .exec = {.kernel = "reference"}};
    size_t bytes = 0;
    CHECK_OK(fdma_score_workspace(&args, &bytes));
    if (CHECK_INT(bytes, 0)) { /* so that a thousand calls take no memory */
        CHECK_OK(fdma_score(&args));
    }
}

static loss loss_of_score(const void *context) {
    const scored *s = context;
    score_now(s);
    return weighted_sum(s->dbias, s->bias);
}

typedef struct score_gradients {
    fdma_tensor dv, ddt_proj, da;
} score_gradients;

static score_gradients score_backward_of(const scored *s) {
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = s->dbias,
        .v = s->x.v,
        .dt_proj = s->dt_proj,
        .a = s->a,
        .key_valid = s->x.key_valid,
        .dv = copy_tensor(new_tensor(FDMA_FLOAT64, s->x.batch, s->x.kv_len, s->x.kv_heads,
                                     s->x.head_dim)), /* zeros, which are added to */
        .ddt_proj = new_output(FDMA_FLOAT64, s->x.kv_heads, s->x.kv_heads * s->x.head_dim, -1, -1),
        .da = new_output(FDMA_FLOAT64, s->x.kv_heads, -1, -1, -1),
        .bias_form = s->form,
        .exec = {.kernel = "reference"},
    };
    CHECK_OK(run_score_backward(&args));
    return (score_gradients){args.dv, args.ddt_proj, args.da};
}

static void score_backward_is_the_derivative_of_score(void) {
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        for (int form = FDMA_BIAS_EXP; form < FDMA_BIAS_NONE; form++) {
            test_context("%s, form %d", shapes[s].name, form);
            const scored x = scored_of(&shapes[s], (fdma_bias_form)form);
            const score_gradients got = score_backward_of(&x);
            check_differences(loss_of_score, &x, x.x.v, got.dv);
            check_differences(loss_of_score, &x, x.dt_proj, got.ddt_proj);
            check_differences(loss_of_score, &x, x.a, got.da);
            test_free_all();
        }
    }
}

/* ---- all in one call ---- */

typedef struct whole_loss {
    scored s;
    forward_loss f;
} whole_loss;

/* With the selection held. */
static loss loss_of_whole(const void *context) {
    const whole_loss *w = context;
    score_now(&w->s);
    return loss_of_forward(&w->f);
}

static fdma_attention_backward_args whole_args(const whole_loss *w) {
    const problem *x = &w->s.x;
    const gradient_problem *p = w->f.p;
    const int64_t heads = x->kv_heads, width = heads * x->head_dim;
    return (fdma_attention_backward_args){
        .size = sizeof(fdma_attention_backward_args),
        .dout = p->dout,
        .dlse = p->dlse,
        .out = p->out,
        .lse = p->lse,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .dt_proj = w->s.dt_proj,
        .a = w->s.a,
        .key_valid = x->key_valid,
        .dq = new_output(FDMA_FLOAT64, x->batch, x->q_len, x->q_heads, x->head_dim),
        .dk = new_output(FDMA_FLOAT64, x->batch, x->kv_len, heads, x->head_dim),
        .dv = new_output(FDMA_FLOAT64, x->batch, x->kv_len, heads, x->head_dim),
        .ddt_proj = new_output(FDMA_FLOAT64, heads, width, -1, -1),
        .da = new_output(FDMA_FLOAT64, heads, -1, -1, -1),
        .selection = &x->selection,
        .scale = x->scale,
        .softcap = x->softcap,
        .bias_form = w->s.form,
        .causal = x->causal,
        .exec = {.kernel = "reference"},
    };
}

/* Selects by the scores, so that this is what fdma_attention() does, and attends. */
static void attend_whole(whole_loss *w, gradient_problem *p, int with_dlse) {
    problem *x = &w->s.x;
    fdma_attention_args args = {
        .size = sizeof args,
        .q = x->q,
        .k = x->k,
        .v = x->v,
        .dt_proj = w->s.dt_proj,
        .a = w->s.a,
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
    };
    CHECK_OK(run_attention(&args));
    score_now(&w->s);
    CHECK(same_tensor(w->s.bias, args.bias));
    x->bias = w->s.bias; /* forward reads what score writes */
    *p = gradient_of(x, with_dlse);
    CHECK(same_tensor(p->out, args.out) && same_tensor(p->lse, args.lse));
    w->f = (forward_loss){.p = p, .args = problem_args(x, "reference")};
    w->f.args.lse = new_output(FDMA_FLOAT64, x->batch, x->q_heads, x->q_len, -1);
    CHECK_OK(run_forward(&w->f.args));
}

static void check_whole(const shape *n, fdma_bias_form form) {
    whole_loss w = {.s = scored_of(n, form)};
    gradient_problem p;
    attend_whole(&w, &p, n->with_dlse);
    fdma_attention_backward_args args = whole_args(&w);
    CHECK_OK(run_attention_backward(&args));
    check_differences(loss_of_whole, &w, w.s.x.q, args.dq);
    check_differences(loss_of_whole, &w, w.s.x.k, args.dk);
    check_differences(loss_of_whole, &w, w.s.x.v, args.dv);
    check_differences(loss_of_whole, &w, w.s.dt_proj, args.ddt_proj);
    check_differences(loss_of_whole, &w, w.s.a, args.da);
    /* The bias that forward made, instead of one computed again: the same. */
    score_now(&w.s);
    fdma_attention_backward_args given = whole_args(&w);
    given.bias = w.s.bias;
    CHECK_OK(run_attention_backward(&given));
    CHECK(same_tensor(given.dq, args.dq) && same_tensor(given.dv, args.dv));
    CHECK(same_tensor(given.ddt_proj, args.ddt_proj) && same_tensor(given.da, args.da));
}

static void attention_backward_is_the_derivative_of_attention(void) {
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        for (int form = FDMA_BIAS_EXP; form < FDMA_BIAS_NONE && shapes[s].window >= 0; form++) {
            test_context("%s, form %d", shapes[s].name, form);
            check_whole(&shapes[s], (fdma_bias_form)form);
            test_free_all();
        }
    }
}

/* Scores that only rank have no gradient; v, k and q have. */
static void ranking_alone_has_no_gradient(void) {
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        if (shapes[s].window < 0 || shapes[s].with_bias == 0) {
            continue;
        }
        test_context("%s", shapes[s].name);
        whole_loss w = {.s = scored_of(&shapes[s], FDMA_BIAS_NONE)};
        w.s.x.bias = (fdma_tensor){0};
        gradient_problem p = gradient_of(&w.s.x, 1);
        w.f.p = &p;
        fdma_attention_backward_args args = whole_args(&w);
        args.ddt_proj = args.da = (fdma_tensor){0};
        CHECK_OK(run_attention_backward(&args));
        const gradients want = gradient_run(&p, "reference", 1);
        CHECK(same_tensor(args.dq, want.dq) && same_tensor(args.dk, want.dk));
        CHECK(same_tensor(args.dv, want.dv));
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(backward_is_the_derivative_of_forward),
    TEST(the_formula_of_the_tests_is_the_references),
    TEST(score_backward_is_the_derivative_of_score),
    TEST(attention_backward_is_the_derivative_of_attention),
    TEST(ranking_alone_has_no_gradient),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
