/* test_merge.c - attention over two sets of keys, merged, equals attention over all keys, and so do
 * its gradients. Partial results may be empty, NaN, or far apart. */
#include "differences.h"
#include "gradient.h"

/* The keys before `cut`, all of them visible, and the keys from `cut` on. Those are masked as in
 * the whole: their last key is at the last query's position. */
typedef struct split {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim, cut;
    int causal;
} split;

static const split splits[] = {
    {2, 20, 60, 4, 2, 24, 23, 0}, {1, 30, 60, 3, 1, 64, 30, 1},
    {1, 30, 60, 2, 2, 8, 31, 1}, /* the later result is empty for the first query */
    {2, 7, 33, 8, 1, 40, 1, 0},   {1, 1, 70, 4, 4, 128, 69, 1},
};

static problem whole_of(const split *n, fdma_dtype dtype) {
    problem x = {.batch = n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = -1,
                 .causal = n->causal,
                 .dtype = dtype};
    problem_fill(&x, 31);
    return x;
}

/* Keys `first` to `end` - 1 of a [batch, kv_len, ...] or [batch, kv_heads, kv_len] tensor. */
static fdma_tensor cut_tensor(fdma_tensor tensor, int64_t first, int64_t end) {
    const int axis = tensor.rank == 4 ? 1 : 2;
    tensor.data =
        (char *)tensor.data + (size_t)(first * tensor.stride[axis]) * dtype_size(tensor.dtype);
    tensor.shape[axis] = end - first;
    return tensor;
}

static problem partial_of(const problem *x, int64_t first, int64_t end) {
    problem partial = *x;
    partial.kv_len = end - first;
    partial.k = cut_tensor(x->k, first, end);
    partial.v = cut_tensor(x->v, first, end);
    partial.bias = cut_tensor(x->bias, first, end);
    partial.causal = x->causal && end == x->kv_len;
    return partial;
}

static fdma_merge_args merge_args(attended a, attended b, const char *kernel) {
    return (fdma_merge_args){
        .size = sizeof(fdma_merge_args),
        .out_a = a.out,
        .lse_a = a.lse,
        .out_b = b.out,
        .lse_b = b.lse,
        .out =
            new_output(a.out.dtype, a.out.shape[0], a.out.shape[1], a.out.shape[2], a.out.shape[3]),
        .lse = new_output(a.lse.dtype, a.lse.shape[0], a.lse.shape[1], a.lse.shape[2], -1),
        .exec = {.kernel = kernel},
    };
}

static fdma_merge_backward_args merge_backward_args(attended a, attended b, fdma_tensor dout,
                                                    fdma_tensor dlse, const char *kernel) {
    const fdma_merge_args room_a = merge_args(a, b, kernel), room_b = merge_args(a, b, kernel);
    return (fdma_merge_backward_args){
        .size = sizeof(fdma_merge_backward_args),
        .dout = dout,
        .dlse = dlse,
        .out_a = a.out,
        .lse_a = a.lse,
        .out_b = b.out,
        .lse_b = b.lse,
        .dout_a = room_a.out,
        .dlse_a = room_a.lse,
        .dout_b = room_b.out,
        .dlse_b = room_b.lse,
        .exec = {.kernel = kernel},
    };
}

static attended merge(attended a, attended b, const char *kernel) {
    fdma_merge_args args = merge_args(a, b, kernel);
    CHECK_OK(run_merge(&args));
    return (attended){args.out, args.lse};
}

/* The tolerance covers the rounding of both partial results and of the merged one. */
static void check_merged(const problem *x, attended actual, attended want) {
    for (int64_t i = 0; i < count_of(want.out); i++) {
        CHECK_NEAR(load_double(actual.out.data, x->dtype, i),
                   load_double(want.out.data, x->dtype, i), 2 * problem_out_tolerance(x));
    }
    for (int64_t i = 0; i < count_of(want.lse); i++) {
        const double lse = load_double(want.lse.data, want.lse.dtype, i);
        CHECK_NEAR(load_double(actual.lse.data, actual.lse.dtype, i), lse,
                   2 * problem_lse_tolerance(x, lse));
    }
}

static void partial_results_merge_to_the_whole(const char *kernel, fdma_dtype dtype) {
    for (int i = 0; i < TEST_COUNT(splits); i++) {
        const split *n = &splits[i];
        const problem x = whole_of(n, dtype);
        const problem early = partial_of(&x, 0, n->cut), late = partial_of(&x, n->cut, n->kv_len);
        const attended a = gradient_forward(&early), b = gradient_forward(&late);
        test_context("%s %s, split %d", kernel, dtype_name(dtype), i);
        check_merged(&x, merge(a, b, kernel), gradient_forward(&x));
        check_merged(&x, merge(b, a, kernel), gradient_forward(&x));
    }
}

/* ---- gradients ---- */

typedef struct merge_loss {
    fdma_merge_args args;
    fdma_tensor dout, dlse;
} merge_loss;

