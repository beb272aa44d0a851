/* test_rotate.c - rotary tables, rotations and their gradients by every kernel of the CPU or of a
 * device, against an evaluation in double precision that finds its angles in long double. */
#include "backend.h"
#include "differences.h"
#include "problem.h"

#include <float.h>

static const double base = 10000;

/* ---- tables ---- */

typedef struct table_case {
    int64_t first, rows, dim;
    double base, factor; /* base 0: given frequencies */
    fdma_dtype dtype;    /* of given frequencies */
    bool lists_positions;
} table_case;

static const table_case table_cases[] = {
    {0, 300, 64, 10000, 0, 0, false},
    {1, 5, 2, 500000, 0, 0, false},
    {(1 << 20) + 1, 70, 128, 10000, 1.3, 0, false},
    {INT32_MAX - 1, 2, 256, 1e6, 0.5, 0, false},
    {INT32_MAX - 40, 41, 20, 1, 0, 0, false},
    {0, 3000, 6, 0, 0, FDMA_FLOAT32, false},
    {INT32_MAX - 9, 10, 40, 0, 1.1, FDMA_FLOAT32, false},
    {(1 << 20) + 1, 9, 254, 0, 0, FDMA_FLOAT64, false},
    {3, 0, 8, 10000, 0, 0, false},
    {0, 90, 30, 10000, 0, 0, true},
    {0, 90, 8, 0, 1.2, FDMA_FLOAT64, true},
};

/* Frequencies from 16 down. */
static fdma_tensor given_frequencies(const table_case *n) {
    fdma_tensor given = {0};
    if (n->base > 0)
        return given;
    given = new_tensor(n->dtype, n->dim / 2, -1, -1, -1);
    for (int64_t d = 0; d < n->dim / 2; d++) {
        const double frequency = 16 / (1 + 0.37 * (double)(d * d));
        if (n->dtype == FDMA_FLOAT64)
            ((double *)given.data)[d] = frequency;
        else
            ((float *)given.data)[d] = (float)frequency;
    }
    return given;
}

/* Positions of every size, negative ones too. */
static fdma_tensor listed_positions(const table_case *n) {
    fdma_tensor listed = {0};
    if (!n->lists_positions)
        return listed;
    listed = new_tensor(FDMA_INT32, n->rows, -1, -1, -1);
    for (int64_t row = 0; row < n->rows; row++)
        ((int32_t *)listed.data)[row] = (int32_t)(row % 2 == 0 ? INT32_MAX >> row / 3 : -row);
    ((int32_t *)listed.data)[7] = INT32_MIN;
    return listed;
}

static fdma_rotary_table_args table_args(const table_case *n, const char *kernel) {
    return (fdma_rotary_table_args){
        .size = sizeof(fdma_rotary_table_args),
        .rotary = new_output(FDMA_FLOAT32, n->rows, n->dim, -1, -1),
        .inv_freq = given_frequencies(n),
        .positions = listed_positions(n),
        .base = n->base,
        .factor = n->factor,
        .first = n->first,
        .exec = {.kernel = kernel},
    };
}

static long double frequency_of(const fdma_rotary_table_args *args, int64_t d) {
    const long double dim = (long double)args->rotary.shape[1];
    return args->inv_freq.rank > 0
               ? (long double)load_double(args->inv_freq.data, args->inv_freq.dtype, d)
               : powl((long double)args->base, -2 * (long double)d / dim);
}

/* An element may be off by a rounding, by the documented 1e-15, and by what the angle in long
 * double may be off. */
static void check_number(float got, long double want, long double angle) {
    const double doubt = (double)(16 * LDBL_EPSILON * fabsl(angle)) + 1e-15;
    CHECK_NEAR((double)got, (double)want, fabs((double)want) * FLT_EPSILON / 2 + 1.3 * doubt);
}

