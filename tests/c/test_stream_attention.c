/* test_stream_attention.c - a stream in pieces, each a fused call, with the rows of k, v and bias
 * moved as fdma.h says. Scores, out and lse equal those of one call on the whole sequence;
 * gradients passed on through carried keys add up to those of the whole sequence; calls whose
 * tensors of a stream contradict each other are refused. */
#include "whole_stream.h"

enum { head_dim = 32, stream_len = 190, most_pieces = 64 };
enum { window = 20, recent = 6, sinks = 2, rows = window + recent };

/* A call on positions `first` to `end` - 1, with its inputs and the tensors it leaves. */
typedef struct piece {
    int64_t first, end, carried;
    fdma_tensor q, k, v, key_valid, out, lse, score, bias, dout;
    fdma_tensor k_carried, v_carried, bias_carried;
    fdma_table table_in, table_out;
    fdma_selection selection;
} piece;

static whole_call new_stream(fdma_dtype dtype, fdma_bias_form form, bool padded) {
    stream_case *const test = test_alloc(sizeof *test);
    uint64_t state = 8;
    *test = (stream_case){.window = window,
                          .recent = recent,
                          .sinks = sinks,
                          .head_dim = head_dim,
                          .len = stream_len,
                          .bias_form = form};
    whole_call x = new_whole(test, dtype);
    x.dout = new_tensor(dtype, streams, stream_len, q_heads, head_dim);
    fill_random(x.dout, &state, 1);
    if (padded) {
        x.key_valid = new_tensor(FDMA_UINT8, streams, stream_len, -1, -1);
        for (int64_t n = 0; n < count_of(x.key_valid); n++)
            ((uint8_t *)x.key_valid.data)[n] = n % 7 != 3;
    }
    return x;
}

static fdma_attention_args attention_args(const whole_call *x, const char *kernel) {
    return (fdma_attention_args){.size = sizeof(fdma_attention_args),
                                 .q = x->q,
                                 .k = x->k,
                                 .v = x->v,
                                 .dt_proj = x->dt_proj,
                                 .a = x->a,
                                 .dt_bias = x->dt_bias,
                                 .key_valid = x->key_valid,
                                 .out = x->out,
                                 .lse = x->lse,
                                 .score = x->score,
                                 .bias = x->bias,
                                 .window = window,
                                 .recent = recent,
                                 .sinks = sinks,
                                 .bias_form = x->test->bias_form,
                                 .causal = 1,
                                 .exec = {.kernel = kernel, .threads = 2}};
}

static void attend_all(whole_call *x, const char *kernel) {
    fdma_attention_args args = attention_args(x, kernel);
    args.selection = &x->selection;
    CHECK_OK(run_attention(&args));
}

/* A copy of a tensor of carried keys. If there is none, a new one full of NaN, because no row is
 * filled. */
static fdma_tensor carried_copy(fdma_tensor before, fdma_tensor own, int axis) {
    fdma_tensor carried = own;
    if (before.rank > 0 || own.rank == 0)
        return before.rank > 0 ? copy_tensor(before) : own;
    carried = axis == 1 ? new_tensor(own.dtype, streams, rows, kv_heads, head_dim)
                        : new_tensor(own.dtype, streams, kv_heads, rows, -1);
    for (int64_t n = 0; n < count_of(carried); n++)
        store_float(carried.data, carried.dtype, n, NAN);
    return carried;
}

/* The inputs of the next piece of the stream: keys that are still kept move to their rows, as
 * fdma.h shows. */
static piece next_piece(const piece *done) {
    piece next = {.first = done->end, .carried = rows, .table_in = done->table_out};
    next.k_carried = carried_copy(done->k_carried, done->k, 1);
    next.v_carried = carried_copy(done->v_carried, done->v, 1);
    next.bias_carried = carried_copy(done->bias_carried, done->bias, 2);
    for (int64_t n = 0; n < streams * kv_heads * rows; n++) {
        const int64_t b = n / rows / kv_heads, g = n / rows % kv_heads, row = n % rows;
        const int64_t own = int_at(done->table_out.position, b, g, row) - done->first;
        if (own < 0)
            continue;
        copy_key(next.k_carried, b, row, done->k, b, own, g);
        copy_key(next.v_carried, b, row, done->v, b, own, g);
        copy_key(next.bias_carried, b, row, done->bias, b, own, g);
    }
    return next;
}

