/* test_empty_rows.c - a row that keeps no key passes no gradient on, for any q, dout and dlse, with
 * a sink logit or without: rows of padding, after the last packed sequence, before the first key
 * that exists, and rows that a mask empties. */
#include "backend.h"
#include "gradient.h"

enum { padding = 13 };

typedef struct empty_case {
    problem x;
    fdma_tensor attn_mask, sinks;
    bool (*is_empty)(int64_t b, int64_t i);
} empty_case;

static bool is_padding(int64_t b, int64_t i) {
    (void)b;
    return i < padding;
}

static bool is_behind(int64_t b, int64_t i) {
    (void)b;
    return i >= 80;
}

static bool is_before(int64_t b, int64_t i) { return b == 0 && i < 20; }

static bool is_masked(int64_t b, int64_t i) {
    (void)b;
    return i % 5 == 0;
}

static empty_case new_case(int n, fdma_dtype dtype) {
    static const int32_t starts[] = {0, 30, 80}, used[] = {70, 90};
    static bool (*const rules[])(int64_t b, int64_t i) = {is_padding, is_behind, is_before,
                                                          is_masked};
    empty_case made = {.x = SIZES(2, 90, 90, 4, 2, 64, 20, 1), .is_empty = rules[n]};
    problem *const x = &made.x;
    x->batch = n == 1 ? 1 : 2;
    x->window = n == 3 ? -1 : 20;
    x->dtype = dtype;
    problem_fill(x, 3);
    if (n == 0) {
        x->key_valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
        for (int64_t j = 0; j < x->batch * x->kv_len; j++)
            ((uint8_t *)x->key_valid.data)[j] = j % x->kv_len >= padding;
    } else if (n == 1) {
        x->starts = new_list(starts, TEST_COUNT(starts));
    } else if (n == 2) {
        x->kv_used = new_list(used, TEST_COUNT(used));
    } else {
        made.attn_mask = new_tensor(FDMA_UINT8, 1, 1, x->q_len, 1);
        for (int64_t i = 0; i < x->q_len; i++)
            ((uint8_t *)made.attn_mask.data)[i] = !is_masked(0, i);
    }
    problem_select(x);
    return made;
}

static fdma_backward_args args_of(const empty_case *c, const char *kernel) {
    const problem *const x = &c->x;
    fdma_forward_args forward = problem_args(x, input_kernels(x->dtype));
    forward.attn_mask = c->attn_mask, forward.sink_logit = c->sinks;
    gradient_problem p = gradient_of(x, 1);
    CHECK_OK(run_forward(&forward));
    p.out = forward.out, p.lse = forward.lse;
    p.deterministic = 1;
    fdma_backward_args args = gradient_args(&p, kernel);
    args.attn_mask = c->attn_mask, args.sink_logit = c->sinks;
    if (c->sinks.rank > 0)
        args.dsink_logit = new_output(FDMA_FLOAT32, x->q_heads, -1, -1, -1);
    return args;
}

/* Writes a number to every empty row of a tensor shaped as q. Returns how many there are. */
static int64_t spoil_rows(const empty_case *c, fdma_tensor tensor, float value) {
    const int64_t dim = tensor.shape[3], heads = tensor.shape[2];
    int64_t count = 0;
    for (int64_t row = 0; row < tensor.shape[0] * tensor.shape[1] * heads; row++) {
        const int64_t i = row / heads % tensor.shape[1], b = row / heads / tensor.shape[1];
        for (int64_t d = 0; d < dim && c->is_empty(b, i); d++)
            store_float(tensor.data, tensor.dtype, row * dim + d, value);
        count += c->is_empty(b, i);
    }
    return count;
}

/* The gradients of the keys, and of the sinks, have the same bits as with ordinary numbers in the
 * empty rows. dq of an empty row is 0. */
static void check_spoilt(const empty_case *c, const char *kernel) {
    static const float values[] = {NAN, INFINITY};
    fdma_backward_args want = args_of(c, kernel);
    if (!call_takes(operation_backward, &want))
        return;
    CHECK_OK(run_backward(&want));
    for (int n = 0; n < 3 * TEST_COUNT(values); n++) {
        fdma_backward_args args = args_of(c, kernel);
        const float value = values[n / 3];
        args.q = copy_tensor(args.q), args.dout = copy_tensor(args.dout);
        if (n % 3 != 1)
            CHECK(spoil_rows(c, args.q, value) > 0);
        if (n % 3 != 0)
            CHECK(spoil_rows(c, args.dout, value) > 0);
        CHECK_OK(run_backward(&args));
        CHECK(same_tensor(args.dk, want.dk) && same_tensor(args.dv, want.dv));
        CHECK(same_tensor(args.dbias, want.dbias) && same_tensor(args.dq, want.dq));
        if (args.dsink_logit.rank > 0)
            CHECK(same_tensor(args.dsink_logit, want.dsink_logit));
        const fdma_tensor dq = copy_tensor(args.dq);
        spoil_rows(c, dq, 0);
        CHECK(same_tensor(dq, args.dq));
    }
}

static void empty_rows_pass_nothing_on(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 2 * 4; n++) {
        empty_case c = new_case(n / 2, dtype);
        uint64_t state = 5;
        if (n % 2 == 1) {
            c.sinks = new_tensor(FDMA_FLOAT32, c.x.q_heads, -1, -1, -1);
            fill_random(c.sinks, &state, 2);
        }
        test_context("%s %s, rows %d, %s", kernel, dtype_name(dtype), n / 2,
                     n % 2 == 1 ? "with sinks" : "without");
        check_spoilt(&c, kernel);
        test_free_all();
    }
}

static const test_entry tests[] = {EACH_KERNEL("backward", empty_rows_pass_nothing_on)};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