static void tables_are_exact(const char *kernel) {
    for (int c = 0; c < TEST_COUNT(table_cases); c++) {
        const table_case *const n = &table_cases[c];
        fdma_rotary_table_args args = table_args(n, kernel);
        const long double factor = n->factor == 0 ? 1 : (long double)n->factor;
        test_context("%s table %d", kernel, c);
        CHECK_OK(run_rotary_table(&args));
        for (int64_t at = 0; at < n->rows * n->dim / 2; at++) {
            const int64_t row = at / (n->dim / 2), d = at % (n->dim / 2);
            const float *const got = (const float *)args.rotary.data + row * n->dim + d;
            const int32_t *const listed = args.positions.data;
            const int64_t position = listed != NULL ? listed[row] : n->first + row;
            const long double angle = (long double)position * frequency_of(&args, d);
            check_number(got[0], factor * cosl(angle), angle);
            check_number(got[n->dim / 2], factor * sinl(angle), angle);
        }
        fdma_rotary_table_args gapped = args;
        gapped.rotary = with_gaps(args.rotary, 3);
        CHECK_OK(run_rotary_table(&gapped));
        check_gapped(gapped.rotary, args.rotary, 3);
    }
}

/* ---- problems ---- */

typedef enum row_places { by_offset, by_positions, by_shared_positions, by_starts } row_places;
typedef enum weights { no_weight, own_weight, wide_weight } weights;

typedef struct turn_case {
    int64_t batch, len, heads, head_dim, dim, nope_heads;
    bool interleaved;
    weights weight;
    row_places places;
    int64_t first, rows; /* of the table */
} turn_case;

static const turn_case turn_cases[] = {
    {2, 37, 4, 64, 64, 0, false, no_weight, by_offset, 0, 50},
    {1, 45, 3, 128, 64, 1, false, own_weight, by_starts, 0, 30},
    {2, 9, 5, 40, 20, 0, false, wide_weight, by_positions, (1 << 20) + 1, 70},
    {1, 20, 2, 256, 256, 0, true, wide_weight, by_shared_positions, INT32_MAX - 63, 64},
    {3, 1, 8, 96, 2, 2, true, own_weight, by_positions, 0, 2},
    {1, 300, 2, 8, 6, 2, false, wide_weight, by_offset, 1000, 400},
    {1, 301, 7, 72, 72, 3, false, own_weight, by_starts, 7, 200},
    {3, 50, 1, 192, 192, 0, false, no_weight, by_shared_positions, 0, 128},
    {2, 21, 6, 128, 90, 0, true, no_weight, by_positions, 12, 500},
    {1, 4100, 1, 16, 16, 0, true, own_weight, by_offset, 0, 4200},
};

typedef struct turn {
    const turn_case *sizes;
    fdma_rotate_args forward;
    fdma_rotate_backward_args backward;
    long double frequency[128];
} turn;

static fdma_tensor table_of(const turn_case *n, fdma_dtype dtype) {
    fdma_rotary_table_args args = {
        .size = sizeof args,
        .rotary = new_output(dtype, n->rows, n->dim, -1, -1),
        .base = base,
        .first = n->first,
        .exec = {.kernel = "reference"},
    };
    CHECK_OK(run_rotary_table(&args));
    return args.rotary;
}

/* Positions of the table, its first and its last among them. */
static fdma_tensor random_positions(const turn_case *n, uint64_t *state) {
    const int64_t batch = n->places == by_positions ? n->batch : 1;
    const fdma_tensor positions = new_tensor(FDMA_INT32, batch, n->len, -1, -1);
    for (int64_t at = 0; at < batch * n->len; at++)
        ((int32_t *)positions.data)[at] =
            (int32_t)(n->first + (at == 0   ? 0
                                  : at == 1 ? n->rows - 1
                                            : random_below(state, n->rows)));
    return positions;
}

/* Four sequences, the second of them empty; the last ends before the rows do. */
static fdma_tensor some_starts(const turn_case *n) {
    const int32_t len = (int32_t)n->len;
    return new_list((int32_t[]){0, len / 3, len / 3, len / 2, len - 4}, 5);
}

