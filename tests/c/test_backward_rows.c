/* test_backward_rows.c - every CPU kernel's gradients against the reference's, over random shapes
 * and options; and that neither the number of threads nor the neighbours in the batch show. */
#include "gradient.h"
#include "unread.h"

typedef struct backward_problem {
    gradient_problem p;
    int has_dbias, accumulate;
} backward_problem;

static const char *const gradient_names[] = {"dq", "dk", "dv", "dbias"};

static fdma_tensor gradient_at(const gradients *all, int n) {
    const fdma_tensor tensors[] = {all->dq, all->dk, all->dv, all->dbias};
    return tensors[n];
}

static gradients run_gradients(const backward_problem *y, const char *kernel, int32_t threads) {
    const problem *const x = &y->p.x;
    fdma_backward_args args = gradient_args(&y->p, kernel);
    const fdma_tensor added_to[] = {args.dq, args.dk, args.dv};
    uint64_t state = 99;
    for (int n = 0; n < TEST_COUNT(added_to) && y->accumulate; n++)
        fill_random(added_to[n], &state, 1);
    args.dbias = y->has_dbias ? new_output(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1)
                              : (fdma_tensor){0};
    args.accumulate = y->accumulate;
    args.exec.threads = threads;
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

static int64_t pick(uint64_t *state, const int64_t *from, int count) {
    return from[random_below(state, count)];
}

/* Out and lse by `kernel`, and their dout. */
static void give_forward(gradient_problem *p, const char *kernel, uint64_t *state) {
    const attended done = problem_attend(&p->x, kernel, 1);
    p->out = done.out;
    p->lse = done.lse;
    p->dout = copy_tensor(p->x.q);
    fill_random(p->dout, state, 1);
}

static backward_problem random_problem(uint64_t *state, fdma_dtype dtype) {
    static const int64_t lengths[] = {1, 2, 7, 33, 64, 130, 257, 300, 511};
    static const int64_t dims[] = {8, 16, 24, 40, 64, 72, 96, 128, 136};
    static const int64_t groups[] = {1, 1, 2, 3, 4, 8};
    backward_problem y = {.accumulate = random_below(state, 4) == 0,
                          .has_dbias = random_below(state, 4) != 0};
    problem *const x = &y.p.x;
    x->dtype = dtype;
    x->batch = 1 + random_below(state, 2);
    x->kv_heads = 1 + random_below(state, 2);
    x->q_heads = x->kv_heads * pick(state, groups, TEST_COUNT(groups));
    x->head_dim = pick(state, dims, TEST_COUNT(dims));
    x->kv_len = pick(state, lengths, TEST_COUNT(lengths));
    x->q_len = random_below(state, 3) ? x->kv_len : 1 + random_below(state, x->kv_len);
    x->causal = random_below(state, 4) != 0;
    x->scope = x->causal && random_below(state, 3) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    x->window = random_below(state, 3) ? 1 + random_below(state, x->kv_len + 5) : -1;
    x->softcap = random_below(state, 4) ? 0 : 1.5;
    problem_fill(x, random_bits(state));
    if (random_below(state, 3) == 0) {
        x->key_valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
        for (int64_t j = 0; j < count_of(x->key_valid); j++)
            ((uint8_t *)x->key_valid.data)[j] = random_below(state, 5) != 0;
    }
    problem_select(x);
    if (random_below(state, 5) == 0)
        x->bias = (fdma_tensor){0};
    give_forward(&y.p, "reference", state);
    if (random_below(state, 2)) {
        y.p.dlse = copy_tensor(y.p.lse);
        fill_random(y.p.dlse, state, 1);
    }
    return y;
}

/* Within a share of the largest gradient: float32 rounds sums of at most some thousand terms in
 * another order; 16-bit kernels round probabilities and their gradients, and out and lse have been
 * rounded alike for both. */
static void check_gradients(const backward_problem *y, const gradients *got,
                            const gradients *want) {
    const double share =
        y->p.x.dtype == FDMA_FLOAT32 ? 256 * (double)FLT_EPSILON : 4 * step_of(y->p.x.dtype);
    for (int n = 0; n < 3 + y->has_dbias; n++) {
        const fdma_tensor a = gradient_at(got, n), b = gradient_at(want, n);
        double most = 0, worst = 0;
        for (int64_t i = 0; i < count_of(b); i++)
            most = fmax(most, fabs(load_double(b.data, b.dtype, i)));
        for (int64_t i = 0; i < count_of(b); i++) {
            const double error =
                fabs(load_double(a.data, a.dtype, i) - load_double(b.data, b.dtype, i));
            worst = error <= worst ? worst : error; /* NaN stays */
        }
        if (!CHECK(worst <= share * fmax(most, 1)))
            printf("    %s: error %g of %g\n", gradient_names[n], worst, most);
    }
}

static void check_one(const backward_problem *y, const char *kernel, const gradients *want) {
    const gradients got = run_gradients(y, kernel, 1);
    check_gradients(y, &got, want);
    const gradients more = run_gradients(y, kernel, 3);
    check_same_gradients(more, got);
    if (y->accumulate)
        return; /* what it is added to differs */
    const backward_problem alone = {.p = last_gradient_problem(&y->p), .has_dbias = y->has_dbias};
    check_same_gradients(run_gradients(&alone, kernel, 2), last_gradients(got));
}

static int takes(const char *kernel, fdma_dtype dtype) {
    return operation_takes("backward", kernel, dtype) && strcmp(kernel, "reference") != 0;
}

static void gradients_are_the_references(void) {
    enum { rounds = 60 };
    uint64_t state = 5;
    const char *const only = getenv("FDMA_TEST_KERNEL");
    for (int round = 0; round < rounds; round++) {
        const fdma_dtype dtype = problem_dtypes[round % problem_dtype_count];
        const kernel_list kernels = kernels_for("backward", dtype);
        const backward_problem y = random_problem(&state, dtype);
        const gradients want = run_gradients(&y, "reference", 1);
        for (int n = 0; n < kernels.count; n++) {
            const problem *const x = &y.p.x;
            if (!takes(kernels.name[n], dtype) || (only && strcmp(only, kernels.name[n]) != 0))
                continue;
            test_context("round %d %s %s b%d h%d g%d d%d q%d kv%d w%d causal %d scope %d cap %g "
                         "dbias %d add %d",
                         round, kernels.name[n], dtype_name(dtype), (int)x->batch, (int)x->q_heads,
                         (int)x->kv_heads, (int)x->head_dim, (int)x->q_len, (int)x->kv_len,
                         (int)x->window, x->causal, (int)x->scope, x->softcap, y.has_dbias,
                         y.accumulate);
            check_one(&y, kernels.name[n], &want);
        }
        test_free_all();
    }
}

/* NaN and infinities in keys that no query keeps reach no gradient; their own are 0. */
static void unread_keys_do_not_show(void) {
    static const float poisons[] = {NAN, INFINITY};
    for (int n = 0; n < kernel_limit * problem_dtype_count; n++) {
        const fdma_dtype dtype = problem_dtypes[n / kernel_limit];
        const kernel_list kernels = kernels_for("backward", dtype);
        if (n % kernel_limit >= kernels.count)
            continue;
        const char *const kernel = kernels.name[n % kernel_limit];
        for (int s = 0; s < TEST_COUNT(unread_shapes) && takes(kernel, dtype); s++) {
            uint64_t state = 3;
            test_context("%s %s, shape %d", kernel, dtype_name(dtype), s);
            backward_problem y = {.p.x = unread_problem(&unread_shapes[s], dtype), .has_dbias = 1};
            give_forward(&y.p, kernel, &state);
            const gradients clean = run_gradients(&y, kernel, 1);
            for (int p = 0; p < TEST_COUNT(poisons); p++) {
                CHECK(poison_unread(&y.p.x, poisons[p]) > 0);
                check_same_gradients(run_gradients(&y, kernel, 1), clean);
            }
            for (int64_t i = 0; i < count_of(clean.dbias); i++) {
                const int64_t j = i % y.p.x.kv_len, g = i / y.p.x.kv_len % y.p.x.kv_heads;
                const int64_t b = i / y.p.x.kv_len / y.p.x.kv_heads;
                if (!is_read(&y.p.x, b, g, j))
                    CHECK(((const float *)clean.dbias.data)[i] == 0);
            }
            test_free_all();
        }
    }
}

/* A damaged selection gives wrong numbers; the guards and the sanitizers see to the rest. */
static void damaged_selections_do_no_harm(void) {
    const kernel_list kernels = kernels_for("backward", FDMA_BFLOAT16); /* which all take */
    uint64_t state = 11;
    for (int n = 0; n < kernels.count; n++) {
        const fdma_dtype dtype =
            takes(kernels.name[n], FDMA_FLOAT32) ? FDMA_FLOAT32 : FDMA_BFLOAT16;
        if (!takes(kernels.name[n], dtype))
            continue;
        test_context("%s", kernels.name[n]);
        backward_problem y = {.p.x = unread_problem(&unread_shapes[12], dtype), .has_dbias = 1};
        give_forward(&y.p, kernels.name[n], &state);
        for (int round = 0; round < 4; round++) {
            static const int32_t wild[] = {INT32_MIN, INT32_MAX, -1, 0, 300, 899, 900, 901};
            for (int64_t i = 0; i < count_of(y.p.x.selection.expiry); i++)
                ((int32_t *)y.p.x.selection.expiry.data)[i] =
                    round % 2 ? (int32_t)random_below(&state, 1000)
                              : wild[random_below(&state, TEST_COUNT(wild))];
            run_gradients(&y, kernels.name[n], 2);
        }
        CHECK(1);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(unread_keys_do_not_show),
    TEST(damaged_selections_do_no_harm),
    TEST(gradients_are_the_references),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
