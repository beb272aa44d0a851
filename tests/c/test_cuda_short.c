/* test_cuda_short.c - fused calls of short sequences on a CUDA device. Their selection also makes
 * the lists for forward: expiry and slot equal the CPU's, and out and lse have the bits of
 * fdma_forward() with that selection, which makes its lists itself. The same holds for the
 * selection of fused calls of any length with at least as many slots as keys. */
#include "device.h"
#include "scores.h"

static const char kernel_name[] = "cuda/sm80/short";

enum { most_keys = 4096, few_queries = 16, query_block = 128 };

static const char *name_of_select(call *x) {
    fdma_attention_kernels names = {.size = sizeof names};
    call_exec(x)->device = device_number;
    CHECK_OK(fdma_attention_kernel(&x->args.attention, &names));
    call_exec(x)->device = FDMA_CPU;
    return names.select != NULL ? names.select : "none";
}

static bool is_taken(call *x) { return strcmp(name_of_select(x), kernel_name) == 0; }

/* Scores in the order of the numbers of a kind; kind_count mixes kinds. The scores follow from one
 * channel of v, whose weight is 1 or -1. With bfloat16 many of them are equal. */
static void fill_scores(call *x, score_kind kind, uint64_t *state) {
    const fdma_attention_args *const args = &x->args.attention;
    const int64_t *const n = args->v.shape;
    const fdma_tensor kinds = new_tensor(FDMA_FLOAT32, n[0], 1, n[1], -1);
    if (kind == kind_count)
        fill_kinds(kinds, 1 + random_below(state, 400), state);
    else
        fill_kind(kinds, kind, state);
    memset(args->dt_proj.data, 0, bytes_of(args->dt_proj));
    for (int64_t g = 0; g < n[2]; g++) {
        store_float(args->dt_proj.data, args->dt_proj.dtype, g * n[2] * n[3],
                    random_below(state, 2) ? 1 : -1);
        store_float(args->a.data, args->a.dtype, g, random_below(state, 8) ? 1 : 0);
    }
    for (int64_t row = 0; row < n[0] * n[1]; row++) {
        const float value = ((const float *)kinds.data)[row];
        store_float(args->v.data, args->v.dtype, row * n[2] * n[3],
                    value > 250    ? 250
                    : value < -250 ? -250
                                   : value);
    }
}

static void check_selection(call *fused) {
    const fdma_attention_args *const args = &fused->args.attention;
    fdma_selection want = selection_for(args->score);
    fdma_select_args select = {.size = sizeof select,
                               .score = args->score,
                               .key_valid = args->key_valid,
                               .selection = &want,
                               .window = args->window,
                               .recent = args->recent,
                               .sinks = args->sinks,
                               .scope = FDMA_SCOPE_CAUSAL,
                               .exec = {.kernel = "cpu", .threads = 1}};
    CHECK_OK(fdma_select_workspace(&select, &select.exec.workspace_size));
    select.exec.workspace = test_alloc(select.exec.workspace_size);
    CHECK_OK(fdma_select(&select));
    CHECK(same_tensor(fused->selection.expiry, want.expiry));
    CHECK(same_tensor(fused->selection.slot, want.slot));
}

/* Compares with fdma_forward() on the selection of the fused call. */
static void check_attention(call *fused) {
    const fdma_attention_args *const args = &fused->args.attention;
    const int64_t *const n = args->out.shape;
    fdma_forward_args forward = {
        .size = sizeof forward,
        .q = args->q,
        .k = args->k,
        .v = args->v,
        .bias = args->bias,
        .key_valid = args->key_valid,
        .out = new_output(args->out.dtype, n[0], n[1], n[2], n[3]),
        .lse = new_output(FDMA_FLOAT32, n[0], n[2], n[1], -1),
        .selection = &fused->selection,
        .causal = 1,
    };
    CHECK_OK(device_run(operation_forward, &forward));
    CHECK(same_tensor(args->out, forward.out));
    CHECK(same_tensor(args->lse, forward.lse));
}

/* Also checks the call that asks for out alone, unless it has so few queries that another kernel
 * selects for them. */