static turn make_turn(const turn_case *n, fdma_dtype dtype, const char *kernel) {
    uint64_t state = 9;
    fdma_rotate_args args = {.size = sizeof args, .first = n->first, .exec = {.kernel = kernel}};
    args.x = new_tensor(dtype, n->batch, n->len, n->heads, n->head_dim);
    fill_random(args.x, &state, 2);
    if (n->weight != no_weight) {
        args.weight =
            new_tensor(n->weight == own_weight || dtype == FDMA_FLOAT64 ? dtype : FDMA_FLOAT32,
                       n->head_dim, -1, -1, -1);
        fill_random(args.weight, &state, 2);
        args.eps = 0.01;
    }
    args.rotary = table_of(n, dtype == FDMA_FLOAT64 ? dtype : FDMA_FLOAT32);
    if (n->places == by_positions || n->places == by_shared_positions)
        args.positions = random_positions(n, &state);
    else
        args.offset = n->first + 3;
    if (n->places == by_starts)
        args.starts = some_starts(n);
    args.out = new_output(dtype, n->batch, n->len, n->heads, n->head_dim);
    args.nope_heads = n->nope_heads;
    args.interleaved = n->interleaved;
    fdma_rotate_backward_args back = {
        .size = sizeof back,
        .weight = args.weight,
        .rotary = args.rotary,
        .positions = args.positions,
        .starts = args.starts,
        .dout = new_tensor(dtype, n->batch, n->len, n->heads, n->head_dim),
        .dx = new_output(dtype, n->batch, n->len, n->heads, n->head_dim),
        .eps = args.eps,
        .first = args.first,
        .offset = args.offset,
        .nope_heads = args.nope_heads,
        .interleaved = args.interleaved,
        .exec = {.kernel = kernel},
    };
    fill_random(back.dout, &state, 1);
    if (n->weight != no_weight) {
        back.x = args.x;
        back.dweight =
            new_output(dtype == FDMA_FLOAT64 ? dtype : FDMA_FLOAT32, n->head_dim, -1, -1, -1);
    }
    turn made = {n, args, back, {0}};
    for (int64_t d = 0; d < n->dim / 2; d++)
        made.frequency[d] = powl((long double)base, -2 * (long double)d / (long double)n->dim);
    return made;
}

/* ---- the evaluation in double ---- */

static int64_t position_of(const turn *t, int64_t b, int64_t i) {
    const fdma_rotate_args *const args = &t->forward;
    const int32_t *const starts = args->starts.data;
    int64_t start = i; /* after the last sequence */
    if (args->positions.rank > 0)
        return ((const int32_t *)
                    args->positions.data)[args->positions.shape[0] > 1 ? b * t->sizes->len + i : i];
    if (args->starts.rank == 0)
        return args->offset + i;
    for (int64_t n = 0; n + 1 < args->starts.shape[0]; n++)
        if (i >= starts[n] && i < starts[n + 1])
            start = starts[n];
    return args->offset + i - start;
}

/* Rotates a row at [b, i, h] by sign times its angles. */
static void rotate_exactly(const turn *t, int64_t b, int64_t i, int64_t h, double sign, double *y) {
    const turn_case *const n = t->sizes;
    for (int64_t d = 0; d < n->dim / 2 && h < n->heads - n->nope_heads; d++) {
        const long double angle = (long double)position_of(t, b, i) * t->frequency[d];
        const double c = (double)cosl(angle), s = sign * (double)sinl(angle);
        const int64_t one = n->interleaved ? 2 * d : d;
        const int64_t other = n->interleaved ? one + 1 : d + n->dim / 2;
        const double x = y[one], z = y[other];
        y[one] = x * c - z * s;
        y[other] = z * c + x * s;
    }
}

static double weight_at(const turn *t, int64_t d) {
    const fdma_tensor weight = t->forward.weight;
    return weight.rank > 0 ? load_double(weight.data, weight.dtype, d) : 1;
}

/* The norm's factor of row `row`, counted in memory; 1 without a norm. */
static double norm_at(const turn *t, int64_t row) {
    const fdma_rotate_args *const args = &t->forward;
    const int64_t dim = t->sizes->head_dim;
    double sum = 0;
    for (int64_t d = 0; d < dim; d++)
        sum += pow(load_double(args->x.data, args->x.dtype, row * dim + d), 2);
    return args->weight.rank > 0 ? 1 / sqrt(sum / (double)dim + args->eps) : 1;
}

/* Rows are numbered [batch, len, heads]. */
static void rotate_row_exactly(const turn *t, int64_t row, double sign, double *y) {
    const turn_case *const n = t->sizes;
    rotate_exactly(t, row / n->heads / n->len, row / n->heads % n->len, row % n->heads, sign, y);
}

static int64_t count_rows(const turn *t) {
    return t->sizes->batch * t->sizes->len * t->sizes->heads;
}