static void attend_piece(const whole_call *x, piece *one, int64_t end, const char *kernel) {
    const int64_t first = one->first;
    one->end = end;
    one->selection = new_selection(streams, kv_heads, one->carried + end - first);
    one->q = positions_of(x->q, 1, first, end);
    one->k = positions_of(x->k, 1, first, end);
    one->v = positions_of(x->v, 1, first, end);
    one->dout = positions_of(x->dout, 1, first, end);
    one->key_valid = positions_of(x->key_valid, 1, first, end);
    one->out = new_output(x->dtype, streams, end - first, q_heads, head_dim);
    one->lse = new_output(FDMA_FLOAT32, streams, q_heads, end - first, -1);
    one->score = new_output(FDMA_FLOAT32, streams, kv_heads, end - first, -1);
    if (x->bias.rank > 0)
        one->bias = new_output(FDMA_FLOAT32, streams, kv_heads, end - first, -1);
    one->table_out = (fdma_table){.score = new_output(FDMA_FLOAT32, streams, kv_heads, rows, -1),
                                  .position = new_output(FDMA_INT32, streams, kv_heads, rows, -1),
                                  .seen = new_output(FDMA_INT32, streams, -1, -1, -1)};
    fdma_attention_args args = attention_args(x, kernel);
    args.q = one->q, args.k = one->k, args.v = one->v, args.key_valid = one->key_valid;
    args.out = one->out, args.lse = one->lse, args.score = one->score, args.bias = one->bias;
    args.table_in = one->table_in, args.table_out = one->table_out;
    args.k_carried = one->k_carried, args.v_carried = one->v_carried;
    args.bias_carried = one->bias_carried;
    args.selection = &one->selection;
    CHECK_OK(run_attention(&args));
}

static int attend_stream(const whole_call *x, int64_t most, const char *kernel, piece *pieces) {
    uint64_t state = (uint64_t)most;
    int count = 0;
    while (count == 0 || pieces[count - 1].end < stream_len) {
        piece *const one = &pieces[count++];
        CHECK(count < most_pieces);
        *one = count > 1 ? next_piece(one - 1) : (piece){0};
        const int64_t end = one->first + most - random_below(&state, most / 2 + 1);
        attend_piece(x, one, end < stream_len ? end : stream_len, kernel);
    }
    return count;
}

static void check_piece(const whole_call *x, const piece *one, double tolerance) {
    const fdma_tensor score = gathered(positions_of(x->score, 2, one->first, one->end));
    CHECK_BYTES(one->score.data, score.data, bytes_of(score));
    check_near(one->out, gathered(positions_of(x->out, 1, one->first, one->end)), tolerance);
    check_near(one->lse, gathered(positions_of(x->lse, 2, one->first, one->end)), 1e-5);
}

static void pieces_are_the_whole(const char *kernel, fdma_dtype dtype) {
    static const int64_t lengths[] = {5, 40, 100};
    static const fdma_bias_form forms[] = {FDMA_BIAS_EXP, FDMA_BIAS_LINEAR, FDMA_BIAS_NONE};
    static piece pieces[most_pieces];
    for (int c = 0; c < 3; c++) {
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        whole_call x = new_stream(dtype, forms[c], c == 1);
        attend_all(&x, kernel);
        const int count = attend_stream(&x, lengths[c], kernel, pieces);
        for (int n = 0; n < count; n++)
            check_piece(&x, &pieces[n], dtype == FDMA_FLOAT32 ? 1e-5 : 0x1p-7);
        test_free_all();
    }
}

