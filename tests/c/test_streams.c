/* test_streams.c - a stream in pieces equals the whole sequence. Selected with a table, it has the
 * same expiries and slots, bit for bit, for any cut, and with a table of what several pieces, each
 * selected alone, leave. In forward and backward, carried keys count as keys before the call's own.
 * Empty rows are never read. */
#include "backend.h"
#include "gradient.h"

typedef struct stream_case {
    int64_t batch, kv_heads, kv_len, window, recent, sinks;
    int levels; /* number of distinct scores: few of them make ties */
    int padded;
} stream_case;

static const stream_case stream_cases[] = {
    {1, 1, 40, 1, 0, 0, 3, 0},  {2, 3, 97, 7, 0, 0, 1000, 0},        {1, 2, 200, 16, 5, 2, 5, 1},
    {2, 1, 150, 2, 1, 1, 2, 1}, {1, 3, 301, 33, 0, 9, 40, 1},        {2, 2, 60, 64, 8, 0, 9, 0},
    {1, 1, 90, 3, 40, 3, 4, 1}, {1, 2, 700, 100, 28, 4, 1000000, 0}, {1, 2, 129, 5, 0, 5, 1, 0},
};

static float score_at(uint64_t *state, int levels) {
    const int64_t level = random_below(state, levels + 1);
    return level == levels && levels > 8 ? NAN : (float)level - 2;
}

static problem stream_problem(const stream_case *test, uint64_t seed) {
    uint64_t state = seed;
    problem x = {.batch = test->batch,
                 .kv_heads = test->kv_heads,
                 .kv_len = test->kv_len,
                 .window = test->window,
                 .recent = test->recent,
                 .sinks = test->sinks,
                 .dtype = FDMA_FLOAT32};
    x.score = new_tensor(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1);
    for (int64_t n = 0; n < count_of(x.score); n++)
        ((float *)x.score.data)[n] = score_at(&state, test->levels);
    if (test->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
        for (int64_t n = 0; n < count_of(x.key_valid); n++)
            ((uint8_t *)x.key_valid.data)[n] = random_below(&state, 4) > 0;
    }
    return x;
}

static fdma_table new_table(const problem *x) {
    const int64_t rows = x->window + x->recent;
    return (fdma_table){
        .score = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, rows, -1),
        .position = new_output(FDMA_INT32, x->batch, x->kv_heads, rows, -1),
        .seen = new_output(FDMA_INT32, x->batch, -1, -1, -1),
    };
}

static int32_t int_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    const int64_t at = b * tensor.stride[0] + g * tensor.stride[1] + j;
    return ((const int32_t *)tensor.data)[at];
}

static float float_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    const int64_t at = b * tensor.stride[0] + g * tensor.stride[1] + j;
    return ((const float *)tensor.data)[at];
}

/* A piece of a stream: the call selects the keys from `first` on with the table `in`. */
typedef struct piece {
    int64_t first, end, rows; /* rows: rows of `in`, 0 for the first piece */
    fdma_table in, out;
    fdma_selection selection;
} piece;

/* The index, in the call, of a position of the stream. */
static int64_t index_of(const piece *one, int64_t position) {
    return position < one->end ? one->rows + position - one->first
                               : one->rows + one->end - one->first;
}
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
    fdma_select_args args = select_args(x, NULL, kernel);
    args.score = positions_of(x->score, 2, one.first, end);
    args.key_valid = positions_of(x->key_valid, 1, one.first, end);
    if (before->out.score.rank > 0) {
        one.in = args.table_in = before->out;
        one.rows = x->window + x->recent;
    }
    one.out = args.table_out = new_table(x);
    one.selection = new_selection(x->batch, x->kv_heads, one.rows + end - one.first);
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
    const fdma_selection whole = selected_by(&x, "reference");
    uint64_t state = seed + 1;
    piece one = {0};
    while (one.end < x.kv_len) {
        const int64_t end = one.end + random_below(&state, most + 1);
        one = select_piece(&x, &one, end < x.kv_len ? end : x.kv_len, kernel);
        check_piece(&x, &whole, &one);
    }
}