static double *exact_out(const turn *t) {
    const fdma_tensor x = t->forward.x;
    const int64_t dim = t->sizes->head_dim;
    double *const out = test_alloc((size_t)count_of(x) * sizeof *out);
    for (int64_t row = 0; row < count_rows(t); row++) {
        double *const y = out + row * dim, norm = norm_at(t, row);
        for (int64_t d = 0; d < dim; d++)
            y[d] = load_double(x.data, x.dtype, row * dim + d) * norm * weight_at(t, d);
        rotate_row_exactly(t, row, 1, y);
    }
    return out;
}

static void exact_gradients(const turn *t, double *dx, double *dweight) {
    const fdma_tensor dout = t->backward.dout, x = t->forward.x;
    const int64_t dim = t->sizes->head_dim;
    for (int64_t row = 0; row < count_rows(t); row++) {
        double *const u = dx + row * dim, norm = norm_at(t, row), mean = 0;
        for (int64_t d = 0; d < dim; d++)
            u[d] = load_double(dout.data, dout.dtype, row * dim + d);
        rotate_row_exactly(t, row, -1, u);
        for (int64_t d = 0; d < dim; d++) {
            const double own = load_double(x.data, x.dtype, row * dim + d);
            dweight[d] += norm * own * u[d];
            u[d] *= weight_at(t, d);
            mean += own * u[d] / (double)dim;
        }
        for (int64_t d = 0; d < dim && t->forward.weight.rank > 0; d++) {
            const double own = load_double(x.data, x.dtype, row * dim + d);
            u[d] = norm * (u[d] - own * norm * norm * mean);
        }
    }
}

/* ---- comparisons ---- */

static double largest_error(fdma_tensor got, const double *want) {
    double largest = 0;
    for (int64_t at = 0; at < count_of(got); at++)
        largest = fmax(largest, fabs(load_double(got.data, got.dtype, at) - want[at]));
    return largest;
}

/* A kernel may err twice as much as the plain evaluation, and round its result. */
static void check_errors(fdma_tensor got, fdma_tensor plain, const double *want) {
    const double error = largest_error(plain, want);
    double largest = 0;
    for (int64_t at = 0; at < count_of(plain); at++)
        largest = fmax(largest, fabs(want[at]));
    CHECK(count_of(got) == count_of(plain) && error < 4 * step_of(plain.dtype) + 0.01 * largest);
    for (int64_t at = 0; at < count_of(got); at++)
        CHECK_NEAR(load_double(got.data, got.dtype, at), want[at],
                   2 * error + step_of(got.dtype) * fabs(want[at]));
}

static void rotations_are_exact(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(turn_cases); c++) {
        turn t = make_turn(&turn_cases[c], dtype, kernel);
        turn plain = make_turn(&turn_cases[c], dtype, "reference/float32");
        test_context("%s %s, case %d", kernel, dtype_name(dtype), c);
        CHECK_OK(run_rotate(&t.forward));
        CHECK_OK(run_rotate(&plain.forward));
        check_errors(t.forward.out, plain.forward.out, exact_out(&t));
        test_free_all();
    }
}

static void gradients_are_exact(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(turn_cases); c++) {
        turn t = make_turn(&turn_cases[c], dtype, kernel);
        turn plain = make_turn(&turn_cases[c], dtype, "reference/float32");
        double *const dx = test_alloc((size_t)count_of(t.backward.dx) * sizeof *dx);
        double *const dweight = test_alloc((size_t)t.sizes->head_dim * sizeof *dweight);
        test_context("%s %s, case %d", kernel, dtype_name(dtype), c);
        CHECK_OK(run_rotate_backward(&t.backward));
        CHECK_OK(run_rotate_backward(&plain.backward));
        exact_gradients(&t, dx, dweight);
        check_errors(t.backward.dx, plain.backward.dx, dx);
        if (t.sizes->weight != no_weight)
            check_errors(t.backward.dweight, plain.backward.dweight, dweight);
        test_free_all();
    }
}

/* ---- forms of calls that change no bit ---- */

