/* test_backward_shapes.c - every backward kernel of the CPU, in every type that it takes, at shapes
 * where such kernels go wrong: right, and bit-equal whatever must not matter. */
#include "gradient_shapes.h"
#include "unread.h"

typedef void (*property)(const gradient_problem *p, const char *kernel);

/* The reference works in double whatever the type: one is enough, of what is slow. */
static kernel_list backward_kernels(fdma_dtype dtype) {
    kernel_list all = kernels_for("backward", dtype), some = {.count = 0};
    for (int i = 0; i < all.count; i++) {
        if (dtype == FDMA_FLOAT32 || strcmp(all.name[i], "reference") != 0) {
            some.name[some.count++] = all.name[i];
        }
    }
    return some;
}

static void for_each_kernel(void (*run)(const char *kernel, fdma_dtype dtype)) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const kernel_list kernels = backward_kernels(problem_dtypes[type]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            run(kernels.name[kernel], problem_dtypes[type]);
        }
    }
}

static void for_each_shape(property holds) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const fdma_dtype dtype = problem_dtypes[type];
        const kernel_list kernels = backward_kernels(dtype);
        for (int s = 0; s < TEST_COUNT(gradient_shapes) && kernels.count > 0; s++) {
            const problem x = gradient_shape_problem(&gradient_shapes[s], dtype);
            const gradient_problem p = gradient_of(&x, (s + type) % 2);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                test_context("%s %s, %s", kernels.name[kernel], dtype_name(dtype),
                             gradient_shapes[s].name);
                holds(&p, kernels.name[kernel]);
            }
            test_free_all();
        }
    }
}

static void check_right(const gradient_problem *p, const char *kernel) {
    check_expected(p, gradient_run(p, kernel, 1));
}

static void gradients_are_right(void) { for_each_shape(check_right); }

/* Whatever lies in outputs and workspace, and however many share the work. */
static void check_repeats(const gradient_problem *p, const char *kernel) {
    static const unsigned char fills[] = {0xff, 0x00, 0x7f};
    const gradients want = gradient_run(p, kernel, 1);
    for (int run = 0; run < TEST_COUNT(fills); run++) {
        fdma_backward_args args = gradient_args(p, kernel);
        size_t bytes = 0;
        CHECK_OK(fdma_backward_workspace(&args, &bytes));
        exec_alloc(&args.exec, bytes);
        memset(args.exec.workspace, fills[run], bytes);
        memset(args.dq.data, fills[run], bytes_of(args.dq));
        memset(args.dk.data, fills[run], bytes_of(args.dk));
        memset(args.dv.data, fills[run], bytes_of(args.dv));
        memset(args.dbias.data, fills[run], bytes_of(args.dbias));
        CHECK_OK(fdma_backward(&args));
        check_same_gradients(gradient_outputs(&args), want);
    }
    for (int32_t threads = 2; threads <= 5; threads++) {
        check_same_gradients(gradient_run(p, kernel, threads), want);
    }
}

static void runs_and_threads_are_equal(void) { for_each_shape(check_repeats); }

static fdma_tensor last_sequence(fdma_tensor tensor) {
    if (tensor.rank > 0) {
        tensor.data = (char *)tensor.data +
                      (size_t)((tensor.shape[0] - 1) * tensor.stride[0]) * dtype_size(tensor.dtype);
        tensor.shape[0] = 1;
    }
    return tensor;
}

static void check_alone(const gradient_problem *p, const char *kernel) {
    if (p->x.batch < 2) {
        return;
    }
    gradient_problem alone = *p;
    fdma_tensor *const tensors[] = {&alone.x.q,
                                    &alone.x.k,
                                    &alone.x.v,
                                    &alone.x.bias,
                                    &alone.x.key_valid,
                                    &alone.x.selection.expiry,
                                    &alone.x.selection.slot,
                                    &alone.out,
                                    &alone.lse,
                                    &alone.dout,
                                    &alone.dlse};
    alone.x.batch = 1;
    for (int i = 0; i < TEST_COUNT(tensors); i++) {
        *tensors[i] = last_sequence(*tensors[i]);
    }
    const gradients all = gradient_run(p, kernel, 2);
    const gradients want = {last_sequence(all.dq), last_sequence(all.dk), last_sequence(all.dv),
                            last_sequence(all.dbias)};
    check_same_gradients(gradient_run(&alone, kernel, 2), want);
}

