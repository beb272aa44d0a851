/* test_cuda_select.c - selection and lists on a CUDA device, bit for bit those of the CPU: mixed
 * patterns of scores, every length and window, padding, both scopes, long sequences. And
 * fdma_score() there, whose results repeat. */
#include "device.h"

typedef enum score_kind {
    kind_iid,
    kind_few_values,
    kind_equal,
    kind_rising,
    kind_falling,
    kind_steps,
    kind_sawtooth,
    kind_nan,
    kind_infinite,
    kind_subnormal,
    kind_zeros,
    kind_any_bits,
    kind_count,
} score_kind;

static const char *const kind_names[] = {"iid",      "few values", "equal",    "rising",
                                         "falling",  "steps",      "sawtooth", "NaN",
                                         "infinite", "subnormal",  "zeros",    "any bits"};

static float score_of(score_kind kind, int64_t j, uint64_t *state) {
    static const float ends[] = {INFINITY, -INFINITY, NAN, -NAN, 3e38F, -3e38F, 0};
    const uint32_t sign = (uint32_t)random_below(state, 2) << 31;
    switch (kind) {
    case kind_few_values:
        return (float)random_below(state, 3);
    case kind_equal:
        return 1;
    case kind_rising:
        return (float)j;
    case kind_falling:
        return (float)-j;
    case kind_steps:
        return -(float)(j / 5);
    case kind_sawtooth:
        return (float)(j % 1021);
    case kind_nan:
        return sign ? NAN : -NAN;
    case kind_infinite:
        return ends[random_below(state, TEST_COUNT(ends))];
    case kind_subnormal:
        return bits_to_float(sign | (uint32_t)random_below(state, 5));
    case kind_zeros:
        return bits_to_float(sign);
    case kind_any_bits:
        return bits_to_float((uint32_t)(random_bits(state) >> 32));
    default:
        return random_float(state);
    }
}

/* Stretches of one kind each, some `stretch` keys long; 0: all of `kind`. */
static void fill_scores(fdma_tensor score, score_kind kind, int64_t stretch, uint64_t *state) {
    for (int64_t i = 0; i < count_of(score); i++) {
        if (stretch > 0 && (i == 0 || random_below(state, stretch) == 0))
            kind = (score_kind)random_below(state, kind_count);
        ((float *)score.data)[i] = score_of(kind, i % score.shape[2], state);
    }
}

/* Some at the left, and some anywhere or nearly all. */
static fdma_tensor new_padding(int64_t batch, int64_t kv_len, uint64_t *state) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, batch, kv_len, -1, -1);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t left = random_below(state, 2) * random_below(state, kv_len + 1);
        const int64_t kept = 1 + random_below(state, 8);
        for (int64_t j = 0; j < kv_len; j++) {
            ((uint8_t *)valid.data)[b * kv_len + j] =
                (uint8_t)(j >= left && random_below(state, 8) < kept);
        }
    }
    return valid;
}

static fdma_select_args new_select(fdma_tensor score, fdma_tensor valid, int64_t window,
                                   fdma_scope scope, fdma_selection *selection) {
    const int64_t *shape = score.shape;
    *selection = (fdma_selection){
        .size = sizeof *selection,
        .expiry = new_output(FDMA_INT32, shape[0], shape[1], shape[2], -1),
        .slot = new_output(FDMA_INT32, shape[0], shape[1], shape[2], -1),
    };
    return (fdma_select_args){
        .size = sizeof(fdma_select_args),
        .score = score,
        .key_valid = valid,
        .selection = selection,
        .window = window,
        .scope = scope,
    };
}

/* The same on the device. Returns whether the row takes it. */
static int check_as_cpu(const fdma_select_args *on_cpu, const char *kernel) {
    fdma_selection selection = *on_cpu->selection;
    fdma_select_args args = *on_cpu;
    args.score = device_tensor(on_cpu->score);
    args.key_valid = device_tensor(on_cpu->key_valid);
    args.selection = &selection;
    args.exec = (fdma_exec){.kernel = kernel};
    selection.expiry = device_output(selection.expiry);
    selection.slot = device_output(selection.slot);
    const fdma_status status = device_run_select(&args);
    if (status == FDMA_UNSUPPORTED)
        return 0;
    CHECK_OK(status);
    device_wait();
    const size_t bytes = bytes_of(selection.expiry);
    CHECK_BYTES(device_read(selection.expiry).data, on_cpu->selection->expiry.data, bytes);
    CHECK_BYTES(device_read(selection.slot).data, on_cpu->selection->slot.data, bytes);
    CHECK_INT(selection.window, on_cpu->window);
    CHECK_INT(selection.kv_len, on_cpu->score.shape[2]);
    CHECK_INT(selection.scope, on_cpu->scope);
    return 1;
}

