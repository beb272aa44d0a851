/* test_sink_logit.c - a sink logit adds one term without a value to the sum of each row. Compares
 * with the results without it, and with a key whose value is zero and whose bias is the sink
 * logit. */
#include "backend.h"
#include "gradient.h"

static const problem sizes[] = {
    SIZES(2, 70, 70, 4, 2, 64, 20, 1),   SIZES(1, 150, 170, 6, 2, 40, -1, 0),
    SIZES(1, 200, 200, 3, 3, 128, 1, 1), SIZES(2, 1, 300, 8, 2, 128, 50, 1),
    SIZES(1, 30, 20, 2, 2, 24, -1, 1), // the first ten queries see no key
    SIZES(1, 64, 90, 2, 1, 256, 30, 0),
};

/* The sink logits of all query heads: -inf for head 0; the last head's outweighs all keys. */
static fdma_tensor new_sinks(int64_t q_heads) {
    const fdma_tensor sinks = new_tensor(FDMA_FLOAT32, q_heads, -1, -1, -1);
    uint64_t state = 5;
    fill_random(sinks, &state, 3);
    ((float *)sinks.data)[0] = -INFINITY;
    if (q_heads > 1)
        ((float *)sinks.data)[q_heads - 1] = 90;
    return sinks;
}

static float sink_of(fdma_tensor sinks, int64_t h) { return ((const float *)sinks.data)[h]; }

static attended attend_with(const problem *x, const char *kernel, fdma_tensor sinks) {
    fdma_forward_args args = problem_args(x, kernel);
    args.sink_logit = sinks;
    CHECK_OK(run_forward(&args));
    return (attended){args.out, args.lse};
}

static double log_of_sum(double x, double y) {
    const double top = fmax(x, y);
    return top == -(double)INFINITY ? top : top + log(exp(x - top) + exp(y - top));
}

/* ---- forward ---- */

static void check_row(const problem *x, attended with, attended without, double sink, int64_t row) {
    const int64_t i = row % x->q_len, h = row / x->q_len % x->q_heads;
    const int64_t first = ((row / x->q_len / x->q_heads * x->q_len + i) * x->q_heads + h);
    const double old = load_double(without.lse.data, FDMA_FLOAT32, row);
    const double lse = log_of_sum(old, sink), factor = isinf(lse) ? 0 : exp(old - lse);
    CHECK_NEAR(load_double(with.lse.data, FDMA_FLOAT32, row), lse, problem_lse_tolerance(x, lse));
    for (int64_t at = first * x->head_dim; at < (first + 1) * x->head_dim; at++) {
        const double out = load_double(without.out.data, x->dtype, at);
        CHECK_NEAR(load_double(with.out.data, x->dtype, at), factor * out,
                   problem_out_tolerance(x));
        if (sink == -(double)INFINITY)
            CHECK(load_double(with.out.data, x->dtype, at) == out);
    }
}

static void adds_a_term_to_each_row(problem *x, const char *kernel) {
    if (!problem_is_taken(x, kernel))
        return;
    const fdma_tensor sinks = new_sinks(x->q_heads);
    const attended with = attend_with(x, kernel, sinks);
    const attended without = problem_attend(x, kernel, 1);
    for (int64_t row = 0; row < count_of(with.lse); row++)
        check_row(x, with, without, (double)sink_of(sinks, row / x->q_len % x->q_heads), row);
}

