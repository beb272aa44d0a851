/* test_streams.c - a stream in pieces equals the whole sequence. Selected with a table, it has the
 * same expiries and slots, bit for bit, for any cut. In forward and backward, carried keys count as
 * keys before the call's own. Empty rows are never read. */
#include "errors.h"
#include "gradient.h"
#include "stream_pieces.h"

/* ---- select: every way of cutting ---- */

static void check_new_keys(const fdma_selection *whole, const piece *one, int64_t b, int64_t g) {
    for (int64_t p = one->first; p < one->end; p++) {
        const int64_t j = index_of(one, p);
        CHECK_INT(int_at(one->selection.slot, b, g, j), int_at(whole->slot, b, g, p));
        CHECK_INT(int_at(one->selection.expiry, b, g, j),
                  index_of(one, int_at(whole->expiry, b, g, p)));
    }
}

static void check_carried_keys(const fdma_selection *whole, const piece *one, int64_t b,
                               int64_t g) {
    for (int64_t row = 0; row < one->rows; row++) {
        const int32_t p = int_at(one->in.position, b, g, row);
        CHECK_INT(int_at(one->selection.slot, b, g, row), p < 0 ? -1 : row);
        CHECK_INT(int_at(one->selection.expiry, b, g, row),
                  p < 0 ? row : index_of(one, int_at(whole->expiry, b, g, p)));
    }
}

/* The table that a piece leaves has the keys that outlive it, each in the row of its slot. */
static void check_table(const problem *x, const fdma_selection *whole, const piece *one, int64_t b,
                        int64_t g) {
    int64_t kept = 0, filled = 0;
    for (int64_t p = 0; p < one->end; p++) {
        const int32_t row = int_at(whole->slot, b, g, p);
        if (int_at(whole->expiry, b, g, p) < one->end)
            continue;
        kept++;
        CHECK_INT(int_at(one->out.position, b, g, row), p);
        CHECK_INT(float_to_bits(float_at(one->out.score, b, g, row)),
                  float_to_bits(float_at(x->score, b, g, p)));
    }
    for (int64_t row = 0; row < one->out.position.shape[2]; row++)
        filled += int_at(one->out.position, b, g, row) >= 0;
    CHECK_INT(filled, kept);
    CHECK_INT(int_at(one->out.seen, b, 0, 0), one->end);
}

static piece select_piece(const problem *x, const piece *before, int64_t end, const char *kernel) {
    piece one = {.first = before->end, .end = end};
    fdma_select_args args = select_args(x, kernel);
    args.score = keys_of(x->score, 2, one.first, end);
    args.key_valid = keys_of(x->key_valid, 1, one.first, end);
    if (before->out.score.rank > 0) {
        one.in = args.table_in = before->out;
        one.rows = x->window + x->recent;
    }
    one.out = args.table_out = new_table(x);
    one.selection = new_selection(x, one.rows + end - one.first);
    args.selection = &one.selection;
    CHECK_OK(run_select(&args));
    CHECK_INT(one.selection.kv_len, one.rows + end - one.first);
    return one;
}

static void check_piece(const problem *x, const fdma_selection *whole, const piece *one) {
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t g = 0; g < x->kv_heads; g++) {
            check_new_keys(whole, one, b, g);
            check_carried_keys(whole, one, b, g);
            check_table(x, whole, one, b, g);
        }
}

static void check_stream(const stream_case *test, int64_t most, uint64_t seed, const char *kernel) {
    const problem x = stream_problem(test, seed);
    const fdma_selection whole = select_whole(&x);
    uint64_t state = seed + 1;
    piece one = {0};
    while (one.end < x.kv_len) {
        const int64_t end = one.end + random_below(&state, most + 1);
        one = select_piece(&x, &one, end < x.kv_len ? end : x.kv_len, kernel);
        check_piece(&x, &whole, &one);
    }
}

