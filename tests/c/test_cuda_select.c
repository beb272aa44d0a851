/* test_cuda_select.c - selection and lists on a CUDA device equal the CPU's bit for bit: mixed
 * kinds of scores, every length and window, recent keys and sinks, padding, both scopes, gaps
 * between rows, and heads further apart than an int32 counts. The numbers and lengths of segments
 * (a batch and a kv head each) vary so that every number of keys per thread and of blocks per
 * segment occurs. */
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

/* Runs a CPU call on the device. kernel: NULL lets the library choose. Returns true if the kernel
 * takes the call. */
static bool check_as_cpu(const fdma_select_args *on_cpu, const char *kernel, bool with_slots) {
    fdma_selection selection = *on_cpu->selection;
    fdma_select_args args = *on_cpu;
    args.selection = &selection;
    args.exec = (fdma_exec){.kernel = kernel};
    selection.expiry = output_like(selection.expiry);
    selection.slot = with_slots ? output_like(selection.slot) : (fdma_tensor){0};
    if (kernel != NULL && !call_takes(operation_select, &args))
        return false;
    CHECK_OK(device_run(operation_select, &args));
    check_as_cpu_tensor(selection.expiry, on_cpu->selection->expiry);
    if (with_slots)
        check_as_cpu_tensor(selection.slot, on_cpu->selection->slot);
    CHECK_INT(selection.window, on_cpu->window);
    CHECK_INT(selection.recent, on_cpu->recent);
    CHECK_INT(selection.sinks, on_cpu->sinks);
    CHECK_INT(selection.kv_len, on_cpu->score.shape[2]);
    CHECK_INT(selection.scope, on_cpu->scope);
    CHECK(selection.gap == on_cpu->gap);
    return true;
}

static void check_kernels(const fdma_select_args *on_cpu, const char *what) {
    const kernel_list kernels = kernels_of("select");
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const int64_t *const n = on_cpu->score.shape;
        test_context("%s: batch %d, kv_heads %d, kv_len %d, window %d, recent %d, sinks %d, "
                     "scope %d, gap %g%s, %s",
                     kernels.name[kernel], (int)n[0], (int)n[1], (int)n[2], (int)on_cpu->window,
                     (int)on_cpu->recent, (int)on_cpu->sinks, (int)on_cpu->scope, on_cpu->gap,
                     on_cpu->key_valid.rank > 0 ? ", padding" : "", what);
        taken += check_as_cpu(on_cpu, kernels.name[kernel], true);
        if (on_cpu->recent > 0)
            check_as_cpu(on_cpu, kernels.name[kernel], false);
    }
    CHECK(taken > 0);
}

/* ---- random cases, and their lists ---- */

/* Compares the lists of a CPU selection, for some tiles of some queries. */
static void check_lists(const fdma_selection *selection, uint64_t *state) {
    const kernel_list kernels = kernels_of("lists");
    const int64_t *shape = selection->expiry.shape, kv_len = shape[2];
    const int causal = selection->scope == FDMA_SCOPE_CAUSAL || random_below(state, 2);
    const int64_t q_len = 1 + random_below(state, kv_len), tile_len = 1 + random_below(state, 200);
    const int64_t tiles = (q_len + tile_len - 1) / tile_len;
    const int64_t most = selection->window + selection->recent + tile_len - 1;
    const int64_t width = (most < kv_len ? most : kv_len) + random_below(state, 3);
    fdma_lists_args want = {
        .size = sizeof want,
        .selection = selection,
        .list = new_output(FDMA_INT32, shape[0], shape[1], tiles, width),
        .count = new_output(FDMA_INT32, shape[0], shape[1], tiles, 2),
        .q_len = q_len,
        .tile_len = tile_len,
        .causal = causal,
        .exec = {.kernel = "cpu", .threads = 1},
    };
    CHECK_OK(run_lists(&want));
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        fdma_lists_args args = want;
        args.list = output_like(want.list);
        args.count = output_like(want.count);
        args.exec = (fdma_exec){.kernel = kernels.name[kernel]};
        CHECK_OK(run_lists(&args));
        check_as_cpu_tensor(args.list, want.list);
        check_as_cpu_tensor(args.count, want.count);
    }
}