/* On a device the steps of a fused call have no common name, and choose their kernels. */
static void pieces_by_every_kernel(void) {
    if (test_backend.run == NULL)
        for_each_kernel("forward", pieces_are_the_whole);
    for (int type = first_dtype(); test_backend.run != NULL && type < test_dtype_count; type++)
        pieces_are_the_whole("cuda", test_dtypes[type]);
}

/* ---- gradients ---- */

static fdma_backward_args backward_args(const whole_call *x, const piece *one, const char *kernel) {
    const int64_t count = one->end - one->first;
    fdma_backward_args args = {.size = sizeof args,
                               .dout = gathered(one->dout),
                               .out = one->out,
                               .lse = one->lse,
                               .q = one->q,
                               .k = one->k,
                               .v = one->v,
                               .bias = one->bias,
                               .k_carried = one->k_carried,
                               .v_carried = one->v_carried,
                               .bias_carried = one->bias_carried,
                               .dq = new_output(x->dtype, streams, count, q_heads, head_dim),
                               .dk = new_output(x->dtype, streams, count, kv_heads, head_dim),
                               .dv = new_output(x->dtype, streams, count, kv_heads, head_dim),
                               .dbias = new_output(FDMA_FLOAT32, streams, kv_heads, count, -1),
                               .selection = &one->selection,
                               .causal = 1,
                               .deterministic = 1,
                               .exec = {.kernel = kernel}};
    if (one->carried > 0) {
        args.dk_carried = new_output(x->dtype, streams, rows, kv_heads, head_dim);
        args.dv_carried = new_output(x->dtype, streams, rows, kv_heads, head_dim);
        args.dbias_carried = new_output(FDMA_FLOAT32, streams, kv_heads, rows, -1);
    }
    return args;
}

static gradients new_sums(void) {
    return (gradients){.dq = new_tensor(FDMA_FLOAT64, streams, stream_len, q_heads, head_dim),
                       .dk = new_tensor(FDMA_FLOAT64, streams, stream_len, kv_heads, head_dim),
                       .dv = new_tensor(FDMA_FLOAT64, streams, stream_len, kv_heads, head_dim),
                       .dbias = new_tensor(FDMA_FLOAT64, streams, kv_heads, stream_len, -1)};
}

/* Adds row `from_row` of a head, or element `from_row` of a tensor shaped as bias, to row `to_row`
 * of the sums. If the row is empty (`to_row` < 0), checks that it is 0. */
static void add_row(fdma_tensor to, int64_t to_row, fdma_tensor from, int64_t from_row, int64_t b,
                    int64_t g) {
    for (int64_t d = 0; d < (to.rank == 4 ? head_dim : 1); d++) {
        const double number =
            load_double(from.data, from.dtype, index_of_key(from, b, from_row, g) + d);
        if (to_row < 0)
            CHECK(number == 0);
        else
            ((double *)to.data)[index_of_key(to, b, to_row, g) + d] += number;
    }
}

/* Adds the gradients of one piece to those of the whole sequence: of its own keys, and of carried
 * keys at their positions in the stream. */
static void add_piece(const piece *one, const fdma_backward_args *args, const gradients *sum) {
    const int64_t count = one->end - one->first, kv_len = one->carried + count;
    for (int64_t n = 0; n < streams * q_heads * count; n++) {
        const int64_t b = n / count / q_heads, h = n / count % q_heads, i = n % count;
        add_row(sum->dq, one->first + i, args->dq, i, b, h);
    }
    for (int64_t n = 0; n < streams * kv_heads * kv_len; n++) {
        const int64_t b = n / kv_len / kv_heads, g = n / kv_len % kv_heads, j = n % kv_len;
        const bool carried = j < one->carried;
        const int64_t from = carried ? j : j - one->carried;
        const int64_t to = carried ? int_at(one->table_in.position, b, g, j) : one->first + from;
        add_row(sum->dk, to, carried ? args->dk_carried : args->dk, from, b, g);
        add_row(sum->dv, to, carried ? args->dv_carried : args->dv, from, b, g);
        add_row(sum->dbias, to, carried ? args->dbias_carried : args->dbias, from, b, g);
    }
}

