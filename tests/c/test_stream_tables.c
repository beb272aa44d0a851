/* test_stream_tables.c - select with a table of the keys that several pieces of a stream, each
 * selected alone, leave: the own queries keep what they keep in the whole stream. */
#include "errors.h"
#include "stream_pieces.h"

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
    fdma_select_args args = select_args(x, "reference");
    fdma_selection alone = new_selection(x, end - first);
    args.score = keys_of(x->score, 2, first, end);
    args.key_valid = keys_of(x->key_valid, 1, first, end);
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
    const fdma_selection whole = select_whole(&x);
    const int64_t slots = x.window + x.recent, length = x.kv_len / pieces;
    piece one = {.first = (pieces - 1) * length, .end = x.kv_len, .rows = (pieces - 1) * slots};
    fdma_select_args args = select_args(&x, kernel);
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
    one.selection = new_selection(&x, one.rows + one.end - one.first);
    args.score = keys_of(x.score, 2, one.first, one.end);
    args.key_valid = keys_of(x.key_valid, 1, one.first, one.end);
    args.selection = &one.selection;
    CHECK_OK(run_select(&args));
    for (int64_t b = 0; b < x.batch; b++)
        for (int64_t g = 0; g < x.kv_heads; g++) {
            check_expiries(&whole, &one, b, g);
            check_slots(&x, &one, b, g);
        }
}

static void tables_hold_what_several_pieces_leave(void) {
    static const int64_t counts[] = {2, 3, 4, 7};
    static const struct {
        stream_case test;
        int64_t pieces;
    } many[] = {
        {{1, 2, 6000, 900, 60, 3, 1000000, 0}, 8},  // 7 tables of 960 rows, each with 750 keys
        {{1, 2, 16000, 901, 60, 3, 1000000, 0}, 8}, // 7 tables of 961 rows, none of them empty
        {{1, 2, 2400, 4900, 60, 3, 1000000, 0}, 3}, // 2 tables of 4960 rows, each with 800 keys
    };
    const kernel_list kernels = kernels_of("select");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int c = 0; c < TEST_COUNT(stream_cases) * TEST_COUNT(counts); c++) {
            const int64_t pieces = counts[c / TEST_COUNT(stream_cases)];
            test_context("case %d, %d pieces, %s", c, (int)pieces, kernels.name[kernel]);
            check_several(&stream_cases[c % TEST_COUNT(stream_cases)], pieces, (uint64_t)(c + 3),
                          kernels.name[kernel]);
            test_free_all();
        }
        for (int c = 0; c < TEST_COUNT(many) * 4; c++) {
            test_context("many rows, case %d, %s", c, kernels.name[kernel]);
            check_several(&many[c / 4].test, many[c / 4].pieces, (uint64_t)c, kernels.name[kernel]);
            test_free_all();
        }
    }
}

static void tables_of_other_rows_leave_no_table(void) {
    const problem x = stream_problem(&stream_cases[1], 3); // 7 slots
    fdma_select_args args = select_args(&x, NULL);
    fdma_selection selection = new_selection(&x, 9 + x.kv_len);
    args.table_in = table_of_rows(&x, 9);
    args.table_out = new_table(&x);
    args.selection = &selection;
    memset(args.table_in.seen.data, 0, (size_t)x.batch * sizeof(int32_t));
    CHECK_INT(run_select(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "table_in.score: axis 2 has 9 elements, want 7 with table_out");
}

static const test_entry tests[] = {
    TEST(tables_hold_what_several_pieces_leave),
    TEST(tables_of_other_rows_leave_no_table),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
