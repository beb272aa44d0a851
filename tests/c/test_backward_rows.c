/* test_backward_rows.c - compares every CPU kernel's gradients with the reference's, over random
 * shapes and options. The number of threads and the other sequences of the batch must not change
 * them. */
#include "gradient.h"

typedef struct backward_problem {
    gradient_problem p;
    int has_dbias, accumulate;
} backward_problem;

static gradients run_problem(const backward_problem *y, const char *kernel, int32_t threads) {
    fdma_backward_args args = gradient_args(&y->p, kernel);
    const gradients outputs = gradient_outputs(&args);
    uint64_t state = 99;
    for (int n = 0; n < 3 && y->accumulate; n++)
        fill_random(outputs.all[n], &state, 1);
    args.dbias = y->has_dbias ? args.dbias : (fdma_tensor){0};
    args.accumulate = y->accumulate;
    args.exec.threads = threads;
    CHECK_OK(run_backward(&args));
    return gradient_outputs(&args);
}

static int64_t pick(uint64_t *state, const int64_t *from, int count) {
    return from[random_below(state, count)];
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
    y.p = gradient_of(&y.p.x, (int)random_below(state, 2));
    return y;
}

/* float32 kernels add at most some thousand terms in another order than the reference; 16-bit
 * kernels round probabilities and their gradients. Both get the same out and lse. */
static double share_of(fdma_dtype dtype) {
    return dtype == FDMA_FLOAT32 ? 256 * (double)FLT_EPSILON : 4 * step_of(dtype);
}

static void check_one(const backward_problem *y, const char *kernel, const gradients *want) {
    const gradients got = run_problem(y, kernel, 1);
    for (int t = 0; t < TEST_COUNT(got.all); t++)
        CHECK_NEAR(largest_difference(got.all[t], want->all[t]), 0,
                   share_of(y->p.x.dtype) * fmax(largest_of(want->all[t]), 1));
    check_same_gradients(run_problem(y, kernel, 3), got);
    if (y->accumulate)
        return; // the last sequence is added to other numbers
    const backward_problem alone = {.p = last_gradient_problem(&y->p), .has_dbias = y->has_dbias};
    check_same_gradients(run_problem(&alone, kernel, 2), last_gradients(got));
}

static void gradients_are_the_references(void) {
    const int rounds = test_repeats(60);
    uint64_t state = 5;
    const char *const only = getenv("FDMA_TEST_KERNEL");
    for (int round = 0; round < rounds; round++) {
        const fdma_dtype dtype = test_dtypes[round % test_dtype_count];
        const kernel_list kernels = kernels_for("backward", dtype);
        const backward_problem y = random_problem(&state, dtype);
        const gradients want = run_problem(&y, "reference", 1);
        for (int n = 0; n < kernels.count; n++) {
            const problem *const x = &y.p.x;
            if (strcmp(kernels.name[n], "reference") == 0 ||
                (only && strcmp(only, kernels.name[n]) != 0))
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

static const test_entry tests[] = {
    TEST(gradients_are_the_references),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
