/* test_packed.c - packed sequences: every kernel gives each sequence the bits that it has alone,
 * whatever the other sequences are; positions after the last sequence have no keys; wrong starts
 * are refused. */
#include "errors.h"
#include "gradient.h"

enum { sequence_count = 6, packed_len = 167 };

/* Sequences of 1, 40, 0, 67, 50 and 0 positions; 9 more belong to none. */
static int32_t starts[sequence_count + 1] = {0, 1, 41, 41, 108, 158, 158};

static fdma_tensor all_starts(void) {
    return fdma_tensor_1d(starts, FDMA_INT32, sequence_count + 1);
}

typedef struct packed_case {
    int64_t group, head_dim, window, recent, sinks;
    fdma_scope scope;
    int causal, padded;
    double softcap;
} packed_case;

static const packed_case packed_cases[] = {
    {2, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0},  {1, 24, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 1, 0},
    {4, 32, 12, 0, 0, FDMA_SCOPE_CAUSAL, 1, 1, 0},  {2, 64, 9, 7, 3, FDMA_SCOPE_CAUSAL, 1, 0, 2.5},
    {3, 128, 55, 0, 2, FDMA_SCOPE_CAUSAL, 1, 0, 0}, {1, 40, 20, 0, 1, FDMA_SCOPE_GLOBAL, 0, 1, 0},
    {2, 8, 1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0},    {1, 16, 300, 0, 0, FDMA_SCOPE_CAUSAL, 1, 1, 0},
};

static problem packed_problem(const packed_case *test, fdma_dtype dtype) {
    problem x = {.batch = 1,
                 .q_len = packed_len,
                 .kv_len = packed_len,
                 .q_heads = 2 * test->group,
                 .kv_heads = 2,
                 .head_dim = test->head_dim,
                 .window = test->window,
                 .recent = test->recent,
                 .sinks = test->sinks,
                 .scope = test->scope,
                 .causal = test->causal,
                 .softcap = test->softcap,
                 .dtype = dtype};
    problem_fill(&x, 31);
    if (test->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, 1, packed_len, -1, -1);
        for (int64_t j = 0; j < packed_len; j++)
            ((uint8_t *)x.key_valid.data)[j] = j % 5 != 2;
    }
    return x;
}

/* A contiguous copy of a view: outputs are compared as contiguous tensors. */
static fdma_tensor contiguous(fdma_tensor view) {
    int64_t n[4] = {1, 1, 1, 1};
    for (int axis = 0; axis < view.rank; axis++)
        n[axis] = view.shape[axis];
    const fdma_tensor copy = new_tensor(view.dtype, n[0], view.rank > 1 ? n[1] : -1,
                                        view.rank > 2 ? n[2] : -1, view.rank > 3 ? n[3] : -1);
    const size_t size = dtype_size(view.dtype);
    int64_t at = 0;
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t c = 0; c < n[2]; c++)
                for (int64_t d = 0; d < n[3]; d++) {
                    const int64_t index[] = {a, b, c, d};
                    int64_t from = 0;
                    for (int axis = 0; axis < view.rank; axis++)
                        from += index[axis] * view.stride[axis];
                    memcpy((char *)copy.data + (size_t)at++ * size,
                           (const char *)view.data + (size_t)from * size, size);
                }
    return copy;
}

static void check_same(fdma_tensor packed, int axis, int64_t first, fdma_tensor alone) {
    const fdma_tensor own =
        contiguous(positions_of(packed, axis, first, first + alone.shape[axis]));
    CHECK_BYTES(own.data, alone.data, bytes_of(alone));
}