static gradients sum_pieces(const whole_call *x, const piece *pieces, int count,
                            const char *kernel) {
    const gradients sum = new_sums();
    for (int n = 0; n < count; n++) {
        fdma_backward_args args = backward_args(x, &pieces[n], kernel);
        if (!call_takes(operation_backward, &args)) // the piece evicts no key
            args.exec.kernel = NULL;
        CHECK_OK(run_backward(&args));
        add_piece(&pieces[n], &args, &sum);
    }
    return sum;
}

static gradients whole_gradients(const whole_call *x) {
    const gradient_problem p = {.x = {.batch = streams,
                                      .q_len = stream_len,
                                      .kv_len = stream_len,
                                      .q_heads = q_heads,
                                      .kv_heads = kv_heads,
                                      .head_dim = head_dim,
                                      .window = window,
                                      .causal = 1,
                                      .dtype = x->dtype,
                                      .q = x->q,
                                      .k = x->k,
                                      .v = x->v,
                                      .bias = x->bias,
                                      .selection = x->selection},
                                .out = x->out,
                                .lse = x->lse,
                                .dout = x->dout};
    return reference_gradients(&p);
}

static void gradients_pass_through_carried_keys(const char *kernel, fdma_dtype dtype) {
    static piece pieces[most_pieces];
    whole_call x = new_stream(dtype, FDMA_BIAS_LINEAR, false);
    attend_all(&x, NULL);
    const int count = attend_stream(&x, 31, NULL, pieces);
    fdma_backward_args args = backward_args(&x, &pieces[1], kernel);
    if (!call_takes(operation_backward, &args))
        return;
    const gradients want = whole_gradients(&x), sum = sum_pieces(&x, pieces, count, kernel);
    const gradients plain = sum_pieces(&x, pieces, count, "reference/float32");
    for (int t = 0; t < TEST_COUNT(want.all); t++)
        check_like_plain(sum.all[t], want.all[t], plain.all[t], t < 3 ? dtype : FDMA_FLOAT32);
}

static fdma_attention_backward_args fused_backward_args(const whole_call *x, const piece *one,
                                                        const char *kernel) {
    const int64_t count = one->end - one->first;
    return (fdma_attention_backward_args){
        .size = sizeof(fdma_attention_backward_args),
        .dout = one->dout,
        .out = one->out,
        .lse = one->lse,
        .q = one->q,
        .k = one->k,
        .v = one->v,
        .dt_proj = x->dt_proj,
        .a = x->a,
        .dt_bias = x->dt_bias,
        .key_valid = one->key_valid,
        .k_carried = one->k_carried,
        .v_carried = one->v_carried,
        .bias_carried = one->bias_carried,
        .dq = new_output(x->dtype, streams, count, q_heads, head_dim),
        .dk = new_output(x->dtype, streams, count, kv_heads, head_dim),
        .dv = new_output(x->dtype, streams, count, kv_heads, head_dim),
        .ddt_proj = new_output(x->dtype, kv_heads, kv_heads * head_dim, -1, -1),
        .da = new_output(FDMA_FLOAT32, kv_heads, -1, -1, -1),
        .ddt_bias = new_output(x->dtype, kv_heads, -1, -1, -1),
        .dk_carried = new_output(x->dtype, streams, rows, kv_heads, head_dim),
        .dv_carried = new_output(x->dtype, streams, rows, kv_heads, head_dim),
        .dbias_carried = new_output(FDMA_FLOAT32, streams, kv_heads, rows, -1),
        .selection = &one->selection,
        .causal = 1,
        .deterministic = 1,
        .exec = {.kernel = kernel},
    };
}