static void selection_does_not_depend_on_cuts(const char *kernel) {
    static const int64_t lengths[] = {1, 3, 20, 64, 300};
    for (int c = 0; c < TEST_COUNT(stream_cases) * TEST_COUNT(lengths); c++) {
        const stream_case *const test = &stream_cases[c % TEST_COUNT(stream_cases)];
        const int64_t most = lengths[c / TEST_COUNT(stream_cases)];
        test_context("case %d, pieces of at most %d, %s", c, (int)most, kernel);
        check_stream(test, most, (uint64_t)(c + 5), kernel);
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
    fdma_select_args args = select_args(&x, NULL, NULL);
    fdma_selection selection = new_selection(x.batch, x.kv_heads, 3 + 6);
    args.selection = &selection;
    args.table_in = one.out;
    CHECK_INT(run_select(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "table_in.seen: element 0 is 2147483647, want 0 to 2147483641");
}

/* With any contents of a table, the selection is one that forward can use. */
static void corrupt_tables_do_no_harm(const char *kernel) {
    static const int32_t strange[] = {INT32_MIN, -1, 0, 7, 7, INT32_MAX};
    for (int c = 0; c < 40; c++) {
        uint64_t state = (uint64_t)c + 1;
        const problem x = stream_problem(&stream_cases[3 + c % 2], state);
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

/* ---- tables of what several pieces leave ---- */

static fdma_table table_of_rows(const problem *x, int64_t rows) {
    const fdma_table table = {
        .score = new_tensor(FDMA_FLOAT32, x->batch, x->kv_heads, rows, -1),
        .position = new_tensor(FDMA_INT32, x->batch, x->kv_heads, rows, -1),
        .seen = new_tensor(FDMA_INT32, x->batch, -1, -1, -1),
    };
    for (int64_t n = 0; n < count_of(table.position); n++)
        ((int32_t *)table.position.data)[n] = -1;
    return table;
}

static void set_row(const fdma_table *table, int64_t b, int64_t g, int64_t row, float score,
                    int32_t position) {
    ((float *)table->score.data)[b * table->score.stride[0] + g * table->score.stride[1] + row] =
        score;
    ((int32_t *)table->position
         .data)[b * table->position.stride[0] + g * table->position.stride[1] + row] = position;
}

/* The row of a table for a kept key: its slot; rows - 1 - slot; or the number of kept keys before
 * it, so that keys are in the order of positions and empty rows come last. */
typedef enum row_order { order_slot, order_reversed, order_position } row_order;

static int64_t row_of(row_order order, int64_t slot, int64_t rows, int64_t kept_before) {
    return order == order_slot ? slot : order == order_reversed ? rows - 1 - slot : kept_before;
}

/* Selects keys `first` to `end` - 1 alone, and writes the keys that its last query keeps to rows
 * from `row` on. */
static void leave_rows(const problem *x, int64_t first, int64_t end, int64_t row, row_order order,
                       const fdma_table *table) {
    const int64_t rows = x->window + x->recent;
    fdma_select_args args = select_args(x, NULL, "reference");
    fdma_selection alone = new_selection(x->batch, x->kv_heads, end - first);
    args.score = positions_of(x->score, 2, first, end);
    args.key_valid = positions_of(x->key_valid, 1, first, end);
    args.selection = &alone;
    CHECK_OK(run_select(&args));
    int64_t kept = 0; // for this (b, g), so far
    for (int64_t n = 0; n < count_of(alone.expiry); n++) {
        const int64_t b = n / (end - first) / x->kv_heads, g = n / (end - first) % x->kv_heads;
        const int64_t j = n % (end - first), slot = int_at(alone.slot, b, g, j);
        if (j == 0)
            kept = 0;
        if (int_at(alone.expiry, b, g, j) < end - first)
            continue;
        set_row(table, b, g, row + row_of(order, slot, rows, kept),
                float_at(x->score, b, g, first + j), (int32_t)(first + j));
        kept++;
    }
}

/* While a key is kept, no other key has its slot. */
static void check_slots(const problem *x, const piece *one, int64_t b, int64_t g) {
    const int64_t slots = x->window + x->recent, kv_len = one->rows + one->end - one->first;
    int32_t *const end_of_slot = test_alloc((size_t)slots * sizeof *end_of_slot);
    for (int64_t slot = 0; slot < slots; slot++)
        end_of_slot[slot] = 0;
    for (int64_t j = 0; j < kv_len; j++) {
        const int32_t expiry = int_at(one->selection.expiry, b, g, j);
        const int32_t slot = int_at(one->selection.slot, b, g, j);
        CHECK((slot >= 0) == (expiry > j) && slot < slots);
        if (slot < 0 || expiry == one->rows)
            continue;
        CHECK(end_of_slot[slot] <= (j < one->rows ? 0 : j));
        end_of_slot[slot] = expiry;
    }
}

/* The own keys, and the carried keys that some own query keeps, expire as in the whole sequence. No
 * query keeps any other key. */
static void check_expiries(const fdma_selection *whole, const piece *one, int64_t b, int64_t g) {
    int64_t carried = 0, wanted = 0;
    for (int64_t row = 0; row < one->rows; row++) {
        const int32_t p = int_at(one->in.position, b, g, row);
        const int32_t expiry = int_at(one->selection.expiry, b, g, row);
        const int64_t want = p < 0 ? 0 : int_at(whole->expiry, b, g, p);
        if (want > one->first)
            CHECK_INT(expiry, index_of(one, want));
        else
            CHECK(expiry <= one->rows);
        carried += expiry > one->rows;
    }
    for (int64_t p = 0; p < one->first; p++)
        wanted += int_at(whole->expiry, b, g, p) > one->first;
    CHECK_INT(carried, wanted); // so none of them is missing in the table
    for (int64_t p = one->first; p < one->end; p++)
        CHECK_INT(int_at(one->selection.expiry, b, g, index_of(one, p)),
                  index_of(one, int_at(whole->expiry, b, g, p)));
}

/* Selects the last of `pieces` pieces with a table of the keys that each earlier piece, alone,
 * leaves. */
static void check_several(const stream_case *test, int64_t pieces, uint64_t seed,
                          const char *kernel) {
    const problem x = stream_problem(test, seed);
    const fdma_selection whole = selected_by(&x, "reference");
    const int64_t slots = x.window + x.recent, length = x.kv_len / pieces;
    piece one = {.first = (pieces - 1) * length, .end = x.kv_len, .rows = (pieces - 1) * slots};
    fdma_select_args args = select_args(&x, NULL, kernel);
    one.in = args.table_in = table_of_rows(&x, one.rows);
    for (int64_t n = 0; n < pieces - 1; n++) { // in some other order if the seed is odd
        const row_order order = seed % 4 >= 2 ? order_position
                                : n % 2 == 1  ? order_reversed
                                              : order_slot;
        leave_rows(&x, n * length, (n + 1) * length,
                   slots * (seed % 2 == 1 ? (n + 1) % (pieces - 1) : n), order, &one.in);
    }
    for (int64_t b = 0; b < x.batch; b++)
        ((int32_t *)one.in.seen.data)[b] = (int32_t)one.first;
    one.selection = new_selection(x.batch, x.kv_heads, one.rows + one.end - one.first);
    args.score = positions_of(x.score, 2, one.first, one.end);
    args.key_valid = positions_of(x.key_valid, 1, one.first, one.end);
    args.selection = &one.selection;
    CHECK_OK(run_select(&args));
    for (int64_t b = 0; b < x.batch; b++)
        for (int64_t g = 0; g < x.kv_heads; g++) {
            check_expiries(&whole, &one, b, g);
            check_slots(&x, &one, b, g);
        }
}

static void tables_hold_what_several_pieces_leave(const char *kernel) {
    static const int64_t counts[] = {2, 3, 4, 7};
    static const struct {
        stream_case test;
        int64_t pieces;
    } many[] = {
        {{1, 2, 6000, 900, 60, 3, 1000000, 0}, 8},  // 7 tables of 960 rows, each with 750 keys
        {{1, 2, 16000, 901, 60, 3, 1000000, 0}, 8}, // 7 tables of 961 rows, none of them empty
        {{1, 2, 2400, 4900, 60, 3, 1000000, 0}, 3}, // 2 tables of 4960 rows, each with 800 keys
    };
    for (int c = 0; c < TEST_COUNT(stream_cases) * TEST_COUNT(counts); c++) {
        const int64_t pieces = counts[c / TEST_COUNT(stream_cases)];
        test_context("case %d, %d pieces, %s", c, (int)pieces, kernel);
        check_several(&stream_cases[c % TEST_COUNT(stream_cases)], pieces, (uint64_t)(c + 3),
                      kernel);
        test_free_all();
    }
    for (int c = 0; c < TEST_COUNT(many) * 4; c++) {
        test_context("many rows, case %d, %s", c, kernel);
        check_several(&many[c / 4].test, many[c / 4].pieces, (uint64_t)c, kernel);
        test_free_all();
    }
}

static void tables_of_other_rows_leave_no_table(void) {
    const problem x = stream_problem(&stream_cases[1], 3); // 7 slots
    fdma_select_args args = select_args(&x, NULL, NULL);
    fdma_selection selection = new_selection(x.batch, x.kv_heads, 9 + x.kv_len);
    args.table_in = table_of_rows(&x, 9);
    args.table_out = new_table(&x);
    args.selection = &selection;
    memset(args.table_in.seen.data, 0, (size_t)x.batch * sizeof(int32_t));
    CHECK_INT(run_select(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "table_in.score: axis 2 has 9 elements, want 7 with table_out");
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
    return tensor.rank > 0 ? gathered(positions_of(tensor, axis, 0, rows_of_table)) : tensor;
}

static fdma_tensor own_of(fdma_tensor tensor, int axis) {
    return tensor.rank > 0 ? gathered(positions_of(tensor, axis, rows_of_table, tensor.shape[axis]))
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

/* Tensors without elements have no memory. A piece without keys does not change a stream. */
static void a_piece_may_have_no_keys(const char *kernel) {
    static int32_t seen[] = {3}, position[] = {2, 0, -1}, expiry[3], slot[3];
    static float score[] = {1, 2, 0};
    fdma_selection selection = {.size = sizeof selection,
                                .expiry = fdma_tensor_3d(expiry, FDMA_INT32, 1, 1, 3),
                                .slot = fdma_tensor_3d(slot, FDMA_INT32, 1, 1, 3)};
    fdma_select_args args = {.size = sizeof args,
                             .score = fdma_tensor_3d(NULL, FDMA_FLOAT32, 1, 1, 0),
                             .table_in = {.score = fdma_tensor_3d(score, FDMA_FLOAT32, 1, 1, 3),
                                          .position = fdma_tensor_3d(position, FDMA_INT32, 1, 1, 3),
                                          .seen = fdma_tensor_1d(seen, FDMA_INT32, 1)},
                             .selection = &selection,
                             .window = 3,
                             .exec.kernel = kernel};
    if (is_device_kernel(kernel))
        return;
    CHECK_OK(run_select(&args));
    CHECK(expiry[0] == 3 && expiry[1] == 3 && expiry[2] == 2);
    CHECK(slot[0] == 0 && slot[1] == 1 && slot[2] == -1);
}

static const test_entry tests[] = {
    EACH_KERNEL_ONCE("select", selection_does_not_depend_on_cuts),
    TEST(streams_end_at_the_last_position),
    EACH_KERNEL_ONCE("select", corrupt_tables_do_no_harm),
    EACH_KERNEL_ONCE("select", tables_hold_what_several_pieces_leave),
    TEST(tables_of_other_rows_leave_no_table),
    EACH_KERNEL("forward", forward_counts_carried_keys),
    EACH_KERNEL("backward", backward_counts_carried_keys),
    EACH_KERNEL_ONCE("select", a_piece_may_have_no_keys),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