/* A sequence of a packed problem, alone. The caller makes its selection. */
static problem sequence_alone(const problem *x, int64_t first, int64_t end) {
    problem alone = *x;
    alone.q_len = alone.kv_len = end - first;
    alone.q = contiguous(positions_of(x->q, 1, first, end));
    alone.k = contiguous(positions_of(x->k, 1, first, end));
    alone.v = contiguous(positions_of(x->v, 1, first, end));
    alone.score = contiguous(positions_of(x->score, 2, first, end));
    alone.bias = contiguous(positions_of(x->bias, 2, first, end));
    if (x->key_valid.rank > 0)
        alone.key_valid = contiguous(positions_of(x->key_valid, 1, first, end));
    return alone;
}

/* ---- select ---- */

static fdma_selection select_packed(const problem *x, const char *kernel) {
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = new_output(FDMA_INT32, 1, x->kv_heads, x->kv_len, -1),
        .slot = new_output(FDMA_INT32, 1, x->kv_heads, x->kv_len, -1),
    };
    fdma_select_args args = {.size = sizeof args,
                             .score = x->score,
                             .key_valid = x->key_valid,
                             .starts = all_starts(),
                             .selection = &selection,
                             .window = x->window,
                             .recent = x->recent,
                             .sinks = x->sinks,
                             .scope = x->scope,
                             .exec = {.kernel = kernel, .threads = 2}};
    CHECK_OK(run_select(&args));
    return selection;
}

static int32_t int_of(fdma_tensor tensor, int64_t g, int64_t j) {
    return ((const int32_t *)tensor.data)[g * packed_len + j];
}

/* Expiry is a position in the packed sequences; slots begin anew in each sequence. */
static void check_selection(const problem *x, const fdma_selection *packed, int64_t first,
                            int64_t end) {
    problem alone = sequence_alone(x, first, end);
    problem_select(&alone);
    for (int64_t at = 0; at < x->kv_heads * (end - first); at++) {
        const int64_t g = at / (end - first), j = at % (end - first);
        CHECK_INT(int_of(packed->expiry, g, first + j),
                  ((const int32_t *)alone.selection.expiry.data)[at] + first);
        CHECK_INT(int_of(packed->slot, g, first + j),
                  ((const int32_t *)alone.selection.slot.data)[at]);
    }
}

static void selections_are_those_of_each_sequence(void) {
    for (int c = 0; c < TEST_COUNT(packed_cases); c++) {
        const kernel_list kernels = kernels_of("select");
        for (int kernel = 0; kernel < kernels.count && packed_cases[c].window > 0; kernel++) {
            test_context("case %d, %s", c, kernels.name[kernel]);
            const problem x = packed_problem(&packed_cases[c], FDMA_FLOAT32);
            const fdma_selection packed = select_packed(&x, kernels.name[kernel]);
            for (int n = 0; n < sequence_count; n++)
                if (starts[n + 1] > starts[n])
                    check_selection(&x, &packed, starts[n], starts[n + 1]);
            for (int64_t j = starts[sequence_count]; j < packed_len; j++)
                for (int64_t g = 0; g < x.kv_heads; g++) {
                    CHECK_INT(int_of(packed.expiry, g, j), j);
                    CHECK_INT(int_of(packed.slot, g, j), -1);
                }
            CHECK_INT(packed.kv_len, packed_len);
            test_free_all();
        }
    }
}

/* ---- forward and backward ---- */

static void check_unused_positions(const gradient_problem *packed, const gradients *found) {
    const int64_t first = starts[sequence_count];
    const fdma_tensor results[] = {packed->out, found->dq, found->dk, found->dv};
    for (int n = 0; n < TEST_COUNT(results); n++) {
        const fdma_tensor rows = contiguous(positions_of(results[n], 1, first, packed_len));
        for (int64_t i = 0; i < count_of(rows); i++)
            CHECK(load_double(rows.data, rows.dtype, i) == 0);
    }
    const fdma_tensor lse = contiguous(positions_of(packed->lse, 2, first, packed_len));
    for (int64_t i = 0; i < count_of(lse); i++)
        CHECK(((const float *)lse.data)[i] == -INFINITY);
    const fdma_tensor dbias = contiguous(positions_of(found->dbias, 2, first, packed_len));
    for (int64_t i = 0; i < count_of(dbias); i++)
        CHECK(((const float *)dbias.data)[i] == 0);
}

