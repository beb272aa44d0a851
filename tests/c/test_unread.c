/* test_unread.c - what no query of a call keeps is not read: NaN and infinities in k, v and bias of
 * every key that is never kept, has expired before the first query, or is not valid, do not show in
 * one bit of the results. */
#include "problem.h"

typedef struct shape {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    fdma_scope scope;
    int causal;
    int padded;
} shape;

static const shape shapes[] = {
    {2, 190, 230, 4, 2, 40, 20, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 300, 300, 2, 1, 64, 129, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 70, 400, 6, 2, 8, 33, FDMA_SCOPE_CAUSAL, 1, 1},
    {1, 130, 150, 3, 1, 128, 20, FDMA_SCOPE_GLOBAL, 1, 1},
    {2, 65, 140, 4, 1, 24, 50, FDMA_SCOPE_GLOBAL, 0, 0},
    {1, 1, 260, 8, 2, 64, 17, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 1, 131, 1, 1, 256, 9, FDMA_SCOPE_GLOBAL, 0, 1},
    {1, 5, 70, 5, 1, 72, 1, FDMA_SCOPE_CAUSAL, 1, 0},
    {1, 40, 90, 4, 2, 16, 0, FDMA_SCOPE_CAUSAL, 1, 0},
    {2, 190, 230, 4, 2, 40, -1, FDMA_SCOPE_CAUSAL, 1, 1},
    {1, 65, 120, 3, 3, 24, -1, FDMA_SCOPE_GLOBAL, 0, 1},
    {1, 1, 200, 8, 2, 128, -1, FDMA_SCOPE_CAUSAL, 1, 1},
};

static problem problem_of(const shape *n, fdma_dtype dtype) {
    problem x = {.batch = n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->scope,
                 .causal = n->causal,
                 .dtype = dtype};
    problem_fill(&x, 61);
    if (n->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
        for (int64_t i = 0; i < x.batch * x.kv_len; i++) {
            ((uint8_t *)x.key_valid.data)[i] = i % 7 < 4 && i % x.kv_len > 2;
        }
    }
    problem_select(&x);
    return x;
}

static int is_read(const problem *x, int64_t b, int64_t g, int64_t j) {
    for (int64_t i = 0; i < x->q_len; i++) {
        if (problem_keeps(x, b, g, i, j)) {
            return 1;
        }
    }
    return 0;
}

/* Writes `poison` into the keys that are not read; returns how many there are. */
static int64_t poison_unread(problem *x, float poison) {
    int64_t unread = 0;
    for (int64_t key = 0; key < x->batch * x->kv_heads * x->kv_len; key++) {
        const int64_t j = key % x->kv_len, g = key / x->kv_len % x->kv_heads;
        const int64_t b = key / x->kv_len / x->kv_heads;
        if (!is_read(x, b, g, j)) {
            spoil_key(x->k, b, j, g, poison);
            spoil_key(x->v, b, j, g, poison);
            ((float *)x->bias.data)[key] = poison;
            unread++;
        }
    }
    return unread;
}

/* The poison has to be there in every type. */
static void every_type_has_poison(void) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const fdma_dtype dtype = problem_dtypes[type];
        void *const data = test_alloc(3 * dtype_size(dtype));
        test_context("%s", dtype_name(dtype));
        store_float(data, dtype, 0, NAN);
        store_float(data, dtype, 1, INFINITY);
        store_float(data, dtype, 2, -INFINITY);
        CHECK(isnan(load_double(data, dtype, 0)));
        CHECK(load_double(data, dtype, 1) == (double)INFINITY);
        CHECK(load_double(data, dtype, 2) == -(double)INFINITY);
    }
}

static void check_unread(const shape *n, fdma_dtype dtype, const char *kernel) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    problem x = problem_of(n, dtype);
    const attended clean = problem_attend(&x, kernel, 1);
    for (int64_t i = 0; i < count_of(clean.lse); i++) {
        CHECK(!isnan(((const float *)clean.lse.data)[i]));
    }
    for (int p = 0; p < TEST_COUNT(poisons); p++) {
        CHECK(poison_unread(&x, poisons[p]) > 0); /* else nothing is shown */
        check_same_results(problem_attend(&x, kernel, 1), clean);
    }
}

static void unread_keys_do_not_show(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int type = 0; type < problem_dtype_count; type++) {
            for (int s = 0; s < TEST_COUNT(shapes); s++) {
                test_context("%s %s, shape %d", kernels.name[kernel],
                             dtype_name(problem_dtypes[type]), s);
                check_unread(&shapes[s], problem_dtypes[type], kernels.name[kernel]);
                test_free_all();
            }
        }
    }
}

/* The same poison in one key that is read changes the results. */
static void read_keys_show(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        problem x = problem_of(&shapes[0], FDMA_FLOAT32);
        const attended clean = problem_attend(&x, kernels.name[kernel], 1);
        int64_t j = 0;
        while (j < x.kv_len && !is_read(&x, 0, 0, j)) {
            j++;
        }
        if (CHECK(j < x.kv_len)) {
            spoil_key(x.v, 0, j, 0, NAN);
            CHECK(!same_tensor(problem_attend(&x, kernels.name[kernel], 1).out, clean.out));
        }
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(every_type_has_poison),
    TEST(unread_keys_do_not_show),
    TEST(read_keys_show),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