/* Sinks whose exponentials no float32 sum holds, and infinities and NaN. */
static void takes_any_number(problem *x, const char *kernel) {
    static const float extremes[] = {1e30F, -1e30F, 2e38F, -2e38F, INFINITY, NAN};
    if (!problem_is_taken(x, kernel))
        return;
    const fdma_tensor sinks = new_tensor(FDMA_FLOAT32, x->q_heads, -1, -1, -1);
    const attended without = problem_attend(x, kernel, 1);
    for (int n = 0; n < TEST_COUNT(extremes); n++) {
        const float sink = extremes[n];
        for (int64_t h = 0; h < x->q_heads; h++)
            ((float *)sinks.data)[h] = h % 2 == 0 ? sink : -INFINITY;
        const attended with = attend_with(x, kernel, sinks);
        for (int64_t at = 0; at < count_of(with.out); at++) {
            const int64_t h = at / x->head_dim % x->q_heads;
            const double out = load_double(with.out.data, x->dtype, at);
            const double old = load_double(without.out.data, x->dtype, at);
            const bool is_nan = isnan(sink) || sink == INFINITY;
            if (h % 2 == 0 && is_nan)
                CHECK(isnan(out));
            else
                CHECK(out == (h % 2 == 0 && sink > 0 ? 0 : old));
        }
        for (int64_t row = 0; row < count_of(with.lse); row++) {
            const float lse = ((const float *)with.lse.data)[row];
            const float old = ((const float *)without.lse.data)[row];
            if (row / x->q_len % x->q_heads % 2 == 1 || (sink < 0 && old != -INFINITY))
                CHECK(lse == old);
            else if (isnan(sink) || sink == INFINITY)
                CHECK(isnan(lse));
            else
                CHECK_NEAR((double)lse, (double)sink, (double)(FLT_EPSILON * fabsf(sink)));
        }
    }
}

static const problem halved = SIZES(1, 40, 130, 4, 2, 64, -1, 0);

static void belongs_to_one_of_merged_halves(problem *x, const char *kernel) {
    problem half = *x;
    if (!problem_is_taken(x, kernel))
        return;
    const fdma_tensor sinks = new_sinks(x->q_heads);
    attended done[2];
    half.kv_len = x->kv_len / 2;
    for (int n = 0; n < 2; n++) {
        const int64_t first = n * half.kv_len * x->kv_heads * x->head_dim;
        half.k.data = (char *)x->k.data + (size_t)first * dtype_size(x->dtype);
        half.v.data = (char *)x->v.data + (size_t)first * dtype_size(x->dtype);
        half.bias.data = (float *)x->bias.data + n * half.kv_len;
        half.k.shape[1] = half.v.shape[1] = half.bias.shape[2] = half.kv_len;
        done[n] = n == 0 ? attend_with(&half, kernel, sinks) : problem_attend(&half, kernel, 1);
    }
    const attended whole = attend_with(x, kernel, sinks);
    fdma_merge_args merge = {
        .size = sizeof merge,
        .out_a = done[0].out,
        .lse_a = done[0].lse,
        .out_b = done[1].out,
        .lse_b = done[1].lse,
        .out = new_output(x->dtype, x->batch, x->q_len, x->q_heads, x->head_dim),
        .lse = new_output(FDMA_FLOAT32, x->batch, x->q_heads, x->q_len, -1),
    };
    CHECK_OK(run_merge(&merge));
    for (int64_t at = 0; at < count_of(whole.out); at++)
        CHECK_NEAR(load_double(merge.out.data, x->dtype, at),
                   load_double(whole.out.data, x->dtype, at), 2 * problem_out_tolerance(x));
}

/* ---- gradients ---- */

/* Copies keys 0, 1, ... of a tensor with keys on `axis` to keys 1, 2, ... of another. */
static void copy_keys(fdma_tensor to, fdma_tensor from, int axis) {
    const int64_t keys = from.shape[axis], inner = from.stride[axis];
    for (int64_t n = 0; n < count_of(from); n++) {
        const int64_t outer = n / (keys * inner);
        store_float(to.data, to.dtype, n + (outer + 1) * inner,
                    (float)load_double(from.data, from.dtype, n));
    }
}

/* The problem with one more key before the others, which every query keeps. */
static problem with_key(const problem *x, fdma_tensor sinks) {
    problem more = *x;
    more.kv_len++;
    more.window += x->window >= 0;
    more.sinks = x->window >= 0;
    problem_fill(&more, 1);
    more.q = x->q;
    copy_keys(more.k, x->k, 1);
    copy_keys(more.v, x->v, 1);
    copy_keys(more.bias, x->bias, 2);
    copy_keys(more.score, x->score, 2);
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t g = 0; g < x->kv_heads; g++) {
            spoil_key(more.k, b, 0, g, 0);
            spoil_key(more.v, b, 0, g, 0);
            ((float *)more.bias.data)[(b * x->kv_heads + g) * more.kv_len] = sink_of(sinks, g);
        }
    problem_select(&more);
    return more;
}