static void check_sequence(const gradient_problem *packed, const gradients *found, int64_t first,
                           int64_t end, const char *kernel) {
    gradient_problem alone = {.x = sequence_alone(&packed->x, first, end)};
    problem_select(&alone.x);
    const attended done = problem_attend(&alone.x, kernel, 1);
    check_same(packed->out, 1, first, done.out);
    check_same(packed->lse, 2, first, done.lse);
    alone.out = done.out;
    alone.lse = done.lse;
    alone.dout = contiguous(positions_of(packed->dout, 1, first, end));
    const gradients own = gradient_run(&alone, kernel, 1);
    check_same(found->dq, 1, first, own.dq);
    check_same(found->dk, 1, first, own.dk);
    check_same(found->dv, 1, first, own.dv);
    check_same(found->dbias, 2, first, own.dbias);
}

static void check_attention(const packed_case *test, const char *kernel, fdma_dtype dtype) {
    uint64_t state = 5;
    gradient_problem packed = {.x = packed_problem(test, dtype)};
    problem *const x = &packed.x;
    if (x->window > 0)
        x->selection = select_packed(x, "reference");
    fdma_forward_args forward = problem_args(x, kernel);
    forward.starts = all_starts();
    CHECK_OK(run_forward(&forward));
    packed.out = forward.out;
    packed.lse = forward.lse;
    packed.dout = new_tensor(dtype, 1, packed_len, x->q_heads, x->head_dim);
    fill_random(packed.dout, &state, 1);
    fdma_backward_args backward = gradient_args(&packed, kernel);
    backward.starts = all_starts();
    backward.exec.threads = 2;
    CHECK_OK(run_backward(&backward));
    const gradients found = gradient_outputs(&backward);
    for (int n = 0; n < sequence_count; n++)
        if (starts[n + 1] > starts[n])
            check_sequence(&packed, &found, starts[n], starts[n + 1], kernel);
    check_unused_positions(&packed, &found);
}

/* Runs tile kernels and the reference. The name of a point alone would let the sequence of one
 * position be decoded, which adds in another order; the packed problem has too many rows for
 * that. */
static void attention_is_that_of_each_sequence(const char *kernel, fdma_dtype dtype) {
    if (strstr(kernel, "/tile") == NULL && strcmp(kernel, "reference") != 0)
        return;
    for (int c = 0; c < TEST_COUNT(packed_cases); c++) {
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        check_attention(&packed_cases[c], kernel, dtype);
        test_free_all();
    }
}

static void attention_by_every_kernel(void) {
    for_each_kernel("forward", attention_is_that_of_each_sequence);
}

/* ---- lists ---- */

static bool is_live(const problem *x, int64_t g, int64_t j, int64_t p) {
    return j <= p && p < int_of(x->selection.expiry, g, j);
}

/* Entry s of a list is the key of slot s; keys that arrive later follow in order. */
static void check_list(const problem *x, const fdma_lists_args *args, int64_t g, int64_t t) {
    const int64_t tiles = args->list.shape[2], width = args->list.shape[3];
    const int32_t *const list = (const int32_t *)args->list.data + (g * tiles + t) * width;
    const int32_t *const count = (const int32_t *)args->count.data + (g * tiles + t) * 2;
    const int64_t first = t * args->tile_len;
    const int64_t end = first + args->tile_len < packed_len ? first + args->tile_len : packed_len;
    int32_t live = 0, used;
    for (int64_t j = 0; j <= first; j++) {
        if (!is_live(x, g, j, first))
            continue;
        CHECK_INT(list[int_of(x->selection.slot, g, j)], j);
        live++;
    }
    CHECK_INT(count[0], live);
    used = live;
    for (int64_t j = first + 1; j < end; j++)
        if (is_live(x, g, j, j))
            CHECK_INT(list[used++], j);
    CHECK_INT(count[1], used);
}