static void each_sequence_is_alone(void) { for_each_shape(check_alone); }

/* ---- accumulate ---- */

/* held + gradient, which each are off by a rounding where that is by itself. */
static void check_added(fdma_tensor sum, fdma_tensor held, fdma_tensor alone) {
    const double step = step_of(sum.dtype);
    for (int64_t i = 0; i < count_of(sum); i++) {
        const double x = load_double(held.data, held.dtype, i);
        const double y = load_double(alone.data, alone.dtype, i);
        CHECK_NEAR(load_double(sum.data, sum.dtype, i), x + y,
                   step * (fabs(x + y) + fabs(y)) + 2 * gradient_floor(sum.dtype));
    }
}

static void check_accumulated(const gradient_problem *p, const char *kernel) {
    uint64_t state = 3;
    const gradients alone = gradient_run(p, kernel, 1);
    fdma_backward_args args = gradient_args(p, kernel);
    fdma_tensor held[3] = {args.dq, args.dk, args.dv};
    for (int i = 0; i < 3; i++) {
        fill_random(held[i], &state, 1);
        held[i] = copy_tensor(held[i]);
    }
    args.accumulate = 1;
    CHECK_OK(run_backward(&args));
    check_added(args.dq, held[0], alone.dq);
    check_added(args.dk, held[1], alone.dk);
    check_added(args.dv, held[2], alone.dv);
    CHECK(same_tensor(args.dbias, alone.dbias)); /* never added to */
}

static void gradients_accumulate(void) { for_each_shape(check_accumulated); }

/* ---- outputs that are not asked for, inputs that are not there ---- */

static void check_optional(const gradient_problem *p, const char *kernel) {
    const gradients want = gradient_run(p, kernel, 1);
    fdma_backward_args args = gradient_args(p, kernel);
    args.dbias = (fdma_tensor){0};
    CHECK_OK(run_backward(&args));
    CHECK(same_tensor(args.dq, want.dq) && same_tensor(args.dk, want.dk));
    CHECK(same_tensor(args.dv, want.dv));

    /* Without bias it still has a gradient. */
    gradient_problem without = *p;
    without.x.bias = (fdma_tensor){0};
    const attended done = gradient_forward(&without.x);
    without.out = done.out;
    without.lse = done.lse;
    fdma_backward_args plain = gradient_args(&without, kernel);
    plain.dbias = new_output(FDMA_FLOAT32, p->x.batch, p->x.kv_heads, p->x.kv_len, -1);
    CHECK_OK(run_backward(&plain));
    check_expected(&without, gradient_outputs(&plain));
}

static void bias_and_its_gradient_are_optional(void) { for_each_shape(check_optional); }

/* ---- strides ---- */

/* The same elements of a rank 4 tensor as [batch, heads, len, head_dim] in memory. */
static fdma_tensor swap_axes(fdma_tensor tensor) {
    const int64_t len = tensor.shape[1], heads = tensor.shape[2], dim = tensor.shape[3];
    const size_t row = (size_t)dim * dtype_size(tensor.dtype);
    fdma_tensor swapped = copy_tensor(tensor);
    for (int64_t at = 0; at < tensor.shape[0] * len * heads; at++) {
        const int64_t b = at / len / heads, j = at / heads % len, g = at % heads;
        memcpy((char *)swapped.data + (size_t)((b * heads + g) * len + j) * row,
               (char *)tensor.data + (size_t)at * row, row);
    }
    swapped.stride[1] = dim;
    swapped.stride[2] = len * dim;
    return swapped;
}

/* Room for the same elements with others between them: rows of the last axis `gap` apart more than
 * they are long. */
static fdma_tensor with_gaps(fdma_tensor tensor, int64_t gap) {
    const int last = tensor.rank - 1;
    if (tensor.rank == 0) {
        return tensor;
    }
    const int64_t row = tensor.shape[last] + gap;
    int64_t count = row;
    for (int axis = last - 1; axis >= 0; axis--) {
        tensor.stride[axis] = count;
        count *= tensor.shape[axis];
    }
    const size_t bytes = (size_t)count * dtype_size(tensor.dtype);
    tensor.data = test_alloc_guarded(bytes);
    memset(tensor.data, test_guard_byte, bytes);
    return tensor;
}