static loss loss_of_merge(const void *context) {
    const merge_loss *m = context;
    CHECK_OK(fdma_merge(&m->args));
    return loss_sum(weighted_sum(m->dout, m->args.out), weighted_sum(m->dlse, m->args.lse));
}

/* Random partial results; some rows of each are empty, with NaN in out. */
static attended random_partial(uint64_t seed, int64_t empty) {
    const attended partial = {new_tensor(FDMA_FLOAT64, 2, 5, 3, 8),
                              new_tensor(FDMA_FLOAT64, 2, 3, 5, -1)};
    fill_random(partial.out, &seed, 1);
    fill_random(partial.lse, &seed, 2);
    for (int64_t row = empty; row < 30; row += 4) {
        const int64_t i = row % 5, h = row / 5 % 3, b = row / 15;
        ((double *)partial.lse.data)[row] = -(double)INFINITY;
        for (int64_t d = 0; d < 8; d++)
            ((double *)partial.out.data)[((b * 5 + i) * 3 + h) * 8 + d] = (double)NAN;
    }
    return partial;
}

static void merge_backward_is_the_derivative_of_merge(void) {
    for (int both = 0; both < 2; both++) { /* 1: rows in which both are empty, too */
        test_context("both partials empty: %d", both);
        const attended a = random_partial(3, 1), b = random_partial(4, both ? 1 : 2);
        uint64_t state = 8;
        merge_loss m = {.args = merge_args(a, b, "reference"),
                        .dout = new_tensor(FDMA_FLOAT64, 2, 5, 3, 8),
                        .dlse = new_tensor(FDMA_FLOAT64, 2, 3, 5, -1)};
        fill_random(m.dout, &state, 1);
        fill_random(m.dlse, &state, 1);
        CHECK_OK(run_merge(&m.args));
        fdma_merge_backward_args got = merge_backward_args(a, b, m.dout, m.dlse, "reference");
        CHECK_OK(run_merge_backward(&got));
        check_differences(loss_of_merge, &m, a.out, got.dout_a);
        check_differences(loss_of_merge, &m, a.lse, got.dlse_a);
        check_differences(loss_of_merge, &m, b.out, got.dout_b);
        check_differences(loss_of_merge, &m, b.lse, got.dlse_b);
        test_free_all();
    }
}

/* Writes the gradients of a range of keys into its rows of the whole's gradients, and adds dq. */
static void add_partial(const gradient_problem *p, const problem *partial, attended done,
                        fdma_tensor dout, fdma_tensor dlse, gradients to, int64_t first) {
    const gradient_problem own = {
        .x = *partial, .out = done.out, .lse = done.lse, .dout = dout, .dlse = dlse};
    const int64_t end = first + partial->kv_len;
    fdma_backward_args args = gradient_args(&own, "reference");
    args.dq = to.dq;
    args.dk = cut_tensor(to.dk, first, end);
    args.dv = cut_tensor(to.dv, first, end);
    args.dbias = cut_tensor(to.dbias, first, end);
    args.accumulate = 1;
    CHECK(p->x.kv_len >= end);
    CHECK_OK(run_backward(&args));
}

static void gradients_of_partials_are_the_wholes(void) {
    for (int s = 0; s < TEST_COUNT(splits); s++) {
        test_context("split %d", s);
        const split *n = &splits[s];
        const problem x = whole_of(n, FDMA_FLOAT64);
        const problem early = partial_of(&x, 0, n->cut), late = partial_of(&x, n->cut, n->kv_len);
        const attended a = gradient_forward(&early), b = gradient_forward(&late);
        const gradient_problem p = gradient_of(&x, 1);
        fdma_merge_backward_args merged = merge_backward_args(a, b, p.dout, p.dlse, "reference");
        CHECK_OK(run_merge_backward(&merged));
        const gradients got = {
            .all = {new_tensor(FDMA_FLOAT64, n->batch, n->q_len, n->q_heads, n->head_dim),
                    copy_tensor(x.k), copy_tensor(x.v), copy_tensor(x.bias)}};
        memset(got.dk.data, 0, bytes_of(got.dk));
        memset(got.dv.data, 0, bytes_of(got.dv));
        add_partial(&p, &early, a, merged.dout_a, merged.dlse_a, got, 0);
        add_partial(&p, &late, b, merged.dout_b, merged.dlse_b, got, n->cut);
        const gradients want = gradient_run(&p, "reference", 1);
        const double relative = (double)(n->kv_len * n->head_dim) * DBL_EPSILON;
        check_near(got.dbias, want.dbias, (double)n->kv_len * (double)FLT_EPSILON);
        for (int t = 0; t < 3; t++)
            check_near(got.all[t], want.all[t], relative);
        test_free_all();
    }
}

/* ---- rows at the edges, of every kernel ---- */

enum { edge_heads = 8, edge_dim = 24 };