static void selection_does_not_depend_on_cuts(void) {
    static const int64_t lengths[] = {1, 3, 20, 64, 300};
    const kernel_list kernels = kernels_of("select");
    for (int kernel = 0; kernel < kernels.count; kernel++)
        for (int c = 0; c < TEST_COUNT(stream_cases) * TEST_COUNT(lengths); c++) {
            const stream_case *const test = &stream_cases[c % TEST_COUNT(stream_cases)];
            const int64_t most = lengths[c / TEST_COUNT(stream_cases)];
            test_context("case %d, pieces of at most %d, %s", c, (int)most, kernels.name[kernel]);
            check_stream(test, most, (uint64_t)(c + 5), kernels.name[kernel]);
            test_free_all();
        }
}

/* A stream may be as long as int32 positions allow, and no longer. */
static void streams_end_at_the_last_position(void) {
    const stream_case test = {1, 1, 6, 3, 0, 0, 3, 0};
    const problem x = stream_problem(&test, 3);
    piece one = select_piece(&x, &(piece){0}, 4, NULL);
    ((int32_t *)one.out.seen.data)[0] = INT32_MAX - 2;
    one = select_piece(&x, &one, 6, NULL);
    CHECK_INT(int_at(one.out.seen, 0, 0, 0), INT32_MAX);
    for (int64_t row = 0; row < 3; row++)
        CHECK(int_at(one.out.position, 0, 0, row) <= INT32_MAX - 1);
    fdma_select_args args = select_args(&x, NULL);
    fdma_selection selection = new_selection(&x, 3 + 6);
    args.selection = &selection;
    args.table_in = one.out;
    CHECK_INT(run_select(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "table_in.seen: element 0 is 2147483647, want 0 to 2147483641");
}

/* With any contents of a table, the selection is one that forward can use. */
static void corrupt_tables_do_no_harm(void) {
    static const int32_t strange[] = {INT32_MIN, -1, 0, 7, 7, INT32_MAX};
    const kernel_list kernels = kernels_of("select");
    for (int c = 0; c < 40 * kernels.count; c++) {
        uint64_t state = (uint64_t)c + 1;
        const problem x = stream_problem(&stream_cases[3 + c % 2], state);
        const char *const kernel = kernels.name[c / 40];
        test_context("case %d, %s", c, kernel);
        piece one = select_piece(&x, &(piece){0}, 50, kernel);
        for (int64_t n = 0; n < count_of(one.out.position); n++)
            ((int32_t *)one.out.position.data)[n] = strange[random_below(&state, 6)];
        one = select_piece(&x, &one, 120, kernel);
        const int64_t rows = x.window + x.recent, kv_len = rows + 70;
        for (int64_t n = 0; n < count_of(one.selection.expiry); n++) {
            const int32_t expiry = ((const int32_t *)one.selection.expiry.data)[n];
            const int32_t slot = ((const int32_t *)one.selection.slot.data)[n];
            CHECK(expiry >= n % kv_len && expiry <= kv_len);
            CHECK(slot >= -1 && slot < rows && (slot >= 0) == (expiry > n % kv_len));
        }
        test_free_all();
    }
}

/* ---- carried keys in forward and backward ---- */

enum { rows_of_table = 24 };

typedef struct carried_case {
    int64_t new_len, q_len, group, head_dim;
    int64_t window; /* -1: dense */
    int biased;
    double softcap;
} carried_case;

static const carried_case carried_cases[] = {
    {70, 70, 2, 64, rows_of_table, 1, 0},
    {1, 1, 4, 128, rows_of_table, 1, 0},
    {33, 33, 3, 24, rows_of_table, 0, 2},
    {300, 300, 1, 32, rows_of_table, 1, 0},
    {5, 3, 2, 40, rows_of_table, 1, 0},
    {40, 40, 2, 16, -1, 1, 0},
    {9, 1, 8, 96, -1, 0, 0},
    {200, 130, 2, 72, rows_of_table, 1, 1.5},
    {50, 50, 2, 160, rows_of_table, 1, 0},
};

/* Carried keys and the call's keys side by side, as a call without carried keys takes them. Rows 20
 * and above are empty: they hold NaN. */
static problem joined_problem(const carried_case *test, fdma_dtype dtype) {
    problem x = {.batch = 2,
                 .q_len = test->q_len,
                 .kv_len = rows_of_table + test->new_len,
                 .q_heads = 2 * test->group,
                 .kv_heads = 2,
                 .head_dim = test->head_dim,
                 .window = test->window,
                 .scope = FDMA_SCOPE_CAUSAL,
                 .causal = 1,
                 .softcap = test->softcap,
                 .dtype = dtype};
    problem_fill(&x, 11);
    if (!test->biased)
        x.bias = (fdma_tensor){0};
    if (test->window < 0)
        return x;
    const fdma_tensor valid = new_tensor(FDMA_UINT8, 2, x.kv_len, -1, -1);
    for (int64_t n = 0; n < count_of(valid); n++)
        ((uint8_t *)valid.data)[n] = n % x.kv_len < 20 || n % x.kv_len >= rows_of_table;
    x.key_valid = valid;
    problem_select(&x);
    x.key_valid = (fdma_tensor){0};
    for (int64_t n = 0; n < 2 * 4 * x.kv_heads; n++) {
        const int64_t b = n % 2, row = 20 + n / 2 % 4, g = n / 8;
        spoil_key(x.k, b, row, g, NAN);
        spoil_key(x.v, b, row, g, NAN);
    }
    return x;
}

/* Both pieces of a tensor, each in its own memory: shaped as k, cut along axis 1, or as bias, along
 * axis 2. */
static fdma_tensor carried_of(fdma_tensor tensor, int axis) {
    return tensor.rank > 0 ? gathered(keys_of(tensor, axis, 0, rows_of_table)) : tensor;
}

static fdma_tensor own_of(fdma_tensor tensor, int axis) {
    return tensor.rank > 0 ? gathered(keys_of(tensor, axis, rows_of_table, tensor.shape[axis]))
                           : tensor;
}

static void check_forward(const problem *x, const char *kernel) {
    const attended want = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    args.k = own_of(x->k, 1);
    args.v = own_of(x->v, 1);
    args.bias = own_of(x->bias, 2);
    args.k_carried = carried_of(x->k, 1);
    args.v_carried = carried_of(x->v, 1);
    args.bias_carried = carried_of(x->bias, 2);
    args.exec.threads = 2;
    CHECK_OK(run_forward(&args));
    CHECK_BYTES(args.out.data, want.out.data, bytes_of(want.out));
    CHECK_BYTES(args.lse.data, want.lse.data, bytes_of(want.lse));
}

static void forward_counts_carried_keys(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(carried_cases); c++) {
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        const problem x = joined_problem(&carried_cases[c], dtype);
        if (problem_is_taken(&x, kernel))
            check_forward(&x, kernel);
        test_free_all();
    }
}