static void check_lists(const packed_case *test, int64_t tile_len, const char *kernel) {
    problem x = packed_problem(test, FDMA_FLOAT32);
    const int64_t tiles = (packed_len + tile_len - 1) / tile_len;
    x.selection = select_packed(&x, "reference");
    fdma_lists_args args = {.size = sizeof args,
                            .selection = &x.selection,
                            .starts = all_starts(),
                            .list = new_output(FDMA_INT32, 1, x.kv_heads, tiles, packed_len),
                            .count = new_output(FDMA_INT32, 1, x.kv_heads, tiles, 2),
                            .q_len = packed_len,
                            .tile_len = tile_len,
                            .causal = 1,
                            .exec = {.kernel = kernel, .threads = 2}};
    CHECK_OK(run_lists(&args));
    for (int64_t g = 0; g < x.kv_heads; g++)
        for (int64_t t = 0; t < tiles; t++)
            check_list(&x, &args, g, t);
}

static void lists_hold_the_keys_of_their_sequence(void) {
    static const int64_t tile_lens[] = {1, 7, 32, 100, 400};
    const kernel_list kernels = kernels_of("lists");
    for (int kernel = 0; kernel < kernels.count; kernel++)
        for (int c = 0; c < TEST_COUNT(packed_cases); c++)
            for (int t = 0; t < TEST_COUNT(tile_lens); t++) {
                const packed_case *const test = &packed_cases[c];
                if (test->window < 0 || test->scope == FDMA_SCOPE_GLOBAL)
                    continue;
                test_context("case %d, tiles of %d, %s", c, (int)tile_lens[t],
                             kernels.name[kernel]);
                check_lists(test, tile_lens[t], kernels.name[kernel]);
                test_free_all();
            }
}

/* ---- bad arguments ---- */

static void check_starts_refused(fdma_tensor given, fdma_status status, const char *word) {
    const packed_case *const test = &packed_cases[0];
    const problem x = packed_problem(test, FDMA_FLOAT32);
    fdma_forward_args args = problem_args(&x, NULL);
    args.starts = given;
    CHECK_INT(run_forward(&args), status);
    CHECK_WORD(fdma_last_error(), "starts");
    CHECK_WORD(fdma_last_error(), word);
}

static void wrong_starts_are_refused(void) {
    int32_t some[] = {0, 40, 30, 167}, late[] = {1, 167}, beyond[] = {0, 168}, below[] = {0, -1};
    const fdma_tensor floats = new_tensor(FDMA_FLOAT32, 3, -1, -1, -1);
    const struct {
        fdma_tensor starts;
        fdma_status status;
        const char *word;
    } wrong[] = {
        {fdma_tensor_1d(some, FDMA_INT32, 4), FDMA_INVALID_ARGUMENT, "element 2 is 30, want 40"},
        {fdma_tensor_1d(late, FDMA_INT32, 2), FDMA_INVALID_ARGUMENT, "element 0 is 1, want 0 to 0"},
        {fdma_tensor_1d(beyond, FDMA_INT32, 2), FDMA_INVALID_ARGUMENT, "is 168, want 0 to 167"},
        {fdma_tensor_1d(below, FDMA_INT32, 2), FDMA_INVALID_ARGUMENT, "is -1, want 0 to 167"},
        {fdma_tensor_1d(some, FDMA_INT32, 0), FDMA_INVALID_ARGUMENT, "0 elements, want 1 or more"},
        {fdma_tensor_2d(some, FDMA_INT32, 1, 4), FDMA_INVALID_ARGUMENT, "rank"},
        {floats, FDMA_UNSUPPORTED, "float32"},
    };
    for (int n = 0; n < TEST_COUNT(wrong); n++)
        check_starts_refused(wrong[n].starts, wrong[n].status, wrong[n].word);
}