static void copy_row(fdma_tensor to, fdma_tensor from, int64_t row) {
    const int last = to.rank - 1;
    int64_t at_to = 0, at_from = 0, left = row;
    for (int axis = last - 1; axis >= 0; axis--) {
        at_to += left % to.shape[axis] * to.stride[axis];
        at_from += left % to.shape[axis] * from.stride[axis];
        left /= to.shape[axis];
    }
    const size_t size = dtype_size(to.dtype);
    memcpy((char *)to.data + (size_t)at_to * size, (char *)from.data + (size_t)at_from * size,
           (size_t)to.shape[last] * size);
}

static int64_t rows_of(fdma_tensor tensor) {
    return count_of(tensor) > 0 ? count_of(tensor) / tensor.shape[tensor.rank - 1] : 0;
}

static fdma_tensor gapped(fdma_tensor tensor, int64_t gap) {
    const fdma_tensor to = with_gaps(tensor, gap);
    for (int64_t row = 0; row < rows_of(tensor); row++) {
        copy_row(to, tensor, row);
    }
    return to;
}

static void check_gapped(fdma_tensor actual, fdma_tensor want, int64_t gap) {
    const fdma_tensor copy = copy_tensor(want);
    for (int64_t row = 0; row < rows_of(want); row++) {
        copy_row(copy, actual, row);
    }
    CHECK_BYTES(copy.data, want.data, bytes_of(want));
    /* What lies between the rows is as it was. */
    const size_t size = dtype_size(want.dtype);
    const int64_t length = want.rank > 0 ? want.shape[want.rank - 1] : 0;
    for (int64_t at = 0; at < rows_of(want) * (length + gap) * (int64_t)size; at++) {
        if (at / (int64_t)size % (length + gap) >= length) {
            CHECK(((unsigned char *)actual.data)[at] == test_guard_byte);
        }
    }
}

static void check_layouts(const gradient_problem *p, const char *kernel) {
    enum { gap = 24 }; /* elements: 16-byte rows stay aligned */
    const gradients want = gradient_run(p, kernel, 1);
    gradient_problem other = *p;
    fdma_tensor *const swapped[] = {&other.x.q, &other.x.k, &other.x.v, &other.out, &other.dout};
    for (int i = 0; i < TEST_COUNT(swapped); i++) {
        *swapped[i] = swap_axes(*swapped[i]);
    }
    check_same_gradients(gradient_run(&other, kernel, 1), want);

    fdma_tensor *const spread[] = {
        &other.x.bias,           &other.x.key_valid, &other.x.selection.expiry,
        &other.x.selection.slot, &other.lse,         &other.dlse};
    for (int i = 0; i < TEST_COUNT(spread); i++) {
        *spread[i] = gapped(*spread[i], 3);
    }
    fdma_backward_args args = gradient_args(&other, kernel);
    args.dq = with_gaps(args.dq, gap);
    args.dk = with_gaps(args.dk, gap);
    args.dv = with_gaps(args.dv, gap);
    args.dbias = with_gaps(args.dbias, 5);
    CHECK_OK(run_backward(&args));
    check_gapped(args.dq, want.dq, gap);
    check_gapped(args.dk, want.dk, gap);
    check_gapped(args.dv, want.dv, gap);
    check_gapped(args.dbias, want.dbias, 5);
}

static void memory_order_does_not_matter(void) { for_each_shape(check_layouts); }

/* ---- keys that none keeps ---- */

static void check_zero(fdma_tensor tensor, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; i++) {
        CHECK(load_double(tensor.data, tensor.dtype, i) == 0);
    }
}

static void check_unread_zero(const problem *x, gradients got) {
    for (int64_t key = 0; key < x->batch * x->kv_heads * x->kv_len; key++) {
        const int64_t j = key % x->kv_len, g = key / x->kv_len % x->kv_heads;
        const int64_t b = key / x->kv_len / x->kv_heads;
        const int64_t row = ((b * x->kv_len + j) * x->kv_heads + g) * x->head_dim;
        if (!is_read(x, b, g, j)) {
            check_zero(got.dk, row, x->head_dim);
            check_zero(got.dv, row, x->head_dim);
            check_zero(got.dbias, key, 1);
        }
    }
}

