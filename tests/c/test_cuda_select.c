/* test_cuda_select.c - selection on a CUDA device equals the CPU's bit for bit: mixed kinds of
 * scores, every length and window, recent keys and sinks, padding, both scopes, gaps between rows,
 * and heads further apart than an int32 counts. The numbers and lengths of segments (a batch and a
 * kv head each) vary so that every number of keys per thread and of blocks per segment occurs. */
#include "device.h"
#include "scores.h"

/* An output with the strides of `like`, full of guard bytes. */
static fdma_tensor output_like(fdma_tensor like) {
    const size_t bytes = device_extent(like);
    like.data = test_alloc_guarded(bytes);
    memset(like.data, test_guard_byte, bytes);
    return like;
}

/* Checks that the gaps between rows are unchanged, too. */
static void check_as_cpu_tensor(fdma_tensor actual, fdma_tensor want) {
    CHECK_BYTES(actual.data, want.data, device_extent(want));
}

/* Makes the CPU's selection of a problem, which the device's must equal. */
static void select_on_cpu(problem *x, const char *kernel) {
    fdma_select_args args = select_args(x, &x->selection, kernel);
    CHECK_OK(run_select(&args));
}

/* Selects on the device. kernel: NULL lets the library choose. Returns true if the kernel takes the
 * call. */
static bool check_as_cpu(const problem *x, const char *kernel, bool with_slots) {
    fdma_selection selection = x->selection;
    fdma_select_args args = select_args(x, &selection, kernel);
    args.exec.threads = 0;
    selection.expiry = output_like(selection.expiry);
    selection.slot = with_slots ? output_like(selection.slot) : (fdma_tensor){0};
    if (kernel != NULL && !call_takes(operation_select, &args))
        return false;
    CHECK_OK(device_run(operation_select, &args));
    check_as_cpu_tensor(selection.expiry, x->selection.expiry);
    if (with_slots)
        check_as_cpu_tensor(selection.slot, x->selection.slot);
    CHECK_INT(selection.window, x->window);
    CHECK_INT(selection.recent, x->recent);
    CHECK_INT(selection.sinks, x->sinks);
    CHECK_INT(selection.kv_len, x->kv_len);
    CHECK_INT(selection.scope, x->scope);
    CHECK(selection.gap == x->gap);
    return true;
}

static void set_context(const problem *x, const char *kernel, const char *what) {
    test_context("%s: batch %d, kv_heads %d, kv_len %d, window %d, recent %d, sinks %d, scope %d, "
                 "gap %g%s, %s",
                 kernel, (int)x->batch, (int)x->kv_heads, (int)x->kv_len, (int)x->window,
                 (int)x->recent, (int)x->sinks, (int)x->scope, x->gap,
                 x->key_valid.rank > 0 ? ", padding" : "", what);
}

static void check_kernels(const problem *x, const char *what) {
    const kernel_list kernels = kernels_of("select");
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        set_context(x, kernels.name[kernel], what);
        taken += check_as_cpu(x, kernels.name[kernel], true);
        if (x->recent > 0)
            check_as_cpu(x, kernels.name[kernel], false);
    }
    CHECK(taken > 0);
}

/* ---- random cases ---- */

/* Any number of recent keys and sinks that a call may ask for, and any gap, often 0. */
static void add_rules(problem *x, uint64_t *state) {
    const int64_t kv_len = x->kv_len, window = x->window;
    const int64_t recent[] = {
        0, 1, 7, kv_len / 4, random_below(state, kv_len + 1), kv_len - window, kv_len + 3};
    const int64_t sinks[] = {0, 1, window, random_below(state, window + 1)};
    const int64_t chosen = recent[random_below(state, TEST_COUNT(recent))];
    x->sinks = sinks[random_below(state, TEST_COUNT(sinks))];
    x->recent = x->scope == FDMA_SCOPE_CAUSAL && chosen > 0 ? chosen : 0;
    if (x->scope == FDMA_SCOPE_CAUSAL && random_below(state, 3) == 0)
        x->gap = 0.125 * (double)(1 + random_below(state, 20));
}