static void forward_by_every_kernel(void) {
    for_each_kernel("forward", forward_counts_carried_keys);
}

/* A request for gradients. Gaps are elements after each row; 24 leave rows aligned. */
typedef struct gradient_request {
    int accumulate, has_dbias;
    int64_t own_gap, carried_gap;
} gradient_request;

static const gradient_request requests[] = {{0, 1, 0, 0}, {1, 0, 0, 0}, {1, 1, 24, 5}};

/* Replaces the tensors of a call's keys by the two pieces, with their contents. */
static void split_keys(fdma_backward_args *args, const gradient_request *request) {
    const struct {
        fdma_tensor *own, *carried;
        int axis;
    } pairs[] = {{&args->k, &args->k_carried, 1},       {&args->v, &args->v_carried, 1},
                 {&args->bias, &args->bias_carried, 2}, {&args->dk, &args->dk_carried, 1},
                 {&args->dv, &args->dv_carried, 1},     {&args->dbias, &args->dbias_carried, 2}};
    for (int n = 0; n < TEST_COUNT(pairs); n++) {
        const fdma_tensor joined = *pairs[n].own;
        *pairs[n].own = with_gaps(own_of(joined, pairs[n].axis), request->own_gap);
        *pairs[n].carried = with_gaps(carried_of(joined, pairs[n].axis), request->carried_gap);
    }
}