static gradient_problem gradient_with(const problem *x, fdma_tensor sinks) {
    const attended done = attend_with(x, input_kernels(x->dtype), sinks);
    gradient_problem p = gradient_of(x, 1);
    p.out = done.out, p.lse = done.lse;
    return p;
}

/* Returns dsink_logit. With `accumulate` gradients are added: to 0 for q, k and v, to 100 for the
 * others. */
static fdma_tensor run_with_sinks(const gradient_problem *p, const char *kernel, fdma_tensor sinks,
                                  int32_t threads, int accumulate, gradients *found) {
    const problem *const x = &p->x;
    fdma_backward_args args = gradient_args(p, kernel);
    args.sink_logit = sinks;
    args.dsink_logit = new_output(FDMA_FLOAT32, x->q_heads, -1, -1, -1);
    args.exec.threads = threads;
    args.accumulate = accumulate;
    for (int64_t h = 0; h < x->q_heads && accumulate; h++)
        ((float *)args.dsink_logit.data)[h] = 100;
    for (int n = 0; n < 3 && accumulate; n++) {
        const fdma_tensor to[] = {args.dq, args.dk, args.dv};
        memset(to[n].data, 0, bytes_of(to[n]));
    }
    CHECK_OK(run_backward(&args));
    *found = gradient_outputs(&args);
    return args.dsink_logit;
}

static bool takes_gradients(const problem *x, const char *kernel) {
    gradient_problem p = gradient_of(x, 1);
    fdma_backward_args args = gradient_args(&p, kernel);
    return call_takes(operation_backward, &args);
}

/* With one query head for each kv head, the gradient of the key's bias equals the sink's. */
static void has_the_gradient_of_a_bias(const char *kernel, fdma_dtype dtype) {
    static const problem one_head[] = {
        SIZES(2, 70, 70, 2, 2, 64, 20, 1),
        SIZES(1, 150, 170, 3, 3, 40, -1, 0),
        SIZES(1, 200, 200, 2, 2, 128, 5, 1),
        SIZES(1, 64, 90, 2, 2, 128, 30, 0),
    };
    for (int n = 0; n < TEST_COUNT(one_head); n++) {
        problem x = new_problem(&one_head[n], dtype, (uint64_t)n + 1);
        if (!takes_gradients(&x, kernel))
            continue;
        const fdma_tensor sinks = new_tensor(FDMA_FLOAT32, x.q_heads, -1, -1, -1);
        uint64_t state = 3;
        fill_random(sinks, &state, 3);
        const problem more = with_key(&x, sinks);
        const gradient_problem given = gradient_with(&x, sinks);
        gradients found, again;
        const fdma_tensor dsinks = run_with_sinks(&given, kernel, sinks, 1, 0, &found);
        gradient_problem p = gradient_of(&more, 1);
        const gradients want = gradient_run(&p, kernel, 1);
        const double tolerance = 8 * step_of(dtype);
        const fdma_tensor key_dbias = new_tensor(FDMA_FLOAT32, x.q_heads, -1, -1, -1);
        for (int64_t h = 0; h < x.q_heads; h++) {
            double sum = 0;
            for (int64_t b = 0; b < x.batch; b++)
                sum +=
                    load_double(want.dbias.data, FDMA_FLOAT32, (b * x.kv_heads + h) * more.kv_len);
            ((float *)key_dbias.data)[h] = (float)sum;
        }
        check_near(dsinks, key_dbias, tolerance);
        check_near(found.dq, want.dq, tolerance);
        const fdma_tensor same = run_with_sinks(&given, kernel, sinks, 3, 1, &again);
        for (int64_t h = 0; h < x.q_heads; h++)
            CHECK_NEAR((double)((const float *)same.data)[h] - 100,
                       (double)((const float *)dsinks.data)[h], 1e-4);
        check_near(again.dk, found.dk, step_of(dtype));
    }
}

/* Sequence b with the keys that exist, alone, with out and lse of a call on it alone. */
static gradient_problem first_keys(const gradient_problem *p, fdma_tensor sinks, int64_t b,
                                   int64_t used) {
    gradient_problem one = *p;
    one.x = problem_sequence(&p->x, b);
    one.x.kv_used = (fdma_tensor){0};
    one.x.kv_len = one.x.k.shape[1] = one.x.v.shape[1] = one.x.bias.shape[2] = used;
    const attended alone = attend_with(&one.x, input_kernels(one.x.dtype), sinks);
    one.out = alone.out, one.lse = alone.lse;
    one.dout = sequence_of(p->dout, b), one.dlse = sequence_of(p->dlse, b);
    return one;
}