/* The fused call equals fdma_backward() and then fdma_score_backward(). */
static void fused_gradients_are_those_of_the_steps(void) {
    static piece pieces[most_pieces];
    const char *const kernel = test_backend.run != NULL ? "cuda" : NULL;
    const whole_call x = new_stream(backend_dtype(), FDMA_BIAS_EXP, true);
    attend_stream(&x, 80, kernel, pieces);
    const piece *const one = &pieces[1];
    fdma_attention_backward_args args = fused_backward_args(&x, one, kernel);
    CHECK_OK(run_attention_backward(&args));
    fdma_backward_args first = backward_args(&x, one, kernel);
    CHECK_OK(run_backward(&first));
    fdma_score_backward_args second = {
        .size = sizeof second,
        .dbias = first.dbias,
        .v = one->v,
        .dt_proj = x.dt_proj,
        .a = x.a,
        .dt_bias = x.dt_bias,
        .key_valid = one->key_valid,
        .dv = first.dv,
        .ddt_proj = new_output(x.dtype, kv_heads, kv_heads * head_dim, -1, -1),
        .da = new_output(FDMA_FLOAT32, kv_heads, -1, -1, -1),
        .ddt_bias = new_output(x.dtype, kv_heads, -1, -1, -1),
        .exec = {.kernel = kernel}};
    CHECK_OK(run_score_backward(&second));
    const fdma_tensor pairs[][2] = {{args.dq, first.dq},
                                    {args.dk, first.dk},
                                    {args.dv, second.dv},
                                    {args.dk_carried, first.dk_carried},
                                    {args.dv_carried, first.dv_carried},
                                    {args.dbias_carried, first.dbias_carried},
                                    {args.ddt_proj, second.ddt_proj},
                                    {args.da, second.da},
                                    {args.ddt_bias, second.ddt_bias}};
    for (int n = 0; n < TEST_COUNT(pairs); n++)
        CHECK_BYTES(pairs[n][0].data, pairs[n][1].data, bytes_of(pairs[n][1]));
}

/* With `accumulate` the gradient of bias_carried is added to the contents of its tensor, like all
 * others. fdma_backward() overwrites it, like dbias. */
static void fused_gradients_are_added(const char *kernel, fdma_dtype dtype) {
    static piece pieces[most_pieces];
    const whole_call x = new_stream(dtype, FDMA_BIAS_EXP, true);
    attend_stream(&x, 80, test_backend.run != NULL ? "cuda" : NULL, pieces);
    fdma_attention_backward_args want = fused_backward_args(&x, &pieces[1], kernel), found;
    if (!call_takes(operation_attention_backward, &want))
        return;
    CHECK_OK(run_attention_backward(&want));
    found = fused_backward_args(&x, &pieces[1], kernel);
    const fdma_tensor held[] = {found.dbias_carried, found.da},
                      sums[] = {want.dbias_carried, want.da};
    for (int n = 0; n < TEST_COUNT(held); n++)
        for (int64_t at = 0; at < count_of(held[n]); at++)
            ((float *)held[n].data)[at] = 1;
    found.accumulate = 1;
    CHECK_OK(run_attention_backward(&found));
    int64_t zeros = 0;
    for (int n = 0; n < TEST_COUNT(held); n++)
        for (int64_t at = 0; at < count_of(held[n]); at++) {
            const double sum = (double)((const float *)sums[n].data)[at];
            const double terms = (double)stream_len * (1 + fabs(sum));
            CHECK_NEAR((double)((const float *)held[n].data)[at], 1 + sum,
                       sum == 0 ? 0 : terms * step_of(FDMA_FLOAT32));
            zeros += sum == 0;
        }
    CHECK(zeros > 0 && zeros < count_of(held[0])); // keys that no query keeps any more
}

/* ---- bad arguments ---- */

static void check_refused(const fdma_attention_args *right, size_t field, fdma_tensor given,
                          fdma_status status, const char *words) {
    fdma_attention_args args = *right;
    memcpy((char *)&args + field, &given, sizeof given);
    test_context("%s", words);
    CHECK_INT(run_attention(&args), status);
    CHECK_WORD(fdma_last_error(), words);
}

#define FIELD(name) offsetof(fdma_attention_args, name)