static void check_random_case(uint64_t *state) {
    static const int64_t longest[] = {3, 70, 300, 1500, 5000};
    const int64_t most = longest[random_below(state, TEST_COUNT(longest))];
    problem x = {.batch = 1 + random_below(state, 3),
                 .kv_heads = 1 + random_below(state, 3),
                 .kv_len = 1 + random_below(state, most)};
    x.window = 1 + random_below(state, random_below(state, 4) ? x.kv_len / 3 + 2 : x.kv_len + 3);
    x.scope = random_below(state, 4) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    x.score = new_tensor(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1);
    x.selection = selection_for(x.score);
    fill_kinds(x.score, 1 + random_below(state, 200), state);
    if (random_below(state, 2))
        x.key_valid = new_padding(x.batch, x.kv_len, state);
    if (random_below(state, 2))
        add_rules(&x, state);
    select_on_cpu(&x, "cpu");
    check_kernels(&x, "random");
}

static void ten_thousand_random_cases(void) {
    enum { random_cases = 10000 };
    uint64_t state = 20;
    for (int i = 0; i < random_cases && test_state.failures < test_reports; i++) {
        check_random_case(&state);
        device_free_both();
    }
}

/* ---- sequences that a cluster holds, and longer ones ---- */

typedef struct long_case {
    int64_t batch, kv_heads, kv_len, window, recent, sinks;
    fdma_scope scope;
    bool padded;
    int kinds; /* the first so many kinds of scores; 0: those that are hard for the rules */
} long_case;