/* The lists of a selection on the CPU, for some tiles of some queries. */
static void check_lists(const fdma_selection *on_cpu, const kernel_list *kernels, uint64_t *state) {
    const int64_t *shape = on_cpu->expiry.shape, kv_len = shape[2];
    const int causal = on_cpu->scope == FDMA_SCOPE_CAUSAL || random_below(state, 2);
    const int64_t q_len = 1 + random_below(state, kv_len), tile_len = 1 + random_below(state, 200);
    const int64_t tiles = (q_len + tile_len - 1) / tile_len, most = on_cpu->window + tile_len - 1;
    const int64_t width = (most < kv_len ? most : kv_len) + random_below(state, 3);
    fdma_lists_args want = {
        .size = sizeof want,
        .selection = on_cpu,
        .list = new_output(FDMA_INT32, shape[0], shape[1], tiles, width),
        .count = new_output(FDMA_INT32, shape[0], shape[1], tiles, 2),
        .q_len = q_len,
        .tile_len = tile_len,
        .causal = causal,
        .exec = {.kernel = "cpu", .threads = 1},
    };
    CHECK_OK(run_lists(&want));
    fdma_selection selection = *on_cpu;
    selection.expiry = device_tensor(on_cpu->expiry);
    selection.slot = device_tensor(on_cpu->slot);
    for (int kernel = 0; kernel < kernels->count; kernel++) {
        fdma_lists_args args = want;
        args.selection = &selection;
        args.list = device_output(want.list);
        args.count = device_output(want.count);
        args.exec = (fdma_exec){.kernel = kernels->name[kernel]};
        CHECK_OK(device_run_lists(&args));
        device_wait();
        CHECK_BYTES(device_read(args.list).data, want.list.data, bytes_of(want.list));
        CHECK_BYTES(device_read(args.count).data, want.count.data, bytes_of(want.count));
    }
}

static void check_random_case(uint64_t *state, const kernel_list *kernels,
                              const kernel_list *listers) {
    static const int64_t longest[] = {3, 70, 300, 1500, 5000};
    const int64_t most = longest[random_below(state, TEST_COUNT(longest))];
    const int64_t batch = 1 + random_below(state, 3), kv_heads = 1 + random_below(state, 3);
    const int64_t kv_len = 1 + random_below(state, most);
    const int64_t window =
        1 + random_below(state, random_below(state, 4) ? kv_len / 3 + 2 : kv_len + 3);
    const fdma_scope scope = random_below(state, 4) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, batch, kv_heads, kv_len, -1);
    fill_scores(score, kind_iid, 1 + random_below(state, 200), state);
    const fdma_tensor valid =
        random_below(state, 2) ? new_padding(batch, kv_len, state) : (fdma_tensor){0};
    fdma_selection selection;
    fdma_select_args args = new_select(score, valid, window, scope, &selection);
    args.exec = (fdma_exec){.kernel = "cpu", .threads = 1};
    CHECK_OK(run_select(&args));
    int taken = 0;
    for (int kernel = 0; kernel < kernels->count; kernel++) {
        test_context("%s: batch %d, kv_heads %d, kv_len %d, window %d, scope %d%s",
                     kernels->name[kernel], (int)batch, (int)kv_heads, (int)kv_len, (int)window,
                     (int)scope, valid.rank > 0 ? ", padding" : "");
        taken += check_as_cpu(&args, kernels->name[kernel]);
    }
    CHECK(taken > 0);
    check_lists(&selection, listers, state);
}

static void ten_thousand_random_cases(void) {
    enum { random_cases = 10000 };
    const kernel_list kernels = device_kernels("select"), listers = device_kernels("lists");
    uint64_t state = 20;
    for (int i = 0; i < random_cases && test_state.failures < test_reports; i++) {
        check_random_case(&state, &kernels, &listers);
        device_free_both();
    }
}