/* Any number of recent keys and sinks that a call may ask for, and any gap, often 0. */
static void add_rules(fdma_select_args *args, uint64_t *state) {
    const int64_t kv_len = args->score.shape[2], window = args->window;
    const int64_t recent[] = {
        0, 1, 7, kv_len / 4, random_below(state, kv_len + 1), kv_len - window, kv_len + 3};
    const int64_t sinks[] = {0, 1, window, random_below(state, window + 1)};
    const int64_t chosen = recent[random_below(state, TEST_COUNT(recent))];
    args->sinks = sinks[random_below(state, TEST_COUNT(sinks))];
    args->recent = args->scope == FDMA_SCOPE_CAUSAL && chosen > 0 ? chosen : 0;
    if (args->scope == FDMA_SCOPE_CAUSAL && random_below(state, 3) == 0)
        args->gap = 0.125 * (double)(1 + random_below(state, 20));
}

static void check_random_case(uint64_t *state) {
    static const int64_t longest[] = {3, 70, 300, 1500, 5000};
    const int64_t most = longest[random_below(state, TEST_COUNT(longest))];
    const int64_t batch = 1 + random_below(state, 3), kv_heads = 1 + random_below(state, 3);
    const int64_t kv_len = 1 + random_below(state, most);
    const int64_t window =
        1 + random_below(state, random_below(state, 4) ? kv_len / 3 + 2 : kv_len + 3);
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, batch, kv_heads, kv_len, -1);
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = window,
                             .scope =
                                 random_below(state, 4) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,
                             .exec = {.kernel = "cpu", .threads = 1}};
    fill_kinds(score, 1 + random_below(state, 200), state);
    if (random_below(state, 2))
        args.key_valid = new_padding(batch, kv_len, state);
    if (random_below(state, 2))
        add_rules(&args, state);
    CHECK_OK(run_select(&args));
    check_kernels(&args, "random");
    check_lists(&selection, state);
}

static void ten_thousand_random_cases(void) {
    enum { random_cases = 10000 };
    uint64_t state = 20;
    for (int i = 0; i < random_cases && test_state.failures < test_reports; i++) {
        check_random_case(&state);
        device_free_both();
    }
}

/* ---- long sequences ---- */

static const struct {
    int64_t batch, kv_heads, kv_len, window;
    int kinds; /* the first so many kinds */
    int padded;
} long_cases[] = {
    {1, 1, 8192, 1024, kind_count, 1},         {1, 1, 32768, 1024, kind_count, 0},
    {2, 3, 16385, 2048, kind_count, 0},        {1, 2, 65537, 1, kind_count, 0},
    {1, 2, 131072, 2048, kind_count, 1},       {1, 1, 131073, 100000, kind_falling + 1, 0},
    {1, 2, 400001, 3000, kind_falling + 1, 1}, {1, 8, 1048576, 2048, kind_equal + 1, 0},
    {1, 1, 4194304, 2048, kind_equal + 1, 0},  {1, 8, 67584, 2048, kind_count, 0},
    {1, 8, 73728, 300, kind_count, 1},         {1, 8, 79872, 2048, kind_count, 1},
    {1, 8, 81920, 4096, kind_count, 0},        {2, 8, 45056, 2048, kind_count, 0},
    {2, 8, 49152, 1000, kind_count, 1},        {2, 6, 73728, 2048, kind_count, 1},
};