static void contradictions_are_refused(void) {
    static piece pieces[most_pieces];
    static int32_t no_starts[] = {0, 5};
    const whole_call x = new_stream(FDMA_FLOAT32, FDMA_BIAS_EXP, true);
    attend_stream(&x, 100, NULL, pieces);
    const piece *const one = &pieces[1];
    fdma_attention_args args = attention_args(&x, NULL);
    const fdma_tensor none = {0}, short_k = positions_of(one->k_carried, 1, 0, rows - 1);
    args.q = one->q, args.k = one->k, args.v = one->v, args.key_valid = one->key_valid;
    args.out = one->out, args.lse = one->lse, args.score = one->score, args.bias = one->bias;
    args.table_in = one->table_in, args.table_out = one->table_out;
    args.k_carried = one->k_carried, args.v_carried = one->v_carried;
    args.bias_carried = one->bias_carried;
    CHECK_OK(run_attention(&args));
    check_refused(&args, FIELD(v_carried), none, FDMA_INVALID_ARGUMENT,
                  "v_carried: is absent, want it with k_carried");
    check_refused(&args, FIELD(k_carried), none, FDMA_INVALID_ARGUMENT,
                  "v_carried: is given, want none without k_carried");
    check_refused(&args, FIELD(bias_carried), none, FDMA_INVALID_ARGUMENT,
                  "bias_carried: is absent, want it with k_carried and a bias");
    check_refused(&args, FIELD(table_in.score), none, FDMA_INVALID_ARGUMENT,
                  "table_in.position: is given, want none without table_in.score");
    check_refused(&args, FIELD(table_in.seen), none, FDMA_INVALID_ARGUMENT,
                  "table_in.seen: is absent, want it with table_in.score");
    check_refused(&args, FIELD(table_out.position), none, FDMA_INVALID_ARGUMENT,
                  "table_out.position: is absent, want it with table_out.score");
    check_refused(&args, FIELD(k_carried), short_k, FDMA_INVALID_ARGUMENT, "v_carried");
    check_refused(&args, FIELD(starts), fdma_tensor_1d(no_starts, FDMA_INT32, 2),
                  FDMA_INVALID_ARGUMENT, "starts: is given, want none with k_carried");
    args.window--;
    CHECK_INT(run_attention(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "axis 2 has 26 elements, want 25");
    args.window++;
    args.gap = 2;
    CHECK_INT(run_attention(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "gap: is 2, want 0 with table_in or table_out");
    args.gap = 0;
    args.scope = FDMA_SCOPE_GLOBAL, args.recent = 0, args.window = rows;
    CHECK_INT(run_attention(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "table_in.score: is given, want none with global scope");
}

/* Queries are aligned with keys of the call. A selection leaves out the keys that are not valid. */
static void forward_with_carried_keys_is_causal(void) {
    static piece pieces[most_pieces];
    const whole_call x = new_stream(FDMA_FLOAT32, FDMA_BIAS_NONE, true);
    attend_stream(&x, 100, NULL, pieces);
    const piece *const one = &pieces[1];
    const fdma_forward_args right = {.size = sizeof right,
                                     .q = one->q,
                                     .k = one->k,
                                     .v = one->v,
                                     .k_carried = one->k_carried,
                                     .v_carried = one->v_carried,
                                     .out = one->out,
                                     .selection = &one->selection,
                                     .causal = 1};
    fdma_forward_args args = right;
    CHECK_OK(run_forward(&args));
    args.key_valid = one->key_valid;
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "key_valid: is given, want none with k_carried");
    args = right;
    args.selection = NULL, args.causal = 0;
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "causal: is 0, want nonzero with k_carried");
    args = right;
    args.q = positions_of(args.q, 1, 0, 5), args.out = positions_of(args.out, 1, 0, 5);
    args.k = positions_of(args.k, 1, 0, 4), args.v = positions_of(args.v, 1, 0, 4);
    args.selection = NULL;
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "q_len: is 5, want at most the keys of the call, 4");
}

static const test_entry tests[] = {
    TEST(pieces_by_every_kernel),
    EACH_KERNEL("backward", gradients_pass_through_carried_keys),
    TEST(fused_gradients_are_those_of_the_steps),
    EACH_KERNEL("backward", fused_gradients_are_added),
    TEST(contradictions_are_refused),
    TEST(forward_with_carried_keys_is_causal),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