static const struct {
    int64_t batch, kv_heads, kv_len, window;
    int orders; /* the first so many kinds */
    int padded;
} long_cases[] = {
    {1, 1, 8192, 1024, kind_count, 1},         {1, 1, 32768, 1024, kind_count, 0},
    {2, 3, 16385, 2048, kind_count, 0},        {1, 2, 65537, 1, kind_count, 0},
    {1, 2, 131072, 2048, kind_count, 1},       {1, 1, 131073, 100000, kind_falling + 1, 0},
    {1, 2, 400001, 3000, kind_falling + 1, 1}, {1, 8, 1048576, 2048, kind_equal + 1, 0},
    {1, 1, 4194304, 2048, kind_equal + 1, 0},
};

static void check_long(int index, int kind, const kernel_list *kernels) {
    uint64_t state = (uint64_t)(100 * index + kind);
    const int64_t batch = long_cases[index].batch, kv_len = long_cases[index].kv_len;
    const fdma_tensor score =
        new_tensor(FDMA_FLOAT32, batch, long_cases[index].kv_heads, kv_len, -1);
    fill_scores(score, (score_kind)kind, kind == kind_iid && index % 2 ? kv_len / 9 : 0, &state);
    const fdma_tensor valid =
        long_cases[index].padded ? new_padding(batch, kv_len, &state) : (fdma_tensor){0};
    fdma_selection selection;
    fdma_select_args args =
        new_select(score, valid, long_cases[index].window, FDMA_SCOPE_CAUSAL, &selection);
    args.exec = (fdma_exec){.kernel = "cpu"};
    CHECK_OK(run_select(&args));
    int taken = 0;
    for (int kernel = 0; kernel < kernels->count; kernel++) {
        test_context("%s: %d keys, window %d, %s", kernels->name[kernel], (int)kv_len,
                     (int)args.window, kind_names[kind]);
        taken += check_as_cpu(&args, kernels->name[kernel]);
    }
    CHECK(taken > 0);
}

static void long_sequences(void) {
    const kernel_list kernels = device_kernels("select");
    for (int index = 0; index < TEST_COUNT(long_cases); index++) {
        for (int kind = 0; kind < long_cases[index].orders; kind++) {
            check_long(index, kind, &kernels);
            device_free_both();
        }
    }
}

/* ---- heads further apart than an int32 counts ---- */

enum { far_heads = 3, far_keys = 5000, far_window = 300 };
static const int64_t far_stride = ((int64_t)1 << 30) + 64; /* elements between two heads */

static void copy_heads(fdma_tensor to, fdma_tensor from) {
    for (int64_t g = 0; g < far_heads; g++) {
        device_must(cudaMemcpy((char *)to.data + g * to.stride[1] * 4,
                               (const char *)from.data + g * from.stride[1] * 4, far_keys * 4,
                               cudaMemcpyDefault),
                    "a copy of a head");
    }
}

static fdma_tensor spread(fdma_tensor near, char *memory, int64_t offset) {
    fdma_tensor far = near;
    far.data = memory + 4 * offset;
    far.stride[1] = far_stride;
    copy_heads(far, near);
    return far;
}

static void check_far(const fdma_select_args *on_cpu, char *memory, const char *kernel) {
    fdma_selection selection = *on_cpu->selection;
    fdma_select_args args = *on_cpu;
    args.score = spread(on_cpu->score, memory, 0);
    args.selection = &selection;
    args.exec = (fdma_exec){.kernel = kernel};
    selection.expiry = spread(new_tensor(FDMA_INT32, 1, far_heads, far_keys, -1), memory, 8192);
    selection.slot = spread(new_tensor(FDMA_INT32, 1, far_heads, far_keys, -1), memory, 16384);
    CHECK_OK(device_run_select(&args));
    device_wait();
    const fdma_tensor expiry = new_tensor(FDMA_INT32, 1, far_heads, far_keys, -1);
    const fdma_tensor slot = new_tensor(FDMA_INT32, 1, far_heads, far_keys, -1);
    copy_heads(expiry, selection.expiry);
    copy_heads(slot, selection.slot);
    CHECK_BYTES(expiry.data, on_cpu->selection->expiry.data, bytes_of(expiry));
    CHECK_BYTES(slot.data, on_cpu->selection->slot.data, bytes_of(slot));
}