static void check_unread(const unread_shape *n, const char *kernel, fdma_dtype dtype) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    problem x = unread_problem(n, dtype);
    const gradient_problem p = gradient_of(&x, 1);
    const gradients clean = gradient_run(&p, kernel, 1);
    check_unread_zero(&x, clean);
    for (int64_t i = 0; i < count_of(clean.dq); i++) {
        CHECK(isfinite(load_double(clean.dq.data, dtype, i)));
    }
    for (int i = 0; i < TEST_COUNT(poisons); i++) {
        CHECK(poison_unread(&x, poisons[i]) > 0); /* else nothing is shown */
        check_same_gradients(gradient_run(&p, kernel, 2), clean);
    }
}

static void check_unread_shapes(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_shapes); s++) {
        test_context("%s %s, shape %d", kernel, dtype_name(dtype), s);
        check_unread(&unread_shapes[s], kernel, dtype);
        test_free_all();
    }
}

static void unread_keys_do_not_show(void) { for_each_kernel(check_unread_shapes); }

/* The same poison in a key that is read shows. */
static void check_read_shows(const char *kernel, fdma_dtype dtype) {
    test_context("%s %s", kernel, dtype_name(dtype));
    problem x = unread_problem(&unread_shapes[0], dtype);
    const gradient_problem p = gradient_of(&x, 1);
    const gradients clean = gradient_run(&p, kernel, 1);
    int64_t j = 0;
    while (j < x.kv_len && !is_read(&x, 0, 0, j)) {
        j++;
    }
    if (CHECK(j < x.kv_len)) {
        spoil_key(x.v, 0, j, 0, NAN);
        CHECK(!same_tensor(gradient_run(&p, kernel, 1).dq, clean.dq));
    }
    test_free_all();
}

static void read_keys_show(void) { for_each_kernel(check_read_shows); }

/* ---- rows that are NaN ---- */

/* A row whose lse is NaN has no finite gradient, and gives none to the keys that it keeps; to others
 * it is as if it were not there. */
static void check_nan_row(const gradient_problem *p, const char *kernel) {
    const problem *x = &p->x;
    const int64_t i = 2 * x->q_len / 3, h = x->q_heads - 1, g = x->kv_heads - 1, dim = x->head_dim;
    const gradients clean = gradient_run(p, kernel, 1);
    gradient_problem spoilt = *p;
    spoilt.lse = copy_tensor(p->lse);
    spoilt.out = copy_tensor(p->out);
    ((float *)spoilt.lse.data)[h * x->q_len + i] = NAN;
    for (int64_t d = 0; d < dim; d++) {
        store_float(spoilt.out.data, x->dtype, (i * x->q_heads + h) * dim + d, NAN);
    }
    const gradients got = gradient_run(&spoilt, kernel, 1);
    for (int64_t j = 0; j < x->kv_len; j++) {
        const int kept = problem_keeps(x, 0, g, i, j);
        for (int64_t d = 0; d < dim; d++) {
            const int64_t at = (j * x->kv_heads + g) * dim + d;
            CHECK(isnan(load_double(got.dk.data, x->dtype, at)) == kept);
            CHECK(isnan(load_double(got.dv.data, x->dtype, at)) == kept);
        }
        CHECK(isnan(((const float *)got.dbias.data)[g * x->kv_len + j]) == kept);
    }
    for (int64_t at = 0; at < x->q_len * x->q_heads * dim; at++) {
        const int same = at / dim != i * x->q_heads + h;
        const double now = load_double(got.dq.data, x->dtype, at);
        CHECK(same ? now == load_double(clean.dq.data, x->dtype, at) : isnan(now));
    }
}

static void check_nan_rows(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < 5; s++) {
        test_context("%s %s, %s", kernel, dtype_name(dtype), gradient_shapes[s].name);
        const problem x = gradient_shape_problem(&gradient_shapes[s], dtype);
        const gradient_problem p = gradient_of(&x, 1);
        check_nan_row(&p, kernel);
        test_free_all();
    }
}

static void nan_rows_stay_with_their_keys(void) { for_each_kernel(check_nan_rows); }

static const test_entry tests[] = {
    TEST(gradients_are_right),
    TEST(runs_and_threads_are_equal),
    TEST(each_sequence_is_alone),
    TEST(gradients_accumulate),
    TEST(bias_and_its_gradient_are_optional),
    TEST(memory_order_does_not_matter),
    TEST(unread_keys_do_not_show),
    TEST(read_keys_show),
    TEST(nan_rows_stay_with_their_keys),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