static void check_long(int index, score_kind kind) {
    uint64_t state = (uint64_t)(100 * index + (int)kind);
    const int64_t batch = long_cases[index].batch, kv_len = long_cases[index].kv_len;
    const fdma_tensor score =
        new_tensor(FDMA_FLOAT32, batch, long_cases[index].kv_heads, kv_len, -1);
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = long_cases[index].window,
                             .scope = FDMA_SCOPE_CAUSAL,
                             .exec = {.kernel = "cpu"}};
    if (kind == kind_iid && index % 2)
        fill_kinds(score, kv_len / 9, &state);
    else
        fill_kind(score, kind, &state);
    if (long_cases[index].padded)
        args.key_valid = new_padding(batch, kv_len, &state);
    CHECK_OK(run_select(&args));
    check_kernels(&args, kind_names[kind]);
}

static void long_sequences(void) {
    for (int index = 0; index < TEST_COUNT(long_cases); index++) {
        for (int kind = 0; kind < long_cases[index].kinds; kind++) {
            check_long(index, (score_kind)kind);
            device_free_both();
        }
    }
}

/* ---- recent keys and sinks in sequences that a cluster holds, and in longer ones ---- */

static const struct {
    int64_t batch, kv_heads, kv_len, window, recent, sinks;
    fdma_scope scope;
    bool padded;
} rule_cases[] = {
    {1, 8, 8192, 1792, 256, 4, FDMA_SCOPE_CAUSAL, false},
    {1, 2, 9000, 20, INT64_MAX, 3, FDMA_SCOPE_CAUSAL, true},
    {1, 2, 9000, FDMA_WINDOW_ALL, 5, 7, FDMA_SCOPE_CAUSAL, true},
    {4, 2, 8192, 1024, 1024, 64, FDMA_SCOPE_CAUSAL, true},
    {2, 3, 16385, 1, 1, 1, FDMA_SCOPE_CAUSAL, true},
    {1, 4, 32768, 2048, 7, 0, FDMA_SCOPE_CAUSAL, false},
    {1, 2, 40000, 2, 9000, 2, FDMA_SCOPE_CAUSAL, true},
    {1, 1, 30000, 10000, 19999, 10000, FDMA_SCOPE_CAUSAL, false}, // one slot fewer than keys
    {1, 1, 30000, 10000, 20000, 100, FDMA_SCOPE_CAUSAL, true},
    {1, 2, 131072, 1500, 500, 3, FDMA_SCOPE_CAUSAL, true},
    {1, 2, 131073, 1500, 500, 3, FDMA_SCOPE_CAUSAL, true},
    {3, 2, 150000, 3, 8193, 3, FDMA_SCOPE_CAUSAL, true},
    {1, 8, 73000, 700, 77, 3, FDMA_SCOPE_CAUSAL, true},
    {1, 8, 81919, 2048, 256, 4, FDMA_SCOPE_CAUSAL, false},
    {1, 8, 80000, 900, 0, 3, FDMA_SCOPE_GLOBAL, true},
    {1, 1, 1048576, 1, 1, 1, FDMA_SCOPE_CAUSAL, false},
    {1, 1, 1048577, 2048, 256, 4, FDMA_SCOPE_CAUSAL, true},
    {1, 2, 300000, 20000, 0, 9000, FDMA_SCOPE_CAUSAL, true}, // sinks past a block of keys
    {3, 2, 20000, 700, 0, 64, FDMA_SCOPE_GLOBAL, true},
    {2, 2, 150000, 700, 0, 700, FDMA_SCOPE_GLOBAL, true},
    {2, 2, 150000, 700, 0, 5, FDMA_SCOPE_GLOBAL, false},
};

static void check_rules(int index, score_kind kind) {
    uint64_t state = (uint64_t)(200 * index + (int)kind);
    const int64_t batch = rule_cases[index].batch, kv_len = rule_cases[index].kv_len;
    const fdma_tensor score =
        new_tensor(FDMA_FLOAT32, batch, rule_cases[index].kv_heads, kv_len, -1);
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = rule_cases[index].window,
                             .recent = rule_cases[index].recent,
                             .sinks = rule_cases[index].sinks,
                             .scope = rule_cases[index].scope,
                             .exec = {.kernel = "cpu"}};
    fill_kind(score, kind, &state);
    if (rule_cases[index].padded)
        args.key_valid = new_padding(batch, kv_len, &state);
    CHECK_OK(run_select(&args));
    check_kernels(&args, kind_names[kind]);
}