static void strides_change_no_bit(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(turn_cases) - 1; c++) {
        turn t = make_turn(&turn_cases[c], dtype, kernel), other = t;
        test_context("%s %s, case %d", kernel, dtype_name(dtype), c);
        CHECK_OK(run_rotate(&t.forward));
        CHECK_OK(run_rotate_backward(&t.backward));
        const fdma_tensor dweight = copy_tensor(t.backward.dweight); // other writes it again
        other.forward.x = heads_first(t.forward.x);
        other.forward.out = with_gaps(t.forward.out, 5);
        other.forward.rotary = with_gaps(t.forward.rotary, 1);
        other.forward.positions = with_gaps(t.forward.positions, 2);
        other.backward.dout = with_gaps(t.backward.dout, 3);
        other.backward.dx = heads_first(t.backward.dx);
        if (t.backward.x.rank > 0)
            other.backward.x = with_gaps(t.backward.x, 1);
        CHECK_OK(run_rotate(&other.forward));
        CHECK_OK(run_rotate_backward(&other.backward));
        check_gapped(other.forward.out, t.forward.out, 5);
        CHECK(same_tensor(gathered(other.backward.dx), t.backward.dx));
        CHECK(same_tensor(other.backward.dweight, dweight));
        test_free_all();
    }
}

/* A call whose output is its input. Its memory is the device's for a kernel of a device. */
static fdma_tensor run_in_place(fdma_operation operation, void *args) {
    call x;
    call_of(&x, operation, args);
    const bool back = operation == operation_rotate_backward;
    const char *const input = back ? "dout" : "x", *const output = back ? "dx" : "out";
    *call_tensor_named(&x, output) = *call_tensor_named(&x, input) =
        copy_tensor(*call_tensor_named(&x, input));
#if defined(FDMA_HAVE_CUDA)
    if (is_device_kernel(call_exec(&x)->kernel)) {
        const int kept = device_state.blocks;
        call there;
        device_copy_call(&there, &x);
        *call_tensor_named(&there, output) = *call_tensor_named(&there, input);
        CHECK_OK(device_run_call(&there));
        device_wait();
        const fdma_tensor found = device_read(*call_tensor_named(&there, output));
        device_free_after(kept);
        return found;
    }
#endif
    CHECK_OK(call_run(&x));
    return *call_tensor_named(&x, output);
}

static void in_place_changes_no_bit(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(turn_cases); c++) {
        turn t = make_turn(&turn_cases[c], dtype, kernel);
        test_context("%s %s, case %d", kernel, dtype_name(dtype), c);
        CHECK_OK(run_rotate(&t.forward));
        CHECK_OK(run_rotate_backward(&t.backward));
        CHECK(same_tensor(run_in_place(operation_rotate, &t.forward), t.forward.out));
        CHECK(same_tensor(run_in_place(operation_rotate_backward, &t.backward), t.backward.dx));
        test_free_all();
    }
}

/* A tensor like an output that no call has written, or none. */
static fdma_tensor another(fdma_tensor output) {
    return output.rank > 0 ? copy_tensor(output) : output;
}

/* Gives a turn the rows of another as k, with results of their own. */
static turn with_keys(const turn *q, const turn *k) {
    turn both = *q;
    both.forward.out = another(q->forward.out);
    both.forward.k = k->forward.x;
    both.forward.k_weight = k->forward.weight;
    both.forward.k_out = another(k->forward.out);
    both.forward.k_nope_heads = k->forward.nope_heads;
    both.backward.dx = another(q->backward.dx);
    both.backward.dweight = another(q->backward.dweight);
    both.backward.dk_out = k->backward.dout;
    both.backward.k = k->backward.x;
    both.backward.k_weight = k->backward.weight;
    both.backward.dk = another(k->backward.dx);
    both.backward.dk_weight = another(k->backward.dweight);
    both.backward.k_nope_heads = k->backward.nope_heads;
    return both;
}

static void check_q_and_k(const turn_case *n, int64_t k_heads, fdma_dtype dtype,
                          const char *kernel) {
    turn_case of_k = *n;
    of_k.heads = k_heads;
    of_k.nope_heads = n->nope_heads > 0 ? 1 : 0;
    turn q = make_turn(n, dtype, kernel), k = make_turn(&of_k, dtype, kernel);
    k.forward.positions = k.backward.positions = q.forward.positions;
    turn both = with_keys(&q, &k);
    CHECK_OK(run_rotate(&q.forward));
    CHECK_OK(run_rotate(&k.forward));
    CHECK_OK(run_rotate_backward(&q.backward));
    CHECK_OK(run_rotate_backward(&k.backward));
    CHECK_OK(run_rotate(&both.forward));
    CHECK_OK(run_rotate_backward(&both.backward));
    CHECK(same_tensor(both.forward.out, q.forward.out));
    CHECK(same_tensor(both.forward.k_out, k.forward.out));
    CHECK(same_tensor(both.backward.dx, q.backward.dx));
    CHECK(same_tensor(both.backward.dk, k.backward.dx));
    CHECK(same_tensor(both.backward.dweight, q.backward.dweight));
    CHECK(same_tensor(both.backward.dk_weight, k.backward.dweight));
}