static void heads_far_apart(void) {
    char *const memory = device_large(4 * (size_t)((far_heads - 1) * far_stride + 3 * 8192));
    const kernel_list kernels = device_kernels("select");
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, far_heads, far_keys, -1);
    uint64_t state = 12;
    fdma_selection selection;
    fill_scores(score, kind_iid, 400, &state);
    fdma_select_args args =
        new_select(score, (fdma_tensor){0}, far_window, FDMA_SCOPE_CAUSAL, &selection);
    args.exec = (fdma_exec){.kernel = "reference"};
    CHECK_OK(run_select(&args));
    for (int kernel = 0; kernel < kernels.count && memory != NULL; kernel++) {
        test_context("%s", kernels.name[kernel]);
        check_far(&args, memory, kernels.name[kernel]);
    }
    device_free_both();
    cudaFree(memory);
}

/* ---- score ---- */

static fdma_score_args new_score(fdma_dtype dtype, int64_t batch, int64_t kv_len, int64_t kv_heads,
                                 int64_t head_dim) {
    uint64_t state = 3;
    fdma_score_args args = {
        .size = sizeof args,
        .v = new_tensor(dtype, batch, kv_len, kv_heads, head_dim),
        .dt_proj = new_tensor(dtype, kv_heads, kv_heads * head_dim, -1, -1),
        .a = new_tensor(dtype, kv_heads, -1, -1, -1),
        .score = new_output(FDMA_FLOAT32, batch, kv_heads, kv_len, -1),
        .bias = new_output(FDMA_FLOAT32, batch, kv_heads, kv_len, -1),
    };
    fill_random(args.v, &state, 1);
    fill_random(args.dt_proj, &state, 0.1F);
    fill_random(args.a, &state, 1);
    args.v = device_tensor(args.v);
    args.dt_proj = device_tensor(args.dt_proj);
    args.a = device_tensor(args.a);
    args.score = device_output(args.score);
    args.bias = device_output(args.bias);
    return args;
}

static void check_scores(fdma_score_args *args, const char *kernel) {
    args->exec = (fdma_exec){.kernel = kernel};
    CHECK_OK(device_run_score(args));
    device_wait();
    const fdma_tensor score = device_read(args->score), bias = device_read(args->bias);
    for (int run = 0; run < 20; run++) {
        device_clear(args->score);
        device_clear(args->bias);
        CHECK_OK(fdma_score(args));
        device_wait();
        CHECK(same_tensor(device_read(args->score), score));
        CHECK(same_tensor(device_read(args->bias), bias));
    }
    fdma_score_args last = *args; /* by itself */
    const int64_t b = args->v.shape[0] - 1;
    last.v.shape[0] = last.score.shape[0] = last.bias.shape[0] = 1;
    last.v.data =
        (char *)args->v.data + (size_t)(b * args->v.stride[0]) * dtype_size(args->v.dtype);
    device_clear(args->score);
    CHECK_OK(device_run_score(&last));
    device_wait();
    const size_t bytes = bytes_of(last.score);
    CHECK_BYTES(device_read(last.score).data, (char *)score.data + (size_t)b * bytes, bytes);
}

static void scores_repeat_and_stay_inside(void) {
    static const int64_t shapes[][4] = {
        {1, 1, 1, 8}, {2, 1000, 2, 64}, {3, 777, 5, 40}, {2, 500, 32, 128}, {2, 300, 8, 256}};
    const kernel_list kernels = device_kernels("score");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int i = 0; i < TEST_COUNT(shapes) * device_dtype_count; i++) {
            const int64_t *n = shapes[i / device_dtype_count];
            const fdma_dtype dtype = device_dtypes[i % device_dtype_count];
            test_context("%s %s, shape %d", kernels.name[kernel], dtype_name(dtype),
                         i / device_dtype_count);
            fdma_score_args args = new_score(dtype, n[0], n[1], n[2], n[3]);
            check_scores(&args, kernels.name[kernel]);
            device_free_both();
        }
    }
}

static const test_entry tests[] = {
    TEST(ten_thousand_random_cases),
    TEST(long_sequences),
    TEST(heads_far_apart),
    TEST(scores_repeat_and_stay_inside),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