/* With falling scores no key is kept by its score once the window is full, and all chains of slots
 * are as long as possible. Infinite scores must not outrank sinks. */
static void recent_keys_and_sinks(void) {
    static const score_kind kinds[] = {kind_iid,          kind_few_values, kind_equal,
                                       kind_rising,       kind_falling,    kind_infinite,
                                       kind_falling_steps};
    for (int index = 0; index < TEST_COUNT(rule_cases); index++) {
        for (int kind = 0; kind < TEST_COUNT(kinds); kind++) {
            check_rules(index, kinds[kind]);
            device_free_both();
        }
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
    const fdma_tensor dense = new_tensor(FDMA_FLOAT32, n->batch, n->kv_heads, n->kv_len, -1);
    fdma_selection selection = selection_for(dense);
    selection.expiry = with_gaps(selection.expiry, gap);
    selection.slot = with_gaps(selection.slot, gap);
    fdma_select_args args = {.size = sizeof args,
                             .score = with_gaps(dense, gap),
                             .selection = &selection,
                             .window = n->window,
                             .recent = scope == FDMA_SCOPE_CAUSAL ? n->recent : 0,
                             .sinks = n->sinks,
                             .scope = scope,
                             .exec = {.kernel = "cpu"}};
    fill_kinds(args.score, 2000, &state);
    CHECK_OK(run_select(&args));
    for (int kernel = -1; kernel < kernels.count; kernel++) {
        const char *const name = kernel < 0 ? NULL : kernels.name[kernel];
        test_context("%s: batch %d, kv_len %d, recent %d, sinks %d, scope %d",
                     name != NULL ? name : "any", (int)n->batch, (int)n->kv_len, (int)args.recent,
                     (int)n->sinks, (int)scope);
        CHECK(check_as_cpu(&args, name, true));
        CHECK(check_as_cpu(&args, name, false));
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

static void check_far(const fdma_select_args *on_cpu, char *memory, const char *kernel) {
    const fdma_selection near = selection_for(on_cpu->score);
    call far;
    call_of(&far, operation_select, on_cpu);
    far.args.select.score = spread(on_cpu->score, memory, 0);
    far.selection.expiry = spread(near.expiry, memory, 8192);
    far.selection.slot = spread(near.slot, memory, 16384);
    *call_exec(&far) = (fdma_exec){.kernel = kernel, .device = device_number};
    CHECK_OK(device_run_call(&far));
    device_wait();
    copy_heads(near.expiry, far.selection.expiry);
    copy_heads(near.slot, far.selection.slot);
    check_as_cpu_tensor(near.expiry, on_cpu->selection->expiry);
    check_as_cpu_tensor(near.slot, on_cpu->selection->slot);
}

static void check_heads_far_apart(int64_t recent) {
    char *const memory = device_large(4 * (size_t)((far_heads - 1) * far_stride + 3 * 8192));
    const kernel_list kernels = kernels_of("select");
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, far_heads, far_keys, -1);
    uint64_t state = 12;
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = far_window,
                             .recent = recent,
                             .scope = FDMA_SCOPE_CAUSAL,
                             .exec = {.kernel = "reference"}};
    fill_kinds(score, 400, &state);
    CHECK_OK(run_select(&args));
    for (int kernel = 0; kernel < kernels.count && memory != NULL; kernel++) {
        test_context("%s, recent %d", kernels.name[kernel], (int)recent);
        check_far(&args, memory, kernels.name[kernel]);
    }
    device_free_both();
    cudaFree(memory);
}

static void heads_far_apart(void) {
    check_heads_far_apart(0);
    check_heads_far_apart(100);
}

static const test_entry tests[] = {
    TEST(ten_thousand_random_cases), TEST(long_sequences),  TEST(recent_keys_and_sinks),
    TEST(segments_of_every_length),  TEST(heads_far_apart),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