static void one_call_has_the_bits_of_two(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(turn_cases); c++) {
        test_context("%s %s, case %d", kernel, dtype_name(dtype), c);
        check_q_and_k(&turn_cases[c], c % 2 == 0 ? 4 : 2, dtype, kernel);
        test_free_all();
    }
}

/* Kernels of a device may take many rows in another way than few. */
static void many_rows_have_the_bits_of_few(const char *kernel) {
    static const turn_case cases[] = {
        {1, 4200, 16, 64, 64, 3, false, no_weight, by_offset, 0, 4300},
        {1, 4200, 16, 64, 48, 0, true, own_weight, by_offset, 0, 4300},
    };
    for (int c = 0; c < TEST_COUNT(cases); c++) {
        turn t =
            make_turn(&cases[c], is_device_kernel(kernel) ? FDMA_BFLOAT16 : FDMA_FLOAT32, kernel);
        fdma_rotate_args few = t.forward;
        test_context("%s, case %d", kernel, c);
        few.x = positions_of(t.forward.x, 1, 0, 90);
        few.out = positions_of(copy_tensor(t.forward.out), 1, 0, 90);
        CHECK_OK(run_rotate(&t.forward));
        CHECK_OK(run_rotate(&few));
        CHECK(same_tensor(few.out, positions_of(t.forward.out, 1, 0, 90)));
        test_free_all();
    }
}

static void threads_change_no_bit(const char *kernel) {
    for (int c = 0; c < TEST_COUNT(turn_cases); c++) {
        turn one = make_turn(&turn_cases[c], backend_dtype(), kernel);
        turn many = make_turn(&turn_cases[c], backend_dtype(), kernel);
        one.backward.exec.threads = 1, many.backward.exec.threads = 5;
        test_context("%s, case %d", kernel, c);
        CHECK_OK(run_rotate_backward(&one.backward));
        CHECK_OK(run_rotate_backward(&many.backward));
        CHECK(same_tensor(one.backward.dx, many.backward.dx));
        CHECK(same_tensor(one.backward.dweight, many.backward.dweight));
        test_free_all();
    }
}

/* Channels and heads that are neither normalized nor rotated keep their bits, -0
 * too; NaN stays NaN. */
static void other_channels_are_copied(const char *kernel, fdma_dtype dtype) {
    const turn_case n = {1, 3, 2, 48, 12, 1, false, no_weight, by_offset, 0, 9};
    turn t = make_turn(&n, dtype, kernel);
    for (int64_t row = 0; row < 6; row++) {
        store_float(t.forward.x.data, dtype, row * 48 + 12, -0.0F);
        store_float(t.forward.x.data, dtype, row * 48 + 13, INFINITY);
        store_float(t.forward.x.data, dtype, row * 48 + 47, NAN);
    }
    CHECK_OK(run_rotate(&t.forward));
    const size_t size = dtype_size(dtype);
    for (int64_t row = 0; row < 6; row++) {
        const size_t from = (size_t)(row * 48 + (row % 2 == 0 ? 12 : 0)) * size;
        const size_t end = (size_t)(row * 48 + 47) * size;
        CHECK(isnan(load_double(t.forward.out.data, dtype, row * 48 + 47)));
        CHECK_BYTES((const char *)t.forward.out.data + from, (const char *)t.forward.x.data + from,
                    end - from);
    }
}

/* ---- the derivative ---- */

static loss loss_of_rotation(const void *context) {
    const turn *const t = context;
    CHECK_OK(fdma_rotate(&t->forward));
    return weighted_sum(t->backward.dout, t->forward.out);
}

static void gradients_are_derivatives(void) {
    static const turn_case cases[] = {
        {2, 3, 3, 16, 10, 1, false, wide_weight, by_positions, 5, 40},
        {1, 9, 2, 8, 8, 0, true, wide_weight, by_starts, 0, 12},
        {1, 3, 2, 8, 4, 0, false, no_weight, by_offset, 0, 12},
    };
    for (int c = 0; c < TEST_COUNT(cases); c++) {
        turn t = make_turn(&cases[c], FDMA_FLOAT64, "reference");
        test_context("case %d", c);
        CHECK_OK(run_rotate_backward(&t.backward));
        check_differences(loss_of_rotation, &t, t.forward.x, t.backward.dx);
        if (t.sizes->weight != no_weight)
            check_differences(loss_of_rotation, &t, t.forward.weight, t.backward.dweight);
    }
}