/* The gradients have the bits of a call on the same keys without carried ones. */
static void check_backward(const gradient_problem *joined, const char *kernel,
                           const gradient_request *request) {
    uint64_t state = 6;
    fdma_backward_args want = gradient_args(joined, kernel);
    if (!request->has_dbias)
        want.dbias = (fdma_tensor){0};
    want.accumulate = request->accumulate;
    fdma_tensor *const held[] = {&want.dq, &want.dk, &want.dv};
    for (int n = 0; n < TEST_COUNT(held); n++)
        fill_random(*held[n], &state, 1);
    fdma_backward_args args = want;
    args.dq = copy_tensor(want.dq);
    split_keys(&args, request);
    const bool takes = call_takes(operation_backward, &args);
    CHECK(takes || request->carried_gap % 8 != 0); // rows that are not aligned
    if (!takes)
        return;
    CHECK_OK(run_backward(&want));
    CHECK_OK(run_backward(&args));
    CHECK_BYTES(args.dq.data, want.dq.data, bytes_of(want.dq));
    check_gapped(args.dk, own_of(want.dk, 1), request->own_gap);
    check_gapped(args.dv, own_of(want.dv, 1), request->own_gap);
    check_gapped(args.dk_carried, carried_of(want.dk, 1), request->carried_gap);
    check_gapped(args.dv_carried, carried_of(want.dv, 1), request->carried_gap);
    if (request->has_dbias) {
        check_gapped(args.dbias, own_of(want.dbias, 2), request->own_gap);
        check_gapped(args.dbias_carried, carried_of(want.dbias, 2), request->carried_gap);
    }
}

static void backward_counts_carried_keys(const char *kernel, fdma_dtype dtype) {
    int taken = 0;
    for (int c = 0; c < TEST_COUNT(carried_cases); c++) {
        const problem x = joined_problem(&carried_cases[c], dtype);
        gradient_problem joined = gradient_of(&x, 1);
        joined.deterministic = 1;
        fdma_backward_args args = gradient_args(&joined, kernel);
        const bool takes = call_takes(operation_backward, &args);
        taken += takes;
        for (int n = 0; n < TEST_COUNT(requests) && takes; n++) {
            test_context("case %d, request %d, %s, %s", c, n, kernel, dtype_name(dtype));
            check_backward(&joined, kernel, &requests[n]);
        }
        test_free_all();
    }
    CHECK(taken > 0);
}

static void backward_by_every_kernel(void) {
    for_each_kernel("backward", backward_counts_carried_keys);
}

/* Tensors without elements have no memory. A piece without keys does not change a stream. */
static void a_piece_may_have_no_keys(void) {
    static int32_t seen[] = {3}, position[] = {2, 0, -1}, expiry[3], slot[3];
    static float score[] = {1, 2, 0};
    const kernel_list kernels = kernels_of("select");
    for (int n = 0; n < kernels.count && test_backend.run == NULL; n++) {
        fdma_selection selection = {.size = sizeof selection,
                                    .expiry = fdma_tensor_3d(expiry, FDMA_INT32, 1, 1, 3),
                                    .slot = fdma_tensor_3d(slot, FDMA_INT32, 1, 1, 3)};
        fdma_select_args args = {
            .size = sizeof args,
            .score = fdma_tensor_3d(NULL, FDMA_FLOAT32, 1, 1, 0),
            .table_in = {.score = fdma_tensor_3d(score, FDMA_FLOAT32, 1, 1, 3),
                         .position = fdma_tensor_3d(position, FDMA_INT32, 1, 1, 3),
                         .seen = fdma_tensor_1d(seen, FDMA_INT32, 1)},
            .selection = &selection,
            .window = 3,
            .exec.kernel = kernels.name[n]};
        test_context("%s", kernels.name[n]);
        CHECK_OK(run_select(&args));
        CHECK(expiry[0] == 3 && expiry[1] == 3 && expiry[2] == 2);
        CHECK(slot[0] == 0 && slot[1] == 1 && slot[2] == -1);
    }
    CHECK(kernels.count > 0);
}

static const test_entry tests[] = {
    TEST(selection_does_not_depend_on_cuts), TEST(streams_end_at_the_last_position),
    TEST(corrupt_tables_do_no_harm),         TEST(forward_by_every_kernel),
    TEST(backward_by_every_kernel),          TEST(a_piece_may_have_no_keys),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