static void packed_sequences_have_one_batch_entry(void) {
    problem x = packed_problem(&packed_cases[0], FDMA_FLOAT32);
    fdma_forward_args args = problem_args(&x, NULL);
    args.starts = all_starts();
    args.q = positions_of(args.q, 1, 0, 100);
    args.out = positions_of(args.out, 1, 0, 100);
    args.lse = (fdma_tensor){0};
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "q_len: is 100, want kv_len, 167");
    x.batch = 2;
    problem_fill(&x, 3);
    args = problem_args(&x, NULL);
    args.starts = all_starts();
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "batch: is 2, want 1");
}

/* ---- workspace ---- */

/* The workspace of a call whose tensors have no data. packed: for packed sequences that
 * divide kv_len positions in any way. */
static size_t workspace_of(fdma_operation operation, const problem *sizes, int64_t kv_len,
                           int32_t threads, bool packed) {
    const call_sizes n = {.batch = 1,
                          .q_len = kv_len,
                          .kv_len = kv_len,
                          .q_heads = sizes->q_heads,
                          .kv_heads = sizes->kv_heads,
                          .head_dim = sizes->head_dim};
    call x = {.operation = operation};
    size_t bytes = 0;
    if (operation == operation_select)
        x.args.select = (fdma_select_args){.window = sizes->window, .recent = sizes->recent};
    call_make(&x, &n, FDMA_BFLOAT16, sizes->causal);
    call_describe_selection(&x, sizes->window, FDMA_SCOPE_GLOBAL);
    if (sizes->window < 0)
        call_drop_selection(&x);
    call_exec(&x)->threads = threads;
    if (packed)
        *call_tensor_named(&x, "starts") = fdma_tensor_1d(NULL, FDMA_INT32, 9);
    CHECK_OK(operations[operation].workspace(&x.args, &bytes));
    return bytes;
}

static void check_workspace_for_all(fdma_operation operation, const problem *sizes,
                                    int32_t threads) {
    static const int64_t lens[] = {5, 700, 5000, 40000, 300000, 530000, 1000000};
    for (int n = 0; n < TEST_COUNT(lens); n++) {
        const size_t packed = workspace_of(operation, sizes, lens[n], threads, true);
        for (int64_t len = 1; len <= lens[n]; len += 1 + len / 29)
            CHECK(workspace_of(operation, sizes, len, threads, false) <= packed);
    }
}

/* The workspace query of packed sequences serves every way to divide the positions, although a
 * shorter sequence may need more than a longer one. */
static void workspace_serves_all_sequences(void) {
    static const fdma_operation asked[] = {operation_select, operation_forward, operation_backward};
    static const int64_t windows[] = {-1, 1, 100, 3000};
    for (int c = 0; c < 4 * 4 * 3 * 2; c++) {
        const int64_t kv_heads = 1 << (c % 4);
        const problem sizes = {.q_heads = kv_heads * (c % 5 + 1),
                               .kv_heads = kv_heads,
                               .head_dim = c % 3 ? 64 : 128,
                               .window = windows[c / 4 % 4],
                               .recent = c / 48 * 50,
                               .causal = c % 7 < 3};
        const fdma_operation operation = asked[c / 16 % 3];
        test_context("case %d", c);
        for (int32_t threads = 1; threads <= 48 && (c % 4 < 3 || threads < 2);
             threads = 3 * threads)
            if (operation != operation_select || sizes.window > 0)
                check_workspace_for_all(operation, &sizes, threads);
    }
}

static const test_entry tests[] = {
    TEST(selections_are_those_of_each_sequence), TEST(attention_by_every_kernel),
    TEST(lists_hold_the_keys_of_their_sequence), TEST(wrong_starts_are_refused),
    TEST(packed_sequences_have_one_batch_entry), TEST(workspace_serves_all_sequences),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