static void check_bare(const call *fused) {
    call bare;
    call_copy(&bare, fused);
    call_own_outputs(&bare);
    bare.args.attention.lse = bare.args.attention.score = (fdma_tensor){0};
    bare.args.attention.bias = (fdma_tensor){0};
    call_drop_selection(&bare);
    CHECK(is_taken(&bare) || fused->args.attention.q.shape[1] <= few_queries);
    if (!is_taken(&bare))
        return;
    CHECK_OK(device_run(operation_attention, &bare.args));
    CHECK(same_tensor(bare.args.attention.out, fused->args.attention.out));
}

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The most slots that the kernel takes: fewer than keys, and lists of at most 64 KB in shared
 * memory. */
static int64_t most_slots(const call_sizes *n) {
    const int64_t lists = (n->q_len + query_block - 1) / query_block;
    return min_of(n->kv_len - 1, 32768 / lists);
}

static void make_call(call *x, const call_sizes *n, int64_t window, uint64_t *state) {
    *x = (call){
        .operation = operation_attention,
        .args.attention = {.window = window,
                           .bias_form = random_below(state, 3) ? FDMA_BIAS_LINEAR : FDMA_BIAS_NONE,
                           .causal = 1}};
    call_make(x, n, random_below(state, 2) ? FDMA_BFLOAT16 : FDMA_FLOAT16, true);
    fdma_attention_args *const args = &x->args.attention;
    args->key_valid = args->sink_logit = args->dt_bias = (fdma_tensor){0};
    if (args->bias_form == FDMA_BIAS_NONE)
        args->bias = (fdma_tensor){0};
    call_alloc(x, state);
    fill_scores(x, kind_count, state);
    if (random_below(state, 3) == 0)
        args->key_valid = new_padding(n->batch, n->kv_len, state);
    if (random_below(state, 3) == 0)
        args->sinks = random_below(state, window + 1);
    if (random_below(state, 3) == 0)
        args->recent = random_below(state, min_of(most_slots(n) - window + 1, 300));
    test_context("batch %d, kv_heads %d, q_len %d, kv_len %d, window %d, recent %d, sinks %d%s",
                 (int)n->batch, (int)n->kv_heads, (int)n->q_len, (int)n->kv_len, (int)window,
                 (int)args->recent, (int)args->sinks, args->key_valid.rank > 0 ? ", padding" : "");
}

static call_sizes sizes_of(int64_t batch, int64_t q_len, int64_t kv_len, int64_t kv_heads) {
    return (call_sizes){.batch = batch,
                        .q_len = q_len,
                        .kv_len = kv_len,
                        .q_heads = 2 * kv_heads,
                        .kv_heads = kv_heads,
                        .head_dim = 64};
}

static void check_random_case(uint64_t *state) {
    static const int64_t longest[] = {20, 300, 300, 1100, 2100};
    const int64_t most = longest[random_below(state, TEST_COUNT(longest))];
    const int64_t kv_len = 2 + random_below(state, most);
    const int64_t q_len = random_below(state, 2) ? kv_len : 1 + random_below(state, kv_len);
    const call_sizes n = sizes_of(1 + random_below(state, 2), q_len, kv_len, 2);
    const int64_t most_window = random_below(state, 3) ? (kv_len + 3) / 4 : kv_len;
    const int64_t window = 1 + random_below(state, min_of(most_window, most_slots(&n)));
    call fused;
    make_call(&fused, &n, window, state);
    if (!CHECK(is_taken(&fused)))
        return;
    CHECK_OK(device_run(operation_attention, &fused.args));
    check_selection(&fused);
    check_attention(&fused);
    check_bare(&fused);
}

static void random_calls(void) {
    uint64_t state = 19;
    for (int i = 0; i < test_repeats(300) && test_state.failures < test_reports; i++) {
        check_random_case(&state);
        device_free_both();
    }
}

/* The most keys of each block size, and one more; windows of one key, and of as many as fit. */
static void sizes_at_the_edge(void) {
    static const int64_t lengths[][2] = {{1024, 1}, {1024, 1023}, {1025, 700}, {2048, 2047},
                                         {2049, 3}, {4096, 1},    {4096, 1024}};
    uint64_t state = 6;
    for (int i = 0; i < TEST_COUNT(lengths); i++) {
        const call_sizes n = sizes_of(1, lengths[i][0], lengths[i][0], 1);
        call fused;
        make_call(&fused, &n, lengths[i][1], &state);
        CHECK(is_taken(&fused));
        CHECK_OK(device_run(operation_attention, &fused.args));
        check_selection(&fused);
        check_attention(&fused);
        device_free_both();
    }
}