/* Positions `first` to `end` - 1 of packed sequences, alone. */
static gradient_problem piece_of(const gradient_problem *p, int64_t first, int64_t end) {
    gradient_problem one = *p;
    problem *const x = &one.x;
    fdma_tensor *const rows[] = {&x->q, &x->k, &x->v, &one.out, &one.dout};
    fdma_tensor *const numbers[] = {&x->bias, &one.lse, &one.dlse};
    x->starts = (fdma_tensor){0};
    x->q_len = x->kv_len = end - first;
    for (int n = 0; n < TEST_COUNT(rows); n++)
        *rows[n] = positions_of(*rows[n], 1, first, end);
    for (int n = 0; n < TEST_COUNT(numbers); n++)
        *numbers[n] = positions_of(*numbers[n], 2, first, end);
    return one;
}

static void check_sum(const gradient_problem *whole, const gradient_problem *pieces, int count,
                      const char *kernel, fdma_tensor sinks) {
    gradients unused;
    const fdma_tensor found = run_with_sinks(whole, kernel, sinks, 1, 0, &unused);
    const fdma_tensor sums = new_tensor(FDMA_FLOAT32, count_of(sinks), -1, -1, -1);
    memset(sums.data, 0, bytes_of(sums));
    for (int n = 0; n < count; n++) {
        const fdma_tensor one = run_with_sinks(&pieces[n], kernel, sinks, 1, 0, &unused);
        for (int64_t h = 0; h < count_of(sinks); h++)
            ((float *)sums.data)[h] += ((const float *)one.data)[h];
    }
    check_near(found, sums, 8 * step_of(whole->x.dtype));
}

/* The gradient of the whole is the sum of the gradients of its pieces: packed sequences, one of
 * them empty, and sequences of a batch with different numbers of existing keys, some with fewer
 * keys than queries or none. */
static void adds_up_over_pieces(const char *kernel, fdma_dtype dtype) {
    const problem packed = pieces_problem(true, dtype), batch = pieces_problem(false, dtype);
    if (!takes_gradients(&packed, kernel))
        return;
    const fdma_tensor sinks = new_sinks(4);
    const gradient_problem all[] = {gradient_with(&packed, sinks), gradient_with(&batch, sinks)};
    const gradient_problem sequences[] = {piece_of(&all[0], 0, 25), piece_of(&all[0], 25, 60)};
    const gradient_problem entries[] = {first_keys(&all[1], sinks, 0, 20),
                                        first_keys(&all[1], sinks, 1, 50),
                                        first_keys(&all[1], sinks, 2, 0)};
    check_sum(&all[0], sequences, TEST_COUNT(sequences), kernel, sinks);
    check_sum(&all[1], entries, TEST_COUNT(entries), kernel, sinks);
}

static void no_rows_give_zero(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(empty_sizes); n++) {
        const problem x = new_problem(&empty_sizes[n], dtype, 5);
        gradients unused;
        if (x.batch * x.q_len > 0 || !takes_gradients(&x, kernel))
            continue;
        const gradient_problem p = gradient_with(&x, new_sinks(4));
        const fdma_tensor found = run_with_sinks(&p, kernel, new_sinks(4), 2, 0, &unused);
        for (int h = 0; h < 4; h++)
            CHECK(((const float *)found.data)[h] == 0);
    }
}

/* ---- the fused calls and decode ---- */