/* One query of 8 heads. The out of empty heads is NaN. */
static attended edge_partial(fdma_dtype dtype, uint64_t seed, const float lse[edge_heads]) {
    const attended partial = {new_tensor(dtype, 1, 1, edge_heads, edge_dim),
                              new_tensor(FDMA_FLOAT32, 1, edge_heads, 1, -1)};
    fill_random(partial.out, &seed, 1);
    for (int h = 0; h < edge_heads; h++) {
        ((float *)partial.lse.data)[h] = lse[h];
        for (int64_t d = 0; d < edge_dim && lse[h] == -INFINITY; d++)
            store_float(partial.out.data, dtype, h * edge_dim + d, NAN);
    }
    return partial;
}

static const float edge_lse[2][edge_heads] = {
    {-INFINITY, 3, -INFINITY, NAN, 1000, 2, -INFINITY, NAN},
    {-INFINITY, -INFINITY, -700, 1, -1000, 2, NAN, -INFINITY},
};
static const float edge_merged[edge_heads] = {-INFINITY, 3, -700, NAN, 1000, 2.6931472F, NAN, NAN};
/* The partial result that a head's out comes from; -1: none, 2: half of each, 3: NaN. */
static const int edge_from[edge_heads] = {-1, 0, 1, 3, 0, 2, 3, 3};

static double edge_out(const attended partials[2], int h, int64_t d) {
    const int from = edge_from[h];
    const int64_t at = h * edge_dim + d;
    double sum = 0;
    for (int n = 0; n < 2; n++)
        if (from == n || from == 2)
            sum +=
                load_double(partials[n].out.data, partials[n].out.dtype, at) / (from == 2 ? 2 : 1);
    return sum;
}

static void edges_of_merge(const char *kernel, fdma_dtype dtype) {
    const attended partials[2] = {edge_partial(dtype, 5, edge_lse[0]),
                                  edge_partial(dtype, 6, edge_lse[1])};
    const attended got = merge(partials[0], partials[1], kernel);
    for (int h = 0; h < edge_heads; h++) {
        const double lse = (double)((const float *)got.lse.data)[h];
        if (isnan(edge_merged[h]))
            CHECK(isnan(lse));
        else
            CHECK_NEAR(lse, (double)edge_merged[h], (double)FLT_EPSILON * fabs(lse));
        for (int64_t d = 0; d < edge_dim; d++) {
            const double out = load_double(got.out.data, dtype, h * edge_dim + d);
            if (isnan(edge_merged[h]))
                CHECK(isnan(out));
            else
                CHECK_NEAR(out, edge_out(partials, h, d), 2 * step_of(dtype));
        }
    }
}

static void edges_of_merge_backward(const char *kernel, fdma_dtype dtype) {
    const attended partials[2] = {edge_partial(dtype, 5, edge_lse[0]),
                                  edge_partial(dtype, 6, edge_lse[1])};
    uint64_t state = 7;
    const fdma_tensor dout = new_tensor(dtype, 1, 1, edge_heads, edge_dim);
    fill_random(dout, &state, 1);
    fdma_merge_backward_args args =
        merge_backward_args(partials[0], partials[1], dout, (fdma_tensor){0}, kernel);
    CHECK_OK(run_merge_backward(&args));
    const fdma_tensor douts[2] = {args.dout_a, args.dout_b}, dlses[2] = {args.dlse_a, args.dlse_b};
    for (int at = 0; at < 2 * edge_heads * edge_dim; at++) {
        const int n = at % 2, h = at / 2 / edge_dim, element = at / 2;
        const double got = load_double(douts[n].data, dtype, element);
        const double dlse = (double)((const float *)dlses[n].data)[h];
        const double weight = edge_from[h] == n ? 1 : edge_from[h] == 2 ? 0.5 : 0;
        if (edge_from[h] == 3) {
            CHECK(isnan(got) && isnan(dlse));
        } else {
            CHECK_NEAR(got, weight * load_double(dout.data, dtype, element), step_of(dtype));
            CHECK(weight == 0.5 || fabs(dlse) <= edge_dim * step_of(dtype));
        }
    }
}

static void lse_need_not_be_asked_for(const char *kernel, fdma_dtype dtype) {
    const attended partials[2] = {edge_partial(dtype, 5, edge_lse[0]),
                                  edge_partial(dtype, 6, edge_lse[1])};
    const attended with = merge(partials[0], partials[1], kernel);
    fdma_merge_args args = merge_args(partials[0], partials[1], kernel);
    args.lse = (fdma_tensor){0};
    CHECK_OK(run_merge(&args));
    CHECK(same_tensor(args.out, with.out));
}

static const test_entry tests[] = {
    EACH_KERNEL("merge", partial_results_merge_to_the_whole),
    TEST(merge_backward_is_the_derivative_of_merge),
    TEST(gradients_of_partials_are_the_wholes),
    EACH_KERNEL("merge", edges_of_merge),
    EACH_KERNEL("merge_backward", edges_of_merge_backward),
    EACH_KERNEL("merge", lse_need_not_be_asked_for),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