static const long_case long_cases[] = {
    {1, 1, 8192, 1024, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    {1, 1, 32768, 1024, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {2, 3, 16385, 2048, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {1, 2, 65537, 1, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {1, 2, 131072, 2048, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    {1, 1, 131073, 100000, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_falling + 1},
    {1, 2, 400001, 3000, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_falling + 1},
    {1, 8, 1048576, 2048, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_equal + 1},
    {1, 1, 4194304, 2048, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_equal + 1},
    {1, 8, 67584, 2048, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {1, 8, 73728, 300, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    {1, 8, 79872, 2048, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    {1, 8, 81920, 4096, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {2, 8, 45056, 2048, 0, 0, FDMA_SCOPE_CAUSAL, false, kind_count},
    {2, 8, 49152, 1000, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    {2, 6, 73728, 2048, 0, 0, FDMA_SCOPE_CAUSAL, true, kind_count},
    // recent keys and sinks
    {1, 8, 8192, 1792, 256, 4, FDMA_SCOPE_CAUSAL, false, 0},
    {1, 2, 9000, 20, INT64_MAX, 3, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 2, 9000, FDMA_WINDOW_ALL, 5, 7, FDMA_SCOPE_CAUSAL, true, 0},
    {4, 2, 8192, 1024, 1024, 64, FDMA_SCOPE_CAUSAL, true, 0},
    {2, 3, 16385, 1, 1, 1, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 4, 32768, 2048, 7, 0, FDMA_SCOPE_CAUSAL, false, 0},
    {1, 2, 40000, 2, 9000, 2, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 1, 30000, 10000, 19999, 10000, FDMA_SCOPE_CAUSAL, false, 0}, // one slot fewer than keys
    {1, 1, 30000, 10000, 20000, 100, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 2, 131072, 1500, 500, 3, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 2, 131073, 1500, 500, 3, FDMA_SCOPE_CAUSAL, true, 0},
    {3, 2, 150000, 3, 8193, 3, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 8, 73000, 700, 77, 3, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 8, 81919, 2048, 256, 4, FDMA_SCOPE_CAUSAL, false, 0},
    {1, 8, 80000, 900, 0, 3, FDMA_SCOPE_GLOBAL, true, 0},
    {1, 1, 1048576, 1, 1, 1, FDMA_SCOPE_CAUSAL, false, 0},
    {1, 1, 1048577, 2048, 256, 4, FDMA_SCOPE_CAUSAL, true, 0},
    {1, 2, 300000, 20000, 0, 9000, FDMA_SCOPE_CAUSAL, true, 0}, // sinks past a block of keys
    {3, 2, 20000, 700, 0, 64, FDMA_SCOPE_GLOBAL, true, 0},
    {2, 2, 150000, 700, 0, 700, FDMA_SCOPE_GLOBAL, true, 0},
    {2, 2, 150000, 700, 0, 5, FDMA_SCOPE_GLOBAL, false, 0},
};

/* With falling scores no key is kept by its score once the window is full, and all chains of slots
 * are as long as possible. Infinite scores must not outrank sinks. */
static const score_kind hard_kinds[] = {kind_iid,          kind_few_values, kind_equal,
                                        kind_rising,       kind_falling,    kind_infinite,
                                        kind_falling_steps};

static void check_long(int index, score_kind kind) {
    const long_case *const n = &long_cases[index];
    uint64_t state = (uint64_t)(100 * index + (int)kind);
    problem x = {.batch = n->batch,
                 .kv_heads = n->kv_heads,
                 .kv_len = n->kv_len,
                 .window = n->window,
                 .recent = n->recent,
                 .sinks = n->sinks,
                 .scope = n->scope};
    x.score = new_tensor(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1);
    x.selection = selection_for(x.score);
    if (kind == kind_iid && n->kinds > 0 && index % 2)
        fill_kinds(x.score, x.kv_len / 9, &state);
    else
        fill_kind(x.score, kind, &state);
    if (n->padded)
        x.key_valid = new_padding(x.batch, x.kv_len, &state);
    select_on_cpu(&x, "cpu");
    check_kernels(&x, kind_names[kind]);
    device_free_both();
}

static void long_sequences(void) {
    for (int index = 0; index < TEST_COUNT(long_cases); index++) {
        const int kinds = long_cases[index].kinds;
        for (int kind = 0; kind < kinds; kind++)
            check_long(index, (score_kind)kind);
        for (int kind = 0; kind < TEST_COUNT(hard_kinds) && kinds == 0; kind++)
            check_long(index, hard_kinds[kind]);
    }
}

/* ---- segments ---- */

enum { gap = 3 }; /* elements between two rows */

typedef struct segment_case {
    int64_t batch, kv_heads, kv_len, window;
    int64_t recent, sinks;
} segment_case;

static const segment_case segment_cases[] = {
    {1, 1, 1, 1, 0, 0},        {1, 1, 1000, 64, 0, 0},    {2, 1, 4097, 700, 0, 0},
    {1, 8, 8192, 2048, 0, 0},  {2, 4, 16384, 999, 0, 0},  {4, 8, 8192, 2048, 0, 0},
    {8, 8, 4096, 1024, 0, 0},  {1, 8, 32768, 2048, 0, 0}, {4, 8, 16000, 31, 0, 0},
    {2, 8, 32768, 1024, 0, 0}, {1, 8, 65536, 2048, 0, 0}, {16, 16, 700, 100, 0, 0},
    {4, 8, 32768, 2048, 0, 0}, {3, 8, 33000, 77, 0, 0},   {1, 1, 1, 1, 1, 1},
    {2, 4, 1000, 64, 30, 2},   {4, 8, 8192, 2048, 1, 4},  {2, 4, 16384, 999, 2000, 0},
    {16, 16, 700, 100, 50, 7}, {1, 8, 65536, 31, 77, 31},
};

static void check_segments(const segment_case *n, fdma_scope scope) {
    const kernel_list kernels = kernels_of("select");
    uint64_t state = (uint64_t)n->kv_len;
    problem x = {.batch = n->batch,
                 .kv_heads = n->kv_heads,
                 .kv_len = n->kv_len,
                 .window = n->window,
                 .recent = scope == FDMA_SCOPE_CAUSAL ? n->recent : 0,
                 .sinks = n->sinks,
                 .scope = scope};
    x.score = with_gaps(new_tensor(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1), gap);
    x.selection = selection_for(x.score);
    x.selection.expiry = with_gaps(x.selection.expiry, gap);
    x.selection.slot = with_gaps(x.selection.slot, gap);
    fill_kinds(x.score, 2000, &state);
    select_on_cpu(&x, "cpu");
    for (int kernel = -1; kernel < kernels.count; kernel++) {
        const char *const name = kernel < 0 ? NULL : kernels.name[kernel];
        set_context(&x, name != NULL ? name : "any", "with gaps");
        CHECK(check_as_cpu(&x, name, true));
        CHECK(check_as_cpu(&x, name, false));
    }
}

static void segments_of_every_length(void) {
    for (int index = 0; index < TEST_COUNT(segment_cases); index++) {
        check_segments(&segment_cases[index], FDMA_SCOPE_CAUSAL);
        check_segments(&segment_cases[index], FDMA_SCOPE_GLOBAL);
        device_free_both();
    }
}

/* ---- heads further apart than an int32 counts ---- */

enum { far_heads = 3, far_keys = 5000, far_window = 300 };
static const int64_t far_stride = ((int64_t)1 << 30) + 64; /* elements between two heads */

static void copy_heads(fdma_tensor to, fdma_tensor from) {
    for (int64_t g = 0; g < far_heads; g++)
        device_must(cudaMemcpy((char *)to.data + g * to.stride[1] * 4,
                               (const char *)from.data + g * from.stride[1] * 4, far_keys * 4,
                               cudaMemcpyDefault),
                    "a copy of a head");
}

static fdma_tensor spread(fdma_tensor near, char *memory, int64_t offset) {
    fdma_tensor far = near;
    far.data = memory + 4 * offset;
    far.stride[1] = far_stride;
    copy_heads(far, near);
    return far;
}

static void check_far(const problem *x, char *memory, const char *kernel) {
    fdma_selection near = selection_for(x->score);
    const fdma_select_args args = select_args(x, &near, kernel);
    call far;
    call_of(&far, operation_select, &args);
    far.args.select.score = spread(x->score, memory, 0);
    far.selection.expiry = spread(near.expiry, memory, 8192);
    far.selection.slot = spread(near.slot, memory, 16384);
    *call_exec(&far) = (fdma_exec){.kernel = kernel, .device = device_number};
    CHECK_OK(device_run_call(&far));
    device_wait();
    copy_heads(near.expiry, far.selection.expiry);
    copy_heads(near.slot, far.selection.slot);
    check_as_cpu_tensor(near.expiry, x->selection.expiry);
    check_as_cpu_tensor(near.slot, x->selection.slot);
}

static void check_heads_far_apart(int64_t recent) {
    char *const memory = device_large(4 * (size_t)((far_heads - 1) * far_stride + 3 * 8192));
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 12;
    problem x = {.batch = 1,
                 .kv_heads = far_heads,
                 .kv_len = far_keys,
                 .window = far_window,
                 .recent = recent,
                 .scope = FDMA_SCOPE_CAUSAL};
    x.score = new_tensor(FDMA_FLOAT32, 1, far_heads, far_keys, -1);
    fill_kinds(x.score, 400, &state);
    x.selection = selected_by(&x, "reference");
    for (int kernel = 0; kernel < kernels.count && memory != NULL; kernel++) {
        set_context(&x, kernels.name[kernel], "far apart");
        check_far(&x, memory, kernels.name[kernel]);
    }
    device_free_both();
    cudaFree(memory);
}

static void heads_far_apart(void) {
    check_heads_far_apart(0);
    check_heads_far_apart(100);
}

static const test_entry tests[] = {
    TEST(ten_thousand_random_cases),
    TEST(long_sequences),
    TEST(segments_of_every_length),
    TEST(heads_far_apart),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