/* ---- bad positions ---- */

/* The host sees the positions of a call on the CPU. Kernels of a device write NaN. */
static void positions_outside_the_table(const char *kernel) {
    const turn_case n = {1, 6, 2, 16, 8, 1, false, no_weight, by_positions, 100, 10};
    static const int32_t wrong[] = {99, 110, -1, INT32_MIN, INT32_MAX};
    turn t = make_turn(&n, backend_dtype(), kernel);
    for (int w = 0; w < TEST_COUNT(wrong); w++) {
        ((int32_t *)t.forward.positions.data)[4] = wrong[w];
        test_context("%s, position %d", kernel, wrong[w]);
        if (!is_device_kernel(kernel)) {
            CHECK_INT(run_rotate(&t.forward), FDMA_INVALID_ARGUMENT);
            CHECK_WORD(fdma_last_error(), "positions: element [0, 4] is");
            CHECK_WORD(fdma_last_error(), "want 100 to 109");
            CHECK_INT(((const unsigned char *)t.forward.out.data)[0], test_guard_byte);
            continue;
        }
        CHECK_OK(run_rotate(&t.forward));
        for (int64_t at = 0; at < count_of(t.forward.out); at++) {
            const bool is_wrong = at / 32 == 4 && at % 32 < 8;
            CHECK(isnan(load_double(t.forward.out.data, t.forward.out.dtype, at)) == is_wrong);
        }
    }
}

/* Wrong starts on a device give wrong positions. The guards show that nothing else is written. */
static void wrong_starts_do_no_harm(const char *kernel) {
    const turn_case n = {1, 40, 2, 16, 8, 0, false, no_weight, by_starts, 0, 50};
    static const int32_t wrong[][5] = {
        {5, 9, 9, 20, 36}, {0, 30, 20, 10, 5}, {-7, INT32_MIN, INT32_MAX, 3, -1}, {0, 0, 0, 0, 99}};
    turn t = make_turn(&n, backend_dtype(), kernel);
    for (int w = 0; w < TEST_COUNT(wrong); w++) {
        t.forward.starts = new_list(wrong[w], 5);
        const fdma_status status = run_rotate(&t.forward);
        CHECK(status == (is_device_kernel(kernel) ? FDMA_OK : FDMA_INVALID_ARGUMENT));
    }
}

/* ---- empty calls ---- */

static void empty_calls_succeed(const char *kernel) {
    const turn_case n = {1, 8, 2, 16, 8, 0, false, wide_weight, by_offset, 0, 20};
    turn t = make_turn(&n, backend_dtype(), kernel);
    t.forward.x.shape[1] = t.forward.out.shape[1] = 0;
    t.backward.x.shape[1] = t.backward.dx.shape[1] = t.backward.dout.shape[1] = 0;
    CHECK_OK(run_rotate(&t.forward));
    CHECK_OK(run_rotate_backward(&t.backward));
    for (int64_t d = 0; d < 16; d++) /* a sum without terms */
        CHECK(((const float *)t.backward.dweight.data)[d] == 0);
}

static const test_entry tests[] = {
    EACH_KERNEL_ONCE("rotary_table", tables_are_exact),
    EACH_KERNEL("rotate", rotations_are_exact),
    EACH_KERNEL("rotate_backward", gradients_are_exact),
    EACH_KERNEL("rotate", strides_change_no_bit),
    EACH_KERNEL("rotate", in_place_changes_no_bit),
    EACH_KERNEL("rotate", one_call_has_the_bits_of_two),
    EACH_KERNEL("rotate", other_channels_are_copied),
    EACH_KERNEL_ONCE("rotate", many_rows_have_the_bits_of_few),
    EACH_KERNEL_ONCE("rotate_backward", threads_change_no_bit),
    EACH_KERNEL_ONCE("rotate", positions_outside_the_table),
    EACH_KERNEL_ONCE("rotate", wrong_starts_do_no_harm),
    EACH_KERNEL_ONCE("rotate", empty_calls_succeed),
    TEST(gradients_are_derivatives),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