/* Each kind alone, with windows that end near a partition of 32 keys. */
static void each_kind(void) {
    static const int64_t windows[] = {1, 31, 32, 33};
    const call_sizes n = sizes_of(1, 200, 200, 1);
    uint64_t state = 12;
    for (int i = 0; i < TEST_COUNT(windows) * kind_count; i++) {
        call fused;
        make_call(&fused, &n, windows[i % TEST_COUNT(windows)], &state);
        fill_scores(&fused, (score_kind)(i / TEST_COUNT(windows)), &state);
        fused.args.attention.key_valid = (fdma_tensor){0};
        fused.args.attention.recent = fused.args.attention.sinks = 0;
        CHECK_OK(device_run(operation_attention, &fused.args));
        check_selection(&fused);
        check_attention(&fused);
        device_free_both();
    }
}

static bool keeps_all(call *x) { return strcmp(name_of_select(x), "cuda/sm80/keep_all") == 0; }

/* Another kernel selects where no key can leave. */
static void as_many_slots_as_keys(void) {
    static const int64_t lengths[][2] = {{2, 2}, {200, 200}, {40, 300}, {257, 1100}};
    uint64_t state = 4;
    for (int i = 0; i < 6 * TEST_COUNT(lengths); i++) {
        const int64_t q_len = lengths[i / 6][0], kv_len = lengths[i / 6][1];
        const call_sizes n = sizes_of(2, q_len, kv_len, 2);
        const int64_t recent = i % 2 == 0 ? 0 : kv_len / 2;
        call fused;
        make_call(&fused, &n, 1, &state);
        fused.args.attention.key_valid = (fdma_tensor){0};
        fused.args.attention.recent = recent;
        fused.args.attention.window = kv_len - recent + (i % 3 == 0 ? 7 : 0);
        CHECK(keeps_all(&fused));
        CHECK_OK(device_run(operation_attention, &fused.args));
        check_selection(&fused);
        check_attention(&fused);
        fused.args.attention.window = kv_len - recent - 1;
        CHECK(fused.args.attention.window == 0 || !keeps_all(&fused));
        fused.args.attention.window = kv_len;
        fused.args.attention.key_valid = new_padding(n.batch, n.kv_len, &state);
        CHECK(!keeps_all(&fused));
        device_free_both();
    }
}

static void refuses_what_it_does_not_know(void) {
    uint64_t state = 8;
    const call_sizes small = sizes_of(1, 300, 300, 1), large = sizes_of(1, 4096, 4096, 1);
    const call_sizes longer = sizes_of(1, 300, most_keys + 1, 1);
    call x;
    make_call(&x, &small, 30, &state);
    fdma_attention_args *const args = &x.args.attention;
    args->key_valid = (fdma_tensor){0};
    args->sinks = args->recent = 0;
    CHECK(is_taken(&x));
    args->gap = 1;
    CHECK(!is_taken(&x));
    args->gap = 0;
    args->scope = FDMA_SCOPE_GLOBAL;
    CHECK(!is_taken(&x));
    args->scope = FDMA_SCOPE_CAUSAL;
    args->window = 300;
    CHECK(!is_taken(&x));
    args->window = 30;
    args->starts = new_tensor(FDMA_INT32, 2, -1, -1, -1);
    ((int32_t *)args->starts.data)[1] = 300;
    CHECK(!is_taken(&x));
    args->starts = (fdma_tensor){0};
    args->kv_used = new_tensor(FDMA_INT32, 1, -1, -1, -1);
    CHECK(!is_taken(&x));
    make_call(&x, &longer, 30, &state);
    CHECK(!is_taken(&x));
    make_call(&x, &large, 1025, &state); // lists of so many slots do not fit in shared memory
    CHECK(!is_taken(&x));
    device_free_both();
}

static const test_entry tests[] = {
    TEST(random_calls),
    TEST(sizes_at_the_edge),
    TEST(each_kind),
    TEST(as_many_slots_as_keys),
    TEST(refuses_what_it_does_not_know),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