/* Runs the steps of a fused call separately, with the selection that it made. */
static void fused_calls_are_their_steps(void) {
    problem x = sizes[0];
    uint64_t state = 8;
    x.dtype = backend_dtype();
    problem_fill(&x, 2);
    problem_select(&x);
    const fdma_tensor sinks = new_sinks(x.q_heads);
    const fdma_tensor dt_proj = new_tensor(x.dtype, x.kv_heads, x.kv_heads * x.head_dim, -1, -1);
    const fdma_tensor a = new_tensor(x.dtype, x.kv_heads, -1, -1, -1);
    fill_random(dt_proj, &state, 0.1F);
    fill_random(a, &state, 1);
    fdma_attention_args args = {
        .size = sizeof args,
        .q = x.q,
        .k = x.k,
        .v = x.v,
        .dt_proj = dt_proj,
        .a = a,
        .out = new_output(x.dtype, x.batch, x.q_len, x.q_heads, x.head_dim),
        .lse = new_output(FDMA_FLOAT32, x.batch, x.q_heads, x.q_len, -1),
        .bias = new_output(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1),
        .selection = &x.selection,
        .window = x.window,
        .causal = 1,
        .sink_logit = sinks,
    };
    CHECK_OK(run_attention(&args));
    x.bias = args.bias;
    const attended steps = attend_with(&x, NULL, sinks);
    check_same_results((attended){args.out, args.lse}, steps);

    gradient_problem p = gradient_of(&x, 1);
    p.out = args.out, p.lse = args.lse;
    fdma_backward_args back = gradient_args(&p, NULL);
    back.sink_logit = sinks;
    back.dsink_logit = new_output(FDMA_FLOAT32, x.q_heads, -1, -1, -1);
    CHECK_OK(run_backward(&back));
    const fdma_tensor to[] = {back.dq, back.dk, back.dv, copy_tensor(dt_proj), copy_tensor(a)};
    fdma_attention_backward_args fused = fused_args(&p, dt_proj, a, FDMA_BIAS_EXP, to, NULL);
    fused.bias = args.bias;
    fused.sink_logit = sinks;
    fused.dsink_logit = new_output(FDMA_FLOAT32, x.q_heads, -1, -1, -1);
    CHECK_OK(run_attention_backward(&fused));
    CHECK_BYTES(fused.dsink_logit.data, back.dsink_logit.data, bytes_of(back.dsink_logit));
}

/* Tokens that enter an empty cache attend to each other as in a causal call over them alone. */
static void decode_has_it_too(const char *kernel, fdma_dtype dtype) {
    problem x = SIZES(1, 12, 12, 6, 2, 64, -1, 1);
    size_t bytes;
    x.dtype = dtype;
    problem_fill(&x, 4);
    fdma_cache cache = {
        .sequences = 1, .kv_heads = 2, .head_dim = 64, .window = 40, .dtype = dtype};
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    const fdma_tensor sinks = new_sinks(x.q_heads);
    fdma_decode_args args = {
        .size = sizeof args,
        .cache = cache,
        .q = x.q,
        .k = x.k,
        .v = x.v,
        .score = x.score,
        .out = new_output(dtype, 1, x.q_len, x.q_heads, x.head_dim),
        .lse = new_output(FDMA_FLOAT32, 1, x.q_heads, x.q_len, -1),
        .bias_form = FDMA_BIAS_LINEAR,
        .exec = {.kernel = kernel},
        .sink_logit = sinks,
    };
    CHECK_OK(run_decode(&args));
    check_close_results(&x, (attended){args.out, args.lse}, attend_with(&x, NULL, sinks));
}

/* ---- bad input ---- */

static void gradient_needs_the_sinks(void) {
    problem x = new_problem(&sizes[0], backend_dtype(), 2);
    gradient_problem p = gradient_of(&x, 0);
    fdma_backward_args args = gradient_args(&p, NULL);
    args.dsink_logit = new_output(FDMA_FLOAT32, x.q_heads, -1, -1, -1);
    CHECK_INT(run_backward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "dsink_logit");
    CHECK_WORD(fdma_last_error(), "sink_logit");
}

static const test_entry tests[] = {
    EACH_SIZE(adds_a_term_to_each_row, sizes),
    EACH_SIZE(takes_any_number, sizes),
    EACH_PROBLEM(belongs_to_one_of_merged_halves, halved, 9),
    EACH_KERNEL("backward", has_the_gradient_of_a_bias),
    TEST(fused_calls_are_their_steps),
    EACH_KERNEL("decode", decode_has_it_too),
    TEST(gradient_needs_the_sinks),
    EACH_KERNEL("backward", adds_up_over_pieces),
    EACH_KERNEL("backward", no_rows_give_zero),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
